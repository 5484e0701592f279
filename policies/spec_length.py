"""How many tokens to draft, per sequence and round. Standard library and numpy only."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same k for every sequence that does not ask for its own."""

    k: int

    def plan(self, asked: Sequence[int | None], caps: Sequence[int]) -> list[int]:
        """k per sequence: what its request asked for (None: the policy's), at most its cap.

        A cap is what the sequence could use: tokens it may still emit, less the one that every round emits anyway.
        """
        return [min(self.k if k is None else k, cap) for k, cap in zip(asked, caps, strict=True)]
