"""Sums of the engine's steps over the last five minutes. They grow with every step and are divided when a viewer asks.

The estimated speedup is the time that plain decoding would have taken for the same tokens (`StepStats.plain_us`) over
the time that the steps took. Steps that also read prompts are left out of both: reading costs the same either way.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.types import REASONS, RoundRecord, StepStats

BINS_PER_S = 4
BINS = 300 * BINS_PER_S  # kept bins: five minutes

# Column of the series → the count that it shows.
SERIES = {
    "steps": "steps",
    "emitted": "emitted",
    "rounds": "drafting",
    "accepted": "accepted",
    "draft_us": "draft_us",
    "verify_us": "verify_us",
    "step_us": "step_us",
}

PROBE = REASONS.index("probe")

Counts = Counter[tuple[str, int]]  # (name, position, batch size or reason); 0: not divided by it


@dataclass(slots=True)
class Bin:
    """Counts of a quarter of a second."""

    index: int  # monotonic time × BINS_PER_S
    counts: Counts = field(default_factory=Counter)


class StepWindow:
    """Holds at most BINS bins, each with a few integers per batch size, position and reason that occurred in it."""

    def __init__(self) -> None:
        self._bins: deque[Bin] = deque()  # ascending; a bin without a step is left out
        self._before: Counts = Counter()  # sum of all bins but the last one, which still grows

    def add(self, steps: Iterable[StepStats], now: float) -> None:
        """now: monotonic seconds, used for steps without a start time."""
        for step in steps:
            end = step.began + step.step_us / 1e6 if step.began else now
            index = int(end * BINS_PER_S)
            if not self._bins or self._bins[-1].index < index:
                self._open(index)
            _count(step, self._bins[-1].counts)

    def _open(self, index: int) -> None:
        if self._bins:
            self._before.update(self._bins[-1].counts)
        self._bins.append(Bin(index))
        self._forget(index)

    def _forget(self, index: int) -> None:
        """Drop the bins that are at least BINS older than `index`."""
        while self._bins and self._bins[0].index <= index - BINS:
            gone = self._bins.popleft()
            if self._bins:
                self._before.subtract(gone.counts)

    def totals(self, now: float) -> Counts:
        """Return the sums over the whole window."""
        self._forget(int(now * BINS_PER_S))
        return self._before + self._bins[-1].counts if self._bins else Counter()

    def recent(self, now: float, seconds: float) -> list[Bin]:
        first = int((now - seconds) * BINS_PER_S)
        found: list[Bin] = []
        for entry in reversed(self._bins):
            if entry.index < first:
                break
            found.append(entry)
        return found[::-1]


def batches(totals: Counts) -> dict[str, list[Any]]:
    """Return columns by number of sequences in a round, ascending: rounds, mean chosen k, speedup."""
    sizes = sorted(batch for what, batch in totals if what == "rounds_of")
    return {
        "batch": sizes,
        "rounds": [totals["rounds_of", size] for size in sizes],
        "k": [_ratio(totals["k_of", size], totals["chosen_of", size], 2) for size in sizes],
        "speedup": [_ratio(totals["plain_us", size], totals["decode_us", size], 3) for size in sizes],
    }


def speedup(totals: Counts) -> float | None:
    """Return the estimated speedup over all batch sizes; None without a step that only decoded."""
    plain_us, decode_us = (
        sum(n for (what, _), n in totals.items() if what == name) for name in ("plain_us", "decode_us")
    )
    return _ratio(plain_us, decode_us, 3)


def ended(bins: Iterable[Bin], now: float) -> list[Bin]:
    return [entry for entry in bins if entry.index < int(now * BINS_PER_S)]


def series(bins: Sequence[Bin], epoch: float) -> dict[str, list[Any]]:
    """Return columns of sums, one entry per bin. The page divides them after it has joined bins.

    t: Unix seconds at which the bin begins. epoch: Unix time of monotonic zero. rounds: rounds with at least one draft,
    per sequence.
    """
    times = [round(entry.index / BINS_PER_S + epoch, 2) for entry in bins]
    return {"t": times} | {name: [entry.counts[what, 0] for entry in bins] for name, what in SERIES.items()}


def positions(totals: Counts) -> dict[str, list[int]]:
    """Return the number of rounds with drafts, and with accepted drafts, at position 1, 2, … A tree's position is a
    depth."""
    most = max((place for what, place in totals if what == "depth_n"), default=0)
    return {name: _at_least(totals, what, most) for name, what in (("drafted", "depth_n"), ("accepted", "accepted_n"))}


def _at_least(totals: Counts, what: str, most: int) -> list[int]:
    """Return the number of rounds whose count is at least 1, at least 2, …"""
    counts = [totals[what, n] for n in range(1, most + 1)]
    return [sum(counts[place:]) for place in range(most)]


def decisions(totals: Counts) -> dict[str, int]:
    return {name: totals["reason", code] for code, name in enumerate(REASONS) if totals["reason", code]}


def why_none(counts: Counts) -> str | None:
    """Return the most frequent reason for k = 0; None if k was never 0."""
    seen = {name: counts["reason_of_none", code] for code, name in enumerate(REASONS)}
    most = max(seen, key=lambda name: seen[name])
    return most if seen[most] else None


def _count(step: StepStats, counts: Counts) -> None:
    """Add one step. Runs for every step, also without a viewer, so it only adds."""
    counts["steps", 0] += 1
    counts["sequences", 0] += len(step.parts)
    counts["emitted", 0] += step.emitted
    counts["accepted", 0] += step.accepted
    counts["drafted", 0] += step.drafted
    counts["draft_us", 0] += step.draft_us
    counts["verify_us", 0] += step.score_us
    counts["step_us", 0] += step.step_us
    counts["faults", 0] += step.draft_faults
    if step.parts:
        _count_round(step, counts)


def _count_round(step: StepStats, counts: Counts) -> None:
    batch = len(step.parts)
    counts["rounds_of", batch] += 1
    if step.decode_only:
        counts["decode_us", batch] += step.step_us
        counts["plain_us", batch] += step.plain_us
    for part in step.parts:
        _count_part(part, batch, counts)


def _count_part(part: RoundRecord, batch: int, counts: Counts) -> None:
    if part.drafted:
        counts["drafting", 0] += 1
        counts["depth_n", part.depth] += 1
        counts["accepted_n", part.accepted] += 1
        counts["meant", 0] += part.reason != PROBE
    if part.reason >= 0:
        counts["chosen_of", batch] += 1
        counts["k_of", batch] += part.k
        counts["reason", part.reason] += 1
        if not part.k:
            counts["reason_of_none", part.reason] += 1


def _ratio(above: float, below: float, digits: int = 0) -> float | None:
    return round(above / below, digits) if below else None
