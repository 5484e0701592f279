"""All that an engine keeps to choose k: what it learned of acceptance and of time, the policy, and the last choice."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from policies.acceptance import Estimator
from policies.config import PolicyConfig
from policies.corrections import FEW, WINDOW
from policies.cost import CostModel, bucket
from policies.held_choice import Decision, HeldChoice, Limits, Rest
from policies.observation import Candidate, Drafted, Observation, ProbeBudget, RoundCost, Timing
from policies.planner import expected_tokens, seconds
from policies.spec_length import make_policy


class SpecControl:
    """Chooses k before a round and learns from it after. The policy may change at any time; what was learned stays.

    It learns from several rounds at once, when the next choice is made. depth: the largest k there is. timings: rounds
    measured at the start, if any.
    """

    def __init__(self, config: PolicyConfig, depth: int, timings: Sequence[Timing] = ()) -> None:
        self.estimator = Estimator(max(1, depth))
        self.cost = CostModel(max(1, depth), timings)
        self.timings = tuple(timings)
        self._depth = depth
        self._budget = ProbeBudget()
        self._held: HeldChoice | None = None
        self.rest: Rest | None = None
        self._last: dict[int, tuple[int, int]] = {}  # as Observation.last
        # Not learned from so far:
        self._drafted: list[Drafted] = []
        self._idle: list[int] = []
        self._gone: list[int] = []
        self._timings: list[Timing] = []
        self._policy_s = deque[float](maxlen=WINDOW)  # seconds of the policy's code in the last rounds with drafts
        self._observed = 0  # rounds
        self._row = 0  # rounds without drafts in a row, until now
        self._drafted_last = False  # whether the last round that was learned from had drafts
        self._new_row = False  # whether such a row has become long enough to be measured since the last choice
        # Bucket of the batch → `_observed` after FEW rounds in a row without drafts.
        self._undrafted: dict[int, int] = {}
        # Learned from since the last choice: rounds, their seconds, tokens of prompts in them.
        self._rounds, self._spent_s, self._prefill = 0, 0.0, 0
        self.configure(config)

    def configure(self, config: PolicyConfig) -> None:
        self.config = config
        self._policy = make_policy(config)
        if self._held is not None:
            self._held.rounds_left = 0
        self._end_rest()

    def begin(self, timings: Sequence[Timing]) -> None:
        """Take over a new profile."""
        self.timings = tuple(timings)
        self.cost.begin(timings)
        self._undrafted.clear()

    @property
    def most(self) -> int:
        """The most drafts that the policy may give a sequence."""
        if not self.config.drafts:
            return 0
        return self._depth if self.config.max_k is None else min(self._depth, self.config.max_k)

    def plan(self, candidates: Sequence[Candidate], prefill: int = 0) -> Decision:
        """k for each candidate of a round whose pass reads about `prefill` tokens of prompts as well."""
        if not candidates:
            return Decision([], [], [], 0.0, 0.0, 0.0)
        if self._held is not None and self._held.serves(candidates):
            return self._held.reuse(candidates, self._limits(candidates))
        self._end_rest()
        self._learn()
        if self._new_row:
            self.cost.refresh()
            self._new_row = False
        observation, prompts_s = self._observation(candidates, prefill)
        self._rounds, self._spent_s, self._prefill = 0, 0.0, 0
        choice, self._budget = self._policy(observation, self._budget)
        decision = Decision(
            choice.ks.tolist(),
            list(choice.reasons),
            observation.survival[:, 0].tolist(),
            choice.confidence,
            prompts_s + seconds(observation, choice.ks, amortised=False),
            expected_tokens(observation, choice.ks),
        )
        places = {candidate.handle: place for place, candidate in enumerate(candidates)}
        more = 0 if any(candidate.guessed for candidate in candidates) else choice.holds - 1
        self._held = HeldChoice(decision, places, more, choice.newcomer_k)
        if choice.rests and not choice.ks.any():
            self.rest = self._new_rest(decision, candidates, choice.rests)
        return decision

    def _new_rest(self, decision: Decision, candidates: Sequence[Candidate], rounds: int) -> Rest | None:
        """None if a drafter without a model, which may have a guess in any round, drafts for one of the candidates."""
        if self.most and any(c.fixed is None and c.source is not None and not c.gap for c in candidates):
            return None
        drafters = frozenset(c.source for c in candidates if c.source is not None)
        if self.most and not drafters:
            return None
        return Rest(decision, [c.handle for c in candidates], drafters if self.most else frozenset(), rounds)

    def observe(self, timing: Timing, drafted: Sequence[Drafted], idle: Iterable[int] = ()) -> None:
        """A round has ended. idle: sequences for which nothing was drafted in it."""
        self._timings.append(timing)
        self._observed += 1
        if timing.batch:  # a round that only reads prompts shows nothing
            self._row = 0 if timing.drafts else self._row + 1  # prompts do not end it: some loads never pause
            if self._row > FEW:
                self._new_row |= self._row == FEW + 1
                self._undrafted[bucket(timing.batch)] = self._observed
        self._drafted += drafted
        self._idle += idle
        if self._held is not None:
            self._held.observe(sum(outcome.accepted for outcome in drafted))
        if len(self._timings) >= WINDOW // 2:  # where nothing is chosen, rounds must not pile up
            self._learn()

    def spent(self, policy_s: float) -> None:
        """So many seconds of a step with drafts went into the policy's code."""
        self._policy_s.append(policy_s)

    def forget(self, handle: int) -> None:
        """The sequence is gone. Idempotent."""
        self._gone.append(handle)
        if len(self._gone) >= WINDOW:
            self._learn()

    def _end_rest(self) -> None:
        """What a rest has run counts as rounds without drafts."""
        rest, self.rest = self.rest, None
        if rest is not None and rest.rounds:
            self.estimator.observe((), dict.fromkeys(rest.handles, rest.rounds), rest.rounds)
            self._rounds += rest.rounds
            self._spent_s += rest.spent_s

    def _learn(self) -> None:
        """Learn from what happened since the last time."""
        timings, drafted, idle, gone = self._timings, self._drafted, self._idle, self._gone
        self._timings, self._drafted, self._idle, self._gone = [], [], [], []
        if timings:
            self.estimator.observe(drafted, idle, len(timings))
        for timing in timings:
            # A choice is made for rounds in a row. The first round without drafts after drafts finds less in the
            # processor's caches than the next ones, and so does a probe. The profile leaves them out as well.
            if (timing.drafts > 0) == self._drafted_last:
                self.cost.observe(timing)
            self._drafted_last = timing.drafts > 0
        for outcome in drafted:
            self._last[outcome.handle] = (outcome.drafted, outcome.accepted)
        for handle in gone:
            self.estimator.forget(handle)
            self._last.pop(handle, None)
        self._rounds += len(timings)
        self._prefill += sum(t.prefill for t in timings)
        self._spent_s += sum(t.draft_s + t.score_s + t.rest_s for t in timings)

    def _observation(self, candidates: Sequence[Candidate], prefill: int) -> tuple[Observation, float]:
        """(what the policy sees, seconds that reading prompts adds to the round).

        A choice is used for rounds with and without prompts. Therefore drafts are priced beside as many tokens of
        prompts as a round had in the mean since the last choice.
        """
        cost, _ = self._beside(len(candidates), round(self._prefill / max(1, self._rounds)))
        _, prompts_s = self._beside(len(candidates), prefill)
        limits = self._limits(candidates)
        gaps = np.array([c.gap for c in candidates])
        left = np.array([c.left for c in candidates])
        observation = Observation(
            handles=tuple(c.handle for c in candidates),
            fixed=np.array(limits.fixed),
            limits=np.array(limits.most),
            bounds=tuple(limits.bounds),
            survival=self.estimator.survival(candidates),
            gaps=gaps,
            horizon=np.maximum(left // 2, 1),  # a round emits some two tokens
            cost=cost,
            alone=self._with_policy(self.cost.round_cost(1, 0)),
            held=self._held.planned if self._held is not None else {},
            last=self._last,
            rounds=self._rounds,
            round_s=self._spent_s / max(1, self._rounds),
            undrafted=self._rounds_since_undrafted(len(candidates)),
        )
        return observation, prompts_s

    def _beside(self, batch: int, prefill: int) -> tuple[RoundCost, float]:
        """(cost of rounds with `prefill` tokens of prompts, less the prompts' own seconds; these seconds).

        Prompts are read whatever is drafted beside them. Counted in, they would make the round look slow and drafts
        in it cheap.
        """
        cost = self._with_policy(self.cost.round_cost(batch, prefill))
        if not prefill:
            return cost, 0.0
        prompts_s = max(0.0, float(cost.verify_s[0] - self.cost.round_cost(batch, 0).verify_s[0]))
        return replace(cost, verify_s=cost.verify_s - prompts_s), prompts_s

    def _rounds_since_undrafted(self, batch: int) -> int | None:
        """As Observation.undrafted. The first rounds of a service are taken to cost what the profile says."""
        last = self._undrafted.get(bucket(batch))
        return (None if self._observed >= WINDOW else 0) if last is None else self._observed - last

    def _with_policy(self, cost: RoundCost) -> RoundCost:
        """Choosing k and learning from drafts takes time, too. A rest takes none."""
        policy_s = sum(self._policy_s) / max(1, len(self._policy_s))
        return replace(cost, drafting_s=cost.drafting_s + policy_s)

    def _limits(self, candidates: Sequence[Candidate]) -> Limits:
        """A fixed k may exceed the policy's maximum, and is asked for whatever the drafter offers."""
        depth = self.most
        limits = Limits([], [], [])
        for c in candidates:
            if c.fixed is not None:
                most = min(c.fixed, c.left, c.room)
                limits.bounds.append("user" if most == c.fixed else "cap" if most == c.left else "cache")
                limits.fixed.append(most)
            else:
                cap = min(depth, c.left, c.offered) if c.source is not None else 0
                user = cap if c.max_k is None else c.max_k
                most = min(cap, user, c.room)
                limits.bounds.append("cache" if most < min(cap, user) else "cap" if most == cap else "user")
                limits.fixed.append(-1)
            limits.most.append(most)
        return limits
