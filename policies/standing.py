"""A choice that stands for a few rounds: choosing anew takes a few percent of a round with few sequences."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from policies.observation import Candidate
from policies.reasons import Reason

YOUNGEST = 2  # rounds that a choice stands for when sequences join: in large batches one does in every other round
ENOUGH = 3.0  # accepted drafts to be expected, before what came of them is a surprise


@dataclass(frozen=True, slots=True)
class Decision:
    """A round's k, and what is expected of it; one entry per candidate, in their order."""

    ks: list[int]
    reasons: list[Reason]
    alphas: list[float]  # chance that the first draft is accepted
    confidence: float  # see Choice
    seconds: float  # of the whole step
    tokens: float  # that the candidates emit together


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

    def serves(self, candidates: Sequence[Candidate]) -> bool:
        """Not those of whom some have a guess to offer, which differs from round to round."""
        if self.age >= self.stands or any(c.source is not None and not c.gap and c.fixed is None for c in candidates):
            return False
        joined = self.joining is None and any(c.handle not in self.places for c in candidates)
        return not joined or self.age < YOUNGEST

    def surprised(self, accepted: int) -> bool:
        """Whether, with so many drafts accepted in one more round, it is out of date: far fewer were than expected, or
        far more."""
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
            ks.append(min(k, limits.most[n]))
            reasons.append(limits.bounds[n] if k > limits.most[n] or limits.fixed[n] >= 0 else reason)
            alphas.append(alpha)
        return replace(self.decision, ks=ks, reasons=reasons, alphas=alphas)

    def _of(self, handle: int) -> tuple[int, Reason, float]:
        """(k, reason, chance of the first draft)."""
        place = self.places.get(handle)
        if place is not None:
            return self.decision.ks[place], self.decision.reasons[place], self.decision.alphas[place]
        return (0, "load", 0.0) if self.joining is None else (self.joining, "policy", 0.0)
