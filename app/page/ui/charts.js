// Live charts of the feed's series, drawn by uPlot. Survival by position is a list of plain bars with their counts.

import { byId, el, number, percent } from "./dom.js";
import { term } from "./terms.js";

const NOTHING = { steps: 0, emitted: 0, rounds: 0, accepted: 0, draft_us: 0, verify_us: 0, step_us: 0 };
const KEPT_S = 300;
const HEIGHT = 160;

const points = new Map(); // Unix time in s of a quarter of a second with steps → its sums by name
let now = null;
let span = 60;
let charts = [];

// [id, title, explanation with its terms].
const FIGURES = [
  ["rate", "Tokens per second", ["All requests together get so many."]],
  ["accepted", "Accepted drafts per round", ["Mean over all ", term("round", "rounds"), " with drafts, per sequence."]],
  ["time", "Time of a step", ["Mean time, split into drafting, verifying and the rest."]],
  ["survival", "Accepted drafts by position", ["Rounds with a draft at the position, and the share that accepted one."]],
  ["k", "k by batch size", ["Mean of the chosen ", term("k"), ", by number of sequences in the round."]],
  ["speedup", "Estimated speedup by batch size", [term("speedup", "Over plain decoding"), ". The dashed line is 1."]],
];

export function buildCharts() {
  for (const [id, title, about] of FIGURES) {
    const readout = el("span", { class: "readout", id: `readout-${id}` });
    const figure = el(
      "figure",
      {},
      el("figcaption", {}, el("b", { id: `title-${id}` }, title), readout),
      el("div", { class: "plot", id: `plot-${id}`, role: "img", "aria-label": title }),
      el("p", { class: "hint", id: `about-${id}` }, ...about),
    );
    byId("figures").append(figure);
  }
  byId("span").addEventListener("change", (event) => {
    span = Number(event.target.value);
    draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", plot);
  new ResizeObserver(resize).observe(byId("figures"));
  plot();
}

export function restart(state) {
  points.clear();
  take(state);
}

export function take(change) {
  now = change.now;
  const { t, ...columns } = change.series;
  t.forEach((second, i) => {
    points.set(second, Object.fromEntries(Object.entries(columns).map(([name, column]) => [name, column[i]])));
  });
  for (const second of points.keys()) if (second < now.t - KEPT_S - 1) points.delete(second);
  draw();
}

// Returns columns [t, ...values] with one entry per interval; the shown span has 60 intervals. Each function of
// `ratios` computes a value from the sums of an interval, or null if it would divide by 0. Starts with the first step
// and leaves out the interval that has not ended.
function series(...ratios) {
  const length = span / 60; // s
  const sums = new Map();
  for (const [second, values] of points) {
    const start = Math.floor(second / length) * length;
    const sum = sums.get(start) ?? {};
    for (const [name, value] of Object.entries(values)) sum[name] = (sum[name] ?? 0) + value;
    sums.set(start, sum);
  }
  const columns = [[], ...ratios.map(() => [])];
  if (!sums.size) return columns;
  for (let start = Math.min(...sums.keys()); start + length <= now.t; start += length) {
    columns[0].push(start + length / 2);
    ratios.forEach((ratio, i) => columns[i + 1].push(ratio(sums.get(start) ?? NOTHING, length)));
  }
  return columns;
}

const per = (numerator, denominator) => (denominator ? numerator / denominator : null);
const rate = (sum, length) => sum.emitted / length;
const accepted = (sum) => per(sum.accepted, sum.rounds);

// Milliseconds of a step, stacked: each value includes the parts before it.
const STACK = [
  (sum) => per(sum.draft_us / 1000, sum.steps),
  (sum) => per((sum.draft_us + sum.verify_us) / 1000, sum.steps),
  (sum) => per(sum.step_us / 1000, sum.steps),
];

function draw() {
  if (!now || document.hidden) return;
  for (const chart of charts) {
    chart.plot.setData(chart.data());
    if (chart.plot.cursor.idx === null || chart.plot.cursor.left < 0) chart.say(null);
  }
  survival();
}

const byBatch = (name) => (now ? [now.batches.batch, now.batches[name]] : [[], []]);

function survival() {
  const { drafted, accepted } = now.positions;
  const root = byId("plot-survival");
  const rows = drafted.map((made, i) => {
    const share = made ? accepted[i] / made : 0;
    const bar = el("span", { class: "bar" }, el("span", { class: "filled" }));
    bar.firstChild.style.width = `${100 * share}%`;
    const counts = `${number(accepted[i])} of ${number(made)}`;
    return el("li", {}, el("span", {}, String(i + 1)), bar, el("span", {}, percent(share)), el("span", {}, counts));
  });
  root.setAttribute("role", "group");
  const none = el("p", { class: "empty" }, "No drafts in the last 5 minutes.");
  root.replaceChildren(rows.length ? el("ol", { class: "survival" }, ...rows) : none);
}

function plot() {
  for (const chart of charts) chart.plot.destroy();
  const line = (color, more = {}) => ({ stroke: ink(color), width: 1.5, points: { show: false }, ...more });
  const dots = (color) => line(color, { points: { show: true, size: 7, fill: ink(color) } });
  const few = { points: { show: true, size: 3 } }; // shows a single value, which has no line
  const filled = line("bonus", { fill: tint("bonus"), ...few });
  const stack = [filled, line("recovered", { dash: [6, 3], ...few }), line("muted", { dash: [2, 2], ...few })];
  const bands = [{ series: [2, 1], fill: tint("recovered") }, { series: [3, 2], fill: tint("muted") }];
  const parts = [["draft ", words(2, " ms")], ["verify ", words(2, " ms")], ["other ", words(2, " ms")]];
  charts = [
    timeChart("rate", [filled], () => series(rate), [["", words(0)]]),
    timeChart("accepted", [line("draft", few)], () => series(accepted), [["", words(2)]]),
    timeChart("time", stack, () => series(...STACK), parts, bands),
    batchChart("k", [dots("draft")], () => byBatch("k"), [["", words(2)]]),
    batchChart("speedup", [dots("bonus"), line("recovered", { dash: [5, 4] })], withOne, [["", words(2, " ×")]]),
  ];
  draw();
}

function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

const tint = (name) => `${ink(name)}38`; // the colour at a fifth of its opacity

const words = (digits, unit = "") => (value) => `${number(value, digits)}${unit}`;

function axes(below, beside) {
  const grid = { stroke: ink("line"), width: 1 };
  const common = { stroke: ink("muted"), grid, ticks: { show: false }, font: "11px system-ui", gap: 4 };
  return [{ ...common, size: 24, ...below }, { ...common, size: 40, space: 36, ...beside }];
}

// Returns the speedups by batch size, and a line at 1 across the whole axis.
function withOne() {
  const [sizes, speedups] = byBatch("speedup");
  if (!sizes.length) return [[], [], []];
  const wide = [0.5, ...sizes, Math.max(4, sizes[sizes.length - 1]) + 0.5];
  return [wide, [null, ...speedups, null], wide.map(() => 1)];
}

function timeChart(id, drawn, data, labels, bands) {
  const x = { time: true, range: () => (now ? [now.t - span, now.t] : [0, 1]) };
  const splits = () => Array.from({ length: 5 }, (_, i) => (now ? now.t - span + (i * span) / 4 : i / 4));
  const below = { splits, values: (plot, ticks) => ticks.map(ago) };
  return chart(id, { scales: { x, y: { range: fromZero } }, axes: axes(below), bands }, drawn, data, labels);
}

const ago = (t) => (now && now.t - t > 0.5 ? `−${Math.round(now.t - t)} s` : "now");

function batchChart(id, drawn, data, labels) {
  const range = () => [0.5, Math.max(4, ...(now?.batches.batch ?? [])) + 0.5];
  const below = { incrs: [1, 2, 4, 8, 16, 32, 64] };
  const scales = { x: { time: false, range }, y: { range: fromZero } };
  return chart(id, { scales, axes: axes(below) }, drawn, data, labels, "batch ");
}

const fromZero = (plot, low, high) => [0, (high || 1) * 1.15];

// labels: for each series its [name, function from a value to words]. A stack's readout shows the parts, not the sums.
function chart(id, options, drawn, data, labels, xName = "") {
  const say = (at) => readout(id, data(), labels, at, options.bands !== undefined, xName);
  const hooks = { setCursor: [(plot) => say(plot.cursor.left >= 0 ? plot.cursor.idx : null)] };
  const cursor = { y: false, points: { size: 6 }, drag: { x: false, y: false } };
  const root = byId(`plot-${id}`);
  const base = { width: root.clientWidth || 300, height: HEIGHT, legend: { show: false }, cursor, hooks };
  const plot = new window.uPlot({ ...base, ...options, series: [{}, ...drawn] }, [[], ...drawn.map(() => [])], root);
  return { id, plot, data, say };
}

// Writes the values at index `at` above the chart, or the latest values if `at` is null.
function readout(id, data, labels, at, isStack, xName) {
  const [x, ...columns] = data;
  const index = at ?? columns[0].findLastIndex((value) => value !== null);
  const known = (columns[0][index] ?? null) !== null;
  const part = (i) => columns[i][index] - (isStack && i ? columns[i - 1][index] : 0);
  const values = known ? labels.map(([name, inWords], i) => name + inWords(part(i), index)).join(" · ") : "";
  const where = xName ? `${xName}${number(x[index])}: ` : at === null ? "" : `${ago(x[index])}: `;
  const root = byId(`plot-${id}`);
  byId(`readout-${id}`).textContent = known ? where + values : "";
  root.setAttribute("aria-label", `${byId(`title-${id}`).textContent}: ${values || missing(id)}`);
  root.dataset.empty = known || at !== null ? "" : missing(id);
}

function missing(id) {
  if (id === "accepted") return "No rounds with drafts in the last 5 minutes.";
  if (id === "k") return "No k was chosen in the last 5 minutes.";
  if (id !== "speedup" || !now?.batches.batch.length) return "Nothing ran in the last 5 minutes.";
  return "Every step of the last 5 minutes read prompts too.";
}

function resize() {
  for (const { id, plot } of charts) {
    const width = byId(`plot-${id}`).clientWidth;
    if (width && width !== plot.width) plot.setSize({ width, height: HEIGHT });
  }
}
