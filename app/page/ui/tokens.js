// A text that shows the origin of each token. Pointing at a token, or stepping with the keyboard, shows its round.

import { el, micros, plural, stepping } from "./dom.js";

const NEAR = 24; // px: a growing text that is scrolled this near to its end stays at its end

export const REASONS = {
  policy: "the policy gives this k, whatever the sequence",
  user: "the request allows no more drafts",
  cap: "no more drafts are possible here",
  cache: "there is no memory for more drafts",
  acceptance: "more drafts would be rejected too often to pay",
  load: "more drafts would not pay beside the other sequences of the round",
  probe: "a trial, to learn whether drafts would pay",
};

export class TokenText {
  // showFacts(text) is called with the facts of the chosen round.
  constructor(root, showFacts) {
    this.root = root;
    this.showFacts = showFacts;
    this.clear();
    root.addEventListener("pointerover", (event) => this.point(event.target.closest("[data-round]")));
    root.addEventListener("focus", () => this.current === null && this.rounds.length && this.choose(0));
    stepping(root, () => this.rounds.length, () => this.current, (index) => this.choose(index));
  }

  // before: nodes that stand in front of the text, such as its prompt.
  clear(...before) {
    this.rounds = []; // from the stream
    this.columns = null; // of the same rounds, from the server's record; null while the request runs
    this.current = null;
    this.root.replaceChildren(...before);
    this.root.scrollTop = this.root.scrollHeight;
  }

  add(rounds) {
    const fresh = document.createDocumentFragment();
    for (const round of rounds) {
      fresh.append(...this.spans(round, this.rounds.length));
      this.rounds.push(round);
    }
    const { scrollHeight, scrollTop, clientHeight } = this.root;
    this.root.append(fresh);
    if (scrollHeight - scrollTop - clientHeight < NEAR) this.root.scrollTop = this.root.scrollHeight;
  }

  spans(round, index) {
    const span = (token) => el("span", { class: `token ${token.source}`, "data-round": index }, token.text);
    const ghost = (text) => el("s", { class: "ghost", "data-round": index }, text.replaceAll("\n", "↵"));
    const ghosts = round.rejected.map(ghost);
    const own = round.tokens.findIndex((token) => token.source !== "draft");
    const cut = own < 0 ? round.tokens.length : own;
    return [...round.tokens.slice(0, cut).map(span), ...ghosts, ...round.tokens.slice(cut).map(span)];
  }

  point(node) {
    if (node) this.choose(Number(node.dataset.round));
  }

  choose(index) {
    for (const node of this.root.querySelectorAll(".chosen")) node.classList.remove("chosen");
    const nodes = this.root.querySelectorAll(`[data-round="${index}"]`);
    for (const node of nodes) node.classList.add("chosen");
    nodes[0]?.scrollIntoView({ block: "nearest" });
    this.current = index;
    this.showFacts(roundFacts(this.rounds[index].round, this.rounds[index], this.columns));
  }
}

// Returns one round in words. columns is null while the request runs.
export function roundFacts(number, round, columns) {
  const parts = [`Round ${number}`];
  const by = columns?.drafter[number] ? ` by ${columns.drafter[number]}` : "";
  parts.push(round.drafted ? `${plural(round.drafted, "draft")}${by}, ${round.accepted} accepted` : "no drafts");
  if (!columns || columns.k[number] === undefined) return parts.join(" · ");
  const reason = columns.reason[number];
  if (reason) parts.push(`k = ${columns.k[number]}: ${REASONS[reason] ?? reason} (${reason})`);
  if (columns.batch[number]) parts.push(`${plural(columns.batch[number], "sequence")} in the round`);
  parts.push(
    `draft ${micros(columns.draft_us[number])}, verify ${micros(columns.verify_us[number])}, ` +
      `other ${micros(columns.overhead_us[number])}`,
  );
  return parts.join(" · ");
}
