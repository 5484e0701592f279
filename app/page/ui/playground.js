// The form and one streamed text. compare.js runs the same form twice.

import { ApiError, complete, get } from "./api.js";
import * as chat from "./chat.js";
import { byId, el, number, percent } from "./dom.js";
import { firstExample, offerExamples } from "./examples.js";
import { term } from "./terms.js";
import { TokenText } from "./tokens.js";

let model = null;
let maxK = 0; // largest number of drafts in a round; 0: the server has no drafter
let draftsUnasked = true; // whether the server drafts for requests that do not ask for it
let running = null; // AbortController of the running request or comparison

export const facts = (text) => (byId("facts").textContent = text);

const chatting = () => form() === "chat";

const form = () => document.querySelector("#form-choice input:checked").value;

// Returns the nodes that show what the form asks, for the beginning of the text.
export function question() {
  const prompt = byId("prompt").value;
  return chatting() ? chat.turns(chat.withQuestion(prompt)) : [el("span", { class: "prompt" }, prompt)];
}

// Returns the body of the form's request, without `speculation.mode`, k and drafter.
export function textBody() {
  const prompt = byId("prompt").value;
  const body = {
    model: model.name,
    ...(chatting() ? { messages: chat.withQuestion(prompt) } : { prompt }),
    temperature: Number(byId("temperature").value),
    max_tokens: Number(byId("max-tokens").value),
    speculation: { tokens: true },
  };
  if (byId("seed").value !== "") body.seed = Number(byId("seed").value);
  return body;
}

// Returns the form's `speculation.mode`, k and drafter; {} leaves the choice to the server.
export function drafting() {
  const k = byId("k").value;
  if (k === "off") return { mode: "off" };
  const fixed = k === "auto" ? {} : { mode: "fixed", k: Number(k) };
  return byId("drafter").value ? { ...fixed, drafter: byId("drafter").value } : fixed;
}

// Returns the same for a request that gets drafts in any case: k = 4, or less, if the server does not draft by itself.
export function draftingSurely() {
  const form = drafting();
  const chosenByForm = form.mode === "off" ? {} : form;
  if (draftsUnasked) return chosenByForm;
  const drafter = model.drafter ?? drafters()[0];
  return { mode: "fixed", k: Math.min(4, model.max_spec_length), drafter, ...chosenByForm };
}

const drafters = () => model.drafters.filter((name) => name !== "prediction"); // it needs a prediction from the client

// Streams one text and calls onChunk(rounds, text, reasoning) for each chunk. Returns the last one: id, usage, metrics.
export async function stream(body, onChunk, signal) {
  let closing = null;
  for await (const chunk of complete(body, signal)) {
    const choice = chunk.choices[0];
    const { content, reasoning_content: reasoning } = choice?.delta ?? {};
    if (choice) onChunk(choice.speculation?.rounds ?? [], choice.text ?? content ?? "", reasoning ?? "");
    if (chunk.usage) closing = chunk;
  }
  return closing;
}

// Returns the server's record of a request; null if it keeps none, or if another replica answers.
export async function recordOf(id) {
  try {
    return await get(`ui/api/requests/${id}`);
  } catch {
    return null;
  }
}

// Whether the form is valid. The browser shows what is missing, so the settings are opened for it.
export function formIsValid() {
  byId("options").open ||= byId("options").querySelector(":invalid") !== null;
  return byId("ask").reportValidity();
}

// The server's default verifier if it is not `match`, else null.
export const otherVerifier = () => (model.verifier === "match" ? null : model.verifier);

// Runs work(signal) and aborts the work that runs already. An error of the work becomes the hint.
export async function exclusively(work) {
  running?.abort();
  const controller = (running = new AbortController());
  updateButtons();
  hint("");
  try {
    await work(controller.signal);
  } catch (error) {
    if (!controller.signal.aborted) hint(failure(error), true);
    else if (running === controller) hint("");
  } finally {
    if (running === controller) {
      running = null;
      updateButtons();
    }
  }
}

function failure(error) {
  if (error instanceof ApiError) return error.code === "unreachable" ? "The server cannot be reached." : error.message;
  console.error(error);
  return `The page failed (${error.message}).`;
}

function updateButtons() {
  byId("go").disabled = running !== null;
  byId("ab").disabled = running !== null || !maxK;
  byId("stop").hidden = running === null;
  byId("ab").classList.toggle("main", maxK > 0 || !model);
  byId("go").classList.toggle("main", !maxK && model !== null);
  byId("go").textContent = chatting() ? "Send" : "Generate";
  byId("new-chat").hidden = chat.isEmpty();
}

export function hint(text, bad = false) {
  byId("hint").textContent = text;
  byId("hint").hidden = !text;
  byId("hint").classList.toggle("bad", bad);
}

export function buildPlayground(chosen) {
  const text = new TokenText(byId("output"), facts);
  byId("go").addEventListener("click", formIsValid);
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    exclusively((signal) => generate(text, chosen, signal));
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("ghosts").addEventListener("change", () => {
    byId("playground").classList.toggle("with-ghosts", byId("ghosts").checked);
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && formIsValid()) byId("ask").requestSubmit();
  });
  byId("k").addEventListener("change", () => (byId("drafter").disabled = byId("k").value === "off"));
  byId("options").open = matchMedia("(min-width: 641px)").matches; // a small screen has no room for it
  byId("form-choice").addEventListener("change", () => changeForm(text));
  byId("new-chat").addEventListener("click", () => changeForm(text));
  changeForm(text);
}

// Begins anew with the chosen form.
function changeForm(text) {
  running?.abort();
  chat.forget();
  byId("prompt-label").textContent = chatting() ? "Message" : "Prompt: the model continues it";
  byId("prompt").value = firstExample(form());
  offerExamples(form(), (prompt) => (byId("prompt").value = prompt));
  text.clear();
  facts("");
  byId("output").hidden = false;
  byId("lanes").hidden = true;
  updateButtons();
}

async function generate(text, chosen, signal) {
  byId("output").hidden = false;
  byId("lanes").hidden = true;
  text.clear(...question());
  byId("output").dataset.state = "running";
  facts("");
  try {
    const asked = chatting() ? byId("prompt").value : null;
    const body = textBody();
    Object.assign(body.speculation, drafting());
    let answer = "";
    const onChunk = (rounds, part) => {
      text.add(rounds);
      answer += part;
    };
    const closing = await stream(body, onChunk, signal);
    facts(summary(closing));
    if (asked !== null) keepTurn(asked, answer);
    const record = await recordOf(closing.id);
    if (record) {
      text.columns = record.choices[0].rounds;
      chosen(record);
    }
  } finally {
    byId("output").dataset.state = "done";
  }
}

function keepTurn(asked, answer) {
  chat.remember(asked, answer);
  if (byId("prompt").value === asked) byId("prompt").value = "";
  updateButtons();
}

function summary(closing) {
  const { metrics, usage, seed } = closing;
  const speculation = metrics.speculative_decoding;
  const drafts = speculation?.num_draft_tokens
    ? `${percent(speculation.draft_acceptance_rate)} of ${number(speculation.num_draft_tokens)} drafts accepted`
    : "no drafts";
  return [
    `${number(usage.completion_tokens)} tokens at ${number(metrics.tokens_per_second)} per second`,
    drafts,
    `seed ${seed}`,
    "point at the text to see its rounds",
  ].join(" · ");
}

// Fits the form to the server: the values of k, the drafters, and a hint if there are none.
export function fitPlayground(card, now) {
  model = card;
  draftsUnasked = now.speculation.unasked;
  maxK = drafters().length ? card.max_spec_length : 0;
  const fixed = Array.from({ length: maxK }, (_, i) => [String(i + 1), String(i + 1)]);
  byId("form-choice").hidden = !card.chat;
  options(byId("k"), [["auto", maxK ? `auto (policy ${now.policy.name})` : "auto"], ["off", "off"], ...fixed]);
  const own = card.drafter ? `server’s own (${card.drafter})` : "server’s own (none)";
  options(byId("drafter"), [["", own], ...drafters().map((name) => [name, name])]);
  byId("about-auto").hidden = !maxK;
  byId("about-auto").replaceChildren("auto: the policy ", term(now.policy.name), " chooses k.");
  byId("k").disabled = !maxK;
  byId("drafter").disabled = !maxK || byId("k").value === "off";
  updateButtons();
  if (running) return; // the hint belongs to the running work
  if (!maxK) hint("This server has no drafter, so every token is the target’s own and there is nothing to compare.");
  else if (!draftsUnasked) hint("This server drafts nothing by itself: choose a k and a drafter to see drafts.");
}

function options(select, entries) {
  const before = select.value;
  select.replaceChildren(...entries.map(([value, label]) => el("option", { value }, label)));
  if (entries.some(([value]) => value === before)) select.value = before;
}
