// The module that the app ships: requests whose abort stops the run, and threads followed.
import { cancellingFetch, follow } from "../../aguiapp/static/aguiapp/client.js";
import { client, given, print, run } from "./client.mjs";

const headers = { Authorization: `Bearer ${given.token}` };
const noted = { calls: [], failures: [], aborted: null, refused: null };

async function counted(url, init) {
  const call = { path: url.replace(given.url, ""), status: null };
  noted.calls.push(call);
  const response = await fetch(url, init);
  call.status = response.status;
  return response;
}

const stopping = (options) =>
  cancellingFetch({ fetch: counted, onError: (error) => noted.failures.push(String(error)), ...options });

function abort(agent) {
  noted.aborted = { at: Date.now() / 1000, status: noted.calls.at(-1).status };
  agent.abortRun();
}

// Runs the agent, and acts at the first text.
async function atFirstText(fetch, act) {
  const agent = client("tokens", given.threadId, { fetch });
  agent.addMessage({ id: "u1", role: "user", content: "go" });
  let acted = false;
  agent.subscribe({
    onTextMessageContentEvent() {
      if (!acted) act(agent);
      acted = true;
    },
  });
  await run(agent, { n: given.n, delay: 0.02 });
  return agent;
}

// Runs the agent, and aborts when the request has gone and no header has come.
async function atOnce(options) {
  const fetch = stopping(options);
  const agent = client("tokens", given.threadId, {
    fetch(...request) {
      setTimeout(() => abort(agent), 2);
      return fetch(...request);
    },
  });
  agent.addMessage({ id: "u1", role: "user", content: "go" });
  await run(agent, { n: given.n, delay: 0.02 });
}

// Prints every event as it comes.
async function followed(stop, options) {
  try {
    for await (const each of follow({ url: given.stream, headers, ...options })) {
      console.log(JSON.stringify(each));
      if (stop(each.event)) break;
    }
  } catch ({ name, status, code }) {
    noted.refused = { name, status, code };
  }
}

const never = () => false;

const cases = {
  aborted: () => atFirstText(stopping(), abort),
  early: () => atOnce(),
  plain: () => atFirstText(counted, abort),
  detached: () => atFirstText(stopping(), (agent) => agent.detachActiveRun()),
  finished: async () => abort(await atFirstText(stopping(), () => {})),
  async cut() {
    const lost = new AbortController();
    const fetch = (url, { signal, ...init }) =>
      counted(url, { ...init, signal: signal && AbortSignal.any([signal, lost.signal]) });
    const fail = () => lost.abort(new TypeError("lost"));
    abort(await atFirstText(stopping({ fetch }), fail));
  },
  refused: () => atOnce({ headers: { Authorization: "Bearer nobody" } }),
  denied() {
    const asked = [];
    const changing = () => (asked.push(1) > 1 ? { Authorization: "Bearer nobody" } : {});
    return atFirstText(stopping({ headers: changing }), abort);
  },
  mute: () => atOnce({ patience: 200 }),

  follow() {
    let terminals = 0;
    const last = ({ type }) =>
      ["RUN_FINISHED", "RUN_ERROR"].includes(type) && ++terminals === given.terminals;
    return followed(last, { after: given.after });
  },
  // Each pause is half of the longest it may be.
  async pauses() {
    Math.random = () => 0.5;
    const times = [];
    const stop = new AbortController();
    await followed(never, {
      signal: stop.signal,
      fetch(...request) {
        times.push(performance.now());
        if (times.length === 5) stop.abort();
        return fetch(...request);
      },
    });
    noted.pauses = times.slice(1).map((time, index) => time - times[index]);
  },
  // It is stopped while it waits, which would take very long.
  waiting() {
    Math.random = () => 1000;
    const stop = new AbortController();
    return followed(never, {
      signal: stop.signal,
      async fetch(...request) {
        setTimeout(() => stop.abort(), 100);
        return fetch(...request);
      },
    });
  },
  // The connection stays open, and nothing comes.
  async silent() {
    noted.attempts = 0;
    const stop = new AbortController();
    await followed(never, {
      signal: stop.signal,
      silence: 200,
      fetch(...request) {
        if (++noted.attempts === 3) stop.abort();
        return fetch(...request);
      },
    });
  },
};

await cases[given.case]();
// Once nothing is left to do: a call in the background is waited for, and the process ends.
process.once("beforeExit", () => print(noted));
