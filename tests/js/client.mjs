// The unmodified official client, and what every script of the tests needs.
import { HttpAgent } from "@ag-ui/client";

export const given = JSON.parse(process.argv[2]);
export const errors = [];
export const threads = new Set();
export let unlogged = 0;

process.on("unhandledRejection", (error) => errors.push(`unhandled: ${error}`));

export function client(agent, threadId, options = {}) {
  return new HttpAgent({
    url: `${given.url}/agents/${agent}/`,
    threadId,
    headers: { Authorization: `Bearer ${given.token}` },
    fetch: async (url, init) => {
      const response = await fetch(url, init);
      if (response.headers.has("AGUI-Thread")) threads.add(response.headers.get("AGUI-Thread"));
      unlogged += Number(response.headers.get("AGUI-Unlogged") ?? 0);
      return response;
    },
    ...options,
  });
}

let turns = 0;

export async function say(agent, content, forwardedProps = {}) {
  agent.addMessage({ id: `said-${process.pid}-${turns++}`, role: "user", content });
  return run(agent, forwardedProps);
}

export async function run(agent, forwardedProps = {}) {
  try {
    return await agent.runAgent({ forwardedProps }, {
      onRunErrorEvent: ({ event }) => void errors.push(event),
      onRunFailed: ({ error }) => void errors.push(String(error)),
    });
  } catch (error) {
    errors.push(String(error));
  }
}

export async function snapshot() {
  const [thread] = threads;
  const response = await fetch(`${given.url}/threads/${thread}/snapshot`, {
    headers: { Authorization: `Bearer ${given.token}` },
  });
  return response.json();
}

export const view = (agent) => ({ messages: agent.messages, state: agent.state });

export function print(found) {
  const all = { errors, threads: [...threads], thread: [...threads][0], unlogged, ...found };
  console.log(JSON.stringify(all));
}
