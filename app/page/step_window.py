"""What the engine's steps of the last minutes add up to: counted as they come, divided only when somebody looks.

The estimated speedup is the time that rounds without drafts would have taken for the same tokens, over the time that
the rounds really took. What a round without drafts takes is the mean of those of the same batch size in the window, or
of those seen before it; it is unknown, and so is the speedup, where there were fewer than MIN_PLAIN. Steps that also
read prompts are left out of both times: reading costs the same with drafts and without.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.types import REASONS, RoundRecord, StepStats

BINS_PER_S = 4
BINS = 300 * BINS_PER_S  # that are kept: five minutes
MIN_PLAIN = 16  # rounds from which the time of a plain round is believed
REMEMBERED = 1024  # plain rounds of a batch size from which on older ones weigh less

# Columns of the series, and what of a bin's counts each of them is.
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

Counts = Counter[tuple[str, int]]  # (what, of which position, batch size or reason); 0 for what is not divided further


@dataclass(slots=True)
class Bin:
    """A quarter of a second."""

    index: int  # monotonic time × BINS_PER_S
    counts: Counts = field(default_factory=Counter)


class StepWindow:
    """Memory: at most BINS bins, each with a few integers per batch size, position and reason that occurred in it."""

    def __init__(self) -> None:
        self._bins: deque[Bin] = deque()  # ascending; those without a step are left out
        self._before: Counts = Counter()  # sum of all bins but the last, which still grows
        self._plain: dict[int, list[int]] = {}  # batch size: [rounds without drafts, their µs], since the start

    def add(self, steps: Iterable[StepStats], now: float) -> None:
        """`now`: monotonic seconds, for steps that do not say when they began."""
        for step in steps:
            end = step.began + step.step_us / 1e6 if step.began else now
            index = int(end * BINS_PER_S)
            if not self._bins or self._bins[-1].index < index:
                self._open(index)
            _count(step, self._bins[-1].counts)
            if _pure(step) and not step.drafted:
                self._remember(len(step.parts), step.step_us)

    def _open(self, index: int) -> None:
        if self._bins:
            self._before.update(self._bins[-1].counts)
        self._bins.append(Bin(index))
        self._forget(index)

    def _forget(self, index: int) -> None:
        """Drop the bins that are BINS or more older than `index`."""
        while self._bins and self._bins[0].index <= index - BINS:
            gone = self._bins.popleft()
            if self._bins:
                self._before.subtract(gone.counts)

    def _remember(self, batch: int, step_us: int) -> None:
        seen = self._plain.setdefault(batch, [0, 0])
        if seen[0] >= REMEMBERED:
            seen[:] = (part // 2 for part in seen)
        seen[0] += 1
        seen[1] += step_us

    def totals(self, now: float) -> Counts:
        """Of the whole window."""
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

    def plain_us(self, batch: int, totals: Counts) -> float | None:
        """Mean time of a round of this many sequences without drafts; None: too few were seen."""
        for rounds, micros in (
            (totals["plain", batch], totals["plain_us", batch]),
            self._plain.get(batch, (0, 0)),
        ):
            if rounds >= MIN_PLAIN:
                return micros / rounds
        return None

    def batches(self, totals: Counts) -> dict[str, list[Any]]:
        """By sequences in a round, ascending: steps, mean k where one was chosen, plain rounds, estimated speedup."""
        sizes = sorted(batch for what, batch in totals if what == "rounds_of")
        return {
            "batch": sizes,
            "rounds": [totals["rounds_of", size] for size in sizes],
            "k": [_ratio(totals["k_of", size], totals["chosen_of", size], 2) for size in sizes],
            "plain_rounds": [totals["plain", size] for size in sizes],
            "speedup": [_ratio(*self._times([size], totals), 3) for size in sizes],
        }

    def speedup(self, totals: Counts) -> float | None:
        """Over all batch sizes for which it is known."""
        return _ratio(*self._times([size for what, size in totals if what == "pure_us"], totals), 3)

    def _times(self, sizes: Sequence[int], totals: Counts) -> tuple[float, float]:
        """(µs that the tokens would have taken without drafts, µs that they took), of the sizes for which both are
        known."""
        without = took = 0.0
        for size in sizes:
            plain = self.plain_us(size, totals)
            if plain is not None:
                without += totals["pure_emitted", size] / size * plain
                took += totals["pure_us", size]
        return without, took


def ended(bins: Iterable[Bin], now: float) -> list[Bin]:
    return [entry for entry in bins if entry.index < int(now * BINS_PER_S)]


def series(bins: Sequence[Bin], epoch: float) -> dict[str, list[Any]]:
    """Columns, one entry per bin: sums, from which a reader makes means over as many bins as it shows together.

    t: Unix seconds of the bin's begin, where `epoch` is the Unix time of monotonic zero; rounds: a sequence's, with at
    least one draft.
    """
    times = [round(entry.index / BINS_PER_S + epoch, 2) for entry in bins]
    return {"t": times} | {name: [entry.counts[what, 0] for entry in bins] for name, what in SERIES.items()}


def positions(totals: Counts) -> dict[str, list[int]]:
    """How many drafts were made, and how many accepted, at position 1, 2, … of their round."""
    most = max((place for what, place in totals if what == "drafted_n"), default=0)
    return {name: _at_least(totals, f"{name}_n", most) for name in ("drafted", "accepted")}


def _at_least(totals: Counts, what: str, most: int) -> list[int]:
    """Rounds with 1 or more, 2 or more, … of it."""
    counts = [totals[what, n] for n in range(1, most + 1)]
    return [sum(counts[place:]) for place in range(most)]


def decisions(totals: Counts) -> dict[str, int]:
    return {name: totals["reason", code] for code, name in enumerate(REASONS) if totals["reason", code]}


def why_none(counts: Counts) -> str | None:
    """The commonest reason for k = 0; None where k was never 0."""
    seen = {name: counts["reason_of_none", code] for code, name in enumerate(REASONS)}
    most = max(seen, key=lambda name: seen[name])
    return most if seen[most] else None


def _count(step: StepStats, counts: Counts) -> None:
    """Every step passes here, looked at or not: additions only."""
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
    if _pure(step):
        counts["pure_us", batch] += step.step_us
        counts["pure_emitted", batch] += step.emitted
        if not step.drafted:
            counts["plain", batch] += 1
            counts["plain_us", batch] += step.step_us
    for part in step.parts:
        _count_part(part, batch, counts)


def _count_part(part: RoundRecord, batch: int, counts: Counts) -> None:
    if part.drafted:
        counts["drafting", 0] += 1
        counts["drafted_n", part.drafted] += 1
        counts["accepted_n", part.accepted] += 1
        counts["meant", 0] += part.reason != PROBE
    if part.reason >= 0:
        counts["chosen_of", batch] += 1
        counts["k_of", batch] += part.k
        counts["reason", part.reason] += 1
        if not part.k:
            counts["reason_of_none", part.reason] += 1


def _pure(step: StepStats) -> bool:
    """Whether it did nothing but a round that worked."""
    return bool(step.parts) and not step.prefill_tokens and not step.draft_faults and not step.failed


def _ratio(above: float, below: float, digits: int = 0) -> float | None:
    return round(above / below, digits) if below else None
