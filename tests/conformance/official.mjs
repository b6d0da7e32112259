// The unmodified official client, held to the same streams: cases on stdin, what it saw on stdout.
// Run it in the folder where @ag-ui/client is installed.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

const require = createRequire(join(process.cwd(), "package.json"));
const { HttpAgent } = require("@ag-ui/client");

let warnings = [];
console.warn = (...said) => void warnings.push(said.map(String).join(" "));
console.error = () => {};

const pause = () => new Promise((resolve) => setImmediate(resolve));
// A frame is read over several promises; the index of a rejection needs each to be through.
const settle = async () => { for (let turn = 0; turn < 2; turn++) await pause(); };

function play(stream, seen) {
  const encoder = new TextEncoder();
  return async (url, { body }) => {
    seen.request = JSON.parse(body);
    const frames = new ReadableStream({
      async start(controller) {
        for (const [index, event] of stream.entries()) {
          if (seen.rejected) return;
          seen.index = index;
          controller.enqueue(encoder.encode(`data: ${JSON.stringify(event)}\n\n`));
          await settle();
        }
        if (seen.rejected) return;
        seen.index = stream.length;
        controller.close();
      },
    });
    return new Response(frames, { headers: { "content-type": "text/event-stream" } });
  };
}

async function run({ stream, input, threadId, runId }) {
  const { messages = [], state, ...parameters } = input;
  const seen = { events: [], rejected: false, error: "", index: null, pending: [] };
  warnings = [];
  const agent = new HttpAgent({
    url: "http://case.invalid/",
    threadId,
    initialMessages: messages,
    initialState: state ?? undefined,
    fetch: play(stream, seen),
  });
  try {
    await agent.runAgent({ runId, ...parameters }, {
      onEvent: ({ event }) => void seen.events.push(structuredClone(event)),
      onRunFinishedEvent: ({ pendingToolCallIds }) => void (seen.pending = pendingToolCallIds ?? []),
      onRunFailed: ({ error }) => {
        if (seen.rejected) return;
        seen.rejected = true;
        seen.error = String(error?.message ?? error);
      },
    });
  } catch (error) {
    seen.rejected = true;
    seen.error ||= String(error?.message ?? error);
  }
  if (!seen.rejected) seen.index = null;
  await settle();
  const { pendingInterrupts: interrupts } = agent;
  return { ...seen, messages: agent.messages, state: agent.state, interrupts, warnings };
}

const results = {};
for (const one of JSON.parse(readFileSync(0, "utf8"))) results[one.name] = await run(one);
process.stdout.write(JSON.stringify(results));
