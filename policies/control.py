"""All that an engine keeps to choose k: what it learned of acceptance and of time, the policy, and the last choice."""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from policies.acceptance import Estimator
from policies.config import PolicyConfig
from policies.corrections import ChangeCost
from policies.cost import CostModel, DraftCost
from policies.held_choice import Decision, HeldChoice
from policies.observation import (
    FEW,
    NO_PREFILL,
    SETTLING,
    WINDOW,
    Candidate,
    Choice,
    Drafted,
    Observation,
    Prefill,
    RoundCost,
    Timing,
)
from policies.planner import expected_tokens, seconds
from policies.spec_length import HOLDS, ProbeBudget, make_policy
from policies.trees import cut


@dataclass(slots=True)
class Tally:
    """Rounds in sum."""

    rounds: int = 0
    seconds: float = 0.0
    prefill: int = 0  # tokens of prompts


class SpecControl:
    """Chooses k before a round and learns from it after. The policy may change at any time; what was learned stays.

    It learns from several rounds at once, when the next choice is made. max_k: the largest k there is. timings: rounds
    measured at the start, if any.
    """

    def __init__(self, config: PolicyConfig, max_k: int, timings: Sequence[Timing] = ()) -> None:
        self.estimator = Estimator(max(1, max_k))
        self.cost = CostModel(max(1, max_k), timings)
        self.timings = tuple(timings)
        self._max_k = max_k
        self._budget = ProbeBudget()
        self._held: HeldChoice | None = None
        self._tries_trees = False  # whether the held choice has trees of the policy's, whose price is not known yet
        self._last: dict[int, tuple[int, int]] = {}  # as Observation.last
        # Not learned from so far:
        self._drafted: list[Drafted] = []
        self._idle: Counter[int] = Counter()  # handle → rounds without drafts
        self._rested = 0  # rounds without drafts of all sequences of the held choice
        self._gone: list[int] = []
        self._timings: list[Timing] = []
        # Seconds of the policy's code in the last rounds with drafts:
        self._holding_s = deque[float](maxlen=WINDOW)  # that used an earlier choice
        self._choosing_s = deque[float](maxlen=WINDOW)  # that had one of their own
        self._chose = False  # whether the last plan made a choice
        self._holds = deque[int]([HOLDS], maxlen=FEW)  # rounds that the last choices of drafts might be used for
        self._drafted_last = False  # whether a model drafted in the last round that was learned from
        self._alike = SETTLING  # rounds in a row before it in which a model drafted, or none did, as in that one
        self._change = ChangeCost()
        self._since_choice = Tally()  # rounds that were learned from
        self.configure(config)

    def configure(self, config: PolicyConfig) -> None:
        self.config = config
        self._policy = make_policy(config)
        self._drop_choice()

    def begin(self, timings: Sequence[Timing]) -> None:
        """Take over a new profile."""
        self.timings = tuple(timings)
        self.cost.begin(timings)
        self._budget = ProbeBudget()

    def begin_draft(self, drafter: str, cost: DraftCost) -> None:
        """Another model drafts under this name from now on: forget what the old one's drafts have taught. cost: the new
        model's, until rounds correct it."""
        self._drop_choice()
        self.estimator.forget_drafter(drafter)
        self.timings = tuple(replace(t, draft_s=0.0, forwards=0, read=0) for t in self.timings)
        self.cost.begin_draft(cost)
        self._budget = ProbeBudget()
        self._since_choice = Tally()
        self._last.clear()

    @property
    def most(self) -> int:
        """The most drafts that the policy may give a sequence."""
        if not self.config.drafts:
            return 0
        return self._max_k if self.config.max_k is None else min(self._max_k, self.config.max_k)

    def rest(self, fixed: Mapping[int, int | None], drafters: Sequence[str | None]) -> Decision | None:
        """As HeldChoice.rest, of the last choice."""
        return None if self._held is None else self._held.rest(fixed, drafters)

    def plain(self, fixed: Mapping[int, int | None], drafters: Sequence[str | None]) -> Decision | None:
        """As HeldChoice.plain, of the last choice: what `plan` would decide, without candidates."""
        return None if self._held is None else self._held.plain(fixed, drafters)

    def rested(self, round_s: float) -> None:
        """A round of a rest has ended."""
        self._rested += 1
        self._since_choice.rounds += 1
        self._since_choice.seconds += round_s

    def keeps_choice(self, handles: Collection[int], drafters: Iterable[str | None]) -> bool:
        """Whether the last choice serves the coming round of these sequences, whatever their drafters offer."""
        return self._held is not None and self._held.rounds_left > 0 and self._held.suits(handles, drafters)

    def plan(self, candidates: Sequence[Candidate], prefill: Prefill = NO_PREFILL) -> Decision:
        """k for each candidate of a round whose pass reads prompts as well. A choice ends where they double the
        batch."""
        if not candidates:
            return Decision([], [], [], [], 0.0, 0.0, 0.0)
        choosing = [c for c in candidates if c.fixed is None]
        self._chose = not self.keeps_choice([c.handle for c in candidates], [c.source for c in choosing])
        if self._held and not self._chose:
            self._held.rounds_left -= 1
            return self._held.decide(candidates, self.most)
        self._learn()
        if self._held is not None and (self._tries_trees or "probe" in self._held.decision.reasons):
            self.cost.refresh()  # these rounds were run to be learned from
        soon = prefill.passes if self.most and prefill.sequences >= len(candidates) else None
        observation = self._observation(candidates, soon)
        self._since_choice = Tally()
        choice, self._budget = self._policy(observation, self._budget)
        chosen = (shape for shape, fixed in zip(choice.shapes, observation.fixed, strict=True) if fixed < 0)
        self._tries_trees = any(chosen) and not self.cost.knows_trees
        if soon is not None:
            choice = replace(choice, holds=min(choice.holds, soon), rests=0)
        self._held = self._hold(choice, observation, candidates)
        if choice.ks.any():
            self._holds.append(1 + self._held.rounds_left)
        drafts_s = seconds(observation, choice.ks, choice.shapes, amortised=False)
        return replace(self._held.decision, seconds=self._prompts_s(len(candidates), prefill.tokens) + drafts_s)

    def _hold(self, choice: Choice, observation: Observation, candidates: Sequence[Candidate]) -> HeldChoice:
        """The choice for the rounds behind the next one. They read neither its prompts nor its gaps."""
        decision = Decision(
            choice.ks.tolist(),
            list(choice.shapes),
            list(choice.reasons),
            observation.survival[:, 0].tolist(),
            choice.confidence,
            seconds(observation, choice.ks, choice.shapes),
            expected_tokens(observation, choice.ks, choice.shapes),
        )
        places = {candidate.handle: place for place, candidate in enumerate(candidates)}
        drafters = frozenset(c.source for c in candidates if c.source is not None and c.gap) if self.most else None
        again = 0 if any(candidate.guessed for candidate in candidates) else choice.holds - 1
        rest = 0 if choice.ks.any() else choice.rests
        return HeldChoice(decision, places, drafters, choice.newcomer_k, again, choice.surprises, rest)

    def observe(self, timing: Timing | None, drafted: Sequence[Drafted], idle: Iterable[int] = ()) -> None:
        """A round has ended. timing: None: its time does not show what such a round takes. idle: sequences for which
        nothing was drafted in it."""
        if timing is not None:
            self._timings.append(timing)
        self._drafted += drafted
        self._idle.update(idle)
        if self._held is not None:
            self._held.observe(sum(outcome.accepted for outcome in drafted))
        if len(self._timings) >= WINDOW:  # where nothing is chosen, rounds must not pile up
            self._learn()

    def spent(self, policy_s: float) -> None:
        """So many seconds of a step with drafts went into the policy's code."""
        (self._choosing_s if self._chose else self._holding_s).append(policy_s)

    def forget(self, handle: int) -> None:
        """The sequence is gone. Idempotent."""
        self._gone.append(handle)
        if len(self._gone) >= WINDOW:
            self._learn()

    def _drop_choice(self) -> None:
        """Choose anew in the next round."""
        self._learn()
        self._held = None

    def _learn(self) -> None:
        """Learn from what happened since the last time."""
        if self._held is not None and self._rested:
            self._idle.update(dict.fromkeys(self._held.places, self._rested))
        self._alike += self._rested
        self._rested = 0
        if self._drafted or self._timings or self._idle:
            self.estimator.observe(self._drafted, self._idle)
        for timing in self._timings:
            self._learn_time(timing)
            self._since_choice.prefill += timing.prefill
            self._since_choice.seconds += timing.draft_s + timing.score_s + timing.host_s
        self._since_choice.rounds += len(self._timings)
        for outcome in self._drafted:
            self._last[outcome.handle] = (outcome.drafted, outcome.drafted if outcome.whole else outcome.accepted)
        for handle in self._gone:
            self.estimator.forget(handle)
            self._last.pop(handle, None)
        for learned in (self._timings, self._drafted, self._idle, self._gone):
            learned.clear()

    def _learn_time(self, timing: Timing) -> None:
        """A choice is made for rounds in a row, so the first ones after a change do not teach what a round costs. The
        guesses of drafters without a model come and go from round to round, so they change nothing."""
        drafted = timing.forwards > 0
        self._alike = self._alike + 1 if drafted == self._drafted_last else 0
        self._drafted_last = drafted
        if self._alike >= (1 if drafted else SETTLING):
            self.cost.observe(timing)
        if drafted or timing.prefill:
            self._change.begin()
        elif self._alike < SETTLING:
            usual_s = self.cost.round_cost(timing.batch, 0).of_round(0, 0, 0, 0)
            self._change.observe(timing.score_s + timing.host_s - usual_s)

    def _observation(self, candidates: Sequence[Candidate], soon: int | None = None) -> Observation:
        """What the policy sees. soon: rounds until the batch doubles; None: nothing tells that it will.

        A choice is used for rounds with and without prompts. Therefore drafts are priced beside as many tokens of
        prompts as a round had in the mean since the last choice. The prompts' own seconds are left out, because prompts
        are read whatever is drafted beside them: they would make the round look slow and drafts in it cheap.
        """
        since, counted = self._since_choice, max(1, self._since_choice.rounds)
        batch, read = len(candidates), round(since.prefill / counted)
        holding_s, choice_s = self._policy_times()
        policy_s = holding_s + choice_s / max(self._holds)
        cost = _with_policy(self.cost.round_cost(batch, read), policy_s)
        cost = replace(cost, verify_s=cost.verify_s - self._prompts_s(batch, read))
        most, bounds = zip(*(c.limit(self.most) for c in candidates), strict=True)
        left = np.array([max(c.left, 1) for c in candidates])
        return Observation(
            fixed=np.array([-1 if c.fixed is None else limit for c, limit in zip(candidates, most, strict=True)]),
            limits=np.array(most),
            bounds=bounds,
            survival=self.estimator.survival(candidates),
            sibling_chances=self.estimator.sibling_chances(candidates, self.config.trees),
            gaps=np.array([c.gap for c in candidates]),
            left=left,
            horizon=left if soon is None else np.minimum(left, soon),
            cost=cost,
            alone=_with_policy(self.cost.round_cost(1, 0), policy_s),
            change_s=self._change.seconds,
            trees=tuple(cut(c.tree, limit) for c, limit in zip(candidates, most, strict=True)),
            held=self._held.planned(candidates, self.most) if self._held is not None else None,
            last=tuple(self._last.get(c.handle) for c in candidates),
            rounds=since.rounds,
            round_s=since.seconds / counted,
            choice_s=choice_s,
        )

    def _prompts_s(self, batch: int, prefill: int) -> float:
        """Seconds by which `prefill` tokens of prompts lengthen a round."""
        with_prompts, without = (float(self.cost.round_cost(batch, n).verify_s[0]) for n in (prefill, 0))
        return max(0.0, with_prompts - without)

    def _policy_times(self) -> tuple[float, float]:
        """(seconds of the policy's code in a round with drafts, seconds that a choice adds); 0 while unknown."""
        holding_s = sum(self._holding_s) / max(1, len(self._holding_s))
        choosing_s = sum(self._choosing_s) / len(self._choosing_s) if self._choosing_s else holding_s
        return holding_s, max(0.0, choosing_s - holding_s)


def _with_policy(cost: RoundCost, policy_s: float) -> RoundCost:
    """Choosing k and learning from drafts takes time, too. A rest takes none.

    policy_s: in a round with drafts, as if each choice served as many rounds as it may. Where drafts go on it does. A
    probe's choice serves two.
    """
    return replace(cost, drafting_s=cost.drafting_s + policy_s)
