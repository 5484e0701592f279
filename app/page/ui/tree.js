// The draft tree of one round: its root is the text so far, and each draft stands right of the draft that it follows.

import { el, plural, svg } from "./dom.js";

// All in px.
const STEP = 34; // between depths
const ROW = 15; // between leaves
const RADIUS = 4.5;

const ROOT = -1;

export class TreeDrawing {
  // trees: by round {parents, accepted}, or null for a chain.
  constructor(trees) {
    this.trees = trees;
    this.root = el("div", { class: "tree", "aria-live": "polite" });
    const rows = trees.reduce((most, tree) => (tree ? Math.max(most, leaves(tree.parents)) : most), 0);
    this.root.style.minHeight = `${(rows + 2) * ROW}px`; // what stands below does not move from round to round
  }

  show(index) {
    const tree = this.trees[index];
    this.root.replaceChildren(...(tree ? [drawing(tree)] : []));
  }
}

// Returns what became of each draft: "accepted", "rejected", or "unreached": behind a rejected or an accepted one.
export function fates({ parents, accepted }) {
  const kept = new Set(accepted);
  return parents.map((parent, node) => {
    if (kept.has(node)) return "accepted";
    if (parent !== ROOT && !kept.has(parent)) return "unreached";
    const sibling = accepted.find((other) => parents[other] === parent);
    return sibling === undefined || node < sibling ? "rejected" : "unreached";
  });
}

function leaves(parents) {
  return parents.filter((_, node) => !parents.includes(node)).length;
}

// Returns the place of each draft: its depth, and its row. A first child stands in its parent's row.
function places(parents) {
  const found = [];
  let rows = 1;
  parents.forEach((parent, node) => {
    const before = parent === ROOT ? { depth: 0, row: 0 } : found[parent];
    const first = parents.indexOf(parent) === node;
    found.push({ depth: before.depth + 1, row: first ? before.row : rows++ });
  });
  return found;
}

function drawing({ parents, accepted }) {
  const at = places(parents);
  const fate = fates({ parents, accepted });
  const deepest = Math.max(...at.map(({ depth }) => depth));
  const rows = Math.max(...at.map(({ row }) => row)) + 1;
  const x = (depth) => RADIUS + 2 + depth * STEP;
  const y = (row) => ROW * (row + 0.5);
  const label =
    `Tree of ${plural(parents.length, "draft")}, ${deepest} deep; the accepted path has ` +
    `${plural(accepted.length, "draft")}.`;
  const size = { width: x(deepest) + RADIUS + 2, height: rows * ROW };
  const picture = svg("svg", { ...size, role: "img", "aria-label": label });
  at.forEach(({ depth, row }, node) => {
    const from = parents[node] === ROOT ? 0 : at[parents[node]].row;
    const line = { x1: x(depth - 1), y1: y(from), x2: x(depth), y2: y(row), class: `branch ${fate[node]}` };
    picture.append(svg("line", line));
  });
  picture.append(svg("circle", { cx: x(0), cy: y(0), r: RADIUS, class: "text-end" }));
  at.forEach(({ depth, row }, node) => {
    picture.append(svg("circle", { cx: x(depth), cy: y(row), r: RADIUS, class: fate[node] }));
  });
  return el("figure", {}, picture, el("figcaption", { class: "hint" }, label));
}
