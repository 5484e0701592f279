"""The planner against brute force: every k of every sequence, each round's seconds by the definition of RoundCost."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.random import Generator

from policies import planner
from policies.observation import Floats, Ints, Observation, RoundCost
from policies.planner import TIE, Allocation, evaluate, expected_tokens, fixed_drafts_only, lone_ks, plan, seconds
from tests.policies.observing import DEPTH, machine, observe

SMALL = 3  # K of random instances
Planner = Callable[[Observation], Allocation]


def passes(random: Generator, size: int) -> Floats:
    """Seconds by tokens, in a shape that machines have: lines, steps, cliffs, rising, or any."""
    n = np.arange(size)
    width = random.integers(1, 6)
    line = random.uniform(0.5, 3.0) + random.uniform(0.0, 0.4) * n
    steps = random.uniform(0.5, 3.0) + random.uniform(0.0, 0.8) * (n // width)
    cliff = line + random.uniform(0.0, 3.0) * (n > random.integers(0, size))
    rising = np.sort(random.uniform(0.5, 6.0, size))
    anything = random.uniform(0.5, 6.0, size)
    return np.asarray((line, steps, cliff, rising, anything)[random.integers(5)], np.float64)


def costs(random: Generator, size: int, rising: bool) -> RoundCost:
    some = random.random(5) < 0.7
    base, drafting, model, step, token = random.uniform(0.0, (0.5, 0.4, 0.4, 0.5, 0.1)) * some
    padding = np.concatenate(([0.0], np.cumsum(random.uniform(0.0, 0.3, SMALL)))) * (random.random() < 0.5)
    verify = passes(random, size)
    verify = np.maximum.accumulate(verify) if rising else verify
    gap_tokens = random.uniform(0.0, 200.0) * (random.random() < 0.3)
    return RoundCost(base, drafting, model, step, token, verify, padding, gap_tokens=gap_tokens)


def instance(random: Generator, gaps: Callable[[int], Ints], rising: bool = False) -> Observation:
    """Up to 4 sequences: a quarter with a k fixed, limits from 0, chances that differ by sequence and position.

    rising: more tokens never make a pass shorter.
    """
    batch = int(random.integers(1, 5))
    limits = random.integers(0, SMALL + 1, batch) if random.random() < 0.6 else np.full(batch, SMALL)
    fixed = np.where(random.random(batch) < 0.25, limits, -1)
    chances = np.sort(random.uniform(0.0, 1.0, (batch, SMALL)), axis=1)[:, ::-1]
    if random.random() < 0.3:
        chances = np.round(chances * 4) / 4  # with ties, certainties and impossibilities
    cost = costs(random, batch * SMALL + 1, rising)
    left = random.integers(1, 40, batch)
    changes = {"limits": limits, "fixed": fixed, "gaps": gaps(batch), "left": left, "horizon": left}
    return observe([0.0] * batch, cost, survival=np.cumprod(chances, axis=1), **changes)


@pytest.mark.parametrize("seed", range(20))
def test_one_round_costs_what_it_costs_among_many(seed: int) -> None:
    random = np.random.default_rng(seed)
    cost = replace(costs(random, 9, rising=False), tree=1.5)
    drafts, longest, forwards = random.integers(0, [[9], [SMALL + 1], [4]], (3, 50))
    read, branched = random.uniform(0.0, 40.0, 50), random.random(50) < 0.5
    together = cost.seconds(drafts, longest, forwards, read, branched=branched)
    rounds = zip(*(column.tolist() for column in (drafts, longest, forwards, read, branched)), strict=True)
    assert together.tolist() == [cost.of_round(*given, branched=tree) for *given, tree in rounds]


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
    behind = np.maximum(observation.gaps - 2, 0)  # a round leaves up to two tokens unread
    behind = behind + np.where(behind > 0, cost.gap_tokens / max(1, (behind > 0).sum()), 0.0)
    read = np.where(modelled, ks + behind / observation.horizon, 0.0).sum(1)
    round_s = cost.base_s + cost.verify_s[drafts] + cost.padding_s[depth] + (drafts > 0) * cost.drafting_s
    round_s += (forwards > 0) * (cost.model_s + forwards * cost.step_s + read * cost.token_s)
    return tokens / round_s


def regret(observation: Observation, planned_by: Planner) -> float:
    """Share of the best goodput that the planner's ks, which must be allowed, give away."""
    ks = planned_by(observation).ks
    allowed = all_ks(observation)
    (place,) = np.flatnonzero((allowed == ks).all(1))
    every = goodputs(observation, allowed)
    return float(1 - every[place] / every.max())


def zeros(batch: int) -> Ints:
    return np.zeros(batch, np.int64)


def check_exact(planned_by: Planner, seed: int, instances: int) -> None:
    """All drafts are a model's that has read each sequence but for what a round leaves, or no drafts are a model's."""
    random = np.random.default_rng(seed)

    def small(batch: int) -> Ints:
        return random.integers(1, 3, batch)

    for number in range(instances):
        observation = instance(random, small if number % 2 else zeros)
        assert regret(observation, planned_by) < 1e-9


def test_equals_brute_force_where_all_drafts_cost_the_same() -> None:
    check_exact(plan, seed=0, instances=400)


def greedy(observation: Observation) -> Allocation:
    """Adds the draft that gains most, as long as one gains."""
    best = fixed_drafts_only(observation)
    while True:
        grown = [best.ks + (np.arange(len(best.ks)) == place) for place in observation.free]
        within = [ks for ks in grown if (ks <= np.maximum(observation.limits, observation.fixed)).all()]
        found = max(
            (evaluate(observation, ks, best.shapes) for ks in within), key=lambda plan: plan.goodput, default=best
        )
        if found.goodput <= best.goodput:
            return best
        best = found


def test_brute_force_tells_a_greedy_planner() -> None:
    """Negative control: fixed costs and steps hide what the second draft would bring behind the first."""
    with pytest.raises(AssertionError):
        check_exact(greedy, seed=0, instances=200)


def mixed_regrets(planned_by: Planner, seed: int) -> Floats:
    """Regrets of 500 instances with gaps of 0, 1 and up to 200 tokens, to be paid off within 1 to 39 rounds."""
    random = np.random.default_rng(seed)

    def gaps(batch: int) -> Ints:
        kinds = ([0, 1], [1, 2], [0, 2], [2], [0, 1, 2])[random.integers(5)]
        kind = random.choice(kinds, batch)
        return np.where(kind == 2, random.integers(2, random.choice([4, 20, 200]), batch), kind)

    return np.array([regret(instance(random, gaps, rising=True), planned_by) for _ in range(500)])


def test_regret_where_drafts_cost_differently() -> None:
    regrets = mixed_regrets(plan, seed=1)
    assert regrets.max() <= 0.07
    assert regrets.mean() <= 0.0002


def test_what_a_gap_costs_matters_to_the_plan() -> None:
    """Negative control of the bounds."""
    regrets = mixed_regrets(lambda observation: plan(replace(observation, gaps=observation.gaps.clip(max=1))), seed=1)
    assert regrets.max() > 0.3
    assert regrets.mean() > 0.001


@pytest.mark.parametrize(("padding_s", "share"), [(0.0, 0.999), (2e-5, 0.98)])
def test_few_depths_are_enough_where_kinds_are_mixed(
    padding_s: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guesses are planned in every round, so beside a model's drafts most pairs of depths are left out."""

    def all_pairs(others: int, model: int) -> Ints:
        return np.array(list(product(range(others + 1), range(model + 1)))[1:])

    random = np.random.default_rng(2)
    assert len(planner._depths(DEPTH, DEPTH)) <= 2 * (DEPTH + 1) < len(all_pairs(DEPTH, DEPTH))
    for _ in range(20):
        cost = machine(64, per_token_s=random.uniform(1e-6, 2e-5), padding_s=padding_s * np.arange(DEPTH + 1))
        observation = observe(random.beta(3, 1.5, 64).tolist(), cost, gaps=random.choice([0, 1, 30], 64))
        few = plan(observation).goodput
        with monkeypatch.context() as patch:
            patch.setattr(planner, "_depths", all_pairs)
            assert few >= share * plan(observation).goodput


def test_the_objective_is_its_definition() -> None:
    random = np.random.default_rng(3)
    for _ in range(200):
        observation = instance(random, lambda batch: random.integers(0, 5, batch))
        for ks, goodput in zip(all_ks(observation), goodputs(observation, all_ks(observation)), strict=True):
            expected = evaluate(observation, ks, observation.trees)
            assert expected.goodput == pytest.approx(goodput)
            assert expected.tokens == expected_tokens(observation, ks, observation.trees)
            assert expected.tokens / seconds(observation, ks, observation.trees) == pytest.approx(goodput)


def test_the_seconds_of_a_round_are_those_of_all_that_it_reads() -> None:
    observation = observe([0.8, 0.8, 0.8], gaps=np.array([40, 0, 7]))
    for ks, forwards, read in (([2, 1, 4], 4, 41 + 10), ([0, 3, 1], 1, 7), ([0, 5, 0], 0, 0), ([0, 0, 0], 0, 0)):
        round_s = observation.cost.seconds(sum(ks), max(ks), forwards, read)
        assert seconds(observation, np.array(ks), observation.trees, amortised=False) == pytest.approx(round_s)
        saved = (39 - 38 / 32) * (ks[0] > 0) + (6 - 5 / 32) * (ks[2] > 0)
        assert seconds(observation, np.array(ks), observation.trees) == pytest.approx(
            round_s - saved * observation.cost.token_s
        )


def test_fewer_drafts_among_equals() -> None:
    for alphas in ([0.0, 0.0], [1.0, 0.0]):
        free = machine(2, per_token_s=0.0)  # a draft costs nothing
        ks = plan(observe(alphas, free, gaps=np.zeros(2, np.int64))).ks
        assert ks.tolist() == [8 * alpha for alpha in alphas]
    even = RoundCost(0.0, 0.0, 0.0, 1.0, 0.0, np.ones(99), np.zeros(9))  # a certain draft pays for its step, no more
    assert plan(observe([1.0], even)).ks.tolist() == [0]
    assert plan(observe([1.0], replace(even, step_s=1 - 1e-6))).ks.tolist() == [8]


def test_a_plan_is_worth_more_than_none() -> None:
    observation = observe([0.9, 0.6, 0.05], machine(3, per_token_s=1e-4))
    best = plan(observation)
    assert best.ks.tolist() == sorted(best.ks, reverse=True)
    assert best.ks[0] > best.ks[1] > best.ks[2] == 0
    assert best.goodput > 1.2 * fixed_drafts_only(observation).goodput


def test_drafts_end_as_the_batch_grows() -> None:
    means = [plan(observe([0.6] * batch, machine(batch, per_token_s=1e-4))).ks.mean() for batch in (1, 4, 16, 64)]
    assert means == sorted(means, reverse=True)
    assert means[0] >= 2
    assert means[-1] == 0


def test_a_gap_is_read_where_enough_rounds_follow() -> None:
    gaps = np.array([2_000])
    assert plan(observe([0.8], gaps=gaps, horizon=np.array([1]))).ks.tolist() == [0]
    assert plan(observe([0.8], gaps=gaps, horizon=np.array([100]))).ks[0] >= 4


def test_only_fixed_drafts_where_nothing_is_to_decide() -> None:
    changes: dict[str, Any] = {"fixed": np.array([3, -1, 0]), "limits": np.array([3, 0, 0])}
    best = plan(observe([0.9] * 3, **changes))
    assert best.ks.tolist() == [3, 0, 0]
    assert best.tokens == pytest.approx(3 + 0.9 + 0.81 + 0.729)


def test_without_any_depth() -> None:
    observation = observe([0.9] * 2, limits=np.zeros(2, np.int64), survival=np.zeros((2, 0)))
    assert plan(observation).ks.tolist() == [0, 0]
    assert lone_ks(observation).tolist() == [0, 0]


def test_lone_ks_are_the_plans_of_rounds_of_one() -> None:
    random = np.random.default_rng(4)
    for _ in range(200):
        observation = replace(
            instance(random, lambda batch: random.integers(0, 9, batch)), alone=costs(random, 4, False)
        )
        for place, k in enumerate(lone_ks(observation).tolist()):
            arrays = ("fixed", "limits", "survival", "gaps", "horizon")
            one = {name: getattr(observation, name)[place : place + 1] for name in arrays}
            alone = observe([0.0], observation.alone, **(one | {"fixed": np.array([-1])}))
            assert evaluate(alone, np.array([k]), (None,)).goodput >= plan(alone).goodput * (1 - TIE)
