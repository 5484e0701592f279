"""What is known of all sequences for which a source drafts: a law over how hard its drafts are to accept.

See estimator.py, which keeps the beliefs of single sequences.
"""

from dataclasses import dataclass, field
from math import exp

import numpy as np

from policies.observation import Floats, Ints

BASE_RATE = 0.65  # acceptance to expect of a drafter that nothing is known of
OCTAVES: Floats = np.arange(-7.0, 3.51, 0.5)  # of hazard around BASE_RATE's: acceptance from .997 down to .008
LEVELS: Floats = -np.log(BASE_RATE) * 2.0**OCTAVES
BASE_SPREAD = 0.7  # octaves: how different the requests of one drafter are, most of them
BASE_TAIL = 0.2  # share of requests that may be like anything
BASE_WEIGHT = 10.0  # of the base law, in rounds of one sequence: it is a guess, but no four rejections shall end it
DOUBT = 0.1  # of every population's law that stays the base law: .05 to .2 are as likely, and where nothing was ever
# accepted it is what lets a few probes convince
MOST_WEIGHT = 50.0  # that what the population was learned from may have, in rounds of new sequences
MEMORY = 0.98  # of it, per round without drafts
FLOOR_WEIGHT = 4.0  # to which ageing takes a source's evidence, its mean unchanged: a few probes then overturn it
POOL_WEIGHT = 8.0  # of a source's pool of all heats, against what is known of one heat, in rounds of one sequence
FACTOR_MEMORY = 0.995  # per round; longer: a drafter's decay with depth changes less than its texts do
FACTOR_WEIGHT = 20.0  # expected failures: the weight of f = 1 at first, and what ageing leaves
FACTOR_RANGE = (0.1, 10.0)  # of f, which for want of failures would be 0 or infinite
BUCKETS = (0, 1, 2, 2)  # of positions 1, 2, 3–4; all behind are in LAST_BUCKET
LAST_BUCKET = 3


def _base_law() -> Floats:
    near = np.exp(-0.5 * (OCTAVES / BASE_SPREAD) ** 2)
    law: Floats = (1 - BASE_TAIL) * near / near.sum() + BASE_TAIL / len(LEVELS)
    return law


BASE_LAW = _base_law()


@dataclass(slots=True)
class Pool:
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


class Population:
    """What is known of the sequences of one source and heat."""

    def __init__(self, pool: Pool, depth: int) -> None:
        self.pool = pool
        self.own = Pool(np.zeros_like(LEVELS))
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
