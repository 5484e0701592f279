// What the page's words mean. A term is a button: its explanation is its description, and shows when it is pressed.

import { byId, el } from "./dom.js";

const TERMS = {
  token: "A token is a piece of text: a word, a part of a word or a sign. A model reads and writes tokens.",
  target: "The model that this server serves, called the target. It alone decides what the text says.",
  drafter:
    "The drafter proposes the next tokens at little cost: a small model, or a rule that looks for repetitions. It " +
    "changes the speed of a text, never the text.",
  draft: "A token that the drafter proposed and the target accepted. It cost no pass of its own.",
  recovered:
    "The drafter’s guess was wrong here. The pass that found this out also gave the target’s own token, which stands " +
    "in its place and ends the round.",
  bonus:
    "All guesses of this round were right. The pass that checked them also gave the target’s next token, as a bonus.",
  plain: "A token of a round without guesses, as in any other server: one pass, one token.",
  rejected: "A token that the drafter proposed and the target did not accept. It is never part of the text.",
  round:
    "In one round the drafter proposes k tokens, and the target checks them all in one pass. The tokens up to the " +
    "first wrong guess stay, and the target adds one of its own: every round adds 1 to k + 1 tokens.",
  k:
    "k is the number of tokens that the drafter proposes in one round. With k = 0 the target writes alone, one token " +
    "per round. “auto” leaves the choice to the server’s policy.",
  goodput:
    "The policy goodput chooses k for every sequence in every round: the k with the most expected tokens per second, " +
    "and 0 if drafts do not pay.",
  confidence: "The policy confidence lets the draft model stop when it is no longer sure of its guesses.",
  heuristic: "The policy heuristic raises k by 2 after a round without a wrong guess, and else lowers it by 1.",
  optimal: "The policy optimal computes k from the share of guesses that were right in this request so far.",
  fixed: "The policy fixed gives every round the same k.",
  off: "The policy off gives no drafts. Only requests that ask for drafts get them.",
  seed: "The same request with the same seed gives the same text, with or without drafts.",
  rate: "Tokens that all requests together got per second, over the last 2 s.",
  speculation: "Whether the server drafts at the moment. If not, the line below says why.",
  speedup:
    "Time that plain decoding would have taken for the same tokens, divided by the time that they took. The server " +
    "estimates it for steps that read no prompts.",
  "request-speedup":
    "Estimated time of plain decoding for the request’s tokens, divided by the time of the rounds that made them. " +
    "Reading the prompt is left out of both.",
  acceptance: "The share of guessed tokens that the target accepted, over the last 5 minutes.",
  accepted: "Guesses that a round keeps, on average over the rounds with guesses. The target’s own token comes on top.",
  ttft: "Time from a request’s arrival to its first token: the median of the recent requests, and the 95th percentile.",
  tpot: "Time per token after the first: the median of the recent requests, and the 95th percentile.",
  load: "Sequences that the engine works on now. A request for n texts counts n times.",
  kv: "The share of the memory for keys and values, which the model keeps of every token, that is in use now.",
};

// Returns a button that explains `word`. label: what it shows.
export function term(word, label = word) {
  return prepared(el("button", { type: "button", class: "term", "data-term": word }, label));
}

function prepared(button) {
  button.title = TERMS[button.dataset.term]; // its description for screen readers, and shown by a resting pointer
  return button;
}

export function buildTerms() {
  for (const button of document.querySelectorAll("[data-term]")) prepared(button);
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("[data-term]");
    if (button) explain(button);
  });
  document.addEventListener("scroll", () => byId("tip").hidePopover(), { passive: true });
}

function explain(button) {
  const tip = byId("tip");
  tip.hidePopover();
  tip.textContent = TERMS[button.dataset.term];
  tip.showPopover({ source: button });
  place(tip, button.getBoundingClientRect());
}

// Puts the explanation below the term, or above it where there is no room, and within the window.
function place(tip, at) {
  const { offsetWidth: width, offsetHeight: height } = tip;
  const below = at.bottom + 6;
  const top = below + height > innerHeight ? Math.max(6, at.top - height - 6) : below;
  tip.style.left = `${Math.max(6, Math.min(at.left, document.documentElement.clientWidth - width - 6))}px`;
  tip.style.top = `${top}px`;
}
