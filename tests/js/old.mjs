// Two turns of an older client on one thread.
import { createRequire } from "node:module";
import { errors, given, print, view } from "./client.mjs";

// Its module form misses fast-json-patch in Node; bundlers do not mind.
const { HttpAgent } = createRequire(import.meta.url)("ag-ui-client-0-0-48");

const agent = new HttpAgent({
  url: `${given.url}/agents/${given.agent}/`,
  threadId: `old-${given.agent}`,
  headers: { Authorization: `Bearer ${given.token}` },
});
// It says its errors on the console as well.
console.error = () => {};
for (const turn of [0, 1]) {
  agent.addMessage({ id: `said-${turn}`, role: "user", content: `${given.text} ${turn}` });
  try {
    await agent.runAgent({ forwardedProps: given.forwarded }, {
      onRunErrorEvent: ({ event }) => void errors.push(event),
    });
  } catch (error) {
    errors.push(String(error));
    break;
  }
}
print(view(agent));
