"""From what may follow a token to a draft: the best chain, or the tree of the most valuable nodes."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from heapq import heappop, heappush
from typing import TypeVar

from engine.trees import ROOT, Parents

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


def grow(root: N, following: Following[N], size: int) -> tuple[list[int], Parents]:
    """The tokens and the parents of the at most `size` most valuable nodes of at least FLOOR.

    Among equals the node that was found first wins. A better sibling has a lower index.
    """
    tokens: list[int] = []
    parents: list[int] = []
    found: list[tuple[float, int, int, int, N]] = []  # a heap of (−value, order, parent, token, node)
    order = 0

    def add(children: Iterable[tuple[int, float, N]], parent: int, value: float) -> None:
        nonlocal order
        for token, share, node in children:
            if value * share >= FLOOR:
                heappush(found, (-value * share, order, parent, token, node))
                order += 1

    add(following(root) if size else (), ROOT, 1.0)
    while found and len(tokens) < size:
        negative, _, parent, token, node = heappop(found)
        tokens.append(token)
        parents.append(parent)
        if len(tokens) < size:
            add(following(node), len(tokens) - 1, -negative)
    return tokens, tuple(parents)
