"""How likely drafts are to be accepted: per sequence and position, from rounds that show only part of it.

With k drafted and n accepted, positions 1 … min(n + 1, k) were observed and the ones behind were not. Unobserved is not
failed: the likelihood of a round is Πa over its n successes times (1 − a) of its one failure, if it has one (a
discrete-time hazard, as in Kaplan and Meier 1958). Where the overlap β = Σ min(p, q) of a reached position is known, β
and 1 − β take the place of the outcome: the same mean, less variance.

A sequence has a hazard h: a draft at position j that is reached is accepted with chance a(j) = exp(−h·f(j)), f(1) = 1.
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

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import exp

import numpy as np

from policies.observation import Candidate, Drafted, Floats, Ints

BASE_RATE = 0.65  # acceptance to expect of a drafter that nothing is known of
OCTAVES: Floats = np.arange(-7.0, 3.51, 0.5)  # of hazard around BASE_RATE's: acceptance from .997 down to .008
LEVELS: Floats = -np.log(BASE_RATE) * 2.0**OCTAVES
BASE_SPREAD = 0.7  # octaves: how different the requests of one drafter are, most of them
BASE_TAIL = 0.2  # share of requests that may be like anything
BASE_WEIGHT = 10.0  # of the base law, in rounds of one sequence: it is a guess, but no four rejections shall end it
DOUBT = 0.1  # of every population's law that stays the base law: .05 to .2 are as likely, and where nothing was ever
# accepted it is what lets a few probes convince
SWITCH = 0.02  # chance per round that a sequence's text turns into another sample of the population
SPAN = 8.0  # rounds of a sequence, from which on each counts less: the population is one of sequences, not of rounds
MOST_WEIGHT = 100.0  # that what the population was learned from may have, in rounds of new sequences
MEMORY = 0.98  # of it, per round without drafts
FLOOR_WEIGHT = 4.0  # to which ageing takes a source's evidence, its mean unchanged: a few probes then overturn it
POOL_WEIGHT = 8.0  # of a source's pool of all heats, against what is known of one heat, in rounds of one sequence
FACTOR_MEMORY = 0.995  # per round; longer: a drafter's decay with depth changes less than its texts do
FACTOR_WEIGHT = 20.0  # expected failures: the weight of f = 1 at first, and what ageing leaves
FACTOR_RANGE = (0.1, 10.0)  # of f, which for want of failures would be 0 or infinite
TRIALS = 2  # rounds in which a sequence is given the benefit of the doubt
SETTLE = 4  # rounds after which what was learned of a population counts; that is what costs time with few sequences
BUCKETS = (0, 1, 2, 2)  # of positions 1, 2, 3–4; all behind are in LAST_BUCKET
LAST_BUCKET = 3
WARMEST = (0.0, 0.5, 1.0)  # temperature of each heat; the last heat is warmer than all
MIN_ROWS = 64


def heat_of(temperature: float) -> int:
    """The bucket of requests among which acceptance is comparable: greedy, up to 0.5, up to 1, above."""
    return sum(temperature > warmest for warmest in WARMEST)


def _base_law() -> Floats:
    near = np.exp(-0.5 * (OCTAVES / BASE_SPREAD) ** 2)
    law: Floats = (1 - BASE_TAIL) * near / near.sum() + BASE_TAIL / len(LEVELS)
    return law


BASE_LAW = _base_law()


@dataclass(slots=True)
class _Pool:
    """What is known of all sequences of one source: [levels], sums to its weight."""

    counts: Floats = field(default_factory=lambda: BASE_LAW * BASE_WEIGHT)

    learned: bool = False  # since it aged last

    def age(self, rounds: int) -> None:
        """Rounds have passed; those without drafts take off weight."""
        if not self.learned and self.counts.any():
            weight = float(self.counts.sum())
            self.counts *= max(MEMORY**rounds, min(1.0, FLOOR_WEIGHT / weight))
        self.learned = False

    def add(self, evidence: Floats) -> None:
        """[levels]. What is older gives way to it."""
        self.counts *= exp(-float(evidence.sum()) / MOST_WEIGHT)
        self.counts += evidence
        self.learned = True

    @property
    def law(self) -> Floats:
        return self.counts / self.counts.sum()


class _Population:
    """What is known of the sequences of one source and heat."""

    def __init__(self, pool: _Pool, depth: int) -> None:
        self.pool = pool
        self.own = _Pool(np.zeros_like(LEVELS))
        self.failed: Floats = np.full(LAST_BUCKET + 1, FACTOR_WEIGHT)  # per position bucket: seen, and
        self.expected: Floats = np.full(LAST_BUCKET + 1, FACTOR_WEIGHT)  # expected were all f = 1
        self._bucket: Ints = np.array([*BUCKETS, *[LAST_BUCKET] * depth][:depth])
        self._one_hot = np.eye(LAST_BUCKET + 1)[self._bucket]  # [depth, buckets]
        self.refresh()

    def refresh(self) -> None:
        """Recompute what follows from the counts."""
        law = (self.own.counts + POOL_WEIGHT * self.pool.law) / (self.own.counts.sum() + POOL_WEIGHT)
        self.law: Floats = (1 - DOUBT) * law + DOUBT * BASE_LAW
        factors = np.clip(self.failed / self.expected, *FACTOR_RANGE)
        self._factors: Floats = factors[self._bucket]
        self._survival: Floats = np.exp(-np.outer(LEVELS, self._factors).cumsum(1))  # [levels, depth]
        # Relative to the first: h and all of f could else drift apart, their product unchanged.
        hazards = np.outer(LEVELS, (factors / factors[0])[self._bucket])
        self._log_accept: Floats = -hazards
        self._log_reject: Floats = np.log(-np.expm1(-hazards))

    def survival(self, beliefs: Floats) -> Floats:
        """[N, depth] of beliefs [N, levels]. Each position takes off far more than rounding could add."""
        survival: Floats = beliefs @ self._survival
        return survival

    def age(self, rounds: int) -> None:
        self.own.age(rounds)
        kept = np.maximum(FACTOR_MEMORY**rounds, np.minimum(1.0, FACTOR_WEIGHT / self.expected))
        self.failed *= kept
        self.expected *= kept

    def learn(self, beliefs: Floats, accepts: Floats, rejects: Floats, weights: Floats) -> Floats:
        """Beliefs [N, levels] after rounds with these outcomes [N, depth], both 0 where nothing was observed.

        weights [N]: of each as a sample of the population.
        """
        self._learn_factors(self.survival(beliefs), rejects, accepts + rejects)
        logs = accepts @ self._log_accept.T + rejects @ self._log_reject.T
        after: Floats = beliefs * np.exp(logs - logs.max(1, keepdims=True))
        after /= after.sum(1, keepdims=True)
        evidence = weights @ after
        self.own.add(evidence)
        self.pool.add(evidence)
        return after

    def _learn_factors(self, survival: Floats, rejects: Floats, observed: Floats) -> None:
        """f is failures seen over failures expected, given what was believed of each sequence before."""
        reached = np.hstack([np.ones((len(survival), 1)), survival[:, :-1]])
        expected = (1 - survival / reached) / self._factors
        self.failed += rejects.sum(0) @ self._one_hot
        self.expected += (expected * observed).sum(0) @ self._one_hot


class Estimator:
    """Predicts acceptance for the sequences that decode, known by their handles, up to `depth` drafts ahead.

    Raises ValueError for a depth below 1.
    """

    def __init__(self, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        self.depth = depth
        self._pools: dict[str, _Pool] = {}
        self._keys: dict[tuple[str, int], int] = {}  # source, heat → place in:
        self._populations: list[_Population] = []
        self._rows: dict[int, dict[str, int]] = {}  # handle → source → row of:
        self._beliefs: Floats = np.empty((MIN_ROWS, len(LEVELS)))
        self._members: Ints = np.zeros(MIN_ROWS, np.int64)  # each row's population
        self._seen: Floats = np.zeros(MIN_ROWS)  # rounds
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
                fresh = unknown | (self._seen[rows] < TRIALS)
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
            self._populations.append(_Population(self._pools.setdefault(source, _Pool()), self.depth))
        return key

    def _row(self, outcome: Drafted, key: int) -> int:
        rows = self._rows.setdefault(outcome.handle, {})
        row = rows.get(outcome.source)
        if row is None:
            row = rows[outcome.source] = self._new_row()
            self._beliefs[row] = self._populations[key].law
            self._seen[row] = 0.0
        self._members[row] = key
        return row

    def _new_row(self) -> int:
        if not self._free:
            size = len(self._beliefs)
            self._beliefs = np.concatenate([self._beliefs, np.empty_like(self._beliefs)])
            self._members = np.concatenate([self._members, np.zeros_like(self._members)])
            self._seen = np.concatenate([self._seen, np.zeros_like(self._seen)])
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
