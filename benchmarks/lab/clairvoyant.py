"""The best plan of one round at a time in a simulation, which knows the truth: the yardstick of policies."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.lab.simulator import World
from policies.acceptance import Estimator
from policies.config import PolicyConfig
from policies.control import SpecControl
from policies.cost import CostModel
from policies.held_choice import Decision
from policies.observation import NO_PREFILL, Candidate, Drafted, Floats, Prefill, RoundCost, Timing
from policies.planner import plan, seconds


class Clairvoyant(SpecControl):
    """Plans with the machine's true table and each request's present chance, or with `bits` each request's bits.

    It looks one round ahead, as the planner does, and does not foresee that a chance will change. Prompts beside the
    round do not mislead it: reading a gap pays off over many rounds only for sequences that would also draft without
    these prompts.
    """

    def __init__(self, world: World, depth: int, bits: bool = False) -> None:
        super().__init__(PolicyConfig(), depth)
        self.estimator = _TrueChances(world, depth, bits)
        self.cost = _TrueCost(world, depth)

    def plan(self, candidates: Sequence[Candidate], prefill: Prefill = NO_PREFILL) -> Decision:
        observation = self._observation(candidates)
        if prefill.tokens:
            usual = plan(observation)
            observation = replace(observation, horizon=np.where(usual.ks > 0, observation.horizon, 1))
        best = plan(observation)
        alphas = observation.survival[:, 0].tolist()
        prompts_s = self._prompts_s(len(candidates), prefill.tokens)
        best_s = prompts_s + seconds(observation, best.ks, best.shapes, amortised=False)
        return Decision(best.ks.tolist(), list(best.shapes), ["policy"] * len(alphas), alphas, 0.0, best_s, best.tokens)

    def observe(self, timing: Timing | None, drafted: Sequence[Drafted], idle: Iterable[int] = ()) -> None:
        """Nothing is left to learn."""


class _TrueChances(Estimator):
    def __init__(self, world: World, depth: int, bits: bool) -> None:
        super().__init__(depth)
        self._world = world
        self._bits = bits
        self._places = np.arange(1, depth + 1)

    def survival(self, candidates: Sequence[Candidate]) -> Floats:
        if self._bits:
            runs = np.array([self._world.run(c.handle) for c in candidates])
            return (runs[:, None] >= self._places).astype(np.float64)
        alphas = np.array([self._world.alpha(c.handle) for c in candidates])
        return alphas[:, None] ** self._places


class _TrueCost(CostModel):
    def __init__(self, world: World, depth: int) -> None:
        super().__init__(depth)
        self._world = world

    def round_cost(self, batch: int, prefill: int) -> RoundCost:
        return self._world.machine(batch, prefill)
