"""What paged attention reads besides queries and memory: where each sequence's keys lie, and which of them a row sees.

A place is the number of a token's row in its sequence's memory. A row of a pass sees all places up to a last one. The
nodes of a draft tree (engine/trees.py) lie behind the committed tokens, one after the other, and siblings have the same
position. So a node's row sees the committed places, and of the nodes only its path, which is given as bits.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.trees import Parents, seen_pairs

MAX_NODES = 63  # nodes of a tree: one bit each in an int64 that stays positive
SPLIT_ROWS = 64  # the keys of a sequence with more rows need not be split: it has programs enough


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The rows of a pass, packed sequence by sequence. N rows, S sequences; all tensors are on the pool's device.

    A place is a key if it lies before its sequence's length, its block number names a block of the pool, and a row sees
    it. Any other place may hold anything. A row without keys gets zeros, and so does one that is in no sequence's rows.
    """

    tables: Tensor  # [S, width] int32: block numbers of each sequence; anything where it has no block
    first_rows: Tensor  # [S + 1] int32: where each sequence's rows begin; its last entry ends the last sequence's
    lengths: Tensor  # [S] int32: places of each sequence after the pass
    owners: Tensor  # [N] int32: the sequence of each row
    positions: Tensor  # [N] int64: each row's position; a committed key's position is its place
    last_visible: Tensor  # [N] int64: a row sees all places up to this one, within the window; −1: none …
    paths: Tensor | None  # [N] int64: … and places base + j of the bits j that are set (path_bits); None: no trees
    bases: Tensor | None  # [S] int32: place of the tree's first node; None: no trees
    max_rows: int  # no sequence has more rows in the pass
    split_rows: int  # the most rows of a sequence that has at most SPLIT_ROWS; 0: there is none
    max_keys: int  # no sequence is longer
    covered: bool = False  # whether each row is in a sequence's rows


def max_split_rows(counts: Iterable[int]) -> int:
    """PagedRows.split_rows of sequences with these numbers of rows."""
    return max((count for count in counts if count <= SPLIT_ROWS), default=0)


class ScoreRule(Protocol):
    """How queries score keys: engine.models.attention.Scoring."""

    @property
    def scale(self) -> float | None: ...

    @property
    def window(self) -> int | None: ...

    @property
    def softcap(self) -> float | None: ...

    @property
    def sinks(self) -> Tensor | None: ...


def path_bits(parents: Parents, window: int | None = None) -> list[int]:
    """Per node of a tree the bits of the nodes that its row sees: the last `window` of its path, itself included.

    Attention does not cut paths to the window. Raises ValueError for more than MAX_NODES nodes.
    """
    if len(parents) > MAX_NODES:
        raise ValueError(f"paged attention reads trees of up to {MAX_NODES} nodes, not of {len(parents)}")
    bits = [0] * len(parents)
    for node, seen in seen_pairs(parents, window):
        bits[node] |= 1 << seen
    return bits
