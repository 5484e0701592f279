"""What rounds teach about a profile of their cost: robust ratios by kind of round, and the work around the passes."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import median

import numpy as np

from policies.observation import Floats, Timing

WINDOW = 32  # rounds of one kind that a median is taken over: up to half of them may have been interrupted
FEW = 4  # rounds from which on their median is used

Key = tuple[int, ...]


@dataclass(slots=True)
class _Bucket:
    """Rounds of one kind: logarithms of measured over profiled seconds."""

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    places: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    centre: float = 0.0  # medians at the last refresh that followed a visit
    place: float = 0.0
    others: Mapping[Key, float] = field(default_factory=dict)  # values of all buckets at that refresh
    drift: float = 0.0  # median change of the other buckets since then

    @property
    def value(self) -> float:
        return self.centre + self.drift

    def add(self, ratio: float, place: float) -> None:
        """A round. What is known from before moves to where the other buckets have gone in the meantime."""
        if self.drift:
            self.ratios = deque((old + self.drift for old in self.ratios), maxlen=WINDOW)
            self.centre, self.drift = self.centre + self.drift, 0.0
        self.ratios.append(ratio)
        self.places.append(place)


class Corrections:
    """Factors on a profile, by kind of round. A kind with too few rounds gets that of the last rounds of any kind.

    A machine that slows down does so for all kinds of rounds. So the factor of a kind that is not run for long moves
    with the factors of the others, and what was learned of their differences stays.
    """

    def __init__(self) -> None:
        self._buckets: dict[Key, _Bucket] = {}
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._visited: set[Key] = set()  # since the last refresh
        self._overall = 0.0

    @property
    def samples(self) -> int:
        return len(self._recent)

    def observe(self, key: Key, realised: float, profiled: float, place: float) -> None:
        """place: where the round lies within its kind, in any unit."""
        if realised > 0 and profiled > 0:
            ratio = log(realised / profiled)
            self._buckets.setdefault(key, _Bucket()).add(ratio, place)
            self._visited.add(key)
            self._recent.append(ratio)

    def refresh(self) -> None:
        """Use what was observed from here on."""
        if len(self._recent) >= FEW:
            self._overall = median(self._recent)
        known = {key: bucket for key, bucket in self._buckets.items() if len(bucket.ratios) >= FEW}
        visited = self._visited & known.keys()
        self._visited.clear()
        for key in visited:
            known[key].centre, known[key].place = median(known[key].ratios), median(known[key].places)
        values = {key: bucket.value for key, bucket in known.items()}
        for key, bucket in known.items():
            if key in visited:
                bucket.others = values
            elif moved := [values[other] - bucket.others[other] for other in visited if other in bucket.others]:
                bucket.drift = median(moved)

    def values(self) -> list[float]:
        """Logarithms of the factors of all kinds that are known."""
        return [bucket.value for bucket in self._buckets.values() if bucket.others]

    def factor(self, key: Key) -> float:
        known = self.known(key)
        return known[0] if known else exp(self._overall)

    def known(self, key: Key) -> tuple[float, float, int] | None:
        """(factor, place, rounds) of a kind; None before a refresh has followed its first FEW rounds."""
        bucket = self._buckets.get(key)
        return (exp(bucket.value), bucket.place, len(bucket.ratios)) if bucket and bucket.others else None


class HostWork:
    """Seconds of a step outside of its passes: medians of rounds without prompts, by batch."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[int, bool], deque[float]] = {}  # by batch, and whether there were drafts
        self._medians: dict[tuple[int, bool], float] = {}
        self._visited: set[tuple[int, bool]] = set()  # since the last refresh
        self._base = ByBatch()
        self._drafting = ByBatch()

    def observe(self, timing: Timing) -> None:
        """Drafting without a model counts as host work."""
        if timing.prefill or not timing.rest_s > 0:
            return
        seconds = timing.rest_s + (timing.draft_s if timing.drafts and not timing.read else 0.0)
        key = timing.batch, timing.drafts > 0
        self._rounds.setdefault(key, deque(maxlen=WINDOW)).append(seconds)
        self._visited.add(key)

    def refresh(self) -> None:
        """Use what was observed from here on.

        Batches that ran both with and without drafts show what drafting costs. Other batches are taken to pay the same.
        """
        self._medians |= {key: median(self._rounds[key]) for key in self._visited if len(self._rounds[key]) >= FEW}
        self._visited.clear()
        without = {batch: seconds for (batch, drafted), seconds in self._medians.items() if not drafted}
        drafted = {batch: seconds for (batch, drafted), seconds in self._medians.items() if drafted}
        self._drafting = ByBatch({b: max(0.0, drafted[b] - without[b]) for b in without.keys() & drafted.keys()})
        more = self._drafting.at(list(drafted)).tolist()
        rest = {b: max(0.0, seconds - extra) for (b, seconds), extra in zip(drafted.items(), more, strict=True)}
        self._base = ByBatch(rest | without)

    def seconds(self, batch: int) -> tuple[float, float]:
        """(seconds of a round without drafts, seconds that drafts add); 0 while nothing is known."""
        return float(self._base.at([batch])[0]), float(self._drafting.at([batch])[0])


class ByBatch:
    """Values by batch: linear between known batches, constant beyond them; 0 if none is known."""

    def __init__(self, known: Mapping[int, float] = {}) -> None:
        self._batches = np.array(sorted(known) or [0], dtype=np.float64)
        self._values = np.array([known[b] for b in sorted(known)] or [0], dtype=np.float64)

    def at(self, batches: Sequence[int]) -> Floats:
        return np.interp(batches, self._batches, self._values)


def isotonic(values: Floats, weights: Floats) -> Floats:
    """[n] the non-decreasing sequence closest to `values` in weighted least squares, by pooling adjacent violators."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] >= pool[0]:
            mean, heavy, many = pools.pop()
            total = heavy + pool[1]
            pool = ((mean * heavy + pool[0] * pool[1]) / total, total, many + pool[2])
        pools.append(pool)
    return np.repeat(np.array([mean for mean, _, _ in pools]), [many for _, _, many in pools])
