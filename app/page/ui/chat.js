// The conversation of the chat form. Only this page keeps it, until it is closed.

import { el } from "./dom.js";

const NAMES = { user: "You", assistant: "Model" };

let messages = []; // so far: questions and answers in turn, as the API takes them

export const withQuestion = (question) => [...messages, { role: "user", content: question }];

export const isEmpty = () => !messages.length;

export function remember(question, answer) {
  messages = [...withQuestion(question), { role: "assistant", content: answer }];
}

export function forget() {
  messages = [];
}

// Returns the nodes that show the messages in front of the answer's tokens.
export function turns(shown) {
  const nodes = shown.flatMap(({ role, content }) => [who(role), el("span", { class: "prompt turn" }, content)]);
  return [...nodes, who("assistant")];
}

const who = (role) => el("b", { class: "who" }, NAMES[role]);
