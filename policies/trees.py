"""Trees of drafts: the nodes that a best one may have, what each is worth, and the shapes that they form.

A node's value is the chance that a round accepts it: the product of the chances on its path, which depend on depth and
rank alone. A tree's accepted drafts are the sum of its nodes' values, so a best tree of n nodes has the n most valuable
ones (Sequoia, Chen et al. 2024, arXiv 2402.12374). A shape is the tuple of its nodes' parents, ROOT for the committed
text; first children come right behind their parents. Standard library and numpy only.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.shapes import ROOT, Parents, is_chain

RANKS = 4  # siblings that a node may get, itself included: a later one is hardly ever accepted
TREE = 6  # nodes of the largest trees to consider, beside what chains add to them: larger ones gain next to nothing

Shapes = tuple[Parents | None, ...]  # by sequence; None: a chain
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Nodes(NamedTuple):
    """U nodes, each behind its parent and its lower siblings, and the chain of first children before all others. A
    node's path leads through its ancestors to itself."""

    parents: Ints  # [U]
    depths: Ints  # [U] 0 for a child of the root
    ranks: Ints  # [U] siblings before it
    branched: Ints  # [U] 1 if some node of its path is not a first child
    places: dict[tuple[int, int], int]  # (parent, rank) → node
    levels: tuple[Ints, ...]  # the branched nodes of depth 1, 2, …


@lru_cache(maxsize=64)
def best_nodes(depth: int) -> Nodes:
    """The chain of `depth` first children, and all further nodes that a best tree of at most TREE nodes may have.

    A node with the ranks r_1, …, r_d on its path is worth no more than any node with ranks as low on a path as short.
    A best tree with it holds all of these: Σ_i Π_{j ≤ i} (r_j + 1).
    """
    found: list[tuple[int, int, int, int]] = []

    def visit(parent: int, at: int, width: int, nodes: int, branched: int) -> None:
        for rank in range(RANKS):
            level = width * (rank + 1)
            beside = branched or int(rank > 0)
            if nodes + level > (min(TREE, depth) if beside else depth):
                return
            found.append((parent, at, rank, beside))
            visit(len(found) - 1, at + 1, level, nodes + level, beside)

    visit(ROOT, 0, 1, 0, 0)
    parents, depths, ranks, branched = np.array(found, np.int64).reshape(-1, 4).T
    places = {(p, rank): n for n, (p, _, rank, _) in enumerate(found)}
    levels = tuple(np.flatnonzero(branched * depths == at) for at in range(1, depths[branched > 0].max(initial=0) + 1))
    return Nodes(parents, depths, ranks, branched, places, levels)


def node_values(survival: Floats, sibling_chances: Floats, nodes: Nodes) -> Floats:
    """[B, U] from Observation.survival [B, K] and Observation.sibling_chances [B, RANKS − 1].

    Where a drafter fails, all of its siblings do: with a chance a of the first child, that of a sibling is proportional
    to a · (1 − a). Survivals are means over what a may be, and so are their differences.
    """
    before = np.hstack([np.ones((len(survival), 1)), survival[:, :-1]])
    first = np.divide(survival, before, out=np.zeros_like(survival), where=before > 0)
    rejected = first * (1 - np.hstack([first[:, 1:], first[:, -1:]]))
    chances = np.concatenate([first[:, :, None], rejected[:, :, None] * sibling_chances[:, None]], 2)
    chances = np.minimum.accumulate(chances, axis=2)
    values = chances[:, nodes.depths, nodes.ranks]
    values[:, : survival.shape[1]] = survival
    for level in nodes.levels:
        values[:, level] *= values[:, nodes.parents[level]]
    return values


@lru_cache(maxsize=1024)
def measure(parents: Parents) -> tuple[int, int]:
    """(forwards of the draft model that a tree takes, tokens that it reads behind the text: one for each node with
    children, the root included)."""
    depths = {ROOT: 0}
    for node, parent in enumerate(parents):
        depths[node] = depths[parent] + 1
    return max(depths.values()), len(set(parents))


@lru_cache(maxsize=1024)
def places_of(parents: Parents, depth: int) -> list[int]:
    """The nodes of a tree among best_nodes(depth). Those that are not there are left out."""
    known, placed = best_nodes(depth).places, {ROOT: ROOT}
    for node, parent in enumerate(parents):
        rank = parents[:node].count(parent)
        if parent in placed and (placed[parent], rank) in known:
            placed[node] = known[placed[parent], rank]
    return [place for node, place in placed.items() if node != ROOT]


@lru_cache(maxsize=1024)
def shape_of(nodes: tuple[int, ...], depth: int) -> Parents | None:
    """The tree of these nodes of best_nodes(depth), in ascending order; None: a chain."""
    known = best_nodes(depth)
    places = {ROOT: ROOT} | {node: place for place, node in enumerate(nodes)}
    parents = tuple(places[int(known.parents[node])] for node in nodes)
    return None if is_chain(parents) else parents


def cut(shape: Parents | None, k: int) -> Parents | None:
    """The first k nodes of a tree; None: a chain."""
    return None if shape is None or is_chain(shape[:k]) else shape[:k]


def depths_of(ks: Sequence[int], shapes: Shapes) -> list[int]:
    """Per sequence the most drafts on a path."""
    return [k if shape is None else measure(shape)[0] for k, shape in zip(ks, shapes, strict=True)]
