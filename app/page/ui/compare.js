// The same seeded prompt without drafts and with them: run one after the other, replayed on one clock.

import { byId, number } from "./dom.js";
import {
  asked,
  exclusively,
  facts,
  filled,
  hint,
  otherVerifier,
  recordOf,
  stream,
  surelyDrafting,
} from "./playground.js";
import { TokenText } from "./tokens.js";

const SEEDS = 2 ** 31; // of those that are drawn here

export function buildCompare(chosen) {
  const lanes = Object.fromEntries(["off", "on"].map((name) => [name, new TokenText(byId(`text-${name}`), facts)]));
  byId("ab").addEventListener("click", () => {
    if (filled()) exclusively((signal) => compare(lanes, chosen, signal));
  });
}

async function compare(lanes, chosen, signal) {
  byId("output").hidden = true;
  byId("lanes").hidden = false;
  for (const name of ["off", "on"]) {
    lanes[name].clear();
    show(name, 0, "");
  }
  facts("");
  verdict("", "");
  const body = asked();
  body.seed ??= Math.floor(Math.random() * SEEDS);
  const off = await record(body, { mode: "off" }, "without drafts (1 of 2)", signal);
  const on = await record(body, { ...surelyDrafting(), ...matching() }, "with drafts (2 of 2)", signal);
  hint(otherVerifier() ? aboutVerifier() : "");
  await replay(lanes, { off, on }, signal);
  conclude(off, on, body.seed);
  for (const [name, run] of Object.entries({ off, on })) await remember(lanes[name], run, chosen);
}

// Only the verifier `match` promises a seed's text with drafts and without; a run without drafts takes no verifier.
const matching = () => (otherVerifier() ? { verifier: "match" } : {});

const aboutVerifier = () =>
  `The drafts were verified by “match”. By this server’s own verifier, “${otherVerifier()}”, the text has the same ` +
  "distribution, but for a given seed it may differ from the text without drafts.";

// One run: what came when, in ms since it was sent. With a salt of its own: else the second would find its prompt read.
async function record(body, speculation, what, signal) {
  const begun = performance.now();
  const run = { steps: [], text: "", tokens: 0 };
  const sent = { ...body, cache_salt: crypto.randomUUID?.() ?? String(Math.random()) };
  sent.speculation = { ...body.speculation, ...speculation };
  const each = (rounds, text) => {
    run.steps.push({ at: performance.now() - begun, rounds });
    run.text += text;
    run.tokens += rounds.reduce((sum, round) => sum + round.tokens.length, 0);
    hint(`Running ${what}: ${number(run.tokens)} tokens.`);
  };
  run.closing = await stream(sent, each, signal);
  run.ms = performance.now() - begun;
  return run;
}

// Both lanes in real time; at once for those who want no motion.
async function replay(lanes, runs, signal) {
  const names = Object.keys(runs);
  const done = Object.fromEntries(names.map((name) => [name, 0]));
  const begun = performance.now();
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  for (;;) {
    const clock = still || document.hidden ? Infinity : performance.now() - begun;
    for (const name of names) advance(name, lanes[name], runs[name], done, clock);
    if (names.every((name) => clock >= runs[name].ms)) return;
    await new Promise((resolve) => setTimeout(resolve, 16));
    signal.throwIfAborted();
  }
}

function advance(name, lane, run, done, clock) {
  while (done[name] < run.steps.length && run.steps[done[name]].at <= clock) lane.add(run.steps[done[name]++].rounds);
  const at = Math.min(clock, run.ms);
  show(name, done[name] / run.steps.length, `${number(at / 1000, 2)} s`);
}

function show(name, share, clock) {
  byId(`bar-${name}`).value = share;
  byId(`clock-${name}`).textContent = clock;
}

function conclude(off, on, seed) {
  const speed = `${number(off.ms / on.ms, 2)} × as fast with drafts (${seconds(on)} against ${seconds(off)})`;
  if (off.text === on.text) {
    verdict("same", `identical · ${number(off.closing.usage.completion_tokens)} tokens · ${speed} · seed ${seed}`);
  } else {
    verdict("different", `different at token ${firstDifference(off, on)} · ${speed} · seed ${seed}`);
  }
}

// Counted from 1.
function firstDifference(...runs) {
  const [one, other] = runs.map((run) => run.steps.flatMap((step) => step.rounds.flatMap((round) => round.tokens)));
  const at = one.findIndex((token, i) => token.text !== other[i]?.text);
  return (at < 0 ? one.length : at) + 1;
}

const seconds = (run) => `${number(run.ms / 1000, 2)} s`;

function verdict(state, text) {
  byId("verdict").dataset.state = state;
  byId("verdict").textContent = text;
}

async function remember(lane, run, chosen) {
  const found = await recordOf(run.closing.id);
  if (!found) return;
  lane.columns = found.choices[0].rounds;
  chosen(found);
}
