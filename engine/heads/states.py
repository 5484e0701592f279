"""Keeps the target's hidden states until a head has read them (the reader of the target's Runner)."""

import itertools
import logging
from collections.abc import Sequence as Seq
from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

from cache.transfer import index_tensor
from engine.device.staging import Staged, Staging
from engine.models.feeds import Feed
from engine.sequence import Sequence
from engine.types import DrafterName

log = logging.getLogger(__name__)

# Rows of plain passes that are copied into the table together. A copy for each pass took 1 to 3 % of the passes of the
# embedded target. More rows spread a copy's own work over more passes, and take more memory.
LATE_ROWS = 512

_numbers = itertools.count()


@dataclass(slots=True)
class _Held:
    """The states of one sequence's consecutive positions."""

    start: int  # the first position
    rows: list[int]  # of the table, by position

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.start + len(self.rows)


@dataclass(frozen=True, slots=True)
class _Planned:
    """The rows that are set aside for the states of a pass."""

    served: tuple[tuple[int, int, int], ...]  # the pass: see TargetStates._name
    rows: list[int]
    targets: Staged  # these rows, on their way to the device; a captured pass adds rows for its padding
    sources: Staged | None  # the rows of the pass that go there; None: all


@dataclass(slots=True)
class _Late:
    """The states of passes one after the other, which are not in the table so far: one row for each sequence."""

    handles: list[int]
    starts: list[int]  # the sequences' positions in the first pass
    passes: list[Tensor]  # [sequences, width] each

    def follows(self, handles: list[int], starts: Seq[int]) -> bool:
        """Whether a pass over these positions is the next one."""
        count = len(self.passes)
        return handles == self.handles and [start - count for start in starts] == self.starts


class TargetStates:
    """Keeps states by sequence until a head has read them.

    A pass also computes the states of drafts. `settle` drops those of rejected drafts, so no head reads them. A
    sequence begins with the first position that the target computes for it: after a hit in the prefix index that is
    not position 0. If positions are missing between two passes, the older ones are dropped.

    All sequences together keep `max_rows` positions. Beyond that the longest one loses its oldest half. A head begins
    anew behind such a hole, with less context.

    The states are copied into one table, because a part of a pass's tensor would keep all of it alive. Everything else
    moves row numbers only. While the policy rests, a head may read nothing for many rounds. Then a pass has one row for
    each sequence, and several passes are copied together.
    """

    def __init__(self, layers: tuple[int, ...], drafters: Set[DrafterName], max_rows: int, late_rows: int = 0) -> None:
        """drafters: the drafters that ask the head; sequences of others keep nothing. late_rows: how many rows of plain
        passes may wait for their copy; 0 for heads that use the states of every pass at once."""
        self.number = next(_numbers)
        self._layers = layers
        self._drafters = drafters
        self._max_rows = max_rows
        self._late_rows = late_rows
        self._table: Tensor | None = None  # [max_rows + 1, width], made by the first pass; nobody reads the last row
        self._held: dict[int, _Held] = {}  # by handle
        self._free = _all_free(max_rows)  # rows of the table; the last one is taken next
        self._planned: _Planned | None = None
        self._late: _Late | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        return self._layers

    def wants(self, feeds: Seq[Feed]) -> bool:
        return any(self._serves(feed.sequence) for feed in feeds)

    def prepare(self, feeds: Seq[Feed], starts: Seq[int], staging: Staging) -> None:
        """As StateReader.prepare. Sets rows aside if so many are free. If they are not, `read` decides which states are
        dropped, and sends the rows itself. A failure is logged and costs the states of all sequences (R9)."""
        try:
            self._plan(feeds, starts, staging)
        except Exception:
            self._lose_all()

    def _plan(self, feeds: Seq[Feed], starts: Seq[int], staging: Staging) -> None:
        self._copy_late()
        self._drop_plan()
        end, sources = 0, list[int]()
        for feed in feeds:
            begin, end = end, end + feed.committed + feed.drafts
            if self._serves(feed.sequence):
                sources += range(begin, end)
        if len(sources) > len(self._free):
            return
        rows = self._take_free(len(sources))
        picked = staging.ints(sources) if len(sources) < end else None
        self._planned = _Planned(self._name(feeds, starts), rows, staging.ints(rows), picked)

    def read(self, feeds: Seq[Feed], starts: Seq[int], states: Tensor) -> None:
        """As StateReader.read. A failure is logged and costs the states of all sequences (R9)."""
        try:
            planned = self._planned
            if planned is not None and planned.served == self._name(feeds, starts):
                self._keep(planned)
                sources = None if planned.sources is None else planned.sources.tensor
                self._copy(planned.targets.tensor, sources, states)
                return
            self._drop_plan()
            if 2 * len(states) <= self._late_rows and self._is_plain(feeds, states):
                self._read_late([feed.sequence.handle for feed in feeds], starts, states)
                return
            self._copy_late()
            self._copy_found(*self._assign_rows(feeds, starts), states)
        except Exception:
            self._lose_all()

    def _read_late(self, handles: list[int], starts: Seq[int], states: Tensor) -> None:
        """Read a pass with one row for each sequence when its states are needed, or with many others."""
        if self._late is None or not self._late.follows(handles, starts):
            self._copy_late()
            self._late = _Late(handles, list(starts), [])
        self._late.passes.append(states)
        if (1 + len(self._late.passes)) * len(states) > self._late_rows:
            self._copy_late()

    def _is_plain(self, feeds: Seq[Feed], states: Tensor) -> bool:
        """Whether a pass has one row for each sequence, and all are served."""
        return len(feeds) == len(states) and all(self._serves(feed.sequence) for feed in feeds)

    def _copy_late(self) -> None:
        """Copy what is late into the table. A failure is logged and costs the states of all sequences (R9)."""
        if (late := self._late) is None:
            return
        self._late = None
        try:
            first = 0
            while first < len(late.passes):  # as many together as the table has free rows for, at least one
                passes = late.passes[first : first + max(1, len(self._free) // len(late.handles))]
                served = [
                    (self._begin(h, s + first), len(passes)) for h, s in zip(late.handles, late.starts, strict=True)
                ]
                states = torch.stack(passes, 1).flatten(0, 1)
                self._copy_found(*self._rows_for(served, list(range(len(states)))), states)
                first += len(passes)
        except Exception:
            self._lose_all()

    def fits(self, feeds: Seq[Feed]) -> bool:
        self._copy_late()
        self._drop_plan()
        return sum(feed.count for feed in feeds if self._serves(feed.sequence)) <= len(self._free)

    def prepare_padded(self, feeds: Seq[Feed], starts: Seq[int], rows: int, sequences: int, staging: Staging) -> Staged:
        """As StateReader.prepare_padded. States that nobody wants go to the last row of the table."""
        self._copy_late()
        self._drop_plan()
        targets, taken = [self._max_rows] * (rows * sequences), list[int]()
        for i, feed in enumerate(feeds):
            if self._serves(feed.sequence):
                new = self._take_free(feed.count)
                targets[i * rows : i * rows + feed.count] = new
                taken += new
        self._planned = _Planned(self._name(feeds, starts), taken, staging.ints(targets), None)
        return self._planned.targets

    def store(self, targets: Tensor, states: Tensor) -> None:
        self._copy(targets, None, states)

    def keep_padded(self) -> None:
        assert self._planned is not None, "a captured pass was prepared"
        self._keep(self._planned)

    @property
    def dtype(self) -> torch.dtype:
        assert self._table is not None, "no pass was read"
        return self._table.dtype

    @property
    def unread(self) -> int:
        """The row of the table that padding rows read. Ignore what is computed from it."""
        return self._max_rows

    def _lose_all(self) -> None:
        """Forget all states: an exception has left them in an unknown state."""
        log.exception("the target's states could not be kept; heads draft nothing until there are new ones")
        self._held.clear()
        self._planned, self._late, self._free = None, None, _all_free(self._max_rows)

    def settle(self, handle: int, base: int, accepted: Seq[int]) -> None:
        """Keep the states before position `base` and those of the accepted drafts. accepted: the accepted nodes in the
        order of their path; in a chain they are 0, 1, …. The i-th one moves to position base + i."""
        held = self._held.get(handle)  # without late states: these are of committed tokens
        if held is None or held.end <= base:
            return
        before = max(0, base - held.start)
        path = [held.rows[place] for node in accepted if (place := base + node - held.start) >= 0]
        if held.start > base:  # the first drafts were dropped already
            held.start = base + len(accepted) - len(path)
        kept = set(path)
        self._give_back([row for row in held.rows[before:] if row not in kept])
        held.rows[before:] = path

    def positions(self, handle: int) -> range:
        """The positions whose states are kept."""
        self._copy_late()
        held = self._held.get(handle)
        return range(0) if held is None else range(held.start, held.end)

    def row_numbers(self, handle: int, start: int, stop: int) -> list[int]:
        """The rows of the table that hold the states of these positions, which must be kept."""
        self._copy_late()
        held = self._held[handle]
        assert held.start <= start <= stop <= held.end, f"{start} to {stop} is not in {held.start} to {held.end}"
        return held.rows[start - held.start : stop - held.start]

    def take(self, rows: Tensor) -> Tensor:
        """States [len(rows), width] of these rows of the table, of any sequences."""
        assert self._table is not None, "no pass was read"
        return self._table[rows]

    def skip(self, handle: int, start: int) -> None:
        """Drop the positions before `start`: the head has read them."""
        self._copy_late()
        if (held := self._held.get(handle)) is not None:
            count = min(max(0, start - held.start), len(held.rows))
            self._give_back(held.rows[:count])
            del held.rows[:count]
            held.start += count

    def drop(self, handle: int) -> None:
        """Forget the sequence. Idempotent."""
        self._copy_late()
        if (held := self._held.pop(handle, None)) is not None:
            self._give_back(held.rows)

    def audit(self, live: Set[int]) -> None:
        """Raise AssertionError if states are held for other handles than those in `live`."""
        handles = self._held.keys() | set(self._late.handles if self._late else ())
        assert handles <= live, f"states of ended sequences are held: {sorted(handles - live)}"
        planned = self._planned.rows if self._planned is not None else []
        rows = sorted([*self._free, *planned, *(row for held in self._held.values() for row in held.rows)])
        assert rows == list(range(self._max_rows)), "rows of the table are lost, or held twice"

    def _serves(self, sequence: Sequence) -> bool:
        return sequence.drafter in self._drafters and sequence.may_draft

    def _name(self, feeds: Seq[Feed], starts: Seq[int]) -> tuple[tuple[int, int, int], ...]:
        """(handle, first position, positions) of each sequence whose states of the pass are kept."""
        return tuple(
            (feed.sequence.handle, start, feed.committed + feed.drafts)
            for feed, start in zip(feeds, starts, strict=True)
            if self._serves(feed.sequence)
        )

    def _keep(self, planned: _Planned) -> None:
        """Give the planned rows to their sequences."""
        self._planned = None
        first = 0
        for handle, start, count in planned.served:
            self._begin(handle, start).rows += planned.rows[first : first + count]
            first += count

    def _drop_plan(self) -> None:
        """Forget the plan of a pass that does not come."""
        if self._planned is not None:
            self._give_back(self._planned.rows)
            self._planned = None

    def _assign_rows(self, feeds: Seq[Feed], starts: Seq[int]) -> tuple[list[int], list[int]]:
        """(rows of the table, the rows of the pass that go there)."""
        sources, served, end = list[int](), list[tuple[_Held, int]](), 0
        for feed, start in zip(feeds, starts, strict=True):
            begin, end = end, end + feed.committed + feed.drafts
            if self._serves(feed.sequence):
                served.append((self._begin(feed.sequence.handle, start), end - begin))
                sources += range(begin, end)
        return self._rows_for(served, sources)

    def _rows_for(self, served: Seq[tuple[_Held, int]], sources: list[int]) -> tuple[list[int], list[int]]:
        """As _assign_rows, for so many next positions of each."""
        if len(sources) > len(self._free):
            return self._assign_fewer_rows(served, sources)
        rows, first = self._take_free(len(sources)), 0
        for held, count in served:
            held.rows += rows[first : first + count]
            first += count
        return rows, sources

    def _assign_fewer_rows(self, served: Seq[tuple[_Held, int]], sources: Seq[int]) -> tuple[list[int], list[int]]:
        """As _assign_rows, where old states must go. A row that a later sequence took from an earlier one is the later
        one's."""
        found, end = dict[int, int](), 0
        for held, count in served:
            end += count
            taken = self._append(held, count)
            found.update(zip(taken, sources[end - len(taken) : end], strict=True))
        return list(found), list(found.values())

    def _begin(self, handle: int, start: int) -> _Held:
        """The sequence's states, without what a pass from position `start` on replaces, and what lies before a hole."""
        held = self._held.get(handle)
        if held is None:
            held = self._held[handle] = _Held(start, [])
        elif held.end != start:
            kept = max(0, start - held.start)
            self._give_back(held.rows[kept:])
            del held.rows[kept:]
            if held.end != start:
                self._give_back(held.rows)
                held.start, held.rows = start, []
        return held

    def _append(self, held: _Held, count: int) -> list[int]:
        """Give rows to the next `count` positions. Returns the rows of the last positions, as many as there is room
        for."""
        while len(self._free) < count and self._shorten():
            pass
        held.start += max(0, count - len(self._free))  # then nothing else is held
        taken = self._take_free(min(count, len(self._free)))
        held.rows += taken
        return taken

    def _take_free(self, count: int) -> list[int]:
        first = len(self._free) - count
        taken = self._free[first:][::-1]
        del self._free[first:]
        return taken

    def _shorten(self) -> bool:
        """Drop the oldest half of the longest sequence. False if nothing is held."""
        handle, longest = max(self._held.items(), key=lambda item: len(item[1].rows))
        self.skip(handle, longest.start + (len(longest.rows) + 1) // 2)
        return any(held.rows for held in self._held.values())

    def _copy_found(self, rows: list[int], sources: list[int], states: Tensor) -> None:
        """As _copy. One copy is enough where all rows of the pass go to rows that follow each other, as they mostly do
        in plain decoding."""
        if not rows:
            return
        first, every = rows[0], len(sources) == len(states) and sources == list(range(len(sources)))
        if every and rows == list(range(first, first + len(rows))) and self._table is not None:
            self._table.narrow(0, first, len(rows)).copy_(states)
            return
        to, of = index_tensor([*rows, *sources], states.device).view(2, -1).unbind(0)
        self._copy(to, None if every else of, states)

    def _copy(self, rows: Tensor, sources: Tensor | None, states: Tensor) -> None:
        """Copy rows `sources` of a pass to rows `rows` of the table. None: all rows of the pass."""
        if self._table is None:
            with torch.inference_mode(False):  # so that passes within and outside of that mode may write
                self._table = states.new_empty(self._max_rows + 1, states.shape[1])
        self._table.index_copy_(0, rows, states if sources is None else states[sources])

    def _give_back(self, rows: list[int]) -> None:
        self._free += rows[::-1]


def _all_free(count: int) -> list[int]:
    return list(range(count))[::-1]
