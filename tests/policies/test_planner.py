"""The planner against brute force: every k of every sequence, each round's seconds by the definition of RoundCost."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.random import Generator

from policies.observation import Floats, Ints, Observation, RoundCost
from policies.planner import TIE, Plan, evaluate, expected_tokens, lone_ks, plan, seconds
from tests.policies.observing import machine, observe

SMALL = 3  # K of random instances
Planner = Callable[[Observation], Plan]


def passes(random: Generator, size: int) -> Floats:
    """Seconds by tokens, in one of the shapes that machines have: lines, steps, cliffs, and any at all."""
    n = np.arange(size)
    width = random.integers(1, 6)
    line = random.uniform(0.5, 3.0) + random.uniform(0.0, 0.4) * n
    steps = random.uniform(0.5, 3.0) + random.uniform(0.0, 0.8) * (n // width)
    cliff = line + random.uniform(0.0, 3.0) * (n > random.integers(0, size))
    rising = np.sort(random.uniform(0.5, 6.0, size))
    anything = random.uniform(0.5, 6.0, size)
    return (line, steps, cliff, rising, anything)[random.integers(5)]


def costs(random: Generator, size: int) -> RoundCost:
    some = random.random(5) < 0.7
    base, drafting, model, step, token = random.uniform(0.0, (0.5, 0.4, 0.4, 0.5, 0.1)) * some
    padding = np.concatenate(([0.0], np.cumsum(random.uniform(0.0, 0.3, SMALL)))) * (random.random() < 0.5)
    return RoundCost(base, drafting, model, step, token, passes(random, size), padding)


def instance(random: Generator, gaps: Callable[[int], Ints]) -> Observation:
    """Up to 4 sequences: a quarter with a k fixed, limits from 0, chances that differ by sequence and position."""
    batch = int(random.integers(1, 5))
    limits = random.integers(0, SMALL + 1, batch) if random.random() < 0.6 else np.full(batch, SMALL)
    fixed = np.where(random.random(batch) < 0.25, limits, -1)
    chances = np.sort(random.uniform(0.0, 1.0, (batch, SMALL)), axis=1)[:, ::-1]
    if random.random() < 0.3:
        chances = np.round(chances * 4) / 4  # with ties, certainties and impossibilities
    cost = costs(random, batch * SMALL + 1)
    changes = {"limits": limits, "fixed": fixed, "gaps": gaps(batch), "horizon": random.integers(1, 40, batch)}
    return observe([0.0] * batch, cost, survival=np.cumprod(chances, axis=1), **changes)


def all_ks(observation: Observation) -> Ints:
    """[plans, B] every choice that is allowed."""
    ranges = [
        (int(fixed),) if fixed >= 0 else range(int(limit) + 1)
        for fixed, limit in zip(observation.fixed, observation.limits, strict=True)
    ]
    return np.array(list(product(*ranges)))


def goodputs(observation: Observation, ks: Ints) -> Floats:
    """[plans] tokens over amortised seconds, for ks [plans, B]."""
    cost, drafts, depth = observation.cost, ks.sum(1), ks.max(1)
    reached = np.concatenate((np.zeros((ks.shape[1], 1)), np.cumsum(observation.survival, axis=1)), axis=1)
    tokens = ks.shape[1] + reached[np.arange(ks.shape[1]), ks].sum(1)
    modelled = (ks > 0) & (observation.gaps > 0)
    forwards = np.where(modelled, ks, 0).max(1)
    read = np.where(modelled, ks + (observation.gaps - 1) / observation.horizon, 0.0).sum(1)
    round_s = cost.base_s + cost.verify_s[drafts] + cost.padding_s[depth] + (drafts > 0) * cost.drafting_s
    round_s += (forwards > 0) * (cost.model_s + forwards * cost.step_s + read * cost.token_s)
    return tokens / round_s


def regret(observation: Observation, planner: Planner = plan) -> float:
    """Share of the best goodput that the planner's ks, which must be allowed, give away."""
    ks = planner(observation).ks
    allowed = all_ks(observation)
    (place,) = np.flatnonzero((allowed == ks).all(1))
    every = goodputs(observation, allowed)
    return float(1 - every[place] / every.max())


def check_exact(planner: Planner, seed: int, instances: int) -> None:
    random = np.random.default_rng(seed)
    for number in range(instances):
        gap = number % 2  # all of them a model's, or none
        observation = instance(random, lambda batch, gap=gap: np.full(batch, gap))
        assert regret(observation, planner) < 1e-9


def test_equals_brute_force_where_all_drafts_cost_the_same() -> None:
    check_exact(plan, seed=0, instances=10_000)


def greedy(observation: Observation, depth: int | None = None) -> Plan:
    """The next draft that gains most, as long as one gains; under a greatest k, if it is given."""
    best = evaluate(observation, np.maximum(observation.fixed, 0))
    while True:
        grown = [best.ks + (np.arange(len(best.ks)) == place) for place in observation.free]
        within = [ks for ks in grown if (ks <= np.maximum(observation.limits, observation.fixed)).all()]
        found = max((evaluate(observation, ks) for ks in within), key=lambda plan: plan.goodput, default=best)
        if found.goodput <= best.goodput:
            return best
        best = found


def test_brute_force_tells_a_greedy_planner() -> None:
    """Negative control: fixed costs and steps hide what the second draft would bring behind the first."""
    with pytest.raises(AssertionError):
        check_exact(greedy, seed=0, instances=200)


@pytest.mark.parametrize("of", ["free or read", "read or behind", "any"])
def test_regret_where_drafts_cost_differently(of: str) -> None:
    """Gaps of up to 200 tokens, to be paid off within as few as one round."""
    random = np.random.default_rng(1)

    def gaps(batch: int) -> Ints:
        behind = random.integers(2, random.choice([4, 20, 200]), batch)
        kinds = {"free or read": (0, 1), "read or behind": (1, behind), "any": (0, 1, behind)}[of]
        return np.choose(random.integers(0, len(kinds), batch), kinds)

    regrets = np.array([regret(instance(random, gaps)) for _ in range(2_000)])
    assert regrets.max() <= 0.05
    assert regrets.mean() <= 0.0005
