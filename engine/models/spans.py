"""Which tokens of which sequences a pass computes."""

from collections.abc import Sequence
from typing import NamedTuple

from engine.trees import Parents, depths, is_chain


class Span(NamedTuple):
    """Consecutive tokens of one sequence, at places start … end − 1 of its slot.

    The nodes of a tree have the last places, in the order of their numbers, from `base` on. The first nodes may have
    been fed by earlier passes. A node of depth d has position base + d − 1. Any other token's position is its place.
    """

    slot: int
    start: int
    end: int
    parents: Parents | None = None  # the shape of the tree; None: there is none, or it is a chain

    @classmethod
    def at(cls, slot: int, start: int, size: int, parents: Parents | None = None) -> "Span":
        return cls(slot, start, start + size, None if parents is None or is_chain(parents) else parents)

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.end - self.start

    @property
    def base(self) -> int:
        """The place of the tree's first node."""
        return self.end - len(self.parents or ())

    def positions(self) -> Sequence[int]:
        if self.parents is None:
            return range(self.start, self.end)
        base = self.base
        nodes = [base + depth - 1 for depth in depths(self.parents)]
        return [*range(self.start, base), *nodes[max(0, self.start - base) :]]

    def last_visible(self) -> Sequence[int]:
        """Each query sees all places up to this one, and a node its path as well."""
        if self.parents is None:
            return range(self.start, self.end)
        committed = range(self.start, self.base)
        return [*committed, *[self.base - 1] * (self.size - len(committed))]
