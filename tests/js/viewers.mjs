// Client A speaks; client B, who knows nothing, speaks on the same thread; then A again.
import { client, given, print, say, snapshot, view } from "./client.mjs";

const a = client(given.agent, "viewers");
await say(a, "Where is order 1001?", { n: 2 });
const b = client(given.agent, "viewers", { initialState: {} });
await say(b, "Where is order 1002?", { n: 2 });
const snapshotAfterB = await snapshot();
const seen = structuredClone(view(b));
await say(a, "And order 1001 again?", { n: 2 });
print({ a: view(a), b: seen, snapshotAfterB });
