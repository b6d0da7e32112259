// Two turns of one client on one thread.
import { client, given, print, say, view } from "./client.mjs";

const agent = client(given.agent, "twice");
await say(agent, "Where is order 1001?");
await say(agent, "And 1002?");
print(view(agent));
