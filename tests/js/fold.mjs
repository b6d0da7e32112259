// Runs streams through the official client: JSON lines of {initial, events, told} in, JSON lines
// of {messages, state, error, error_index, pendingInterrupts, runs} out, in the same order.
//
//   node fold.mjs streams.jsonl results.jsonl
//
// `runs` is what a subscriber was told at each terminal event; `told: false` goes without one,
// which is faster. The client applies an event in microtasks and loses what is queued when a
// later event of the same burst is refused, so one event goes out per macrotask. Several agents
// share the macrotasks.
import { createReadStream, createWriteStream } from "node:fs";
import { once } from "node:events";
import { createInterface } from "node:readline";
import { AbstractAgent } from "@ag-ui/client";
import { Observable } from "rxjs";

const [, , source, target] = process.argv;
const AT_ONCE = 8;

// The client's warnings are not compared.
console.warn = console.error = console.debug = () => {};

class Played extends AbstractAgent {
  constructor({ initial, events }) {
    super({ threadId: "t1", initialMessages: initial.messages, initialState: initial.state });
    this.events = events;
    this.sent = -1;
    // The constructor takes some states for none.
    this.state = initial.state;
  }

  run() {
    return new Observable((observer) => {
      const next = () => {
        if (observer.closed) return;
        this.sent += 1;
        if (this.sent === this.events.length) return observer.complete();
        observer.next(this.events[this.sent]);
        setImmediate(next);
      };
      setImmediate(next);
    });
  }
}

function told(runs, { outcome, result, pendingToolCallIds, interrupts }) {
  runs.push({ outcome, result, pendingToolCallIds, interrupts });
}

async function play(stream) {
  const agent = new Played(stream);
  const runs = [];
  const listener = {
    onRunFinishedEvent: (params) => told(runs, params),
    onRunErrorEvent: () => told(runs, { outcome: "error" }),
  };
  let error = null;
  try {
    await agent.runAgent({}, stream.told === false ? undefined : listener);
  } catch (problem) {
    error = String(problem.message);
  }
  const { messages, state, pendingInterrupts } = agent;
  const error_index = error === null ? null : agent.sent;
  return JSON.stringify({ messages, state, error, error_index, pendingInterrupts, runs });
}

const results = createWriteStream(target);
const playing = [];

async function write() {
  const result = await playing.shift();
  if (!results.write(`${result}\n`)) await once(results, "drain");
}

for await (const line of createInterface({ input: createReadStream(source) })) {
  playing.push(play(JSON.parse(line)));
  if (playing.length >= AT_ONCE) await write();
}
while (playing.length) await write();
results.end();
