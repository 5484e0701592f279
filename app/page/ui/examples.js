// Prompts to begin with. The embedded model, which only writes Python, continues them well, and so do larger models.

import { byId, el } from "./dom.js";

const EXAMPLES = {
  text: [
    "class Reader:\n    def __init__(self, file):\n        self.file = file\n\n    def read(self, size=-1):\n        ",
    "class Version:\n    def __lt__(self, other):\n        return self.value < other.value\n\n    def __gt__(self, other):\n        ",
    "class Person:\n    @property\n    def name(self):\n        return self._name\n\n    @property\n    def age(self):\n        ",
    "class Lock:\n    def __enter__(self):\n        self.acquire()\n        return self\n\n    def __exit__(self, *args):\n        ",
  ],
  chat: ["Test that a closed file raises ValueError", "class Person with a property name", "Compare two versions"],
};

// Offers the examples of a form, "text" or "chat". take(prompt) is called with the chosen one.
export function offerExamples(form, take) {
  byId("examples").replaceChildren(...EXAMPLES[form].map((prompt) => example(prompt, take)));
}

export const firstExample = (form) => EXAMPLES[form][0];

function example(prompt, take) {
  const button = el("button", { type: "button", class: "example" }, prompt.split("\n")[0]);
  button.addEventListener("click", () => take(prompt));
  return button;
}
