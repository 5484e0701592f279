"""Passes whose shapes depend on few numbers: every sequence has the same number of rows. So they can be captured.

Where a sequence has fewer tokens, its other rows are padding. Ignore what padding computes. Its keys and values go to
the storage's spare block, which nobody reads, and it reads its own sequence's keys only.
"""

from collections.abc import Sequence as Seq
from itertools import repeat

from cache.gathered import GatheredStorage
from engine.device.round_limits import table_width
from engine.device.staging import Staged, Staging
from engine.kernels.paged_rows import max_split_rows
from engine.models.paged_attention import PagedPlan, PagedTrees, path_bits_of
from engine.models.runner import Runner
from engine.models.spans import Span


def can_capture(runner: Runner) -> bool:
    """Whether passes of the runner's model may be captured. What chooses experts waits for the device."""
    known = runner.decoder.can_capture and runner.decoder.config.traits.experts is None
    return known and runner.staging.graphs is not None and isinstance(runner.storage, GatheredStorage)


class PaddedPlans:
    """Plans of passes over the same S sequences. They share the tables of blocks, whose width is a power of two."""

    def __init__(self, slots: Seq[int | None], storage: GatheredStorage, staging: Staging) -> None:
        """slots: prepared ones, with all memory that the passes need; None: the sequence has no tokens in any pass."""
        tables = [[] if slot is None else storage.table(slot) for slot in slots]
        self._width = table_width(max(map(len, tables)))
        self._storage, self._staging = storage, staging
        staging.note("table width", self._width)
        self._tables = staging.int32s([block for table in tables for block in _filled(table, self._width)])
        self._shapes: dict[int, tuple[Staged, Staged]] = {}  # rows per sequence → (first rows, owners)

    def put(
        self, spans: Seq[Span | None], rows: int, *, at_end: bool = False, windows: Seq[int] | None = None
    ) -> PagedPlan:
        """The plan of a pass with `rows` rows of each sequence, on its way to the device. None: it has no tokens.

        at_end: a sequence's tokens have the last of its rows, not the first. windows: those that may cut a path of a
        tree (cutting_windows); None: the pass holds chains only. The shapes of trees are numbers, so all trees have the
        same plan.
        """
        positions: list[int] = []
        cache_rows: list[int] = []
        for span in spans:
            own = range(0) if span is None else span.positions()
            stored = [] if span is None else self._storage.row_numbers(span.slot, span.start, span.end)
            padding = rows - len(own)
            if not padding:
                positions += own
                cache_rows += stored
                continue
            like = [own[-1] if own else 0] * padding
            spare = [self._storage.spare_row] * padding
            positions += [*like, *own] if at_end else [*own, *like]
            cache_rows += [*spare, *stored] if at_end else [*stored, *spare]
        lengths = [0 if span is None else span.end for span in spans]
        trees = None if windows is None else self._put_trees(spans, rows, windows)
        return self._plan(positions, cache_rows, lengths, rows, trees)

    def put_steps(self, slots: Seq[int | None], lengths: Seq[int], steps: Seq[int]) -> list[PagedPlan]:
        """The plans of passes that read one token of each sequence, one pass after the other. Sequence i has lengths[i]
        tokens before the first pass, and a token in the first steps[i] of them."""
        tokens = list(zip(slots, lengths, steps, strict=True))
        stored = [[] if s is None else self._storage.row_numbers(s, n, n + count) for s, n, count in tokens]
        plans, spare = list[PagedPlan](), self._storage.spare_row
        for step in range(max(steps)):
            places = [length + step if count > step else -1 for length, count in zip(lengths, steps, strict=True)]
            cache_rows = [own[step] if len(own) > step else spare for own in stored]
            plans.append(self._plan([max(0, p) for p in places], cache_rows, [p + 1 for p in places], 1, None))
        return plans

    def _plan(
        self, positions: list[int], cache_rows: list[int], lengths: list[int], rows: int, trees: PagedTrees | None
    ) -> PagedPlan:
        first_rows, owners = self._shape(len(lengths), rows)
        return PagedPlan(
            self._staging.ints(positions),
            self._staging.ints(cache_rows),
            self._tables,
            first_rows,
            self._staging.int32s(lengths),
            owners,
            rows,
            max_split_rows([rows]),
            self._width * self._storage.block_size,
            trees,
        )

    def _put_trees(self, spans: Seq[Span | None], rows: int, windows: Seq[int]) -> PagedTrees:
        """What the rows see. A sequence's first rows are its tokens."""
        self._staging.note("trees")
        visible, paths = list[int](), {window: list[int]() for window in (None, *windows)}
        for span in spans:
            own = [] if span is None else span.last_visible()
            visible += [*own, *[own[-1] if own else 0] * (rows - len(own))]
            for window, bits in paths.items():
                bits += [*([] if span is None else path_bits_of(span, window)), *[0] * (rows - len(own))]
        return PagedTrees(
            self._staging.ints(visible),
            self._staging.int32s([0 if span is None else span.base for span in spans]),
            self._staging.ints(paths[None]),
            {window: self._staging.ints(paths[window]) for window in windows},
        )

    def _shape(self, sequences: int, rows: int) -> tuple[Staged, Staged]:
        if rows not in self._shapes:
            self._staging.note("rows per sequence", rows)
            first_rows = self._staging.int32s([n * rows for n in range(sequences + 1)])
            owners = self._staging.int32s([n for n in range(sequences) for _ in range(rows)])
            self._shapes[rows] = first_rows, owners
        return self._shapes[rows]


def _filled(table: Seq[int], width: int) -> list[int]:
    return [*table, *repeat(0, width - len(table))]
