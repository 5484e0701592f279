"""The planner's trees against brute force: every tree of every sequence, each round's seconds by their definition."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from numpy.random import Generator

from policies.observation import Floats, Observation
from policies.planner import Allocation, evaluate, plan
from policies.trees import RANKS, ROOT, Parents
from tests.policies.observing import observe
from tests.policies.test_planner import costs


def all_trees(nodes: int) -> list[Parents]:
    """Every tree of at most so many nodes, with first children behind their parents, and at most RANKS siblings."""
    found: list[Parents] = [()]
    for tree in found:
        path, node = [ROOT], len(tree) - 1
        while node != ROOT:
            path.append(node)
            node = tree[node]
        if len(tree) < nodes:
            found += [(*tree, parent) for parent in path if tree.count(parent) < RANKS]
    return found


def chances_of(observation: Observation, n: int) -> list[list[float]]:
    """[depth][rank] of a child of an accepted draft of the n-th sequence."""
    chances, before = [], 1.0
    for survival in observation.survival[n].tolist():
        row = [survival / before if before else 0.0]
        row += [(1 - row[0]) * share for share in observation.siblings[n].tolist()]
        chances.append(np.minimum.accumulate(row).tolist())
        before = survival
    return chances


def value(tree: Parents, chances: list[list[float]]) -> tuple[float, int, int]:
    """(accepted drafts to expect, the most drafts on a path, drafts that have children)."""
    values, depths = list[float](), list[int]()
    for node, parent in enumerate(tree):
        depths.append(0 if parent == ROOT else depths[parent] + 1)
        rank = tree[:node].count(parent)
        values.append((1.0 if parent == ROOT else values[parent]) * chances[depths[-1]][rank])
    return sum(values), 1 + max(depths, default=-1), len(set(tree) - {ROOT})


def chain(k: int) -> Parents:
    return tuple(range(ROOT, k - 1))


def best_goodput(observation: Observation) -> float:
    """Over all trees of all sequences; chains for those that may not branch."""
    offered = []
    for n, (fixed, limit) in enumerate(zip(observation.fixed.tolist(), observation.limits.tolist(), strict=True)):
        chances, may = chances_of(observation, n), observation.siblings[n].any() and fixed < 0
        shapes = all_trees(limit) if may else [chain(k) for k in range(limit + 1)] if fixed < 0 else [chain(fixed)]
        offered.append([(shape, *value(shape, chances)) for shape in shapes])
    best, cost = 0.0, observation.cost
    modelled, behind = observation.gaps > 0, np.maximum(observation.gaps - 2, 0) / observation.horizon
    for choice in product(*offered):
        round_s = cost.base_s + cost.verify_s[sum(len(shape) for shape, *_ in choice)]
        round_s += cost.padding_s[max(depth for _, _, depth, _ in choice)]
        used = [n for n, (shape, *_) in enumerate(choice) if shape]
        own = [n for n in used if modelled[n]]
        if used:
            round_s += cost.drafting_s
        if own:
            forwards = max(choice[n][2] for n in own)
            round_s += cost.model_s + forwards * cost.step_s
            round_s += cost.token_s * sum(1 + behind[n] + choice[n][3] for n in own)
        if any(shape != chain(len(shape)) for shape, *_ in choice):
            round_s *= cost.tree
        best = max(best, (len(choice) + sum(tokens for _, tokens, _, _ in choice)) / round_s)
    return best


def instance(random: Generator, reads: bool, most: int = 5) -> Observation:
    """One to three sequences: some with a k fixed, some that may not branch, chances by depth and rank."""
    batch = int(random.integers(1, 4))
    deepest = [most, min(4, most), 3][batch - 1]
    limits = random.integers(0, deepest + 1, batch) if random.random() < 0.5 else np.full(batch, deepest)
    survival = np.cumprod(np.sort(random.uniform(0.0, 1.0, (batch, deepest)), axis=1)[:, ::-1], axis=1)
    siblings = random.uniform(0.0, 0.6, (batch, RANKS - 1)) * (random.random((batch, 1)) < 0.8)
    cost = replace(costs(random, batch * deepest + 1, rising=False), tree=float(random.choice([1.0, 1.02, 1.2])))
    cost = replace(cost, padding_s=np.append(cost.padding_s, np.full(deepest, cost.padding_s[-1])))
    gaps = np.ones(batch, np.int64)
    changes: dict[str, Any] = {"gaps": gaps, "horizon": np.full(batch, 32)}
    if not reads:
        cost = replace(cost, token_s=0.0)
    fixed = np.where(random.random(batch) < 0.2, limits, -1)
    changes |= {"limits": limits, "fixed": fixed, "survival": survival, "siblings": siblings}
    return observe([0.0] * batch, cost, **changes)


def regrets(planned_by: Callable[[Observation], Allocation], reads: bool, instances: int) -> Floats:
    """Shares of the best goodput that the planner gives away."""
    random, found = np.random.default_rng(5), list[float]()
    for _ in range(instances):
        observation = instance(random, reads)
        planned = planned_by(observation)
        for n, (k, shape) in enumerate(zip(planned.ks.tolist(), planned.shapes or [None] * 9, strict=False)):
            assert k == observation.fixed[n] or (observation.fixed[n] < 0 and k <= observation.limits[n])
            assert shape is None or (len(shape) == k and shape in all_trees(k) and observation.siblings[n].any())
        found.append(1 - evaluate(observation, planned.ks, planned.shapes).goodput / best_goodput(observation))
    return np.array(found)


def test_equals_brute_force_over_all_trees() -> None:
    found = regrets(plan, reads=False, instances=150)
    assert np.abs(found).max() < 1e-9


def chains_only(observation: Observation) -> Allocation:
    return plan(replace(observation, siblings=np.zeros_like(observation.siblings)))


def test_brute_force_tells_a_planner_of_chains() -> None:
    """Negative control."""
    assert regrets(chains_only, reads=False, instances=60).max() > 0.05


def test_regret_where_a_last_draft_costs_less_to_read() -> None:
    found = regrets(plan, reads=True, instances=150)
    assert found.min() > -1e-9
    assert found.max() <= 0.05
    assert found.mean() <= 0.0005
