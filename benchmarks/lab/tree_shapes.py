"""The draft tree with the most accepted drafts to be expected, for given chances by depth and rank.

The value of a node is the chance that a round gets to it: the product of the chances on its path. A tree's accepted
drafts are the sum of its nodes' values, so the best tree has the most valuable nodes (EAGLE-2, Li et al. 2024, arXiv
2406.16858, section 4; Sequoia, Chen et al. 2024, arXiv 2402.12374, for chances that depend on the rank).
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from engine.trees import ROOT, Parents, ranks

Chances = Sequence[Sequence[float]]  # [depth][rank]: of a child, once its parent is accepted


def value(parents: Parents, chances: Chances) -> float:
    """Accepted drafts to be expected in a round."""
    values: list[float] = []
    depths: list[int] = []
    for parent, rank in zip(parents, ranks(parents), strict=True):
        depth = 0 if parent == ROOT else depths[parent] + 1
        depths.append(depth)
        values.append((1.0 if parent == ROOT else values[parent]) * _chance(chances, depth, rank))
    return sum(values)


def best_shape(chances: Chances, nodes: int) -> Parents:
    """The best tree of at most so many nodes, depth first. At each depth no later sibling may have a larger chance."""
    chosen: list[tuple[int, int]] = []  # (parent, rank) in the order of choice
    heap: list[tuple[float, int, int, int]] = []  # (−value, parent, depth, rank)

    def offer(parent: int, reached: float, depth: int, rank: int) -> None:
        if (gained := reached * _chance(chances, depth, rank)) > 0:
            heappush(heap, (-gained, parent, depth, rank))

    reached = {ROOT: 1.0}
    offer(ROOT, 1.0, 0, 0)
    while heap and len(chosen) < nodes:
        negative, parent, depth, rank = heappop(heap)
        reached[len(chosen)] = -negative
        chosen.append((parent, rank))
        offer(len(chosen) - 1, -negative, depth + 1, 0)
        offer(parent, reached[parent], depth, rank + 1)
    return _depth_first(chosen)


def _chance(chances: Chances, depth: int, rank: int) -> float:
    return chances[depth][rank] if depth < len(chances) and rank < len(chances[depth]) else 0.0


def _depth_first(chosen: Sequence[tuple[int, int]]) -> Parents:
    children: dict[int, list[int]] = {}
    for node, (parent, _) in enumerate(chosen):  # siblings were chosen in the order of their ranks
        children.setdefault(parent, []).append(node)
    parents: list[int] = []

    def visit(node: int, parent: int) -> None:
        for child in children.get(node, []):
            parents.append(parent)
            visit(child, len(parents) - 1)

    visit(ROOT, ROOT)
    return tuple(parents)
