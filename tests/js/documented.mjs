// The snippets of docs/how-to/clients.md, from the folder they were written to.
import { given } from "./client.mjs";

const headers = { Authorization: `Bearer ${given.token}` };
const say = (found) => console.log(JSON.stringify(found));

const cases = {
  async chat() {
    const { chat } = await import(`${given.folder}/chat.js`);
    const agent = chat(`${given.url}/agents/tokens/`, given.token);
    agent.threadId = given.threadId;
    agent.addMessage({ id: "u1", role: "user", content: "go" });
    const stop = () => agent.abortRun();
    await agent.runAgent({ forwardedProps: { n: 2000 } }, { onTextMessageContentEvent: stop });
  },
  async watch() {
    const { watch } = await import(`${given.folder}/watch.js`);
    const stop = new AbortController();
    let starts = 0;
    await watch(given.thread, {
      headers,
      signal: stop.signal,
      start(messages, state) {
        say({ messages, state });
        if (++starts === given.starts) stop.abort();
      },
      apply: (event) => say({ event }),
    });
  },
};

await cases[given.case]();
