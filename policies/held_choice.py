"""A choice that stands for a few rounds: choosing anew takes a few percent of a round with few sequences."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from policies.observation import Candidate
from policies.reasons import Reason

YOUNGEST = 2  # rounds that a choice stands for when sequences join: in large batches one does in every other round
FEW = 4  # of so many sequences one may join a choice that gives everybody the same, and is not asked about
ENOUGH = 2.0  # accepted drafts to be expected, before what came of them is a surprise


@dataclass(frozen=True, slots=True)
class Decision:
    """A round's k, and what is expected of it; one entry per candidate, in their order."""

    ks: list[int]
    reasons: list[Reason]
    alphas: list[float]  # chance that the first draft is accepted
    confidence: float  # see Choice
    seconds: float  # of the whole step; 0: others run than those for whom it was predicted
    tokens: float  # that the candidates emit together; 0 as seconds


class Limits(NamedTuple):
    """Of a round's candidates, in their order."""

    fixed: list[int]  # k that a request fixed, within its limit; −1: the policy's to choose
    most: list[int]  # drafts that each may get
    bounds: list[Reason]  # what a k at its limit is due to: user, cap or cache


@dataclass(slots=True)
class Standing:
    """A choice, and for whom it was made."""

    decision: Decision
    stands: int  # rounds
    joining: int | None
    places: dict[int, int]  # handle → place in the decision
    age: int = 1  # rounds that it was used for
    accepted: int = 0  # drafts in these
    expected: float = 0.0  # of them
    same: bool = True  # whether those run for whom it was made

    def serves(self, candidates: Sequence[Candidate]) -> bool:
        """Not those of whom some have a guess to offer, which differs from round to round."""
        if self.age >= self.stands or any(c.source is not None and not c.gap and c.fixed is None for c in candidates):
            return False
        joined = sum(c.handle not in self.places for c in candidates)
        if self.joining is None:
            return not joined or self.age < YOUNGEST
        return joined * FEW <= len(candidates)

    def surprised(self, accepted: int) -> bool:
        """Whether, with so many drafts accepted in one more round, it is out of date: far fewer were than expected, or
        far more."""
        if not self.same:
            return False
        self.accepted += accepted
        self.expected += self.decision.tokens - len(self.decision.ks)
        return self.expected >= ENOUGH and not self.expected / 2 <= self.accepted <= self.expected * 2

    def decide(self, candidates: Sequence[Candidate], limits: Limits) -> Decision:
        """The same again for those that are still there, within today's limits."""
        self.age += 1
        ks, reasons, alphas = list[int](), list[Reason](), list[float]()
        for n, candidate in enumerate(candidates):
            k, reason, alpha = self._of(candidate.handle)
            k = k if limits.fixed[n] < 0 else limits.fixed[n]
            bound = limits.fixed[n] >= 0 or k > limits.most[n]
            ks.append(min(k, limits.most[n]))
            reasons.append(limits.bounds[n] if bound else reason)
            alphas.append(alpha)
        decision = replace(self.decision, ks=ks, reasons=reasons, alphas=alphas)
        self.same = len(candidates) == len(self.places) and all(c.handle in self.places for c in candidates)
        return decision if self.same else replace(decision, seconds=0.0, tokens=0.0)

    def _of(self, handle: int) -> tuple[int, Reason, float]:
        """(k, reason, chance of the first draft)."""
        place = self.places.get(handle)
        if place is not None:
            return self.decision.ks[place], self.decision.reasons[place], self.decision.alphas[place]
        usual = sum(self.decision.alphas) / len(self.decision.alphas)
        return (0, "load", usual) if self.joining is None else (self.joining, "policy", usual)
