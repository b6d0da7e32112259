/*
 * For clients of aguiapp, in browsers and in Node 18 or newer; depends on nothing.
 *
 *   cancellingFetch  a `fetch` whose aborted requests stop their runs
 *   follow           every event of a thread exactly once, through lost connections
 *
 * A run does not depend on a connection: who aborts a request only hangs up, and the agent works
 * on. That is right for a closed tab and wrong for a stop button.
 */

/** A request that the server answered with an error, or with something that is no stream. */
export class Refused extends Error {
  constructor(status, { code, message, details } = {}) {
    super(message ?? `The server answered ${status}.`);
    Object.assign(this, { name: "Refused", status, code, details });
  }
}

/**
 * A fetch for `new HttpAgent({ url, fetch })`: when a request's signal is aborted before its
 * stream ended in order, the run is stopped for everybody, even if the connection was lost before.
 *
 * The caller sees what plain fetch would show. An abort that comes ahead of the response headers
 * is kept: the request goes on in the background, at most `patience` ms, until they name the run.
 *
 * `headers` (an object or a function) are sent with the run's request and with the cancel call;
 * `onError` hears why a stop failed, for which no caller is waiting.
 */
export function cancellingFetch({
  fetch = globalThis.fetch,
  headers,
  patience = 30_000,
  onError = console.error,
} = {}) {
  async function cancel(response, url, { body, ...request }) {
    const { "content-type": _, ...sent } = await merged(request.headers, headers);
    // keepalive: also when the page is left right after
    const call = { ...request, method: "POST", headers: sent, keepalive: true };
    const answer = await fetch(cancelAddress(response, url), call);
    if (!answer.ok) throw await refusal(answer);
  }

  return async (url, { signal, ...request } = {}) => {
    request.headers = await merged(request.headers, headers);
    if (!signal) return fetch(url, request);
    signal.throwIfAborted();
    const connection = new AbortController();
    const pending = fetch(url, { ...request, signal: connection.signal });

    async function stop() {
      const late = new Error(`No answer within ${patience} ms: the run may go on.`);
      const timer = setTimeout(() => connection.abort(late), patience);
      try {
        const response = await pending;
        // Hang up first: browsers open few connections to a host, and the call needs one.
        connection.abort(signal.reason);
        if (response.ok) await cancel(response, url, request);
      } catch (error) {
        onError(error);
      } finally {
        clearTimeout(timer);
      }
    }

    let forget;
    const aborted = new Promise((_, reject) => {
      const heard = () => {
        reject(signal.reason);
        stop();
      };
      signal.addEventListener("abort", heard, { once: true });
      forget = () => signal.removeEventListener("abort", heard);
    });
    try {
      return watched(await Promise.race([pending, aborted]), forget);
    } catch (error) {
      forget();
      throw error;
    }
  };
}

/**
 * Every event behind the cursor `after`, then live: `for await (const { cursor, event } of …)`.
 *
 * `url` is a thread's `stream`, with `?run=` for one run only: then it ends with that run. It
 * comes back after every lost connection, with a pause that grows from 0.2 to 5 s, is random,
 * and starts anew with each event. Throws Refused where coming back is no use; ends when `signal`
 * is aborted. `cursor` is null for an event that the server made up to fill a gap.
 *
 * `headers` may be a function, asked at each connection; `silence` is how many ms without a byte
 * mean that the connection is dead (the server sends a comment every 15 s).
 */
export async function* follow({
  url,
  after = "",
  headers,
  signal,
  fetch = globalThis.fetch,
  silence = 45_000,
}) {
  let cursor = after;
  for (let failures = 0; !signal?.aborted; failures++) {
    const address = absolute(url);
    if (cursor) address.searchParams.set("after", cursor);
    const sent = await merged({ Accept: "text/event-stream" }, headers);
    const connection = limited(signal, silence);
    let rest = 0;
    try {
      const request = { headers: sent, signal: connection.signal, cache: "no-store" };
      const response = await fetch(address.href, request).catch(() => null);
      if (response?.status === 204) return; // nothing is left of the run
      rest = await checked(response);
      for await (const frame of frames(response, connection)) {
        if (signal?.aborted) return;
        cursor = frame.id ?? frame.resume ?? cursor;
        if (frame.data === undefined) continue;
        failures = 0;
        yield { cursor: frame.id ?? null, event: JSON.parse(frame.data) };
      }
    } finally {
      connection.close();
    }
    await pause(rest + Math.random() * Math.min(5000, 200 * 2 ** failures), signal);
  }
}

/* The whole frames of a stream; a lost connection is an end, and half a frame comes again. */
async function* frames(response, connection) {
  if (!response?.ok) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ; ) {
    const { done, value } = await reader.read().catch(() => ({ done: true }));
    if (done) return;
    connection.alive();
    const whole = (text + value).split("\n\n");
    text = whole.pop();
    for (const frame of whole) {
      const [id, data, resume] = ["id:", "data:", ": aguiapp\\.resume"].map(
        (field) => new RegExp(`^${field} ?(.*)$`, "m").exec(frame)?.[1],
      );
      yield { id, data, resume };
    }
  }
}

/* How many ms the server wants to be left alone; throws where asking again is no use. */
async function checked(response) {
  if (!response) return 0;
  const { ok, status, headers } = response;
  if (ok && headers.get("Content-Type")?.startsWith("text/event-stream")) return 0;
  const passing = [408, 425, 429].includes(status) || (status >= 500 && status !== 501);
  if (!passing) throw await refusal(response);
  return 1000 * Number(headers.get("Retry-After")) || 0;
}

async function refusal(response) {
  const { error } = await response.json().catch(() => ({}));
  return new Refused(response.status, error);
}

/* The same response; `ended` is called when its body was read to an end in order. */
function watched(response, ended) {
  if (!response.body) {
    ended();
    return response;
  }
  const reader = response.body.getReader();
  const source = {
    async pull(controller) {
      const { done, value } = await reader.read();
      if (!done) return controller.enqueue(value);
      ended();
      controller.close();
    },
    cancel: (reason) => reader.cancel(reason),
  };
  return new Response(new ReadableStream(source, { highWaterMark: 0 }), response);
}

function cancelAddress(response, url) {
  const thread = response.headers.get("AGUI-Thread");
  const run = response.headers.get("AGUI-Run");
  if (!thread || !run) throw new Error("CORS does not expose AGUI-Thread and AGUI-Run.");
  const path = `../../threads/${thread}/runs/${run}/cancel`;
  return new URL(path, absolute(response.url || url)).href;
}

const absolute = (url) => new URL(url, globalThis.location?.href);

async function merged(given, more) {
  const headers = new Headers(given);
  const extra = new Headers(typeof more === "function" ? await more() : more);
  extra.forEach((value, name) => headers.set(name, value));
  return Object.fromEntries(headers);
}

/* A signal that is aborted with the outer one, on `close`, or `ms` after the last `alive`. */
function limited(outer, ms) {
  const controller = new AbortController();
  let timer;
  const close = () => {
    clearTimeout(timer);
    outer?.removeEventListener("abort", close);
    controller.abort();
  };
  const alive = () => {
    clearTimeout(timer);
    if (!controller.signal.aborted) timer = setTimeout(close, ms);
  };
  outer?.addEventListener("abort", close);
  if (outer?.aborted) close();
  else alive();
  return { signal: controller.signal, alive, close };
}

function pause(ms, outer) {
  const { signal } = limited(outer, ms);
  return new Promise((resolve) => {
    if (signal.aborted) resolve();
    signal.addEventListener("abort", resolve);
  });
}
