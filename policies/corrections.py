"""What rounds teach about a profile of their cost: robust ratios by kind of round, and the work around the passes."""

from collections import deque
from collections.abc import Mapping
from math import exp, log
from statistics import median

import numpy as np

from policies.observation import FEW, SETTLING, STALE, WINDOW, Timing

RoundKind = tuple[int, ...]
ANY: RoundKind = ()  # all kinds together


class Medians:
    """The median of the last rounds of each kind."""

    def __init__(self) -> None:
        self.known: dict[RoundKind, float] = {}
        self._rounds: dict[RoundKind, deque[float]] = {}
        self._last: dict[RoundKind, int] = {}  # kind → `_count` at its last round
        self._count = 0  # rounds of all kinds
        self._refreshed = 0  # `_count` at the last refresh

    def add(self, value: float, *kinds: RoundKind) -> None:
        """The value of a round, which may be of several kinds."""
        self._count += 1
        for key in kinds:
            self._last[key] = self._count
            self._rounds.setdefault(key, deque(maxlen=WINDOW)).append(value)

    def skip(self) -> None:
        """A round of none of these kinds."""
        self._count += 1

    def refresh(self) -> None:
        """Use what was added from here on."""
        for key, last in tuple(self._last.items()):
            if self._count - last > STALE:
                del self._last[key], self._rounds[key]
                self.known.pop(key, None)
            elif last > self._refreshed and len(self._rounds[key]) >= FEW:
                self.known[key] = median(self._rounds[key])
        self._refreshed = self._count


class Corrections(Medians):
    """Factors on a profile, by kind of round. `known` has their logarithms.

    A kind with too few rounds gets the factor of the last rounds of any kind. A kind's first rounds show its own
    factor. A later change is put down to the machine and moves all kinds: other work slows a machine down for seconds,
    and the kinds that run in these seconds must not look dearer than the rest.
    """

    def __init__(self) -> None:
        super().__init__()
        self._level = 0.0  # by how much the machine has become slower, as a logarithm
        self._new: list[tuple[RoundKind, float]] = []  # not learned from so far: kind, logarithm of the factor

    def observe(self, key: RoundKind, realised: float, profiled: float) -> None:
        if realised > 0 and profiled > 0:
            self._new.append((key, log(realised / profiled)))

    def refresh(self) -> None:
        changes = [value - self._level - self.known[key] for key, value in self._new if key in self.known]
        if len(changes) >= FEW:
            self._level += median(changes)
        for key, value in self._new:
            self.add(value - self._level, key, ANY)
        self._new.clear()
        super().refresh()

    def factor(self, key: RoundKind, unknown: float = 1.0) -> float:
        """unknown: what to take before there were enough rounds of any kind."""
        found = self.known.get(key, self.known.get(ANY))
        return unknown if found is None else exp(self._level + found)


class ChangeCost:
    """Seconds that rounds without drafts take longer in sum after rounds with drafts, which leave them less in the
    processor's caches: a median."""

    def __init__(self) -> None:
        self._found = deque[float](maxlen=WINDOW)
        self._sum_s = 0.0
        self._count = 0  # rounds in the sum; the first SETTLING ones after drafts

    def observe(self, longer_s: float) -> None:
        """A round without drafts after drafts took so much longer than usual."""
        self._sum_s += longer_s
        self._count += 1
        if self._count == SETTLING:
            self._found.append(max(0.0, self._sum_s))

    def begin(self) -> None:
        """A round with drafts, or one whose time shows nothing."""
        self._sum_s, self._count = 0.0, 0

    @property
    def seconds(self) -> float:
        """0 while too few changes are known."""
        return median(self._found) if len(self._found) >= FEW else 0.0


class HostWork:
    """Seconds of a step outside of its passes: medians of rounds without prompts, by batch."""

    def __init__(self) -> None:
        self._rounds = Medians()  # by batch, and whether there were drafts
        self._base: dict[int, float] = {}  # by batch
        self._drafting: dict[int, float] = {}

    def observe(self, timing: Timing) -> None:
        """Drafting without a model counts as host work."""
        if not timing.prefill and timing.host_s > 0:
            seconds = timing.host_s + (timing.draft_s if timing.drafts and not timing.read else 0.0)
            self._rounds.add(seconds, (timing.batch, timing.drafts > 0))

    def refresh(self) -> None:
        """Use what was observed from here on.

        A batch that ran both with and without drafts shows what drafting costs. This is kept when its rounds are
        forgotten, and holds for batches that ran in one way only.
        """
        self._rounds.refresh()
        without, drafted = ({b: s for (b, had), s in self._rounds.known.items() if had == kind} for kind in (0, 1))
        self._drafting |= {b: max(0.0, drafted[b] - without[b]) for b in without.keys() & drafted.keys()}
        self._base = {b: max(0.0, s - _at(b, self._drafting)) for b, s in drafted.items()} | without

    def seconds(self, batch: int) -> tuple[float, float]:
        """(seconds of a round without drafts, seconds that drafts add); 0 while nothing is known."""
        return _at(batch, self._base), _at(batch, self._drafting)


def _at(batch: int, known: Mapping[int, float]) -> float:
    """A value by batch: linear between known batches, constant beyond them; 0 if none is known."""
    batches = sorted(known)
    return float(np.interp(batch, batches, [known[b] for b in batches])) if known else 0.0
