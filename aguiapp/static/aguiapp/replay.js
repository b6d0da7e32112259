/*
 * The Replay page: moves through the stored events of one run.
 *
 * The server folds; this script asks for the fold at a position and shows it. Whatever an agent
 * wrote becomes a text node, never markup. The event list holds as many rows in the document as
 * fit on the screen, so a run may have any number of events.
 */

const SHOWN_MESSAGES = 40;
const SHOWN_CALLS = 10;
const SHOWN_CHARACTERS = 20_000;
const PAGE_ROWS = 200;
const KEPT_PAGES = 50;
const SPARE_ROWS = 6;
// Browsers lay out nothing beyond some 16 million pixels.
const MAX_HEIGHT = 8_000_000;
const FAMILIES = [
  [/^(RUN|STEP|SUBAGENT)_/, "run"],
  [/^TEXT_/, "text"],
  [/^TOOL_/, "tool"],
  [/^REASONING_/, "reasoning"],
  [/^(STATE|MESSAGES)_/, "state"],
  [/^ACTIVITY_/, "activity"],
];

const byId = (id) => document.getElementById(id);
const config = JSON.parse(byId("agui-config").textContent);
const say = (name, values = {}) =>
  config.text[name].replace(/\{(\w+)\}/g, (_, key) => values[key] ?? "");
const whole = new Intl.NumberFormat(document.documentElement.lang || undefined);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

function make(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

/* Numbers that JavaScript would round keep their digits. */
function parse(text) {
  if (!JSON.rawJSON) return JSON.parse(text);
  return JSON.parse(text, (_key, value, context) =>
    typeof value === "number" && String(value) !== context.source
      ? JSON.rawJSON(context.source)
      : value,
  );
}

async function load(address, query) {
  const response = await fetch(`${address}?${new URLSearchParams(query)}`, {
    headers: { Accept: "application/json" },
  });
  const type = response.headers.get("Content-Type") ?? "";
  if (!response.ok || !type.startsWith("application/json")) throw new Error(response.status);
  return parse(await response.text());
}

/* JSON text on indented lines, token by token: keys, numbers and escapes stay as stored. */
function indent(text) {
  const tokens = text.match(/"(?:[^"\\]|\\.)*"|[[\]{}:,]|[^\s[\]{}:,"]+/g) ?? [];
  let depth = 0;
  let result = "";
  const newline = () => `\n${"  ".repeat(depth)}`;
  tokens.forEach((token, index) => {
    if (token === "{" || token === "[") {
      depth += 1;
      result += token + (/[\]}]/.test(tokens[index + 1]) ? "" : newline());
    } else if (token === "}" || token === "]") {
      depth -= 1;
      result += (/^[[{]$/.test(tokens[index - 1]) ? "" : newline()) + token;
    } else if (token === ",") {
      result += token + newline();
    } else {
      result += token === ":" ? ": " : token;
    }
  });
  return result;
}

function asJSON(value) {
  return JSON.stringify(value, null, 2) ?? "";
}

function offset(created) {
  if (!created || !config.start) return "";
  const seconds = (Date.parse(created) - Date.parse(config.start)) / 1000;
  return `${seconds < 0 ? "−" : "+"}${Math.abs(seconds).toFixed(3)}`;
}

/* A long text is cut, with a button for the rest. */
function long(text, tag = "pre", className = "agui-pre") {
  if (text.length <= SHOWN_CHARACTERS) return make(tag, className, text);
  const node = make(tag, className, text.slice(0, SHOWN_CHARACTERS), "…");
  const more = make("button", "button", say("cut", { count: whole.format(text.length) }));
  more.type = "button";
  more.addEventListener("click", () => {
    node.textContent = text;
    more.remove();
  });
  return make("div", "", node, more);
}

/* ------------------------------------------------------------------ the list of events */

class EventList {
  constructor(box, choose) {
    this.box = box;
    this.choose = choose;
    this.count = 0;
    this.current = 0;
    this.pages = new Map();
    this.space = make("div", "agui-space");
    this.space.setAttribute("role", "presentation");
    box.replaceChildren(this.space);
    box.addEventListener("scroll", () => this.soon(), { passive: true });
    box.addEventListener("click", (event) => {
      const row = event.target.closest("[data-seq]");
      if (row) choose(Number(row.dataset.seq));
    });
    new ResizeObserver(() => {
      this.measure();
      this.select(this.current);
    }).observe(box);
  }

  /* The height of a row follows the reader's font size. */
  measure() {
    const probe = make("div", "agui-row", "0");
    this.space.append(probe);
    this.rowHeight = probe.getBoundingClientRect().height || 24;
    probe.remove();
    const height = Math.min(this.count * this.rowHeight, MAX_HEIGHT);
    this.space.style.setProperty("block-size", `${height}px`);
    this.fitting = Math.max(1, Math.floor(this.box.clientHeight / this.rowHeight));
    this.squeeze = this.count * this.rowHeight > MAX_HEIGHT;
  }

  resize(count) {
    this.pages.delete(Math.floor(this.count / PAGE_ROWS));
    this.count = count;
    this.measure();
    this.soon();
  }

  get range() {
    return Math.max(1, this.box.scrollHeight - this.box.clientHeight);
  }

  first() {
    if (!this.squeeze) return Math.floor(this.box.scrollTop / this.rowHeight);
    return Math.round((this.box.scrollTop / this.range) * (this.count - this.fitting));
  }

  select(seq) {
    this.current = seq;
    const index = Math.max(0, seq - 1);
    const first = this.first();
    if (index <= first || index >= first + this.fitting - 1) {
      const wanted = clamp(index - Math.floor(this.fitting / 2), 0, this.count);
      this.box.scrollTop = this.squeeze
        ? (wanted / Math.max(1, this.count - this.fitting)) * this.range
        : wanted * this.rowHeight;
    }
    this.soon();
  }

  soon() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = undefined;
      this.draw();
    });
  }

  draw() {
    if (!this.rowHeight) return;
    if (!this.count) {
      this.space.replaceChildren(make("p", "agui-empty", say("empty")));
      return;
    }
    const first = clamp(this.first(), 0, this.count - 1);
    const from = Math.max(0, first - SPARE_ROWS);
    const until = Math.min(this.count, first + this.fitting + SPARE_ROWS);
    const top = this.squeeze ? this.box.scrollTop - first * this.rowHeight : 0;
    const rows = [];
    for (let index = from; index < until; index += 1) {
      const row = this.row(index + 1);
      row.style.setProperty("transform", `translateY(${top + index * this.rowHeight}px)`);
      rows.push(row);
    }
    this.space.replaceChildren(...rows);
    const shown = this.current > from && this.current <= until;
    if (shown) this.box.setAttribute("aria-activedescendant", `agui-row-${this.current}`);
    else this.box.removeAttribute("aria-activedescendant");
  }

  row(seq) {
    const page = this.page(Math.floor((seq - 1) / PAGE_ROWS));
    const entry = page.rows?.get(seq);
    const row = make("div", "agui-row", make("span", "agui-seq", String(seq)));
    row.id = `agui-row-${seq}`;
    row.dataset.seq = seq;
    row.setAttribute("role", "option");
    row.setAttribute("aria-setsize", this.count);
    row.setAttribute("aria-posinset", seq);
    row.setAttribute("aria-selected", String(seq === this.current));
    if (seq > this.current) row.classList.add("agui-later");
    if (!entry) {
      row.append(make("span", "agui-missing", say(page.rows ? "gone" : "loading")));
      return row;
    }
    const family = FAMILIES.find(([pattern]) => pattern.test(entry.type))?.[1] ?? "other";
    row.append(make("span", "agui-offset", offset(entry.created)));
    if (!entry.valid) row.append(make("span", "agui-flag", `⚠ ${say("unreadable")}`));
    row.append(
      make("span", `agui-type agui-${family}`, entry.type),
      make("span", "agui-summary", entry.summary),
    );
    return row;
  }

  /* The page if it is here; else it is on its way. */
  page(number) {
    const known = this.pages.get(number);
    if (known) return known;
    const page = { rows: null };
    this.pages.set(number, page);
    if (this.pages.size > KEPT_PAGES) this.pages.delete(this.pages.keys().next().value);
    load(config.events, { after: number * PAGE_ROWS, limit: PAGE_ROWS })
      .then(({ events }) => {
        const end = (number + 1) * PAGE_ROWS;
        page.rows = new Map(events.filter((e) => e.seq <= end).map((e) => [e.seq, e]));
        this.soon();
      })
      .catch((error) => {
        this.pages.delete(number);
        complain(error);
      });
    return page;
  }
}

/* ------------------------------------------------------------------ conversation */

const unfolded = new Set();
let shownMessages = SHOWN_MESSAGES;

function partText(part) {
  if (typeof part === "string") return part;
  if (part?.type === "text") return part.text ?? "";
  return asJSON(part);
}

function contentText(message) {
  const { content } = message;
  if (content === undefined || content === null) return "";
  if (typeof content === "string") return content;
  return Array.isArray(content) ? content.map(partText).join("\n") : asJSON(content);
}

function callNode(call, open, pending) {
  const head = make("header", "", make("code", "", call.function?.name ?? ""));
  if (open.has(call.id)) head.append(make("span", "agui-tag", say("streaming")));
  else if (pending.has(call.id)) head.append(make("span", "agui-tag", say("pending")));
  return make("div", "agui-call", head, long(call.function?.arguments ?? ""));
}

function messageNode(message, open, pending) {
  const title = [message.role, message.name, message.activityType].filter(Boolean).join(" · ");
  const head = make("header", "", make("strong", "", title));
  if (message.metadata?.aguiapp?.actor) {
    head.append(make("span", "agui-tag", String(message.metadata.aguiapp.actor)));
  }
  if (message.subagentRunId) head.append(make("span", "agui-tag", message.subagentRunId));
  if (open.has(message.id)) head.append(make("span", "agui-tag", say("streaming")));
  const node = make("article", `agui-message agui-role-${message.role}`, head);
  const text = contentText(message);
  if (message.role === "reasoning") node.append(reasoningNode(message, text));
  else if (text) node.append(long(text, "div", "agui-said"));
  if (message.error) node.append(make("div", "agui-error", message.error));
  const calls = message.toolCalls ?? [];
  node.append(...calls.slice(0, SHOWN_CALLS).map((call) => callNode(call, open, pending)));
  if (calls.length > SHOWN_CALLS) {
    node.append(make("p", "", say("calls", { count: calls.length - SHOWN_CALLS })));
  }
  return node;
}

function reasoningNode(message, text) {
  const node = make("details", "", make("summary", "", say("reasoning")));
  node.append(long(text, "div", "agui-said"));
  node.open = unfolded.has(message.id);
  node.addEventListener("toggle", () => {
    if (node.open) unfolded.add(message.id);
    else unfolded.delete(message.id);
  });
  return node;
}

function showConversation(box, fold) {
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  const open = new Set(fold.openItems.map((item) => item.id));
  const pending = new Set(fold.pendingToolCallIds);
  const nodes = fold.messages.map((message) => messageNode(message, open, pending));
  const earlier = fold.messageCount - fold.messages.length;
  if (earlier > 0) nodes.unshift(earlierButton(earlier));
  if (!nodes.length) nodes.push(make("p", "agui-empty", say("messages")));
  box.replaceChildren(...nodes);
  if (atEnd) box.scrollTop = box.scrollHeight;
}

function earlierButton(count) {
  const button = make("button", "button", say("earlier", { count: whole.format(count) }));
  button.type = "button";
  button.addEventListener("click", () => {
    shownMessages += SHOWN_MESSAGES;
    ask();
  });
  return button;
}

/* ------------------------------------------------------------------ event and notes */

function showEvent(box, fold) {
  if (fold.event === null) {
    box.replaceChildren(make("p", "agui-empty", say(fold.seq ? "gone" : "nothing")));
    return;
  }
  const size = new TextEncoder().encode(fold.event).length;
  const facts = [
    fold.type,
    say("bytes", { count: whole.format(size) }),
    fold.created,
    say("position", { position: fold.position }),
  ];
  const nodes = [make("p", "agui-facts", facts.join(" · "))];
  if (!fold.valid) nodes.push(make("p", "agui-error", `⚠ ${say("invalid")}`));
  nodes.push(long(fold.valid ? indent(fold.event) : fold.event));
  box.replaceChildren(...nodes);
}

function showNotes(fold) {
  const steps = fold.openItems.map((item) => `${item.kind} ${item.id}`).slice(0, 8).join(" › ");
  const notes = [
    steps && say("open", { items: steps }),
    fold.interrupts.length && say("interrupts", { count: fold.interrupts.length }),
  ];
  byId("agui-open").textContent = notes.filter(Boolean).join(" · ");
  const named = fold.unreadableSeqs.map((seq) => `#${seq}`).join(" ");
  const seqs = named && `(${named})`;
  byId("agui-skipped").textContent = fold.unreadable
    ? `⚠ ${say("skipped", { count: fold.unreadable, seqs })}`
    : "";
}

/* ------------------------------------------------------------------ moving */

const slider = byId("agui-slider");
const number = byId("agui-number");
const alertBox = byId("agui-alert");
const list = new EventList(byId("agui-events"), (seq) => go(seq));
let last = 0;
let current = 0;
let asking = false;
let askAgain = false;

function complain(error) {
  alertBox.textContent = say("failed", { status: error.message });
  alertBox.hidden = false;
}

function grow(count) {
  last = count;
  slider.max = count;
  number.max = count;
  slider.disabled = !count;
  number.disabled = !count;
  byId("agui-last").textContent = whole.format(count);
  list.resize(count);
}

function go(seq) {
  current = clamp(Math.round(seq) || 0, 0, last);
  slider.value = current;
  slider.setAttribute("aria-valuetext", `${current} / ${last}`);
  number.value = current;
  for (const button of document.querySelectorAll("[data-go]")) {
    const back = ["first", "previous"].includes(button.dataset.go);
    button.disabled = back ? current <= 0 : current >= last;
  }
  list.select(current);
  ask();
}

/* One question at a time, then the newest: a dragged slider never queues up work. */
async function ask() {
  if (asking) {
    askAgain = true;
    return;
  }
  asking = true;
  do {
    askAgain = false;
    document.querySelector(".agui-panels").setAttribute("aria-busy", "true");
    try {
      show(await load(config.at, { seq: current, messages: shownMessages }));
      alertBox.hidden = true;
    } catch (error) {
      complain(error);
    }
  } while (askAgain);
  asking = false;
  document.querySelector(".agui-panels").setAttribute("aria-busy", "false");
  settle();
}

function show(fold) {
  for (const mark of document.querySelectorAll(".agui-at")) mark.textContent = `#${fold.seq}`;
  showConversation(byId("agui-conversation"), fold);
  byId("agui-state").replaceChildren(long(asJSON(fold.state)));
  showEvent(byId("agui-event"), fold);
  showNotes(fold);
  byId("agui-time").textContent = fold.created ? `${offset(fold.created)} s` : "";
  byId("agui-where").textContent = fold.seq ? fold.type ?? say("gone") : say("beginning");
  byId("agui-replay").dataset.at = fold.seq;
}

/* What need not happen while the slider moves: the address and the announcement. */
function settle() {
  if (location.hash !== `#e${current}`) history.replaceState(null, "", `#e${current}`);
  const type = byId("agui-where").textContent;
  const text = say("announce", { seq: current, last, type });
  byId("agui-live").textContent = text;
  slider.setAttribute("aria-valuetext", text);
}

function hashSeq() {
  const found = /^#e(\d+)$/.exec(location.hash);
  return found ? Number(found[1]) : null;
}

const MOVES = {
  first: () => go(0),
  previous: () => go(current - 1),
  next: () => go(current + 1),
  last: () => go(last),
};

async function refresh() {
  const follow = current === last;
  try {
    const news = await load(config.events, { after: last, limit: 1 });
    config.start ??= news.events[0]?.created;
    grow(news.last);
    const badge = byId("agui-status").querySelector(".agui-badge");
    badge.className = `agui-badge agui-badge-${news.status}`;
    badge.textContent = news.statusText;
    byId("agui-refresh").hidden = news.ended;
    go(follow ? last : current);
  } catch (error) {
    complain(error);
  }
}

const SIDEWAYS = { ArrowLeft: -1, ArrowRight: 1 };
const ALONG = { ArrowUp: -1, ArrowDown: 1, PageUp: -50, PageDown: 50 };

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
  if (event.target.closest("input, select, textarea, [contenteditable]")) return;
  // Panels scroll with their own keys; the rest of the page moves the playhead.
  const scrolling = event.target.closest(".agui-scroll") !== null;
  const inList = event.target.closest("#agui-events") !== null;
  const step = SIDEWAYS[event.key] ?? (inList ? ALONG[event.key] : undefined);
  if (step) go(current + step);
  else if (event.key === "Home" && !scrolling) go(0);
  else if (event.key === "End" && !scrolling) go(last);
  else return;
  event.preventDefault();
}

function begin() {
  byId("agui-replay").hidden = false;
  grow(config.last);
  slider.addEventListener("input", () => go(slider.valueAsNumber));
  number.addEventListener("change", () => go(number.valueAsNumber));
  for (const button of document.querySelectorAll("[data-go]")) {
    button.addEventListener("click", () => MOVES[button.dataset.go]());
  }
  byId("agui-refresh").addEventListener("click", refresh);
  document.addEventListener("keydown", onKey);
  window.addEventListener("hashchange", () => {
    const seq = hashSeq();
    if (seq !== null && seq !== current) go(seq);
  });
  go(hashSeq() ?? config.seq);
}

begin();
