"""How likely drafts are to be accepted: per sequence and position, from rounds that show only part of it.

With k drafted and n accepted, positions 1 … min(n + 1, k) were observed and the ones behind were not. Unobserved is not
failed: the likelihood of a round is Πa over its n successes times (1 − a) of its one failure, if it has one (a
discrete-time hazard, as in Kaplan and Meier 1958). Where the overlap β = Σ min(p, q) of a reached position is known, β
and 1 − β take the place of the outcome: the same mean, less variance.

A sequence has a hazard h: a draft at position j that is reached is accepted with chance a(j) = exp(−h·f(j)).
What is known of h is a belief over LEVELS. Each round it is multiplied by the likelihood of what was seen and leaks a
little towards the population's belief, for text changes: the filter of a hidden Markov model, where discounted Beta
counts keep only a mean and a weight. The population's belief, per source and heat, is learned from its sequences'
(empirical Bayes): it is where a sequence starts, and where one without drafts returns to. Two things come out right
that a shrunken mean gets wrong. Acceptance has a heavy tail (most requests are alike, some repeat themselves for long),
so a small surprise is noise and a large one is believed at once. And the chance of a further draft rises with the
drafts that were accepted, since that is evidence on h: the survival Σ_h belief(h)·Π_j exp(−h·f(j)) contains it. The
factors f are learned per position bucket, for drafters that get worse, or better, with depth.

The constants were chosen by the log-likelihood of recorded rounds of the demo pair (greedy and at temperature 0.8) on
other prompts than those of tests/policies/data; the optima are flat. The weights were chosen by how soon a drafter that
fails and is repaired is dropped and found again.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np

from policies.observation import Candidate, Drafted, Floats, Ints
from policies.population import LEVELS, Pool, Population

SWITCH = 0.02  # chance per round that a sequence's text turns into another sample of the population
SPAN = 8.0  # rounds of a sequence, from which on each counts less: the population is one of sequences, not of rounds
TRIALS = 1  # rounds in which a sequence is given the benefit of the doubt
SETTLE = 4  # rounds after which what was learned of a population counts; that is what costs time with few sequences
WARMEST = (0.0, 0.5, 1.0)  # temperature of each heat; the last heat is warmer than all
MIN_ROWS = 64


def heat_of(temperature: float) -> int:
    """The bucket of requests among which acceptance is comparable: greedy, up to 0.5, up to 1, above."""
    return bisect_left(WARMEST, temperature)


class Estimator:
    """Predicts acceptance for the sequences that decode, known by their handles, up to `depth` drafts ahead.

    Raises ValueError for a depth below 1.
    """

    def __init__(self, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        self.depth = depth
        self._pools: dict[str, Pool] = {}
        self._keys: dict[tuple[str, int], int] = {}  # source, heat → place in:
        self._populations: list[Population] = []
        self._rows: dict[int, dict[str, int]] = {}  # handle → source → row of:
        self._beliefs: Floats = np.empty((MIN_ROWS, len(LEVELS)))
        self._members: Ints = np.zeros(MIN_ROWS, np.int64)  # each row's population
        self._seen: Floats = np.zeros(MIN_ROWS)  # rounds since it was a new sample of the population
        self._tried: Floats = np.zeros(MIN_ROWS)  # rounds
        self._free = list(range(MIN_ROWS))
        self._rounds = 0  # observed since the populations were settled

    def survival(self, candidates: Sequence[Candidate], hopeful: bool = False) -> Floats:
        """[B, depth] chance that the first j + 1 drafts are all accepted; 0 where nobody would draft.

        hopeful: for a sequence that has drafted in fewer than TRIALS rounds, the chance if it is of the better half of
        what it may be. Who always expects the mean never learns which sequences are better than that.
        """
        result = np.zeros((len(candidates), self.depth))
        groups: dict[int, tuple[list[int], list[int]]] = {}
        for place, candidate in enumerate(candidates):
            if candidate.source is not None:
                places, rows = groups.setdefault(self._population(candidate.source, candidate.heat), ([], []))
                places.append(place)
                rows.append(self._rows.get(candidate.handle, {}).get(candidate.source, -1))
        for key, (places, rows) in groups.items():
            population = self._populations[key]
            unknown = np.array(rows) < 0
            beliefs = self._beliefs[rows]
            beliefs[unknown] = population.law
            if hopeful:
                fresh = unknown | (self._tried[rows] < TRIALS)
                beliefs[fresh] = _better_half(beliefs[fresh])
            result[places] = population.survival(beliefs)
        return result

    def observe(self, outcomes: Sequence[Drafted], idle: Iterable[int] = (), rounds: int = 1) -> None:
        """Learn from one or a few rounds at once. idle: handles of sequences that decoded in them without drafts, one
        for each such round.

        All rounds are to be observed, whether or not anything was drafted in them: what is known ages in rounds.
        """
        groups: dict[int, list[Drafted]] = {}
        for outcome in outcomes:
            if outcome.drafted > 0:
                groups.setdefault(self._population(outcome.source, outcome.heat), []).append(outcome)
        for key, group in groups.items():
            rows = [self._row(outcome, key) for outcome in group]
            accepts, rejects = _evidence(group, self.depth)
            seen = np.ones(len(rows))
            if rounds > 1:
                rows, accepts, rejects, seen = _merged(rows, accepts, rejects)
            weights = seen / (1 + self._seen[rows] / SPAN)
            self._seen[rows] += seen
            self._tried[rows] += seen
            self._beliefs[rows] = self._populations[key].learn(self._beliefs[rows], accepts, rejects, weights)
        self._rounds += rounds
        if self._rounds >= SETTLE:
            self._settle(self._rounds)
            self._rounds = 0
        self._leak(Counter([*(outcome.handle for outcome in outcomes), *idle]))

    def forget(self, handle: int) -> None:
        """The sequence is over. Unknown handles are none."""
        self._free.extend(self._rows.pop(handle, {}).values())

    def _settle(self, rounds: int) -> None:
        """Let the populations age, and what follows from them be what was learned."""
        for pool in self._pools.values():
            pool.age(rounds)
        for population in self._populations:
            population.age(rounds)
            population.refresh()

    def _leak(self, rounds: Mapping[int, int]) -> None:
        """rounds: handle → in how many it took part."""
        rows = [(row, n) for handle, n in rounds.items() for row in self._rows.get(handle, {}).values()]
        if rows:
            which, times = map(list, zip(*rows, strict=True))
            laws = np.array([population.law for population in self._populations])
            shares = 1 - (1 - SWITCH) ** np.array(times)
            self._beliefs[which] += shares[:, None] * (laws[self._members[which]] - self._beliefs[which])
            self._seen[which] *= 1 - shares  # what turns into another sample counts as one again

    def _population(self, source: str, heat: int) -> int:
        key = self._keys.get((source, heat))
        if key is None:
            key = self._keys[source, heat] = len(self._populations)
            self._populations.append(Population(self._pools.setdefault(source, Pool()), self.depth))
        return key

    def _row(self, outcome: Drafted, key: int) -> int:
        rows = self._rows.setdefault(outcome.handle, {})
        row = rows.get(outcome.source)
        if row is None:
            row = rows[outcome.source] = self._new_row()
            self._beliefs[row] = self._populations[key].law
            self._seen[row] = self._tried[row] = 0.0
        self._members[row] = key
        return row

    def _new_row(self) -> int:
        if not self._free:
            size = len(self._beliefs)
            self._beliefs = np.concatenate([self._beliefs, np.empty_like(self._beliefs)])
            self._members = np.concatenate([self._members, np.zeros_like(self._members)])
            self._seen = np.concatenate([self._seen, np.zeros_like(self._seen)])
            self._tried = np.concatenate([self._tried, np.zeros_like(self._tried)])
            self._free.extend(range(size, 2 * size))
        return self._free.pop()


def _better_half(beliefs: Floats) -> Floats:
    """[N, levels], given that the hazard is below its median; LEVELS ascend."""
    before = beliefs.cumsum(1) - beliefs
    return 2 * np.clip(0.5 - before, 0.0, beliefs)


def _evidence(outcomes: Sequence[Drafted], depth: int) -> tuple[Floats, Floats]:
    """Successes and failures [N, depth] at each position; both are 0 at positions that were not reached."""
    drafted = np.array([outcome.drafted for outcome in outcomes])[:, None]
    accepted = np.array([outcome.accepted for outcome in outcomes])[:, None]
    places = np.arange(depth)
    accepts = (places < accepted).astype(np.float64)
    rejects = ((places == accepted) & (accepted < drafted)).astype(np.float64)
    known = [outcome.overlaps[:depth] for outcome in outcomes]
    if any(known):
        lengths = np.array([len(overlaps) for overlaps in known])[:, None]
        reached = places < lengths
        values = np.clip(np.nan_to_num(np.fromiter(chain.from_iterable(known), np.float64)), 0.0, 1.0)
        replaced = lengths[:, 0] > 0
        accepts[replaced], rejects[replaced] = 0.0, 0.0
        accepts[reached], rejects[reached] = values, 1 - values
    return accepts, rejects


def _merged(rows: list[int], accepts: Floats, rejects: Floats) -> tuple[list[int], Floats, Floats, Floats]:
    """The evidence of each row once, what it saw in one round and what in the next, and in how many it saw any."""
    places = {row: place for place, row in enumerate(dict.fromkeys(rows))}
    at = [places[row] for row in rows]
    merged = np.zeros((2, len(places), accepts.shape[1]))
    np.add.at(merged[0], at, accepts)
    np.add.at(merged[1], at, rejects)
    return list(places), merged[0], merged[1], np.bincount(at).astype(np.float64)
