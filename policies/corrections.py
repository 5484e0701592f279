"""What rounds teach about a profile of their cost: robust ratios by kind of round, and the work around the passes."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import median

import numpy as np

from policies.observation import Floats, Timing

WINDOW = 32  # rounds that a median is taken of
COUNTS = 8  # rounds from which on a bucket speaks for itself
FEW = 4  # rounds from which on all of them together correct what none has visited
OUTLIER = 3.0  # deviations from the median, in units of the standard deviation that the absolute ones imply
LEAST_SPREAD = 0.02  # relative: a bucket that was as regular as clockwork must not call every change an outlier
PERSISTENT = 4  # outliers in a row, to the same side, that are a change and not outliers

Key = tuple[int, ...]


@dataclass(slots=True)
class _Bucket:
    """Rounds of one kind: logarithms of realised over profiled seconds."""

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    places: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    held: list[tuple[float, float]] = field(default_factory=list)  # the last ones, if they are outliers
    centre: float = 0.0  # median and spread of the ratios when last looked at
    spread: float = 0.0
    place: float = 0.0
    beside: Mapping[Key, float] = field(default_factory=dict)  # medians of all buckets when this one was last visited
    drift: float = 0.0  # of those that were visited since

    @property
    def counts(self) -> bool:
        return len(self.ratios) >= COUNTS

    @property
    def value(self) -> float:
        return self.centre + self.drift

    def resume(self) -> None:
        """It is visited again: what it knew moves to where the others have gone in the meantime."""
        if self.drift:
            self.ratios = deque((ratio + self.drift for ratio in self.ratios), maxlen=WINDOW)
            self.centre += self.drift
            self.drift = 0.0

    def admit(self, ratio: float, place: float) -> list[tuple[float, float]]:
        """What may be taken in now: this one, nothing yet if it is an outlier, or all that turn out to be a change."""
        off = ratio - self.centre
        if not self.counts or not self.spread or abs(off) <= OUTLIER * self.spread:
            self.held.clear()
            return [(ratio, place)]
        if self.held and (self.held[-1][0] > self.centre) != (off > 0):
            self.held.clear()
        self.held.append((ratio, place))
        if len(self.held) < PERSISTENT:
            return []
        change, self.held = self.held, []
        return change

    def look(self) -> None:
        self.centre = median(self.ratios)
        self.place = median(self.places)
        deviations = median(abs(ratio - self.centre) for ratio in self.ratios)
        self.spread = max(1.4826 * deviations, LEAST_SPREAD)  # 1.4826: for normal noise


class Corrections:
    """Factors on a profile, by bucket; where too few rounds have been, the one of the last rounds of any kind.

    A bucket that is not visited for long moves along with those that are, by as much as these have changed since: a
    machine that slows down does so for all of them, and what was learned of their differences stays.
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
        """`place`: where within its bucket the round lies, in any unit."""
        if not (realised > 0 and profiled > 0):
            return
        bucket = self._buckets.setdefault(key, _Bucket())
        bucket.resume()
        self._visited.add(key)
        for ratio, where in bucket.admit(log(realised / profiled), place):
            bucket.ratios.append(ratio)
            bucket.places.append(where)
            self._recent.append(ratio)

    def refresh(self) -> None:
        """Take what was observed into account from now on."""
        visited = {key for key in self._visited if self._buckets[key].counts}
        self._visited.clear()
        if len(self._recent) >= FEW:
            self._overall = median(self._recent)
        for key in visited:
            self._buckets[key].look()
        counting = {key: bucket for key, bucket in self._buckets.items() if bucket.counts}
        beside = {key: bucket.value for key, bucket in counting.items()}
        for key, bucket in counting.items():
            if key in visited:
                bucket.beside = beside
            elif moved := [beside[other] - bucket.beside[other] for other in visited if other in bucket.beside]:
                bucket.drift = median(moved)

    def factor(self, key: Key) -> float:
        bucket = self._counting(key)
        return exp(bucket.value if bucket else self._overall)

    def place(self, key: Key) -> float | None:
        """Where the rounds of the bucket lie; None: too few have been there."""
        bucket = self._counting(key)
        return bucket.place if bucket else None

    def count(self, key: Key) -> int:
        bucket = self._counting(key)
        return len(bucket.ratios) if bucket else 0

    def _counting(self, key: Key) -> _Bucket | None:
        """The bucket, if it has been looked at since it counts."""
        bucket = self._buckets.get(key)
        return bucket if bucket and bucket.spread else None


class HostWork:
    """Seconds of a step around its passes: medians of rounds without prompts, by batch."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[int, bool], deque[float]] = {}  # by batch, and whether there were drafts
        self._medians: dict[tuple[int, bool], float] = {}
        self._visited: set[tuple[int, bool]] = set()  # since the last refresh
        self._base = Table()
        self._drafting = Table()

    def observe(self, timing: Timing) -> None:
        """Drafts that no model made cost the host time, and nothing else."""
        if timing.prefill or not timing.rest_s > 0:
            return
        seconds = timing.rest_s + (timing.draft_s if timing.drafts and not timing.read else 0.0)
        key = timing.batch, timing.drafts > 0
        self._rounds.setdefault(key, deque(maxlen=WINDOW)).append(seconds)
        self._visited.add(key)

    def refresh(self) -> None:
        """What drafting costs is told by the batches that ran with and without. The others ran with the same work."""
        self._medians |= {key: median(self._rounds[key]) for key in self._visited if len(self._rounds[key]) >= FEW}
        self._visited.clear()
        plain = {batch: seconds for (batch, drafted), seconds in self._medians.items() if not drafted}
        drafted = {batch: seconds for (batch, drafted), seconds in self._medians.items() if drafted}
        self._drafting = Table({b: max(0.0, drafted[b] - plain[b]) for b in plain.keys() & drafted.keys()})
        more = self._drafting.at(list(drafted)).tolist()
        rest = {b: max(0.0, seconds - extra) for (b, seconds), extra in zip(drafted.items(), more, strict=True)}
        self._base = Table(rest | plain)

    def seconds(self, batch: int) -> tuple[float, float]:
        """(of a round without drafts, how much more one with drafts takes); 0 while nothing is known."""
        return float(self._base.at([batch])[0]), float(self._drafting.at([batch])[0])


class Table:
    """Values by batch, linear between the known ones, beyond them as at the end; 0 where none is known."""

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
