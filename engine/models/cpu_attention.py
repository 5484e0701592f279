"""Attention on a CPU that reads keys and values where they lie (engine/kernels/cpu_attention.py).

It serves every storage: in slotted memory a slot is one block. Nothing is copied, padded or masked, and keys are read
once for some rows of a sequence. Where torch's fused attention, which multiplies matrices, does better on long spans,
it computes these; engine/models/attention.py has both.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cache.storage import Storage
from engine.kernels.paged_rows import MAX_NODES
from engine.models.compiled import as_stored, compiled_module, in_parts, type_of_sums
from engine.models.paged_attention import path_bits_of
from engine.models.pass_attention import Scoring
from engine.models.spans import Span

UNMEASURED_LANES = (
    16  # queries that share a key: with more of them matrices may be faster. For where nothing was measured
)
PIECE_LANES = 128  # queries that share a key and are computed together: with their sums they stay in a core's cache
PIECE_ROWS = 32  # of a piece at most: keys behind its last row are left out
# To multiply a query's number by one of a key or value takes as long as to read half a byte: 2.5 ns for a query and a
# key of 64 numbers, 20 ns to read them and their value in fp32.
BYTES_OF_SCORE = 0.5
VisibleRows = tuple[Any, Any, Any, Any, Any]  # (first, last, path [N], base, end [S]) int64, as the kernel's


class BlockGroup(NamedTuple):
    """Spans whose attention reads blocks. Long ones are in pieces, which are computed as if they were sequences."""

    rows: slice  # of the packed input
    spans: tuple[Span, ...]  # the pieces
    tables: Any  # [S, width] int32
    first_rows: Any  # [S + 1] int64
    keys: int  # of all pieces together
    scores: int  # of all pieces together, for each of their kv heads
    positions: Any  # [N] int64
    last_visible: Any  # [N] int64: each query sees all places up to this one, and a node its path as well
    seen: dict[int | None, VisibleRows]  # by window; filled as layers ask

    @classmethod
    def of(
        cls,
        rows: slice,
        spans: Sequence[Span],
        group_size: int,
        storage: Storage,
        positions: Tensor,
        last_visible: Tensor,
    ) -> "BlockGroup":
        """group_size: queries of a position that share a key."""
        spans = [piece for span in spans for piece in pieces_of(span, group_size)]
        tables = [storage.table(s.slot) for s in spans]
        width = max(map(len, tables))
        padded = [[*table, *[0] * (width - len(table))] for table in tables]
        first_rows = np.array([0, *accumulate([s.size for s in spans])], np.int64)
        keys, scores = sum([s.end for s in spans]), sum([s.end * s.size for s in spans]) * group_size
        places, seen = (positions.numpy(), last_visible.numpy()), dict[int | None, VisibleRows]()
        return cls(rows, tuple(spans), np.array(padded, np.int32), first_rows, keys, scores, *places, seen)

    def rows_within(self, window: int | None) -> VisibleRows:
        """What each row sees, in layers with this window."""
        if window not in self.seen:
            self.seen[window] = self._rows(window)
        return self.seen[window]

    def _rows(self, window: int | None) -> VisibleRows:
        spans, nothing = self.spans, np.zeros(len(self.positions), np.int64)
        first = nothing if window is None else np.maximum(self.positions - (window - 1), 0)
        paths, ends = nothing, np.array([s.end for s in spans], np.int64)
        bases = ends  # of trees; without paths nobody asks
        if any(s.parents is not None for s in spans):
            bases = np.array([s.base for s in spans], np.int64)
            paths = np.array([bits for s in spans for bits in path_bits_of(s, window)], np.int64)
        return first, self.last_visible, paths, bases, ends


def pieces_of(span: Span, group_size: int) -> Sequence[Span]:
    """The span in parts of few rows; one with a tree as it is."""
    rows = max(1, min(PIECE_ROWS, PIECE_LANES // group_size))
    if span.parents is not None or span.size <= rows:
        return (span,)
    return [Span(span.slot, at, min(at + rows, span.end)) for at in range(span.start, span.end, rows)]


class BlockReader:
    """Attention over one storage's blocks. attention_choice.py measures `most_lanes`."""

    def __init__(self, storage: Storage, kernel: ModuleType) -> None:
        self._kernel = kernel
        self.most_lanes = UNMEASURED_LANES  # spans with more queries for each key are not taken
        self._layers = [as_stored(blocks) for blocks in storage.blocks]
        row = storage.blocks[0][0, 0]
        self._sums = type_of_sums(row.dtype)
        self._numbers, self.row_bytes = row.numel(), row.numel() * row.element_size()

    @classmethod
    def over(cls, storage: Storage) -> "BlockReader | None":
        """None where torch's attention must do: on other devices, without Numba, or for a storage of no layers."""
        on_cpu = bool(storage.blocks) and storage.blocks[0].device.type == "cpu"
        kernel = compiled_module("cpu_attention") if on_cpu else None
        return None if kernel is None else cls(storage, kernel)

    def takes(self, span: Span, group_size: int) -> bool:
        """Whether the span is short enough. group_size: queries of a position that share a key."""
        return span.size * group_size <= self.most_lanes and len(span.parents or ()) <= MAX_NODES

    @cached_property
    def addresses(self) -> Any:
        """Where each layer's blocks begin: addresses [layers, 1] int64."""
        return np.array([[blocks.ctypes.data] for blocks in self._layers], np.int64)

    def blocks(self, layer: int) -> Any:
        """A layer's blocks as a NumPy array."""
        return self._layers[layer]

    def read_bytes(self, group: BlockGroup) -> int:
        """Bytes of a layer's keys and values that the group's spans see, or more, which take as long to read as their
        scores take to compute."""
        return max(group.keys * self.row_bytes, int(group.scores * self._numbers * BYTES_OF_SCORE))

    def seen(self, group: BlockGroup, window: int | None) -> tuple[Any, Any, VisibleRows]:
        """Which places the kernel reads, in layers with this window."""
        return group.tables, group.first_rows, group.rows_within(window)

    def attend(self, group: BlockGroup, layer: int, queries: Tensor, scoring: Scoring) -> Tensor:
        """queries [rows, heads, head_dim] → [rows, heads·head_dim], over what the pass has stored already."""
        wide = queries if queries.dtype == self._sums else queries.to(self._sums)
        out = torch.empty(wide.shape, dtype=self._sums)
        numbers = scoring_numbers(scoring, queries.shape[-1], self._sums)
        given = (
            wide.contiguous().numpy(),
            self._layers[layer],
            *self.seen(group, scoring.window),
            *numbers,
            out.numpy(),
        )
        in_parts(self._kernel.attend, self.read_bytes(group), *given)
        packed = out.view(out.shape[0], -1)
        return packed if queries.dtype == self._sums else packed.to(queries.dtype)


def scoring_numbers(scoring: Scoring, head_dim: int, sums: torch.dtype) -> tuple[float, float, Any]:
    """(scale, cap, sinks) as the kernel has them; sums: type of its sums."""
    scale = head_dim**-0.5 if scoring.scale is None else scoring.scale
    sinks = torch.empty(0, dtype=sums) if scoring.sinks is None else scoring.sinks.to(sums)
    return scale, float(scoring.softcap or 0), sinks.numpy()
