// All network access of the page: requests with the tab's API key, streamed texts, and the live feed.

const KEY = "foretoken.key"; // its name in this tab's session storage
const SILENCE_MS = 6000; // the feed sends an event every second; after this long without one it counts as gone
const LASTED_MS = 5000; // the page waits before it follows again a feed that ended sooner
const LONGEST_WAIT_MS = 60_000; // even if the server asks for a longer pause
const WAITS_MS = [500, 1000, 2000, 4000, 8000]; // before the first, second, … new attempt to reach the server

export class ApiError extends Error {
  // status: 0 without a reply; pause: ms that the server asks clients to wait.
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

// Returns the reply. Throws ApiError for an error reply, or if the server cannot be reached.
async function request(path, options = {}) {
  const headers = { ...(options.headers ?? {}) };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  const reply = await fetch(path, { ...options, headers, cache: "no-store" }).catch(unreachable);
  if (!reply.ok) throw await refusal(reply);
  return reply;
}

async function refusal(reply) {
  const body = await reply.json().catch(() => ({}));
  const error = body.error ?? {};
  const pause = 1000 * (Number(reply.headers.get("retry-after")) || 0);
  return new ApiError(reply.status, error.code ?? null, error.message ?? `the server answered ${reply.status}`, pause);
}

// Throws a network error as an ApiError. Throws an ApiError or an abort unchanged.
function unreachable(error) {
  if (error instanceof ApiError || error.name === "AbortError") throw error;
  throw new ApiError(0, "unreachable", "the server cannot be reached");
}

export const get = async (path) => (await request(path, { signal: AbortSignal.timeout(SILENCE_MS) })).json();

// Yields the data of each server-sent event as it arrives.
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

// Yields the chunks of one streamed completion, or of a chat's next message if the body has `messages`. Throws ApiError,
// also for an error event within the stream.
export async function* complete(body, signal) {
  const options = {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  };
  const path = body.messages ? "v1/chat/completions" : "v1/completions";
  for await (const data of events(await request(path, options))) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(500, chunk.error.code, chunk.error.message);
    yield chunk;
  }
  throw new ApiError(0, "cut_short", "the server ended the stream before the text was complete");
}

// Follows the feed for ever. Calls listener.state(whole), listener.event(change) and listener.gone(error, wait in ms).
// If a key is needed, calls listener.locked() and waits for its promise. A hidden tab requests nothing.
export async function follow(listener) {
  let tries = 0; // feeds in a row that did not last
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

// Calls onEvent for each event of the feed. Returns true once the tab is hidden, false if the server ended the feed.
// Throws if the server is gone.
async function listen(onEvent) {
  const controller = new AbortController();
  const silent = () => controller.abort(new ApiError(0, "silent", `no event for ${SILENCE_MS / 1000} s`));
  let tabHidden = false;
  const hide = () => {
    if (!document.hidden) return;
    tabHidden = true;
    controller.abort();
  };
  let timer = setTimeout(silent, SILENCE_MS);
  document.addEventListener("visibilitychange", hide);
  try {
    for await (const data of events(await request("ui/events", { signal: controller.signal }))) {
      clearTimeout(timer);
      timer = setTimeout(silent, SILENCE_MS);
      onEvent(JSON.parse(data));
    }
  } catch (error) {
    if (!tabHidden) throw error;
  } finally {
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", hide);
    controller.abort();
  }
  return tabHidden;
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
