"""What is known of acceptance and of time, and the policy that makes k of it: all that an engine keeps for this."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from policies.config import PolicyConfig
from policies.cost import CostModel
from policies.estimator import Estimator
from policies.observation import Candidate, Drafted, Ints, Observation, State, Timing
from policies.planner import expected_tokens, seconds
from policies.reasons import Reason
from policies.spec_length import make_policy

HORIZON = 64  # rounds, the most over which reading what the draft model has missed is taken to pay off


@dataclass(frozen=True, slots=True)
class Decision:
    """A round's k, and what is expected of it; one entry per candidate, in their order."""

    ks: list[int]
    reasons: list[Reason]
    alphas: list[float]  # chance that the first draft is accepted
    confidence: float  # see Choice
    seconds: float  # of the whole step
    tokens: float  # that the candidates emit together


class SpecControl:
    """Choose k before a round, learn from it after. Policies may change at any time: what was learned stays.

    depth: the largest k there is. timings: rounds measured at the start, if any.
    """

    def __init__(self, config: PolicyConfig, depth: int, timings: Sequence[Timing] = ()) -> None:
        self.estimator = Estimator(max(1, depth))
        self.cost = CostModel(max(1, depth), timings)
        self.timings = tuple(timings)
        self._depth = depth
        self._state = State()
        self._last: dict[int, tuple[int, int]] = {}
        self._round_s = 0.0
        self.configure(config)

    def configure(self, config: PolicyConfig) -> None:
        self.config = config
        self._policy = make_policy(config)

    @property
    def most(self) -> int:
        """Drafts that the policy may give a sequence at most."""
        if self.config.name == "off":
            return 0
        return self._depth if self.config.max_k is None else min(self._depth, self.config.max_k)

    def plan(self, candidates: Sequence[Candidate], prefill: int = 0) -> Decision:
        """k for each candidate of a round whose pass reads about `prefill` tokens of prompts as well."""
        if not candidates:
            return Decision([], [], [], 0.0, 0.0, 0.0)
        observation, prompts_s = self._observation(candidates, prefill)
        choice, self._state = self._policy(observation, self._state)
        return Decision(
            choice.ks.tolist(),
            list(choice.reasons),
            observation.survival[:, 0].tolist(),
            choice.confidence,
            prompts_s + seconds(observation, choice.ks, amortised=False),
            expected_tokens(observation, choice.ks),
        )

    def observe(self, timing: Timing, drafted: Sequence[Drafted], idle: Iterable[int] = ()) -> None:
        """A round has ended. idle: candidates for which nothing was drafted in it."""
        self.estimator.observe(drafted, idle)
        for outcome in drafted:
            self._last[outcome.handle] = (outcome.drafted, outcome.accepted)
        self.cost.observe(timing)
        self._round_s = timing.draft_s + timing.score_s + timing.rest_s

    def forget(self, handle: int) -> None:
        """The sequence is gone. Idempotent."""
        self.estimator.forget(handle)
        self._last.pop(handle, None)

    def _observation(self, candidates: Sequence[Candidate], prefill: int) -> tuple[Observation, float]:
        """(what the policy sees, seconds that reading prompts adds to the round).

        Prompts have to be read whatever is drafted beside them. Counted among a round's seconds, they would make it
        look slow, and drafts in it cheap; what they change of the cost of drafts stays in.
        """
        cost = self.cost.round_cost(len(candidates), prefill)
        prompts_s = 0.0
        if prefill:
            prompts_s = max(0.0, float(cost.verify_s[0] - self.cost.round_cost(len(candidates), 0).verify_s[0]))
            cost = replace(cost, verify_s=cost.verify_s - prompts_s)
        limits, bounds, fixed = self._limits(candidates)
        gaps = np.array([c.gap for c in candidates])
        left = np.array([c.left for c in candidates])
        observation = Observation(
            handles=tuple(c.handle for c in candidates),
            fixed=fixed,
            limits=limits,
            bounds=bounds,
            survival=self.estimator.survival(candidates),
            gaps=gaps,
            horizon=np.clip(left // 2, 1, HORIZON),  # a round emits some two tokens
            cost=cost,
            alone=self.cost.round_cost(1, 0),
            last=self._last,
            round_s=self._round_s,
        )
        return observation, prompts_s

    def _limits(self, candidates: Sequence[Candidate]) -> tuple[Ints, tuple[Reason, ...], Ints]:
        """(most drafts of each, what binds there, k that a request fixed or −1). A fixed k goes before the policy's
        own maximum, and is asked for whatever the drafter has: it may offer less."""
        depth = self.most
        limits: list[int] = []
        bounds: list[Reason] = []
        fixed: list[int] = []
        for c in candidates:
            if c.fixed is not None:
                most = min(c.fixed, c.left, c.room)
                bounds.append("user" if most == c.fixed else "cap" if most == c.left else "cache")
                fixed.append(most)
            else:
                cap = min(depth, c.left, c.offered) if c.source is not None else 0
                user = cap if c.max_k is None else c.max_k
                most = min(cap, user, c.room)
                bounds.append("cache" if most < min(cap, user) else "cap" if most == cap else "user")
                fixed.append(-1)
            limits.append(most)
        return np.array(limits), tuple(bounds), np.array(fixed)
