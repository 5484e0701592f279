"""Attention as a decoder's layers call it, whatever reads the memory."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scoring:
    """How the queries of a layer score keys."""

    scale: float | None = None  # None: 1 / √head_dim
    window: int | None = None  # how many keys a query sees, its own included; None: all up to its own
    softcap: float | None = None  # a score s becomes softcap · tanh(s / softcap)
    sinks: Tensor | None = None  # [heads]: one more score for each head, whose value is zero


PLAIN = Scoring()


class PassAttention(Protocol):
    """The attention of one pass, as its layers call it."""

    @property
    def positions(self) -> Tensor:
        """[N] int64, of the packed tokens."""
        ...

    @property
    def rotates(self) -> bool:
        """Whether it may be given factors."""
        ...

    def __call__(
        self, layer: int, queries: Tensor, kv: Tensor, scoring: Scoring = PLAIN, factors: Tensor | None = None, /
    ) -> Tensor:
        """Store kv [N, 2·kv_heads, head_dim], then attend with queries [N, heads, head_dim] → [N, heads·head_dim].

        factors: rotate queries and keys first, as engine.kernels.row_work.rotate_and_store(); None: they are rotated.
        """
        ...
