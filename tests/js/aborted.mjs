// The server dies in mid-stream: the client must not take that for success.
import { client, print } from "./client.mjs";

const agent = client("tokens", "aborted");
agent.addMessage({ id: "u1", role: "user", content: "go" });
let reading = false;
let outcome = "resolved";
try {
  await agent.runAgent({ forwardedProps: { n: 10000, delay: 0.01 } }, {
    onTextMessageContentEvent: () => {
      if (!reading) console.log("reading");
      reading = true;
    },
  });
} catch {
  outcome = "rejected";
}
print({ outcome });
