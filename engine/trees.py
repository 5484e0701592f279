"""The shape of a draft tree: several guesses for the same position, checked in one pass.

A shape is the tuple of its nodes' parents. Node v is the draft at index v of its sequence. Its parent is a node before
it, or ROOT: the sequence's last committed token. A chain is the tree in which node v's parent is node v − 1. Siblings
are ordered: a verifier tries the one with the lowest index first.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache

from policies.shapes import ROOT as ROOT
from policies.shapes import Parents as Parents
from policies.shapes import chain as chain
from policies.shapes import is_chain as is_chain


@dataclass(frozen=True, slots=True)
class Growth:
    """The limits of a tree whose shape follows from the draft's own probabilities."""

    nodes: int
    depth: int  # drafts on a path


def check(parents: Parents) -> None:
    """Raise ValueError unless each node's parent is the root or a node before it."""
    for node, parent in enumerate(parents):
        if not ROOT <= parent < node:
            raise ValueError(f"node {node} of a draft tree has the parent {parent}: {ROOT} to {node - 1} are allowed")


@lru_cache(maxsize=512)
def with_chains(parents: Parents, length: int) -> Parents:
    """The tree with chains of `length` further nodes behind the root and behind each node. They come last, in the order
    of the nodes that they hang on."""
    found = list(parents)
    for node in range(ROOT, len(parents)):
        for depth in range(length):
            found.append(len(found) - 1 if depth else node)
    return tuple(found)


def depths(parents: Parents) -> list[int]:
    """Per node the number of drafts on its path, itself included: 1 for a child of the root."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent == ROOT else found[parent] + 1)
    return found


def within_depth(parents: Parents, most: int) -> Parents:
    """The tree without the nodes that have more than `most` drafts on their path."""
    kept = [node for node, depth in enumerate(depths(parents)) if depth <= most]
    places = {node: place for place, node in enumerate(kept)} | {ROOT: ROOT}
    return tuple(places[parents[node]] for node in kept)


def ranks(parents: Parents) -> list[int]:
    """Per node the number of siblings before it."""
    siblings: dict[int, int] = {}
    found = []
    for parent in parents:
        found.append(siblings.get(parent, 0))
        siblings[parent] = found[-1] + 1
    return found


def path(parents: Parents, node: int) -> list[int]:
    """The nodes from the root's child down to `node`, itself included; empty for ROOT."""
    found = []
    while node != ROOT:
        found.append(node)
        node = parents[node]
    return found[::-1]


def tried(parents: Parents, accepted: Seq[int]) -> list[int]:
    """The nodes that a verifier has tried, in its order, if it has accepted the path `accepted`."""
    parent, found = ROOT, []
    for node in (*accepted, None):
        found += [n for n, p in enumerate(parents) if p == parent and (node is None or n <= node)]
        parent = ROOT if node is None else node
    return found


def fates(parents: Parents, accepted: Seq[int]) -> list[list[bool]]:
    """One entry per node that was reached and has children, from the root on. It tells for each child that a verifier
    tried, in its order, whether it was accepted. `accepted` is the accepted path."""
    found = []
    for parent, chosen in zip((ROOT, *accepted), (*accepted, None), strict=True):
        children = [n for n, p in enumerate(parents) if p == parent and (chosen is None or n <= chosen)]
        if children:
            found.append([node == chosen for node in children])
    return found


@lru_cache(maxsize=512)  # some 10 kB for a chain of 16 nodes
def seen_pairs(parents: Parents, window: int | None = None) -> tuple[tuple[int, int], ...]:
    """(node, node that it sees) for each node: itself and its ancestors. A window shows the last `window` of them."""
    paths = [path(parents, node) for node in range(len(parents))]
    return tuple((node, seen) for node, nodes in enumerate(paths) for seen in nodes[-(window or len(nodes)) :])


def trunk(parents: Parents) -> list[int]:
    """The path of first children, from the root's on."""
    found: list[int] = []
    for node, parent in enumerate(parents):
        if parent == (found[-1] if found else ROOT):
            found.append(node)
    return found


def decided(parents: Parents, accepted: Seq[int]) -> list[int]:
    """The accepted nodes of a path from the root, then the nodes that were rejected for the position behind them."""
    end = accepted[-1] if accepted else ROOT
    return [*accepted, *(node for node, parent in enumerate(parents) if parent == end)]


def count_nodes(widths: Seq[int], most: int) -> int:
    """The nodes of `branching(widths)`, or some number above `most` if they are more."""
    nodes, level = 0, 1
    for width in widths:
        level *= width
        nodes += level
        if nodes > most:
            break
    return nodes


def branching(widths: Seq[int]) -> Parents:
    """The tree in which every node of depth d has widths[d] children, depth first: first children come right behind
    their parents."""
    parents: list[int] = []

    def grow(parent: int, depth: int) -> None:
        if depth == len(widths):
            return
        for _ in range(widths[depth]):
            parents.append(parent)
            grow(len(parents) - 1, depth + 1)

    grow(ROOT, 0)
    return tuple(parents)
