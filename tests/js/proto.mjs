// The official client over protobuf: a whole run, then the same run cut and resumed at cursors.
import { HttpAgent } from "@ag-ui/client";
import { errors, given, print, run, view } from "./client.mjs";

const PROTO = "application/vnd.ag-ui.event+proto";
const headers = { Authorization: `Bearer ${given.token}` };
const types = new Set();

class BinaryAgent extends HttpAgent {
  requestInit(input) {
    const init = super.requestInit(input);
    return { ...init, headers: { ...init.headers, Accept: `${PROTO}, text/event-stream` } };
  }
}

async function played(fetch) {
  const agent = new BinaryAgent({
    url: `${given.url}/agents/${given.agent}/`,
    threadId: given.threadId,
    headers,
    initialMessages: [{ id: "said", role: "user", content: given.text }],
    fetch,
  });
  await run(agent, given.forwardedProps ?? {});
  return view(agent);
}

let cursor, key, runKey;
const frames = [];

const whole = await played(async (url, init) => {
  const response = await fetch(url, init);
  types.add(response.headers.get("content-type"));
  cursor = response.headers.get("AGUI-Cursor");
  key = response.headers.get("AGUI-Thread");
  runKey = response.headers.get("AGUI-Run");
  const body = Buffer.from(await response.arrayBuffer());
  for (let at = 0; at < body.length; ) {
    const end = at + 4 + body.readUInt32BE(at);
    frames.push(body.subarray(at, end));
    at = end;
  }
  return new Response(body, { headers: response.headers });
});

const split = cursor.lastIndexOf("-");
const [epoch, first] = [cursor.slice(0, split), Number(cursor.slice(split + 1))];
const resumed = [];

for (let seen = 0; seen < frames.length; seen += 10) {
  resumed.push(
    await played(async () => {
      const after = `${epoch}-${first + seen - 1}`;
      const rest = await fetch(`${given.url}/threads/${key}/stream?after=${after}&run=${runKey}`, {
        headers: { ...headers, Accept: PROTO },
      });
      types.add(rest.headers.get("content-type"));
      const tail = Buffer.from(await rest.arrayBuffer());
      const body = Buffer.concat([...frames.slice(0, seen), tail]);
      if (!body.equals(Buffer.concat(frames))) errors.push(`other bytes behind ${after}`);
      return new Response(body, { headers: { "content-type": PROTO } });
    }),
  );
}
print({ ...whole, thread: key, types: [...types], frames: frames.length, resumed });
