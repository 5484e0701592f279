// The form, and one streamed text; compare.js runs the same form twice.

import { ApiError, complete, get } from "./api.js";
import { byId, el, number, percent } from "./dom.js";
import { TokenText } from "./tokens.js";

let model = null;
let most = 0; // drafts in a round; none without a drafter
let unasked = true; // whether the server drafts by itself
let running = null; // AbortController of what runs

export const facts = (text) => (byId("facts").textContent = text);

// What the form asks for, without `speculation.mode` and k; those of "auto" are the server's own.
export function asked() {
  const body = {
    model: model.name,
    prompt: byId("prompt").value,
    temperature: Number(byId("temperature").value),
    max_tokens: Number(byId("max-tokens").value),
    speculation: { tokens: true },
  };
  if (byId("seed").value !== "") body.seed = Number(byId("seed").value);
  return body;
}

export function drafting() {
  const k = byId("k").value;
  if (k === "off") return { mode: "off" };
  const fixed = k === "auto" ? {} : { mode: "fixed", k: Number(k) };
  return byId("drafter").value ? { ...fixed, drafter: byId("drafter").value } : fixed;
}

// The same, but surely with drafts: where the server makes none by itself, those that its limits allow.
export function surelyDrafting() {
  const asks = drafting();
  const own = asks.mode === "off" ? {} : asks;
  if (unasked) return own;
  return { mode: "fixed", k: Math.min(4, model.max_spec_length), drafter: model.drafter ?? drafters()[0], ...own };
}

const drafters = () => model.drafters.filter((name) => name !== "prediction"); // that needs the client's guess

// Stream one completion; each(rounds, text) for each chunk. Returns the reply's id and its closing fields.
export async function stream(body, each, signal) {
  let closing = null;
  for await (const chunk of complete(body, signal)) {
    const choice = chunk.choices[0];
    if (choice) each(choice.speculation?.rounds ?? [], choice.text);
    if (chunk.usage) closing = chunk;
  }
  return closing;
}

// What the server keeps of a request; null if it does not, or the one that answers is another replica.
export async function recordOf(id) {
  try {
    return await get(`ui/api/requests/${id}`);
  } catch {
    return null;
  }
}

// Whether the form is filled in; the browser says what is missing.
export const filled = () => byId("ask").reportValidity();

// The server's own verifier, if it is not `match`; else null.
export const otherVerifier = () => (model.verifier === "match" ? null : model.verifier);

// Run one thing at a time: work(signal); its failure becomes the hint.
export async function exclusively(work) {
  running?.abort();
  const controller = (running = new AbortController());
  offer();
  hint("");
  try {
    await work(controller.signal);
  } catch (error) {
    if (!controller.signal.aborted) hint(failure(error), true);
    else if (running === controller) hint("");
  } finally {
    if (running === controller) {
      running = null;
      offer();
    }
  }
}

function failure(error) {
  if (error instanceof ApiError) return error.code === "unreachable" ? "The server cannot be reached." : error.message;
  console.error(error);
  return `The page failed (${error.message}).`;
}

function offer() {
  byId("go").disabled = running !== null;
  byId("ab").disabled = running !== null || !most;
  byId("stop").hidden = running === null;
}

export function hint(text, bad = false) {
  byId("hint").textContent = text;
  byId("hint").hidden = !text;
  byId("hint").classList.toggle("bad", bad);
}

export function buildPlayground(chosen) {
  const text = new TokenText(byId("output"), facts);
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    exclusively((signal) => generate(text, chosen, signal));
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("ghosts").addEventListener("change", () => {
    byId("playground").classList.toggle("with-ghosts", byId("ghosts").checked);
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
  });
  byId("k").addEventListener("change", () => (byId("drafter").disabled = byId("k").value === "off"));
}

async function generate(text, chosen, signal) {
  byId("output").hidden = false;
  byId("lanes").hidden = true;
  text.clear();
  byId("output").dataset.state = "running";
  facts("");
  try {
    const body = asked();
    Object.assign(body.speculation, drafting());
    const closing = await stream(body, (rounds) => text.add(rounds), signal);
    facts(summary(closing));
    const record = await recordOf(closing.id);
    if (record) {
      text.columns = record.choices[0].rounds;
      chosen(record);
    }
  } finally {
    byId("output").dataset.state = "done";
  }
}

function summary(closing) {
  const { metrics, usage, seed } = closing;
  const said = metrics.speculative_decoding;
  const drafts = said?.num_draft_tokens
    ? `${percent(said.draft_acceptance_rate)} of ${number(said.num_draft_tokens)} drafts accepted`
    : "no drafts";
  return [
    `${number(usage.completion_tokens)} tokens at ${number(metrics.tokens_per_second)} per second`,
    drafts,
    `seed ${seed}`,
    "point at the text to see its rounds",
  ].join(" · ");
}

// Fit the form to the server: which k and which drafters there are, and why there may be none.
export function fitPlayground(card, now) {
  model = card;
  unasked = now.speculation.unasked;
  most = drafters().length ? card.max_spec_length : 0;
  const fixed = Array.from({ length: most }, (_, i) => [String(i + 1), String(i + 1)]);
  options(byId("k"), [["auto", most ? `auto (policy ${now.policy.name})` : "auto"], ["off", "off"], ...fixed]);
  const own = card.drafter ? `server’s own (${card.drafter})` : "server’s own (none)";
  options(byId("drafter"), [["", own], ...drafters().map((name) => [name, name])]);
  byId("k").disabled = !most;
  byId("drafter").disabled = !most || byId("k").value === "off";
  offer();
  if (running) return; // the hint tells of what runs
  if (!most) hint("This server has no drafter, so every token is the target’s own and there is nothing to compare.");
  else if (!unasked) hint("This server drafts nothing by itself: choose a k and a drafter to see drafts.");
}

function options(select, entries) {
  const before = select.value;
  select.replaceChildren(...entries.map(([value, label]) => el("option", { value }, label)));
  if (entries.some(([value]) => value === before)) select.value = before;
}
