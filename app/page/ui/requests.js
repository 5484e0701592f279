// The list of recent requests. A click on one shows its rounds in the strip.

import { get } from "./api.js";
import { byId, el, millis, number, percent, plural } from "./dom.js";

const SHOWN = 40; // rows at first; the button "more" shows all
const ALL = 998; // more than any server keeps
const STATUS = { ok: "✓", error: "✕", disconnected: "⤺" };

let limit = SHOWN;
let chosen = null; // id of the request in the strip
let known = ""; // which changes of the list were known when it was last read
let latest = null; // the figures of the latest event
let nextReading = 0; // earliest time to read the list again, ms of performance.now()
let timer; // of the next reading

// open(record) is called when the user chooses a request.
export function buildRequests(open) {
  byId("rows").addEventListener("click", async (event) => {
    const row = event.target.closest("[data-id]");
    if (!row) return;
    const record = await get(`ui/api/requests/${row.dataset.id}`).catch(() => null);
    if (record) open(record);
    else row.querySelector(".when").textContent = "gone";
  });
  byId("more").addEventListener("click", async () => {
    limit = ALL;
    await refreshRequests(latest, true);
    byId("rows").children[SHOWN]?.focus();
  });
}

export function markChosen(id) {
  chosen = id;
  for (const row of byId("rows").children) row.setAttribute("aria-pressed", String(row.dataset.id === id));
}

// Reads the list again if requests have ended, or got their speedup, since the last reading: at most once a second.
export async function refreshRequests(now, force = false) {
  latest = now;
  const changes = `${now.requests} ${now.speedups}`;
  if (!force && changes === known) return;
  clearTimeout(timer);
  const wait = nextReading - performance.now();
  if (!force && wait > 0) {
    timer = setTimeout(() => refreshRequests(latest), wait);
    return;
  }
  known = changes;
  nextReading = performance.now() + 1000;
  try {
    const { requests } = await get(`ui/api/requests?limit=${limit + 1}`);
    byId("no-requests").hidden = requests.length > 0;
    byId("about-requests").hidden = !requests.length;
    byId("more").hidden = requests.length <= limit;
    show(requests.slice(0, limit));
  } catch {
    known = ""; // the next event reads the list again; the feed reports the error
  }
}

function show(requests) {
  const focused = document.activeElement?.dataset?.id;
  byId("rows").replaceChildren(...requests.map(row));
  markChosen(chosen);
  if (focused) byId("rows").querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
}

function row(request) {
  const sums = (name) => request.choices.reduce((sum, choice) => sum + choice[name], 0);
  const drafted = sums("drafted");
  const drafts = drafted ? `${percent(sums("accepted") / drafted)} of ${plural(drafted, "draft")}` : "no drafts";
  const outcome = request.status === "ok" ? drafts : (request.error ?? request.status);
  const speed = request.output_tokens ? `${number((1000 * request.output_tokens) / request.total_ms)} tokens/s` : "";
  return el(
    "button",
    { type: "button", class: "row", "data-id": request.id, "data-status": request.status },
    el("span", { class: "status", role: "img", "aria-label": request.status }, STATUS[request.status]),
    el("span", { class: "when" }, new Date(request.began_unix_ms).toLocaleTimeString("en-GB")),
    el("span", { class: "size" }, `${number(request.prompt_tokens)} + ${plural(request.output_tokens, "token")}`),
    el("span", { class: "speedup" }, request.speedup ? `${number(request.speedup, 2)} ×` : ""),
    el("span", { class: "drafts" }, outcome),
    el("span", { class: "speed" }, speed),
    el("span", { class: "took" }, millis(request.total_ms)),
  );
}
