// The last answer is dropped, and the strict prefix that ends in the user's message is posted.
import { client, given, print, run, say, view } from "./client.mjs";

const agent = client(given.agent, "regenerate");
await say(agent, "first 1001");
await say(agent, "second 1002");
const last = agent.messages.findLastIndex((message) => message.role === "user");
const dropped = agent.messages.at(-1).id;
agent.setMessages(agent.messages.slice(0, last + 1));
await run(agent);
print({ ...view(agent), dropped });
