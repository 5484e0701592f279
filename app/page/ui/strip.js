// The rounds of one request. Each round is a column: its height is k, its filled part the accepted drafts, with the
// round's time below.

import { byId, copyButton, el, millis, number, percent, plural, stepping, svg } from "./dom.js";
import { REASONS, roundFacts } from "./tokens.js";
import { TreeDrawing } from "./tree.js";

// All in px.
const NARROWEST = 12; // width of a column
const WIDEST = 26;
const CELL = 11; // height of one draft
const TIMES = 56; // height of the longest round's time
const GAP = 22; // between drafts and times; it holds the marks of the reasons

const TIME = { draft: "draft_us", verify: "verify_us", other: "overhead_us" };
let traceViewerUrl = null; // with {trace_id} in place of the id; null: the operator gave none

export const fitStrip = (url) => (traceViewerUrl = url);

const MARKS = { policy: "P", user: "U", cap: "C", cache: "M", acceptance: "A", load: "L", probe: "?" };

export function showStrip(record) {
  const body = byId("strip-body");
  body.dataset.id = record.id;
  body.replaceChildren(facts(record), ...record.choices.map((choice) => drawing(choice, record.choices.length > 1)));
  body.append(record.choices.length ? key(record.choices) : el("p", { class: "empty" }, nothing(record)));
}

function nothing(record) {
  const why = record.error ? `it ended with ${record.error}` : "its client left";
  return `No rounds: ${why} before the engine took it.`;
}

function facts(record) {
  const rate = record.total_ms ? (1000 * record.output_tokens) / record.total_ms : null;
  const entries = [
    ["Status", record.error ? `${record.status}: ${record.error}` : record.status],
    ["Tokens", `${number(record.prompt_tokens)} in, ${number(record.output_tokens)} out`],
    ["Est. speedup", record.speedup ? `${number(record.speedup, 2)} ×` : "–"],
    ["Queued", millis(record.queue_ms)],
    ["First token", millis(record.ttft_ms)],
    ["Total", `${millis(record.total_ms)} (${number(rate)} tokens per second)`],
    ["Request", named(record.id, "the request’s id")],
    ["Trace", record.trace_id ? named(record.trace_id, "the trace’s id", traceUrl(record.trace_id)) : "not traced"],
  ];
  const pairs = entries.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  return el("dl", { class: "record" }, ...pairs);
}

const traceUrl = (id) => traceViewerUrl?.replaceAll("{trace_id}", id);

// href: what the id links to; undefined: nothing.
function named(id, label, href) {
  const code = el("code", {}, id);
  const link = href ? el("a", { href, target: "_blank", rel: "noopener noreferrer" }, code) : code;
  return el("span", { class: "named" }, link, copyButton(id, label));
}

function drawing(choice, several) {
  const columns = choice.rounds;
  const count = columns.step.length;
  const tallest = Math.max(1, ...columns.k, ...columns.drafted);
  const longest = Math.max(1, ...columns.draft_us.map((us, i) => us + columns.verify_us[i] + columns.overhead_us[i]));
  const height = tallest * CELL + GAP + TIMES;
  const pitch = Math.max(NARROWEST, Math.min(WIDEST, Math.floor(byId("strip-body").clientWidth / count)));
  const picture = svg("svg", { width: count * pitch, height, role: "img", "aria-label": spoken(choice) });
  picture.append(hatching());
  for (let i = 0; i < count; i++) picture.append(column(i, columns, { pitch, tallest, longest }));
  const factsLine = el("p", { class: "facts", role: "status" }, "Point at a round, or step with the arrow keys.");
  const tree = choice.trees ? new TreeDrawing(choice.trees) : null;
  const scroll = el("div", { class: "rounds", tabindex: 0, role: "group", "aria-label": "Rounds, left to right" });
  scroll.append(picture);
  follow(scroll, picture, count, pitch, (i) => {
    const round = { drafted: columns.drafted[i], accepted: columns.accepted[i] };
    factsLine.textContent = roundFacts(i, round, columns);
    tree?.show(i);
  });
  const title = several ? el("h3", {}, `Choice ${choice.index}`) : null;
  return el("div", { class: "drawing" }, title, el("p", { class: "hint" }, spoken(choice)), scroll, factsLine, tree?.root);
}

function spoken(choice) {
  const sum = (name) => choice.rounds[name].reduce((a, b) => a + b, 0);
  const drafted = sum("drafted");
  const drafts = drafted ? `${number(sum("accepted"))} of ${number(drafted)} drafts accepted` : "no drafts";
  const share = drafted ? ` (${percent(sum("accepted") / drafted)})` : "";
  const k = choice.fixed_k === null ? `policy ${choice.policy}` : `k = ${choice.fixed_k} by request`;
  const settings = choice.drafter ? `drafter ${choice.drafter}, verifier ${choice.verifier}` : "speculation off";
  const end = choice.finish_reason ? `, ended by ${choice.finish_reason}` : "";
  return `${plural(choice.rounds.step.length, "round")}, ${drafts}${share}; ${k}; ${settings}${end}`;
}

function column(i, columns, { pitch, tallest, longest }) {
  const x = i * pitch + 1;
  const width = pitch - 3;
  const group = svg("g", { class: "column", "data-index": i });
  group.append(svg("rect", { class: "hit", x: i * pitch, y: 0, width: pitch, height: "100%" }));
  for (let position = 0; position < Math.max(columns.k[i], columns.drafted[i]); position++) {
    const y = (tallest - 1 - position) * CELL + 1;
    group.append(svg("rect", { class: fate(position, i, columns), x, y, width, height: CELL - 3, rx: 1.5 }));
  }
  const base = tallest * CELL;
  group.append(svg("line", { class: "base", x1: i * pitch, x2: (i + 1) * pitch, y1: base + 0.5, y2: base + 0.5 }));
  const reason = columns.reason[i];
  if (reason && reason !== columns.reason[i - 1]) {
    group.append(svg("text", { class: "mark", x: x + width / 2, y: base + 15 }, MARKS[reason] ?? "•"));
  }
  group.append(...times(i, columns, base + GAP, TIMES / longest, x, width));
  return group;
}

function fate(position, i, columns) {
  if (position < columns.accepted[i]) return "accepted";
  return position < columns.drafted[i] ? "rejected" : "missing";
}

function times(i, columns, y, scale, x, width) {
  const bars = [];
  for (const [name, column] of Object.entries(TIME)) {
    const height = Math.max(0, columns[column][i] * scale);
    bars.push(svg("rect", { class: `time ${name}`, x, y, width, height }));
    y += height;
  }
  return bars;
}

function hatching() {
  const line = svg("path", { d: "M0 5 L5 0", class: "hatch-line" });
  return svg("defs", {}, svg("pattern", { id: "hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse" }, line));
}

function follow(scroll, picture, count, pitch, showFacts) {
  let current = null;
  const choose = (index) => {
    picture.querySelector(".chosen")?.classList.remove("chosen");
    picture.querySelector(`[data-index="${index}"]`).classList.add("chosen");
    current = index;
    const left = index * pitch;
    if (left < scroll.scrollLeft) scroll.scrollLeft = left;
    if (left + pitch > scroll.scrollLeft + scroll.clientWidth) scroll.scrollLeft = left + pitch - scroll.clientWidth;
    showFacts(index);
  };
  picture.addEventListener("pointerover", (event) => {
    const column = event.target.closest("[data-index]");
    if (column) choose(Number(column.dataset.index));
  });
  stepping(scroll, () => count, () => current, choose);
  scroll.addEventListener("focus", () => current === null && count && choose(0));
}

function key(choices) {
  const entries = [
    ["accepted", "accepted"],
    ["rejected", "rejected"],
    ["missing", "planned, not drafted"],
    ...(choices.some((choice) => choice.trees) ? [["unreached", "in a tree: not reached"]] : []),
    ["time draft", "draft time"],
    ["time verify", "verify time"],
    ["time other", "other time"],
  ];
  const swatches = entries.map(([name, label]) => el("li", {}, swatch(name), label));
  const reasons = new Set(choices.flatMap((choice) => choice.rounds.reason.filter((reason) => reason)));
  const marks = [...reasons].map((reason) => {
    return el("li", {}, el("b", { class: "mark" }, MARKS[reason] ?? "•"), `${reason}: ${REASONS[reason] ?? ""}`);
  });
  return el("ul", { class: "legend" }, ...swatches, ...marks);
}

function swatch(name) {
  const shape = svg("rect", { class: name, x: 1, y: 1, width: 11, height: 8, rx: 1.5 });
  return svg("svg", { width: 13, height: 10, "aria-hidden": "true" }, shape);
}
