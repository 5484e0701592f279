"""Attention that reads a paged cache's blocks where they lie, by one operation for all sequences of a pass.

It serves memory on other devices than the CPU (GatheredStorage). Nothing is grouped, padded or gathered: the operation
gets the tables of blocks (engine/kernels/paged_attention.py). What a pass needs is put on its way to the device when it
is planned.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from cache.gathered import GatheredStorage
from engine.device.staging import Staged, Staging
from engine.kernels.paged_attention import attend
from engine.kernels.paged_rows import MAX_NODES, PagedRows, max_split_rows, path_bits
from engine.kernels.row_work import rotate_and_store
from engine.models.pass_attention import PLAIN, Scoring
from engine.models.spans import Span
from engine.trees import depths


@dataclass(frozen=True, slots=True)
class PagedTrees:
    """What rows of trees see besides the committed tokens."""

    last_visible: Staged  # [N] int64
    bases: Staged  # [S] int32: the place of each sequence's first node
    paths: Staged  # [N] int64: bits of the nodes on each row's path
    cut: Mapping[int, Staged]  # by window: paths that hold no more nodes than the window; all windows that cut any


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """S sequences with N rows, made once per pass for all layers."""

    positions: Staged  # [N] int64
    cache_rows: Staged  # [N] int64: the storage's row of each token
    tables: Staged  # [S · width] int32
    first_rows: Staged  # [S + 1] int32
    lengths: Staged  # [S] int32
    owners: Staged  # [N] int32
    max_rows: int
    split_rows: int
    max_keys: int
    trees: PagedTrees | None

    @classmethod
    def of(
        cls, spans: Sequence[Span], storage: GatheredStorage, staging: Staging, windows: Sequence[int | None]
    ) -> "PagedPlan | None":
        """The plan of a pass over these spans, whose memory is prepared, through layers with these windows. None if a
        tree has too many nodes for it."""
        if any(len(s.parents or ()) > MAX_NODES for s in spans):
            return None
        tables = [storage.table(s.slot) for s in spans]
        width = max(map(len, tables))
        return cls(
            staging.ints([p for s in spans for p in s.positions()]),
            staging.ints([row for s in spans for row in storage.row_numbers(s.slot, s.start, s.end)]),
            staging.int32s([block for table in tables for block in (*table, *[0] * (width - len(table)))]),
            staging.int32s([*accumulate((s.size for s in spans), initial=0)]),
            staging.int32s([s.end for s in spans]),
            staging.int32s([n for n, s in enumerate(spans) for _ in range(s.size)]),
            max(s.size for s in spans),
            max_split_rows([s.size for s in spans]),
            max(s.end for s in spans),
            _trees(spans, staging, windows),
        )


def _trees(spans: Sequence[Span], staging: Staging, windows: Sequence[int | None]) -> PagedTrees | None:
    if all(s.parents is None for s in spans):
        return None
    cutting = cutting_windows(windows, max(max(depths(s.parents)) for s in spans if s.parents is not None))
    return PagedTrees(
        staging.ints([place for s in spans for place in s.last_visible()]),
        staging.int32s([s.base for s in spans]),
        staging.ints([bits for s in spans for bits in path_bits_of(s, None)]),
        {window: staging.ints([bits for s in spans for bits in path_bits_of(s, window)]) for window in cutting},
    )


def cutting_windows(windows: Sequence[int | None], depth: int) -> list[int]:
    """Return the windows of a model that cut a path of `depth` nodes, in ascending order."""
    return sorted({window for window in windows if window is not None and window < depth})


class PagedAttention:
    """The attention of one pass over a storage's blocks."""

    def __init__(self, plan: PagedPlan, storage: GatheredStorage) -> None:
        self._plan = plan
        self._storage = storage
        self._rows: dict[int | None, PagedRows] = {}  # by window, for those that cut the paths of trees

    @property
    def positions(self) -> Tensor:
        return self._plan.positions.tensor

    @property
    def rotates(self) -> bool:
        """One kernel for what takes four by torch's operations, in 16 bits."""
        return self._storage.rows[0].dtype.itemsize == 2

    def __call__(
        self, layer: int, queries: Tensor, kv: Tensor, scoring: Scoring = PLAIN, factors: Tensor | None = None
    ) -> Tensor:
        """As PassAttention."""
        stored, rows = self.memory(layer)
        if factors is None:
            stored.index_copy_(0, rows, kv)
        else:
            rotate_and_store(queries, kv, factors, stored, rows)
        return self.attend(layer, queries, scoring)

    def memory(self, layer: int) -> tuple[Tensor, Tensor]:
        """(a layer's keys and values [R, 2·kv_heads, head_dim], the row [N] of each token)."""
        return self._storage.rows[layer], self._plan.cache_rows.tensor

    def attend(self, layer: int, queries: Tensor, scoring: Scoring) -> Tensor:
        """As __call__(), with queries that are rotated, and keys and values that are stored."""
        return attend(queries, self._storage.blocks[layer], self._rows_within(scoring.window), scoring)

    def _rows_within(self, window: int | None) -> PagedRows:
        trees = self._plan.trees
        cut = window if trees is not None and window in trees.cut else None
        if cut not in self._rows:
            self._rows[cut] = self._make_rows(trees, cut)
        return self._rows[cut]

    def _make_rows(self, trees: PagedTrees | None, window: int | None) -> PagedRows:
        plan, positions = self._plan, self.positions
        first_rows, paths = plan.first_rows.tensor, None
        if trees is not None:
            paths = (trees.paths if window is None else trees.cut[window]).tensor
        return PagedRows(
            plan.tables.tensor.view(len(first_rows) - 1, -1),
            first_rows,
            plan.lengths.tensor,
            plan.owners.tensor,
            positions,
            positions if trees is None else trees.last_visible.tensor,
            paths,
            None if trees is None else trees.bases.tensor,
            plan.max_rows,
            plan.split_rows,
            plan.max_keys,
            covered=True,
        )


def path_bits_of(span: Span, window: int | None) -> list[int]:
    """Per row of the span the bits of the nodes on its path; 0 for a row that is no node."""
    nodes = path_bits(span.parents, window) if span.parents is not None else []
    new = min(span.size, len(nodes))
    return [0] * (span.size - new) + nodes[len(nodes) - new :]
