"""Makes a draft of what may follow a token: the best chain, a tree of a given shape, or the most valuable tree."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from heapq import heappop, heappush
from typing import TypeVar

from engine.trees import ROOT, Parents, ranks

FLOOR = 0.05  # smallest value of a node: the product of the shares on its path

N = TypeVar("N")
Following = Callable[[N], Seq[tuple[int, float, N]]]  # node → its children as (token, share in 0 … 1, node), best first


def follow(root: N, following: Following[N], length: int) -> list[int]:
    """At most `length` tokens: the best child of the root, its best child and so on, down to a value of FLOOR."""
    tokens: list[int] = []
    node, value = root, 1.0
    while len(tokens) < length:
        children = following(node)
        if not children:
            break
        token, share, node = children[0]
        value *= share
        if value < FLOOR:
            break
        tokens.append(token)
    return tokens


def draw_tree(root: N, following: Following[N], nodes: int, shape: Parents | None) -> tuple[list[int], Parents]:
    """The tokens and the parents of a tree of this shape or, without one, of the most valuable tree.

    First children lie right behind their parents, and a better sibling has a lower index.
    """
    return _grow(root, following, nodes) if shape is None else _fill(root, following, shape)


def _fill(root: N, following: Following[N], shape: Parents) -> tuple[list[int], Parents]:
    """A node's r-th child is its r-th best continuation. Nodes without one are left out."""
    tokens: list[int] = []
    parents: list[int] = []
    placed = {ROOT: ROOT}  # node of the shape → its index
    children = {ROOT: following(root)}  # by node of the shape
    for node, (parent, rank) in enumerate(zip(shape, ranks(shape), strict=True)):
        if parent in placed and rank < len(children[parent]):
            token, _, state = children[parent][rank]
            placed[node], children[node] = len(tokens), following(state)
            tokens.append(token)
            parents.append(placed[parent])
    return tokens, tuple(parents)


def _grow(root: N, following: Following[N], size: int) -> tuple[list[int], Parents]:
    """At most `size` nodes of at least FLOOR. Among equals the node that was found first wins."""
    tokens: list[int] = []
    children: list[list[int]] = [[]]  # of the root, then of each node
    found: list[tuple[float, int, int, int, N]] = []  # a heap of (−value, order, parent, token, node)
    order = 0

    def add(offered: Iterable[tuple[int, float, N]], parent: int, value: float) -> None:
        nonlocal order
        for token, share, node in offered:
            if value * share >= FLOOR:
                heappush(found, (-value * share, order, parent, token, node))
                order += 1

    add(following(root) if size else (), ROOT, 1.0)
    while found and len(tokens) < size:
        negative, _, parent, token, node = heappop(found)
        children[parent + 1].append(len(tokens))
        children.append([])
        tokens.append(token)
        if len(tokens) < size:
            add(following(node), len(tokens) - 1, -negative)
    return _depth_first(tokens, children)


def _depth_first(tokens: Seq[int], children: Seq[Seq[int]]) -> tuple[list[int], Parents]:
    ordered: list[int] = []
    parents: list[int] = []
    waiting = [(node, ROOT) for node in reversed(children[0])]
    while waiting:
        node, parent = waiting.pop()
        waiting += [(child, len(ordered)) for child in reversed(children[node + 1])]
        ordered.append(tokens[node])
        parents.append(parent)
    return ordered, tuple(parents)
