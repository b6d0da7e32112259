// The chat: posts to the agent, reads its stream, and follows the thread between its own runs.
// Everything that comes from outside goes into text nodes.

const $ = (id) => document.getElementById(id);
const page = $("chat").dataset;
const log = $("log");

let threadId = page.threadId || uuid();
let thread = page.thread; // keys, as in the addresses; empty until the first run
let run = ""; // the active run's key
let cursor = "";
let state = null;
let watching = null;
let items = new Map();

// --- talking to the server -------------------------------------------------------------------

async function send(text) {
  const message = { id: uuid(), role: "user", content: text };
  watching?.abort();
  notice("");
  running(true);
  show(message);
  try {
    const response = await ask(page.agent, {
      threadId,
      runId: uuid(),
      state: {},
      messages: [message],
      tools: [],
      context: [],
      forwardedProps: {},
    });
    thread = response.headers.get("AGUI-Thread");
    run = response.headers.get("AGUI-Run");
    window.history.replaceState(null, "", `?thread=${thread}`);
    await read(response).catch(() => notice("Connection lost; catching up."));
  } catch (problem) {
    // Refused, so nothing was stored: give the text back.
    remove(message.id);
    $("text").value = text;
    running(false);
    notice(problem.message);
  }
  if (thread) watch();
}

async function stop() {
  $("stop").disabled = true;
  try {
    await ask(`${page.threads}${thread}/runs/${run}/cancel`, {});
  } catch (problem) {
    notice(problem.message);
  }
  $("stop").disabled = false;
}

// Follows the thread from the last cursor, through lost connections, until the next own run.
async function watch() {
  const { signal } = (watching = new AbortController());
  for (let pause = 500; !signal.aborted; pause = Math.min(pause * 2, 3000)) {
    try {
      if (!cursor) await load(signal);
      const after = encodeURIComponent(cursor);
      const response = await get(`${page.threads}${thread}/stream?after=${after}`, signal);
      notice("");
      pause = 500;
      await read(response);
    } catch (problem) {
      if (signal.aborted) return;
      if (problem.code === "cursor_foreign") cursor = "";
      else if (problem.status >= 400 && problem.status < 500) return notice(problem.message);
      else notice("Connection lost; trying again.");
    }
    await new Promise((wake) => setTimeout(wake, pause));
  }
}

async function load(signal) {
  const snapshot = await (await get(`${page.threads}${thread}/snapshot`, signal)).json();
  reset(snapshot.messages ?? []);
  state = snapshot.state ?? null;
  draw();
  cursor = snapshot.cursor;
  run = snapshot.run?.key ?? "";
  running(Boolean(run));
  if (!run) await recall(signal);
}

// Shows how the last run ended: a snapshot has the messages and the state only.
async function recall(signal) {
  const response = await get(`${page.home}threads/${thread}/ending/`, signal);
  const event = response.status === 204 ? {} : await response.json();
  if (["RUN_FINISHED", "RUN_ERROR"].includes(event.type)) apply(event);
}

// Finds the key of a run that began elsewhere, so that it can be stopped from here.
async function identify(runId) {
  const snapshot = await (await get(`${page.threads}${thread}/snapshot`)).json();
  if (!run && snapshot.run?.runId === runId) {
    run = snapshot.run.key;
    running(true);
  }
}

function ask(url, body) {
  return answered(
    fetch(url, {
      method: "POST",
      headers: {
        Accept: "text/event-stream, application/json;q=0.5",
        "AGUI-Resume": "1", // a stream that is cut short is picked up by watch()
        "Content-Type": "application/json",
        "X-CSRFToken": page.csrf,
      },
      body: JSON.stringify(body),
    }),
  );
}

function get(url, signal) {
  return answered(fetch(url, { signal, headers: { Accept: "text/event-stream, application/json;q=0.5" } }));
}

async function answered(request) {
  let response;
  try {
    response = await request;
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new Error("The server cannot be reached.");
  }
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({}));
  const problem = new Error(error?.message ?? `The server answered ${response.status}.`);
  throw Object.assign(problem, { code: error?.code, status: response.status });
}

// Applies every event of a stream; frames end with an empty line, comments are skipped.
async function read(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      const lines = frame.split("\n");
      const field = (name) =>
        lines.filter((line) => line.startsWith(`${name}:`)).map((line) => line.slice(name.length + 1).trimStart());
      const data = field("data").join("\n");
      if (data) apply(JSON.parse(data));
      cursor = field("id").pop() ?? cursor;
    }
  }
}

// --- events ----------------------------------------------------------------------------------

function apply(event) {
  switch (event.type) {
    case "RUN_STARTED":
      running(true);
      if (!run && thread) identify(event.runId).catch(() => {}); // Stop stays hidden, no more
      event.input?.messages?.forEach(show);
      break;
    case "RUN_FINISHED":
      ended({ cancelled: "Stopped.", interrupt: "Waiting for an answer." }[event.outcome?.type ?? event.outcome]);
      break;
    case "RUN_ERROR":
      ended(event.code ? `${event.message} (${event.code})` : event.message, "error");
      break;
    case "STEP_STARTED":
      $("step").textContent = `${event.stepName} …`;
      break;
    case "STEP_FINISHED":
      $("step").textContent = "";
      break;
    case "TEXT_MESSAGE_START":
      item(event.messageId, event.role ?? "assistant");
      break;
    case "TEXT_MESSAGE_CONTENT":
      item(event.messageId, "assistant").append(event.delta);
      break;
    case "REASONING_MESSAGE_START":
    case "REASONING_MESSAGE_CONTENT":
      item(event.messageId, "reasoning", "Reasoning").append(event.delta ?? "");
      break;
    case "TOOL_CALL_START":
      item(event.toolCallId, "tool", event.toolCallName);
      break;
    case "TOOL_CALL_ARGS":
      item(event.toolCallId, "tool", "Tool").append(event.delta);
      break;
    case "TOOL_CALL_RESULT":
      item(event.toolCallId, "tool", "Tool").append(`\n→ ${event.content}`);
      break;
    case "MESSAGES_SNAPSHOT":
      reset(event.messages);
      break;
    case "STATE_SNAPSHOT":
      state = event.snapshot;
      draw();
      break;
    case "STATE_DELTA":
      state = patched(state, event.delta);
      draw();
      break;
  }
}

function ended(text, kind = "") {
  running(false);
  run = "";
  $("step").textContent = "";
  if (text) item(uuid(), `end ${kind}`).append(text);
}

function patched(document, operations) {
  const root = { root: structuredClone(document) };
  const keys = (path) =>
    ["root", ...path.split("/").slice(1).map((key) => key.replaceAll("~1", "/").replaceAll("~0", "~"))];
  const holder = (path) => keys(path).slice(0, -1).reduce((value, key) => value[key], root);
  const key = (path) => keys(path).at(-1);
  const take = (path) => holder(path)[key(path)];
  const remove = (path) => {
    const [target, name] = [holder(path), key(path)];
    if (Array.isArray(target)) target.splice(Number(name), 1);
    else delete target[name];
  };
  const add = (path, value) => {
    const [target, name] = [holder(path), key(path)];
    if (Array.isArray(target)) target.splice(name === "-" ? target.length : Number(name), 0, value);
    else target[name] = value;
  };
  for (const { op, path, from, value } of operations) {
    const moved = from === undefined ? value : structuredClone(take(from));
    if (op === "move") remove(from);
    if (op === "remove") remove(path);
    else if (op === "replace") holder(path)[key(path)] = value;
    else if (op !== "test") add(path, moved);
  }
  return root.root;
}

// --- the page --------------------------------------------------------------------------------

function show(message) {
  if (message.role === "tool") {
    item(message.toolCallId, "tool", "Tool").append(`\n→ ${message.content}`);
  } else if (!items.has(message.id)) {
    const text = typeof message.content === "string" ? message.content : "";
    if (text || !message.toolCalls) item(message.id, message.role, message.role === "reasoning" ? "Reasoning" : "").append(text);
    for (const call of message.toolCalls ?? []) item(call.id, "tool", call.function.name).append(call.function.arguments);
  }
}

function reset(messages) {
  log.replaceChildren();
  items = new Map();
  messages.forEach(show);
}

// The entry of that id; made at the end of the conversation, folded away when it has a title.
function item(id, kind, title = "") {
  let text = items.get(id);
  if (!text) {
    const entry = document.createElement("li");
    entry.className = kind;
    text = document.createTextNode("");
    if (title) {
      const [details, summary, body] = ["details", "summary", "pre"].map((tag) => document.createElement(tag));
      summary.textContent = title;
      body.append(text);
      details.append(summary, body);
      entry.append(details);
    } else {
      entry.append(text);
    }
    entry.dataset.id = id;
    log.append(entry);
    items.set(id, text);
  }
  return {
    append(more) {
      const low = window.innerHeight + window.scrollY > document.body.scrollHeight - 80;
      text.appendData(more);
      if (low) later("scroll", () => window.scrollTo(0, document.body.scrollHeight));
    },
  };
}

function remove(id) {
  items.get(id)?.parentElement.closest("li").remove();
  items.delete(id);
}

function draw() {
  later("state", () => {
    $("state").hidden = state === null || JSON.stringify(state) === "{}";
    $("state-json").textContent = JSON.stringify(state, null, 2);
  });
}

function running(active) {
  $("send").disabled = active;
  $("stop").hidden = !(active && run);
  log.ariaBusy = String(active);
}

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

// One call per frame, however often it is asked for.
const due = new Map();
function later(name, act) {
  if (!due.has(name)) requestAnimationFrame(() => (due.get(name)(), due.delete(name)));
  due.set(name, act);
}

// crypto.randomUUID is missing on plain http pages that are not local.
function uuid() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  bytes[6] = (bytes[6] & 0x0f) | 0x40;
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  return [...bytes]
    .map((byte, index) => ([4, 6, 8, 10].includes(index) ? "-" : "") + byte.toString(16).padStart(2, "0"))
    .join("");
}

$("say").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || $("send").disabled) return;
  $("text").value = "";
  send(text);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("say").requestSubmit();
  }
});
$("stop").addEventListener("click", stop);
if (thread) watch();
