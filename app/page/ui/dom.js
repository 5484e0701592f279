// Small helpers: elements, formatted numbers, keyboard steps and the clipboard.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// Lets arrow keys, Home and End step through `count()` items while the node has the focus: calls choose(index).
export function stepping(node, count, current, choose) {
  node.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (!(event.key in steps) || !count() || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const from = current() ?? (steps[event.key] > 0 ? -1 : count());
    choose(Math.max(0, Math.min(count() - 1, from + steps[event.key])));
  });
}

export function number(value, digits = 0) {
  if (value === null || value === undefined) return "–";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export const percent = (value) => (value === null || value === undefined ? "–" : `${number(100 * value)} %`);

export function millis(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1000) return `${number(value / 1000, 2)} s`;
  return `${number(value, value < 10 ? 2 : value < 100 ? 1 : 0)} ms`;
}

export const micros = (value) => (value >= 1000 ? `${number(value / 1000, 2)} ms` : `${number(value)} µs`);

export const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

// Returns a button that copies the text. If the browser forbids copying, it selects the text instead.
export function copyButton(text, label) {
  const button = el("button", { type: "button", class: "quiet copy", "aria-label": `Copy ${label}` }, "copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(button.previousElementSibling);
      button.textContent = "selected";
    }
    setTimeout(() => (button.textContent = "copy"), 1500);
  });
  return button;
}
