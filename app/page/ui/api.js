// All that crosses the network: requests with the tab's key, streams of completions, and the live feed.

const KEY = "foretoken.key"; // in this tab's session storage
const SILENCE_MS = 6000; // the feed speaks every second: after so long without a word it is gone
const LASTED_MS = 5000; // a feed that ends sooner did not last: the next is waited for
const LONGEST_WAIT_MS = 60_000; // whatever the server asks for
const WAITS_MS = [500, 1000, 2000, 4000, 8000]; // before the first, second, … try to reach the server again

export class ApiError extends Error {
  // status: 0 where no reply came; pause: ms that the server asks to be left alone for.
  constructor(status, code, message, pause = 0) {
    super(message);
    this.status = status;
    this.code = code;
    this.pause = pause;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  drop: () => sessionStorage.removeItem(KEY),
};

// Raises ApiError for an error's reply, and where the server cannot be reached.
async function ask(path, options = {}) {
  const headers = { ...(options.headers ?? {}) };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  const reply = await fetch(path, { ...options, headers, cache: "no-store" }).catch(unreachable);
  if (!reply.ok) throw await refusal(reply);
  return reply;
}

async function refusal(reply) {
  const body = await reply.json().catch(() => ({}));
  const said = body.error ?? {};
  const pause = 1000 * (Number(reply.headers.get("retry-after")) || 0);
  return new ApiError(reply.status, said.code ?? null, said.message ?? `the server answered ${reply.status}`, pause);
}

// What the network raises, as an ApiError; what was aborted raises its own reason.
function unreachable(error) {
  if (error instanceof ApiError || error.name === "AbortError") throw error;
  throw new ApiError(0, "unreachable", "the server cannot be reached");
}

export const get = async (path) => (await ask(path, { signal: AbortSignal.timeout(SILENCE_MS) })).json();

// The data of each server-sent event, as the bytes come.
async function* events(reply) {
  const decoder = new TextDecoder();
  const reader = reply.body.getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(unreachable);
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      const parts = rest.split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// The chunks of one streamed completion; raises ApiError also for an error that comes within the stream.
export async function* complete(body, signal) {
  const options = {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  };
  for await (const data of events(await ask("v1/completions", options))) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(500, chunk.error.code, chunk.error.message);
    yield chunk;
  }
  throw new ApiError(0, "cut_short", "the server ended the stream before the text was finished");
}

// Follow the feed for ever: listener.state(whole), .event(change), .gone(error, wait in ms), and .locked() where a key
// is needed, after which it waits for the returned promise. Nothing is asked while the tab is hidden.
export async function follow(listener) {
  let tries = 0; // in a row, of feeds that did not last
  for (;;) {
    let first = null; // when this feed's first event came
    let error = null;
    try {
      await visible();
      const hidden = await listen((change) => {
        first ??= performance.now();
        if (change.state) listener.state(change.state);
        else listener.event(change);
      });
      if (!hidden && !lasted(first)) error = new ApiError(0, "ended", "its feed ends at once");
    } catch (raised) {
      error = raised;
    }
    if (lasted(first)) tries = 0;
    if (error?.status === 401) await listener.locked();
    else if (error) {
      const wait = Math.max(WAITS_MS[Math.min(tries++, WAITS_MS.length - 1)], pause(error));
      listener.gone(error, wait);
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }
}

const lasted = (first) => first !== null && performance.now() - first >= LASTED_MS;

const pause = (error) => Math.min(error.pause ?? 0, LONGEST_WAIT_MS);

// Returns once the tab is hidden (true), or the server asks to come again; raises when the server is gone.
async function listen(tell) {
  const controller = new AbortController();
  const silent = () => controller.abort(new ApiError(0, "silent", `no word for ${SILENCE_MS / 1000} s`));
  let left = false;
  const hide = () => {
    if (!document.hidden) return;
    left = true;
    controller.abort();
  };
  let timer = setTimeout(silent, SILENCE_MS);
  document.addEventListener("visibilitychange", hide);
  try {
    for await (const data of events(await ask("ui/events", { signal: controller.signal }))) {
      clearTimeout(timer);
      timer = setTimeout(silent, SILENCE_MS);
      tell(JSON.parse(data));
    }
  } catch (error) {
    if (!left) throw error;
  } finally {
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", hide);
    controller.abort();
  }
  return left;
}

function visible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => {
    const look = () => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", look);
      resolve();
    };
    document.addEventListener("visibilitychange", look);
  });
}
