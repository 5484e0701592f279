// Compares the same seeded prompt without and with drafts: runs both one after the other, then replays them together.

import { byId, el, number, plural } from "./dom.js";
import {
  draftingSurely,
  exclusively,
  facts,
  formIsValid,
  hint,
  otherVerifier,
  question,
  recordOf,
  stream,
  textBody,
} from "./playground.js";
import { TokenText } from "./tokens.js";

const SEEDS = 2 ** 31; // seeds drawn here are below this

export function buildCompare(chosen) {
  const lanes = Object.fromEntries(["off", "on"].map((name) => [name, new TokenText(byId(`text-${name}`), facts)]));
  byId("ab").addEventListener("click", () => {
    if (formIsValid()) exclusively((signal) => compare(lanes, chosen, signal));
  });
}

async function compare(lanes, chosen, signal) {
  byId("output").hidden = true;
  byId("lanes").hidden = false;
  for (const name of ["off", "on"]) {
    lanes[name].clear(...question());
    show(name, 0, "");
  }
  facts("");
  byId("verdict").replaceChildren();
  const body = textBody();
  body.seed ??= Math.floor(Math.random() * SEEDS);
  const off = await record(body, { mode: "off" }, "without drafts (1 of 2)", signal);
  const on = await record(body, { ...draftingSurely(), ...matching() }, "with drafts (2 of 2)", signal);
  hint(otherVerifier() ? aboutVerifier() : "");
  await replay(lanes, { off, on }, signal);
  conclude(off, on, body.seed);
  for (const [name, run] of Object.entries({ off, on })) await remember(lanes[name], run, chosen);
}

// Only the verifier `match` gives the same text for a seed with and without drafts.
const matching = () => (otherVerifier() ? { verifier: "match" } : {});

const aboutVerifier = () =>
  `The drafts were verified by “match”. With this server’s own verifier, “${otherVerifier()}”, the text has the same ` +
  "distribution, but for a given seed it may differ from the text without drafts.";

// Records one run: its chunks with the time of each, in ms since the request. Each run has a cache salt of its own:
// otherwise the second run would find the first one's prompt in the cache.
async function record(body, speculation, runName, signal) {
  const begun = performance.now();
  const run = { steps: [], text: "", tokens: 0 };
  const sent = { ...body, cache_salt: crypto.randomUUID?.() ?? String(Math.random()) };
  sent.speculation = { ...body.speculation, ...speculation };
  const onChunk = (rounds, text, reasoning) => {
    run.steps.push({ at: performance.now() - begun, rounds });
    run.text += reasoning + text;
    run.tokens += rounds.reduce((sum, round) => sum + round.tokens.length, 0);
    hint(`Running ${runName}: ${number(run.tokens)} tokens.`);
  };
  run.closing = await stream(sent, onChunk, signal);
  run.ms = performance.now() - begun;
  return run;
}

// Replays both runs in real time, or at once if the user prefers no motion.
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
  const times = `${seconds(on)} with drafts, ${seconds(off)} without`;
  if (off.text === on.text) {
    const tokens = plural(off.closing.usage.completion_tokens, "token");
    verdict("same", `${number(off.ms / on.ms, 2)} × as fast`, `Identical text: ${tokens} in ${times}. Seed ${seed}.`);
  } else {
    const where = `The texts differ at token ${firstDifference(off, on)}`;
    verdict("different", "Different texts", `${where}. ${times}. Seed ${seed}.`);
  }
}

// Returns the number of the first token that differs, from 1.
function firstDifference(...runs) {
  const [one, other] = runs.map((run) => run.steps.flatMap((step) => step.rounds.flatMap((round) => round.tokens)));
  const at = one.findIndex((token, i) => token.text !== other[i]?.text);
  return (at < 0 ? one.length : at) + 1;
}

const seconds = (run) => `${number(run.ms / 1000, 2)} s`;

function verdict(state, headline, detail) {
  byId("verdict").dataset.state = state;
  byId("verdict").replaceChildren(el("strong", {}, headline), " ", el("span", {}, detail));
}

async function remember(lane, run, chosen) {
  const serverRecord = await recordOf(run.closing.id);
  if (!serverRecord) return;
  lane.columns = serverRecord.choices[0].rounds;
  chosen(serverRecord);
}
