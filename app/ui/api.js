// All that crosses the network: requests with the tab's key, streams of completions, and the live feed.

const KEY = "foretoken.key"; // in this tab's session storage
const SILENCE_MS = 6000; // the feed speaks every second: after so long without a word it is gone
const WAITS_MS = [500, 1000, 2000, 4000, 8000]; // before the first, second, … try to reach the server again

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  drop: () => sessionStorage.removeItem(KEY),
};

// Raises ApiError for an error's reply, and TypeError where the server cannot be reached.
async function ask(path, options = {}) {
  const headers = { ...(options.headers ?? {}) };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  const reply = await fetch(path, { ...options, headers, cache: "no-store" });
  if (!reply.ok) throw await refusal(reply);
  return reply;
}

async function refusal(reply) {
  const body = await reply.json().catch(() => ({}));
  const said = body.error ?? {};
  return new ApiError(reply.status, said.code ?? null, said.message ?? `the server answered ${reply.status}`);
}

export const get = async (path) => (await ask(path)).json();

// The data of each server-sent event, as the bytes come.
async function* events(reply) {
  const decoder = new TextDecoder();
  const reader = reply.body.getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
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
  for (let tries = 0; ; ) {
    try {
      await visible();
      listener.state(await get("ui/api/state"));
      await listen((change) => {
        tries = 0;
        listener.event(change);
      });
    } catch (error) {
      if (error.status === 401) {
        await listener.locked();
        continue;
      }
      const wait = WAITS_MS[Math.min(tries++, WAITS_MS.length - 1)];
      listener.gone(error, wait);
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }
}

// Returns once the tab is hidden, or the server asks to come again; raises when the server is gone.
async function listen(tell) {
  const controller = new AbortController();
  const hide = () => document.hidden && controller.abort();
  let timer = setTimeout(() => controller.abort(), SILENCE_MS);
  document.addEventListener("visibilitychange", hide);
  try {
    for await (const data of events(await ask("ui/events", { signal: controller.signal }))) {
      clearTimeout(timer);
      timer = setTimeout(() => controller.abort(), SILENCE_MS);
      tell(JSON.parse(data));
    }
  } catch (error) {
    if (!document.hidden) throw error;
  } finally {
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", hide);
    controller.abort();
  }
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
