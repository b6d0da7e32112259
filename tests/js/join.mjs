// One client watches a run from its start; others, with histories of four kinds, join it at every
// position and once it is over. Prints what each of them holds in the end.
//
// Each byte of the file `gate` lets the agent go on by one event.
import { appendFileSync } from "node:fs";
import { HttpAgent } from "@ag-ui/client";
import { client, errors, given, print, say, view } from "./client.mjs";

const soon = () => new Promise((done) => setTimeout(done, 5));
const until = async (holds) => {
  while (!holds()) await soon();
};
const held = (agent) => structuredClone(view(agent));
const pass = () => appendFileSync(given.gate, ".");

const watcher = client("echo", given.threadId);
await say(watcher, "before");
const before = held(watcher);
const seen = [];
watcher.subscribe({ onEvent: () => void seen.push(held(watcher)) });
watcher.url = `${given.url}/agents/gated/`;
const { played: script, gate, events } = given;
const watching = say(watcher, "go", { script, gate });

function histories(position) {
  const stale = before.messages.map((m) => ({ ...m, content: `not ${m.content}` })).reverse();
  return {
    empty: { messages: [], state: {} },
    prefix: before,
    partial: seen[Math.max(0, position - 4)] ?? before,
    stale: {
      messages: [{ id: "x9", role: "user", content: "never sent" }, ...stale],
      state: { old: true },
    },
  };
}

const joiners = [];

function join(position, name, { messages, state }) {
  const joiner = { position, name, errors: [], events: 0 };
  joiners.push(joiner);
  const agent = new HttpAgent({
    url: `${given.urls[position % given.urls.length]}/agents/gated/connect`,
    threadId: given.threadId,
    headers: { Authorization: `Bearer ${given.token}` },
    initialMessages: structuredClone(messages),
    initialState: structuredClone(state),
  });
  const told = {
    onEvent: () => void joiner.events++,
    onRunErrorEvent: ({ event }) => void joiner.errors.push(event),
    onRunFailed: ({ error }) => void joiner.errors.push(String(error)),
  };
  joiner.done = agent
    .runAgent({}, told)
    .catch((error) => void joiner.errors.push(String(error)))
    .then(() => Object.assign(joiner, held(agent), { over: true }));
}

function joinAll(position) {
  for (const [name, history] of Object.entries(histories(position))) join(position, name, history);
}

const joined = () => joiners.every((joiner) => joiner.events || joiner.over);

for (let position = 1; position <= events + 1; position++) {
  await until(() => seen.length >= position);
  joinAll(position);
  if (position % 2) await until(joined); // else they meet the next event on their way in
  if (position <= events) pass();
}
await until(joined);
const early = joiners.filter((joiner) => joiner.over).length;
pass();
await watching;
await Promise.all(joiners.map((joiner) => joiner.done));
joinAll(events + 2);
await Promise.all(joiners.map((joiner) => joiner.done));
print({ ...view(watcher), early, joiners, watcherErrors: errors });
