"""How likely drafts are to be accepted, per sequence, learned from rounds that show only part of it.

With k drafts and n of them accepted, a round shows n successes, and one failure if n < k. The positions behind it are
unobserved, not failed (a discrete-time hazard, as in Kaplan and Meier 1958). Where the overlap β = Σ min(p, q) of a
reached position is known, β and 1 − β replace the outcome: the same mean, less variance.

A sequence with hazard h accepts a reached draft with chance exp(−h). What is known of h is a belief, a distribution
over LEVELS. A round multiplies it by the likelihood of what was seen, and moves it towards the law of the drafter's
population, because text changes: the filter of a hidden Markov model. The law is learned from the beliefs (empirical
Bayes). So a small surprise counts as noise, a large one is believed at once, and the chance of a further draft rises
with those accepted before it. Counts of successes and failures do neither.

The constants have the best likelihood of recorded rounds of the demo pair, and the weights drop and find again a
drafter that fails and is repaired the soonest. The optima are flat, and LAW_SWITCH has the best simulated speed.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import exp

import numpy as np

from policies.observation import Candidate, Drafted, Floats
from policies.trees import RANKS

BASE_RATE = 0.65  # chance of acceptance to expect of an unknown drafter
BASE_SPREAD = 0.7  # octaves of hazard: standard deviation between most requests of one drafter
BASE_TAIL = 0.2  # share of requests that may have any hazard
BASE_WEIGHT = 4.0  # rounds of one sequence: weight of BASE_LAW beside what rounds have shown
SWITCH = 0.02  # chance per round that a sequence's text turns into another sample of the population
LAW_SWITCH = 0.005  # share of the evidence for the population's law that one round of drafts of a sequence drives out.
# At the rate of SWITCH one or two texts would be the law, and all others would wait for probes behind a bad one
SIBLING_SWITCH = 0.002  # share per round that is forgotten of siblings: chains show nothing of them, and half of this
# tries trees again too seldom
SIBLING_RATE = 0.3  # chance to expect of a second sibling once the first is rejected; of the third half, and so on

OCTAVES: Floats = np.arange(-7.0, 3.51, 0.5)  # between a hazard and that of BASE_RATE
LEVELS: Floats = -np.log(BASE_RATE) * 2.0**OCTAVES  # hazards: acceptance from 0.997 to 0.008
BASE_LAW: Floats = np.exp(-0.5 * (OCTAVES / BASE_SPREAD) ** 2)  # [levels] of a sequence of an unknown drafter
BASE_LAW = (1 - BASE_TAIL) * BASE_LAW / BASE_LAW.sum() + BASE_TAIL / len(LEVELS)


class Population:
    """The sequences for which one drafter drafts."""

    def __init__(self) -> None:
        self.law = BASE_LAW  # [levels]
        self.beliefs: dict[int, Floats] = {}  # handle → [levels]
        self._evidence: Floats = np.zeros(len(LEVELS))  # sums to its weight in rounds
        self._sibling_counts: Floats = np.zeros((2, RANKS - 1))  # tried and accepted ones, by rank from 1 on
        self.sibling_chances = _shares(self._sibling_counts, self.law)  # [RANKS − 1] as Observation.sibling_chances

    def believed(self, handles: Iterable[int]) -> Floats:
        """[N, levels] beliefs; a sequence without drafts so far is like the population."""
        return np.array([self.beliefs.get(handle, self.law) for handle in handles])

    def learn(self, outcomes: Iterable[Drafted], max_k: int) -> Counter[int]:
        """Only the first `max_k` positions of each outcome count.

        Returns by handle for how many rounds the belief has moved towards the law: for all but the last one, as if all
        that they show came behind that. A belief that moved for all of them afterwards would never be sure.
        """
        seen: dict[int, tuple[float, float, int]] = {}  # handle → accepted and rejected drafts, rounds that showed them
        for outcome in outcomes:
            before, (accepted, rejected) = seen.get(outcome.handle, (0.0, 0.0, 0)), _evidence(outcome, max_k)
            seen[outcome.handle] = before[0] + accepted, before[1] + rejected, before[2] + 1
            for rank, counts in enumerate(outcome.sibling_counts[: RANKS - 1]):
                self._sibling_counts[:, rank] += counts
        if not seen:
            return Counter()
        accepted, rejected, rounds = np.array(list(seen.values())).T
        likelihood = np.outer(rejected, np.log(-np.expm1(-LEVELS))) - np.outer(accepted, LEVELS)
        beliefs = self._moved(seen, rounds - 1) * np.exp(likelihood - likelihood.max(1, keepdims=True))
        beliefs /= beliefs.sum(1, keepdims=True)
        self.beliefs.update(zip(seen, beliefs, strict=True))
        evidence = rounds @ beliefs
        self._evidence = self._evidence * exp(-LAW_SWITCH * evidence.sum()) + evidence
        return Counter({handle: n - 1 for handle, (_, _, n) in seen.items()})

    def _moved(self, handles: Collection[int], rounds: Floats) -> Floats:
        """[N, levels] beliefs behind so many rounds more, as far as the text may have changed in them."""
        beliefs = self.believed(handles)
        return beliefs + (1 - (1 - SWITCH) ** rounds)[:, None] * (self.law - beliefs)

    def settle(self, rounds: Mapping[int, int], most: int) -> None:
        """Recompute the law, move beliefs towards it, and forget of siblings: trees that are no longer chosen must be
        tried again. rounds: handle → rounds for which its belief has not moved yet. most: rounds that a sequence took
        part in."""
        law = self._evidence + BASE_WEIGHT * BASE_LAW
        self.law = law / law.sum()
        if self._sibling_counts.any():
            self._sibling_counts *= (1 - SIBLING_SWITCH) ** most
            self.sibling_chances = _shares(self._sibling_counts, self.law)
        known = [handle for handle in rounds if handle in self.beliefs]
        if known:
            moved = self._moved(known, np.array([float(rounds[handle]) for handle in known]))
            self.beliefs.update(zip(known, moved, strict=True))


def _shares(counts: Floats, law: Floats) -> Floats:
    """[RANKS − 1] as Observation.sibling_chances. counts [2, RANKS − 1]: siblings tried and accepted, by rank.

    A sibling is tried where a first child was rejected, which tells that the chance of first children was low there.
    """
    prior = SIBLING_RATE / np.arange(1, RANKS)
    tried, found = counts + 2 * BASE_WEIGHT * np.array([np.ones_like(prior), prior])
    rates = found / tried
    among_rejected = rates * np.append(1.0, np.cumprod(1 - rates[:-1]))
    first, rejected = np.exp(-LEVELS), law * -np.expm1(-LEVELS)
    return among_rejected * rejected.sum() / (rejected @ first)


class Estimator:
    """Predicts acceptance for sequences, known by their handles, up to `max_k` ≥ 1 drafts ahead."""

    def __init__(self, max_k: int) -> None:
        self.max_k = max_k
        self._populations: defaultdict[str, Population] = defaultdict(Population)  # by drafter
        self._survival: Floats = np.exp(-np.outer(LEVELS, np.arange(1, max_k + 1)))  # [levels, max_k]

    def survival(self, candidates: Sequence[Candidate]) -> Floats:
        """[B, max_k] chance that the first j + 1 drafts are all accepted; 0 where nothing would draft."""
        result = np.zeros((len(candidates), self.max_k))
        for source in {c.source for c in candidates if c.source is not None}:
            places = [place for place, candidate in enumerate(candidates) if candidate.source == source]
            beliefs = self._populations[source].believed(candidates[place].handle for place in places)
            result[places] = beliefs @ self._survival
        return result

    def sibling_chances(self, candidates: Sequence[Candidate], free: bool) -> Floats:
        """[B, RANKS − 1] as Observation.sibling_chances. free: whether the policy may choose trees."""
        result = np.zeros((len(candidates), RANKS - 1))
        for place, candidate in enumerate(candidates):
            if candidate.source is not None and (candidate.tree or (free and candidate.branches)):
                result[place] = self._populations[candidate.source].sibling_chances
        return result

    def observe(self, outcomes: Sequence[Drafted], idle: Mapping[int, int] | None = None) -> None:
        """Learn from one or more rounds at once. idle: handle → rounds in which it decoded without drafts."""
        drafted = [outcome for outcome in outcomes if outcome.drafted > 0]
        took_part = Counter(outcome.handle for outcome in outcomes)
        took_part.update(idle or {})
        most = max(took_part.values(), default=0)
        for source in {outcome.source for outcome in drafted} | self._populations.keys():
            population = self._populations[source]
            moved = population.learn((outcome for outcome in drafted if outcome.source == source), self.max_k)
            population.settle(took_part - moved, most)

    def forget_drafter(self, drafter: str) -> None:
        """Another drafter has this name now."""
        self._populations.pop(drafter, None)

    def forget(self, handle: int) -> None:
        """The sequence is over. An unknown handle is ignored."""
        for population in self._populations.values():
            population.beliefs.pop(handle, None)


def _evidence(outcome: Drafted, max_k: int) -> tuple[float, float]:
    """(accepted, rejected) drafts among the first `max_k` positions that the round reached."""
    if outcome.overlaps:
        overlaps = np.clip(np.nan_to_num(outcome.overlaps[:max_k]), 0.0, 1.0)
        return float(overlaps.sum()), float((1 - overlaps).sum())
    return float(min(outcome.accepted, max_k)), float(outcome.accepted < min(outcome.drafted, max_k))
