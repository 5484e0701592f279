"""A choice that is used for more than one round.

Choosing anew and learning from rounds take as long as a plain step of a small model. In a rest, in which nobody drafts,
rounds are only counted and timed. Other rounds without drafts are observed, but nobody is asked what could be drafted.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from policies.config import Reason
from policies.observation import Candidate, Ints
from policies.shapes import Parents
from policies.trees import Shapes, cut

NEWCOMER_WAIT = 24  # rounds of a rest that a sequence spends at most without a choice for it
SURPRISE = 2.0  # accepted drafts over expected ones, or the reverse, from which on a choice is not used again

_Drafts = tuple[int, Parents | None, Reason, float]  # k, its shape, its reason, chance of the first draft


@dataclass(frozen=True, slots=True)
class Decision:
    """The drafts of a round and its expected outcome; lists have one entry per candidate, in their order."""

    ks: list[int]
    shapes: list[Parents | None]  # the trees of the drafts; None: a chain
    reasons: list[Reason]
    alphas: list[float]  # chance that the first draft is accepted
    confidence: float  # see Choice
    seconds: float  # of the whole step; 0 if other sequences run than those that it was predicted for
    tokens: float  # that the candidates emit together; 0 in the same case

    def of(self, place: int) -> _Drafts:
        return self.ks[place], self.shapes[place], self.reasons[place], self.alphas[place]


@dataclass(slots=True)
class HeldChoice:
    """The last choice, the sequences that it was made for, and how long it may be used."""

    decision: Decision
    places: dict[int, int]  # handle → place in the decision
    drafters: frozenset[str] | None  # that have no guesses, for these sequences; None: nobody drafts, whoever joins
    newcomer_k: int  # k of sequences that join
    rounds_left: int  # rounds that it may still be used for
    surprises: bool = True  # as in Choice
    rest_left: int = 0  # rounds before them that are not observed, if nobody fixed a k
    same_sequences: bool = True  # whether the round runs the sequences that it was made for
    accepted: int = 0  # drafts, in the rounds of these sequences
    expected: float = 0.0  # drafts that these rounds were predicted to accept
    drafting: int = 0  # sequences that drafted in these rounds, in sum
    # of the last round without drafts: each sequence's handle and the k that its request asks for; the decision
    _plain: tuple[list[tuple[int, int | None]], Decision] | None = None

    def suits(self, handles: Collection[int], drafters: Iterable[str | None]) -> bool:
        """Whether it may be used for these sequences: it was made for most of them, half of its own are left, and none
        of the drafters has guesses, because the length of a guess changes in every round. drafters: None for those
        without a drafter."""
        if self.drafters is None:
            return True
        known = 2 * sum(handle in self.places for handle in handles)
        most = len(handles) < known >= len(self.places)
        return most and self.drafters.issuperset(filter(None, drafters))

    def rest(self, fixed: Mapping[int, int | None], drafters: Iterable[str | None]) -> Decision | None:
        """The decision without drafts if the next round belongs to a rest; this takes the round from it.

        fixed: handle → k that the sequence's request asks for.
        """
        if self.rest_left <= 0 or any(fixed.values()) or not self.suits(fixed, drafters):
            return None
        self.rest_left -= 1
        if self.drafters is not None and not fixed.keys() <= self.places.keys():
            self.rest_left = min(self.rest_left, NEWCOMER_WAIT)
        return self._without_drafts(fixed)

    def plain(self, fixed: Mapping[int, int | None], drafters: Iterable[str | None]) -> Decision | None:
        """The decision if it has no drafts and may be used for the next round; this takes the round from it.

        Such a decision does not depend on what the sequences' drafters offer.
        """
        drafting = self.newcomer_k or any(self.decision.ks) or any(fixed.values())
        if self.rounds_left <= 0 or drafting or not self.suits(fixed, drafters):
            return None
        self.rounds_left -= 1
        return self._without_drafts(fixed)

    def _without_drafts(self, fixed: Mapping[int, int | None]) -> Decision:
        self.same_sequences = fixed.keys() == self.places.keys()
        if list(fixed) == list(self.places):
            return self.decision
        asked = list(fixed.items())
        if self._plain is None or self._plain[0] != asked:
            self._plain = asked, self.decide([Candidate(handle, k) for handle, k in asked], 0)
        return self._plain[1]

    def decide(self, candidates: Sequence[Candidate], policy_most: int) -> Decision:
        """The decision for those candidates, within their present limits. policy_most: as in Candidate.limit."""
        chosen, places = self.decision, [self.places.get(candidate.handle) for candidate in candidates]
        self.same_sequences = len(places) == len(self.places) and None not in places
        seconds, tokens = (chosen.seconds, chosen.tokens) if self.same_sequences else (0.0, 0.0)
        decision = Decision([], [], [], [], chosen.confidence, seconds, tokens)
        newcomer: _Drafts = self.newcomer_k, None, "policy", sum(chosen.alphas) / len(chosen.alphas)
        for candidate, place in zip(candidates, places, strict=True):
            k, tree, reason, alpha = newcomer if place is None else chosen.of(place)
            most, bound = candidate.limit(policy_most)
            if candidate.fixed is not None or k > most:
                k, reason = most, bound
            decision.ks.append(k)
            decision.shapes.append(cut(tree, k))
            decision.reasons.append(reason)
            decision.alphas.append(alpha)
        return decision

    def planned(self, candidates: Sequence[Candidate], policy_most: int) -> tuple[Ints, Shapes] | None:
        """[B] its drafts for these candidates, but for those of a probe; None: it was made for other sequences."""
        if self.places.keys() != {candidate.handle for candidate in candidates}:
            return None
        decision = self.decide(candidates, policy_most)
        probed = [self.decision.reasons[self.places[candidate.handle]] == "probe" for candidate in candidates]
        return np.where(probed, 0, decision.ks), tuple(decision.shapes)

    def observe(self, accepted: int) -> None:
        """Learn how many drafts a round accepted. A number within a standard deviation of the expected one is chance.

        The accepted drafts of a long chain are about geometrically distributed: with a mean m they have the variance
        m · (1 + m). A chain that is mostly accepted to its end has less.
        """
        if not (self.surprises and self.same_sequences):
            return
        self.accepted += accepted
        self.expected += self.decision.tokens - len(self.decision.ks)
        self.drafting += sum(map(bool, self.decision.ks))
        least = self.expected / SURPRISE
        if least >= 1 and not least <= self.accepted <= self.expected * SURPRISE:  # less than a draft is chance, too
            variance = self.expected * (1 + self.expected / self.drafting)
            if (self.accepted - self.expected) ** 2 >= variance:
                self.rounds_left = 0
