// Times the official client on whole runs: a JSON line of {events, paced} in, a line of
// {ms, messages, state} out, in the same order. `ms` is from runAgent() to its end.
//
// All events leave one Observable, in one go or, when `paced`, one per macrotask. Reading and
// parsing the line is not timed. The client comes from the folder of the tests that drive it.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const require = createRequire(new URL("../tests/js/package.json", import.meta.url));
const { AbstractAgent } = require("@ag-ui/client");
const { Observable } = require("rxjs");

console.warn = console.error = console.debug = () => {};

class Played extends AbstractAgent {
  constructor({ events, paced }) {
    super({ threadId: "t1" });
    this.source = new Observable(paced ? (observer) => step(observer, events, 0) : (observer) => {
      for (const event of events) observer.next(event);
      observer.complete();
    });
  }

  run() {
    return this.source;
  }
}

function step(observer, events, index) {
  if (index === events.length) return observer.complete();
  observer.next(events[index]);
  setImmediate(step, observer, events, index + 1);
}

for await (const line of createInterface({ input: process.stdin })) {
  const agent = new Played(JSON.parse(line));
  const started = performance.now();
  await agent.runAgent({});
  const ms = performance.now() - started;
  const { messages, state } = agent;
  process.stdout.write(`${JSON.stringify({ ms, messages, state })}\n`);
}
