"""A choice that is used for a few rounds, and a rest, in which no policy is asked.

Choosing anew takes a few percent of a round with few sequences, and so does learning from one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from policies.observation import Candidate
from policies.reasons import Reason
from policies.trees import Parents, cut

PER_NEWCOMER = 4  # sequences per newcomer, from which on newcomers do not make a new choice due
SURPRISE = 2.0  # accepted drafts to expect before they can surprise, and the factor by which they then do


@dataclass(frozen=True, slots=True)
class Decision:
    """The drafts of a round and its expected outcome; lists have one entry per candidate, in their order."""

    ks: list[int]
    reasons: list[Reason]
    alphas: list[float]  # chance that the first draft is accepted
    confidence: float  # see Choice
    seconds: float  # of the whole step; 0 if other sequences run than those that it was predicted for
    tokens: float  # that the candidates emit together; 0 in the same case
    shapes: list[Parents | None] = field(default_factory=list)  # the trees of the drafts; None: a chain; []: all are


@dataclass(slots=True)
class Rest:
    """Rounds without drafts in which the policy is not asked. Only their number and their seconds are kept."""

    decision: Decision  # without drafts
    handles: list[int]  # the sequences that it was made for, in its order
    drafters: frozenset[str]  # a sequence of another drafter may have a guess to offer; empty: nobody gets drafts
    rounds_left: int
    rounds: int = 0  # that have ended and were not learned from
    spent_s: float = 0.0  # seconds of these rounds

    def serves(self, fixed: Mapping[int, int | None], drafters: Sequence[str | None]) -> bool:
        """Whether the next round belongs to it, and takes that round from it.

        fixed: handle → k that the sequence's request asks for; drafters: each one's, None if nothing is drafted for it.
        A crowd of newcomers ends the rest, and so does a batch of less than half the size.
        """
        if self.rounds_left <= 0 or any(fixed.values()):
            return False
        if self.drafters:
            newcomers = len(fixed.keys() - self.handles)
            crowd = newcomers * PER_NEWCOMER > len(fixed) or len(fixed) * 2 < len(self.handles)
            if crowd or not self.drafters.issuperset(name for name in drafters if name is not None):
                return False
        self.rounds_left -= 1
        return True

    def decide(self, fixed: Mapping[int, int | None]) -> Decision:
        """No drafts for these sequences."""
        if list(fixed) == self.handles:
            return self.decision
        reasons = dict(zip(self.handles, self.decision.reasons, strict=True))
        alphas = dict(zip(self.handles, self.decision.alphas, strict=True))
        others: list[Reason] = [reasons.get(h, "policy" if k is None else "user") for h, k in fixed.items()]
        return Decision([0] * len(fixed), others, [alphas.get(h, 0.0) for h in fixed], 0.0, 0.0, 0.0)


@dataclass(slots=True)
class HeldChoice:
    """The last choice, the sequences that it was made for, and how long it may be used."""

    decision: Decision
    places: dict[int, int]  # handle → place in the decision
    rounds_left: int  # rounds that it may still be used for
    newcomer_k: int  # k of sequences that join
    drafters: frozenset[str] = frozenset()  # drafters of a model for these sequences: they have no guesses
    same: bool = True  # whether the round runs the sequences that it was made for
    accepted: int = 0  # drafts in the rounds that it was used for, while `same`
    expected: float = 0.0  # the same, as predicted

    @property
    def planned(self) -> dict[int, int]:
        """handle → k of the plan, without the drafts of a probe."""
        entries = zip(self.places, self.decision.ks, self.decision.reasons, strict=True)
        return {handle: 0 if reason == "probe" else k for handle, k, reason in entries}

    @property
    def planned_shapes(self) -> dict[int, Parents]:
        """handle → tree of the plan."""
        return {handle: tree for handle, tree in zip(self.places, self.decision.shapes, strict=False) if tree}

    def serves(self, candidates: Sequence[Candidate]) -> bool:
        """Whether it may be used for one more round. It may not beside a guess, whose length changes every round."""
        return self.suits([c.handle for c in candidates]) and not any(c.guessed for c in candidates)

    def suits(self, handles: Sequence[int]) -> bool:
        """Whether it may be used for one more round of these sequences, if none has a guess."""
        newcomers = sum(handle not in self.places for handle in handles)
        return self.rounds_left > 0 and newcomers * PER_NEWCOMER <= len(handles)

    def reuse(self, candidates: Sequence[Candidate], depth: int) -> Decision:
        """The decision for those candidates, within their present limits. depth: the policy's maximum."""
        self.rounds_left -= 1
        chosen = self.decision
        self.same = len(candidates) == len(self.places) and all(c.handle in self.places for c in candidates)
        seconds, tokens = (chosen.seconds, chosen.tokens) if self.same else (0.0, 0.0)
        reused = Decision([], [], [], chosen.confidence, seconds, tokens)
        for candidate in candidates:
            k, alpha = self.newcomer_k, sum(chosen.alphas) / len(chosen.alphas)
            reason: Reason = "policy"
            tree: Parents | None = None
            if (place := self.places.get(candidate.handle)) is not None:
                k, reason, alpha = chosen.ks[place], chosen.reasons[place], chosen.alphas[place]
                tree = chosen.shapes[place] if chosen.shapes else None
            most, bound = candidate.limit(depth)
            if candidate.fixed is not None or k > most:
                k, reason = most, bound
            reused.ks.append(k)
            reused.reasons.append(reason)
            reused.alphas.append(alpha)
            if chosen.shapes:
                reused.shapes.append(cut(tree, k))
        return reused

    def observe(self, accepted: int) -> None:
        """Learn how many drafts a round accepted. A choice that expected far more or far fewer is not used again."""
        if not self.same:
            return
        self.accepted += accepted
        self.expected += self.decision.tokens - len(self.decision.ks)
        usual = self.expected / SURPRISE <= self.accepted <= self.expected * SURPRISE
        if self.expected >= SURPRISE and not usual:
            self.rounds_left = 0
