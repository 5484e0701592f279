// The figures at the top of the page.

import { byId, el, millis, number, percent } from "./dom.js";
import { term } from "./terms.js";

// [id, label, function from `now` to the value, function from `now` to the note below it].
const TILES = [
  ["rate", "Tokens / s", (now) => number(now.tokens_per_s), () => "last 2 s"],
  ["speculation", "Speculation", (now) => now.speculation.state, speculationNote],
  ["speedup", "Est. speedup", (now) => (now.speedup ? `${number(now.speedup, 2)} ×` : "–"), speedupNote],
  ["acceptance", "Acceptance", (now) => percent(now.acceptance), () => "of drafts, 5 min"],
  ["accepted", "Per round", (now) => number(now.accepted_per_round, 2), () => "drafts accepted"],
  ["ttft", "First token", (now) => millis(now.ttft_ms?.p50), (now) => `p95 ${millis(now.ttft_ms?.p95)}`],
  ["tpot", "Further tokens", (now) => millis(now.tpot_ms?.p50), (now) => `p95 ${millis(now.tpot_ms?.p95)}`],
  ["load", "Running", (now) => number(now.running), (now) => `${number(now.waiting)} waiting`],
  ["kv", "KV memory", (now) => percent(now.kv_used), () => "held now"],
];

export function buildTiles() {
  for (const [id, label] of TILES) {
    const value = el("dd", { class: "value", id: `tile-${id}` }, "–");
    const note = el("dd", { class: "note", id: `note-${id}` });
    byId("tiles").append(el("div", { class: `tile ${id}` }, el("dt", {}, term(id, label)), value, note));
  }
}

export function showTiles(now) {
  for (const [id, , value, note] of TILES) {
    set(byId(`tile-${id}`), value(now));
    set(byId(`note-${id}`), note(now));
  }
  byId("tile-speculation").dataset.state = now.speculation.state;
  byId("tile-speedup").dataset.below = now.speedup !== null && now.speedup < 1;
}

function set(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function speculationNote(now) {
  const faults = now.faults ? `the drafter failed ${number(now.faults)} times; ` : "";
  const k = now.policy.k !== undefined && now.policy.name === "fixed" ? `, k = ${now.policy.k}` : "";
  return `${faults}${now.speculation.why || `policy ${now.policy.name}${k}`}`;
}

function speedupNote(now) {
  return now.speedup ? "over plain decoding" : "no step without prompts";
}
