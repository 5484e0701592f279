"""The planner's trees against brute force: every tree of every sequence, each round's seconds by their definition."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from numpy.random import Generator

from engine.trees import fates
from policies import acceptance, planner, trees
from policies.acceptance import Estimator
from policies.config import PolicyConfig
from policies.control import SpecControl
from policies.cost import CostModel
from policies.observation import STALE, Candidate, Drafted, Floats, Ints, Observation, Timing
from policies.planner import Allocation, evaluate, lone_ks, plan
from policies.shapes import ROOT, Parents
from policies.spec_length import HOLDS
from policies.trees import RANKS, depths_of
from tests.policies.observing import DEPTH, machine, observe
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
    survival = [1.0, *observation.survival[n].tolist()]
    first = [after / before if before else 0.0 for before, after in pairwise(survival)]
    chances = []
    for own, next_one in zip(first, [*first[1:], first[-1]], strict=True):
        row = [own, *(own * (1 - next_one) * share for share in observation.sibling_chances[n].tolist())]
        chances.append(np.minimum.accumulate(row).tolist())
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
        chances, may = chances_of(observation, n), observation.sibling_chances[n].any() and fixed < 0
        shapes = all_trees(limit) if may else [chain(k) for k in range(limit + 1)] if fixed < 0 else [chain(fixed)]
        offered.append([(shape, *value(shape, chances)) for shape in shapes])
    best, cost = 0.0, observation.cost
    modelled, behind = observation.gaps > 0, np.maximum(observation.gaps - 2, 0) / observation.horizon
    for choice in product(*offered):
        round_s = cost.base_s + cost.verify_s[sum(len(shape) for shape, *_ in choice)]
        round_s += cost.padding_s[max(len(shape) for shape, *_ in choice)]
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
    siblings = random.uniform(0.0, 1.0, (batch, RANKS - 1)) * (random.random((batch, 1)) < 0.8)
    cost = replace(costs(random, batch * deepest + 1, rising=False), tree=float(random.choice([1.0, 1.02, 1.2])))
    cost = replace(cost, padding_s=np.append(cost.padding_s, np.full(deepest, cost.padding_s[-1])))
    gaps = np.ones(batch, np.int64)
    changes: dict[str, Any] = {"gaps": gaps, "horizon": np.full(batch, 32)}
    if not reads:
        cost = replace(cost, token_s=0.0)
    fixed = np.where(random.random(batch) < 0.2, limits, -1)
    changes |= {"limits": limits, "fixed": fixed, "survival": survival, "sibling_chances": siblings}
    return observe([0.0] * batch, cost, **changes)


def regrets(planned_by: Callable[[Observation], Allocation], reads: bool, instances: int) -> Floats:
    """Shares of the best goodput that the planner gives away."""
    random, found = np.random.default_rng(5), list[float]()
    for _ in range(instances):
        observation = instance(random, reads)
        planned = planned_by(observation)
        for n, (k, shape) in enumerate(zip(planned.ks.tolist(), planned.shapes, strict=True)):
            assert k == observation.fixed[n] or (observation.fixed[n] < 0 and k <= observation.limits[n])
            assert shape is None or (len(shape) == k and shape in all_trees(k) and observation.sibling_chances[n].any())
        found.append(1 - evaluate(observation, planned.ks, planned.shapes).goodput / best_goodput(observation))
    return np.array(found)


def test_equals_brute_force_over_all_trees() -> None:
    found = regrets(plan, reads=False, instances=150)
    assert np.abs(found).max() < 1e-9


def chains_only(observation: Observation) -> Allocation:
    return plan(replace(observation, sibling_chances=np.zeros_like(observation.sibling_chances)))


def test_brute_force_tells_a_planner_of_chains() -> None:
    """Negative control."""
    assert regrets(chains_only, reads=False, instances=60).max() > 0.05


def test_trees_must_beat_the_best_chains_by_their_margin() -> None:
    random, seen = np.random.default_rng(7), Counter[str]()
    for _ in range(120):
        observation = instance(random, reads=False)
        chains, best, planned = chains_only(observation), plan(observation), plan(observation, tree_margin=0.05)
        wins = best.goodput > 1.05 * chains.goodput
        assert planned.goodput == pytest.approx((best if wins else chains).goodput)
        seen["wins" if wins else "too little" if best.goodput > 1.001 * chains.goodput else "chains"] += 1
    assert min(seen.values()) >= 5
    assert len(seen) == 3


def test_regret_where_a_last_draft_costs_less_to_read() -> None:
    found = regrets(plan, reads=True, instances=150)
    assert found.min() > -1e-9
    assert found.max() <= 0.05
    assert found.mean() <= 0.0005


# --- what is learned, and what is made of it -------------------------------------------------------------------------

FIRST, FURTHER = 0.5, (0.6, 0.3, 0.1)  # chances of a first child, and of each sibling once those before it are rejected
STEP_S, ROW_S = 1e-3, 2e-5  # a forward of the draft model, a row of the target's pass


def profile() -> list[Timing]:
    """A machine whose forwards are dear and whose rows are cheap: trees pay."""
    shapes = [(b, k) for b in (1, 2, 4) for k in (0, 1, 2, 4, 8)]
    return [Timing(b, b * k, k, 0, k, b * k, STEP_S * k, 2e-3 + ROW_S * b * (1 + k), 0.0) for b, k in shapes]


def control(*timings: Timing, **changes: Any) -> SpecControl:
    return SpecControl(PolicyConfig(**({"probe_share": 0.0, "trees": True} | changes)), DEPTH, timings or profile())


def branching(handle: int, **changes: Any) -> Candidate:
    usual = {"fixed": None, "max_k": None, "left": 99, "room": 99, "source": "model", "offered": DEPTH, "gap": 1}
    return Candidate(handle, **(usual | {"branches": True} | changes))


def outcome(
    random: Generator,
    handle: int,
    k: int,
    tree: Parents | None,
    first: float = FIRST,
    further: tuple[float, ...] = FURTHER,
) -> Drafted:
    """A round's walk through a draft."""
    parents, path, node = tree or chain(k), list[int](), ROOT
    while True:
        children = [n for n, parent in enumerate(parents) if parent == node]
        passes = random.random(len(children)) < (first, *further)[: len(children)]
        if not passes.any():
            break
        node = children[int(passes.argmax())]
        path.append(node)
    if tree is None:
        return Drafted(handle, "model", k, len(path))
    walked = fates(parents, path)
    ranks = [[fate[rank] for fate in walked if rank < len(fate)] for rank in range(1, max(map(len, walked)))]
    firsts = tuple(float(fate[0]) for fate in walked)
    return Drafted(handle, "model", k, len(path), firsts, tuple((len(tried), sum(tried)) for tried in ranks))


def play(
    policy: SpecControl,
    rounds: int,
    batch: int = 2,
    slower: float = 1.0,
    further: tuple[float, ...] = FURTHER,
    **changes: Any,
) -> list[list[Parents | None]]:
    """The trees of each round. slower: how many times as long a round with trees takes."""
    random, played = np.random.default_rng(0), list[list[Parents | None]]()
    for _ in range(rounds):
        decision = policy.plan([branching(n, **changes) for n in range(batch)])
        shapes = decision.shapes
        drafted = [outcome(random, n, k, shapes[n], further=further) for n, k in enumerate(decision.ks) if k]
        forwards = max(depths_of(decision.ks, tuple(shapes)))
        count, beside = sum(decision.ks), sum(len(t) - len(set(t)) for t in shapes if t)
        factor = slower if beside else 1.0
        draft_s, score_s = STEP_S * forwards * factor, (2e-3 + ROW_S * (batch + count)) * factor
        longest, idle = max(decision.ks), [n for n, k in enumerate(decision.ks) if not k]
        policy.observe(Timing(batch, count, longest, 0, forwards, count, draft_s, score_s, 1e-4, beside), drafted, idle)
        played.append(shapes)
    return played


def share(played: list[list[Parents | None]]) -> float:
    """Return the share of the rounds that had a tree."""
    return float(np.mean([any(shapes) for shapes in played]))


def test_trees_are_chosen_where_they_pay() -> None:
    policy = control()
    assert share(play(policy, 60)[20:]) > 0.9
    decision = policy.plan([branching(0), branching(1)])
    assert decision.tokens == pytest.approx(2 * (1 + 0.5 + 0.3 + 0.5), rel=0.35)
    for k, tree in zip(decision.ks, decision.shapes, strict=True):
        assert tree is None or (len(tree) == k and max(depths_of([k], (tree,))) < k)


@pytest.mark.parametrize("changes", [{"branches": False}, {"source": "lookup", "gap": 0, "branches": False}])
def test_no_trees_for_those_that_may_not_branch(changes: dict[str, Any]) -> None:
    assert share(play(control(), 40, **changes)) == 0


def test_no_trees_where_the_operator_wants_none() -> None:
    policy = control(trees=False)
    assert share(play(policy, 40)) == 0
    policy.configure(PolicyConfig(probe_share=0.0, trees=True))
    assert share(play(policy, 20)) > 0.5


def test_one_that_may_not_branch_beside_others() -> None:
    policy = control()
    play(policy, 60)
    policy.configure(policy.config)
    decision = policy.plan([branching(0), branching(1, branches=False)])
    assert decision.shapes[0] is not None
    assert decision.shapes[1] is None


def test_trees_that_take_too_long_are_dropped_and_tried_again_much_later() -> None:
    policy = control()
    played = play(policy, 200, slower=1.5)
    assert share(played[:8]) == 1
    assert share(played[40:]) == 0
    assert policy.cost.round_cost(2, 0).tree == pytest.approx(1.5, rel=0.05)
    again = play(policy, STALE + 100, slower=1.5)
    assert 0 < sum(any(shapes) for shapes in again) <= HOLDS + 1  # the rounds of one choice, whose price is then known
    assert share(play(policy, 2 * STALE)[-100:]) > 0.5  # they take no longer any more


def test_trees_that_requests_ask_for_are_no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices are learned from them when their turn comes, as from chains. Trees of the policy's own are learned from at
    once, but only until their price is known."""
    learned = list[int]()
    monkeypatch.setattr(CostModel, "refresh", lambda self: learned.append(1))
    monkeypatch.setattr(CostModel, "observe", lambda self, timing: None)
    asked = control(trees=False)
    play(asked, 5 * HOLDS, fixed=3, tree=(ROOT, ROOT, 0))
    assert not learned
    play(control(), 5 * HOLDS)
    assert len(learned) >= 4
    learned.clear()
    monkeypatch.setattr(CostModel, "knows_trees", True)
    assert share(play(control(), 5 * HOLDS)) > 0.5
    assert not learned


@pytest.mark.parametrize("forgets", [True, False])
def test_siblings_that_were_never_accepted_are_tried_again(forgets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In few rounds, and by the time that they are accepted again trees come back. Negative control: what is known of
    siblings stays where no siblings are tried."""
    if not forgets:
        monkeypatch.setattr(acceptance, "SIBLING_SWITCH", 0.0)
    policy, never = control(), (0.0, 0.0, 0.0)
    play(policy, 400, 4, further=never)
    hopeless = share(play(policy, 2000, 4, further=never))
    after = share(play(policy, 600, 4)[300:])
    assert (0 < hopeless < 0.05 and after > 0.9) if forgets else after == 0


def test_chains_keep_their_price_beside_trees() -> None:
    policy = control()
    play(policy, 40, slower=1.1)
    cost = policy.cost.round_cost(2, 0)
    assert cost.tree == pytest.approx(1.1, rel=0.03)
    assert cost.seconds(4, 2, 2, 4) == pytest.approx(2 * STEP_S + 2e-3 + 6 * ROW_S, rel=0.1)


@pytest.mark.parametrize("first", [FIRST, pytest.param(0.9, marks=pytest.mark.proofs)])
def test_the_chances_of_siblings_are_learned(first: float) -> None:
    """One drafter is worse than an unknown one is taken to be, the other is better."""
    random, estimator = np.random.default_rng(2), Estimator(DEPTH)
    tree = (ROOT, 0, 0, 0, ROOT, ROOT, ROOT)
    for n in range(1200):
        estimator.observe([outcome(random, n % 4, len(tree), tree, first)])
    learned, survival = estimator.sibling_chances([branching(9)], free=True), estimator.survival([branching(9)])
    nodes = trees.best_nodes(DEPTH)
    (values,) = trees.node_values(survival, learned, nodes)[:, [nodes.places[ROOT, rank] for rank in range(RANKS)]]
    assert values[0] == pytest.approx(first, abs=0.06)
    left = np.cumprod([1 - first, *(1 - np.array(FURTHER[:-1]))])
    assert values[1] == pytest.approx((1 - first) * FURTHER[0], rel=0.2)
    assert values[2:] == pytest.approx((left * FURTHER)[1:], abs=0.02)
    assert not estimator.sibling_chances([branching(0)], free=False).any()


def test_chains_spend_no_time_on_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    known, calls, shares = Estimator(DEPTH), 0, acceptance._shares

    def count(counts: Floats, law: Floats) -> Floats:
        nonlocal calls
        calls += 1
        return shares(counts, law)

    known.observe([Drafted(0, "model", 4, 1)])
    monkeypatch.setattr(acceptance, "_shares", count)
    known.observe([Drafted(0, "model", 4, 1)], {1: 50})
    assert calls == 0
    known.observe([Drafted(0, "model", 4, 0, sibling_counts=((1, 1),))])
    assert calls == 1


def test_siblings_that_were_not_tried_say_nothing() -> None:
    """Neither those behind an accepted one, nor those that a chain does not have."""
    known = Estimator(DEPTH)
    before = known.sibling_chances([branching(0)], free=True)
    known.observe([Drafted(0, "model", 4, 1, (1.0, 0.0))])
    assert known.sibling_chances([branching(0)], free=True) == pytest.approx(before)
    known.observe([Drafted(0, "model", 4, 1, (0.0,), ((1, 1),))])
    after = known.sibling_chances([branching(0)], free=True)
    assert after[0, 0] > before[0, 0]


def test_a_held_tree_is_cut_to_todays_limits_and_newcomers_get_chains() -> None:
    policy = control()
    play(policy, 60, batch=4)
    policy.configure(policy.config)
    everyone = [branching(n) for n in range(4)]
    first = policy.plan(everyone)
    tree = first.shapes[0]
    assert tree is not None
    again = policy.plan([branching(0, room=len(tree) - 1), *everyone[1:], branching(9)])
    assert again.shapes[0] == trees.cut(tree, len(tree) - 1)
    assert again.shapes[1:4] == first.shapes[1:]
    assert again.shapes[4] is None
    assert 0 < again.ks[4] <= max(depths_of(first.ks, tuple(first.shapes)))


def test_trees_are_planned_only_for_those_that_may_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's own tree beside chains takes no more time to plan than a chain."""
    tables, find = list[int](), planner._tables

    def spy(observation: Observation) -> list[Ints]:
        found = find(observation)
        tables.append(len(found))
        return found

    monkeypatch.setattr(planner, "_tables", spy)
    fixed = branching(0, fixed=6, tree=(ROOT, 0, 0, ROOT, 3, 3), branches=False)
    control(trees=False).plan([fixed, branching(1)])
    assert set(tables) == {1}
    control().plan([fixed, branching(1)])
    assert set(tables) == {1, 2}


@pytest.mark.parametrize("depth", [1, 4, 16, 64])
def test_deep_trees_are_made_of_few_nodes(depth: int) -> None:
    """The trees of 48 nodes would be made of 14,210 ones, those of 64 of many more."""
    nodes = trees.best_nodes(depth)
    assert nodes.parents[:depth].tolist() == list(range(ROOT, depth - 1))
    assert len(nodes.parents) <= depth + 18


def test_the_heuristic_asks_for_more_behind_a_whole_path() -> None:
    """A drafter that branches by itself never gets all of its drafts accepted."""
    policy = SpecControl(PolicyConfig("heuristic", k=4), DEPTH, profile())
    candidate = branching(0, source="merged", branches=False)
    timing = Timing(1, 4, 4, 0, 4, 4, 1e-3, 2e-3, 1e-4)
    found = []
    for drafted in (
        Drafted(0, "merged", 4, 2, (0.0, 1.0), ((1, 1),)),  # to the end of a path
        Drafted(0, "merged", 6, 2, (0.0, 1.0, 0.0), ((1, 1),)),  # not to its end
    ):
        policy.plan([candidate])
        policy.observe(timing, [drafted])
        found += policy.plan([candidate]).ks
    assert found == [6, 5]


def test_a_requests_tree_is_priced_as_one() -> None:
    """It runs as many forwards as it is deep, and its rows cost what rows cost."""
    policy, tree = control(), (ROOT, 0, 0, ROOT, 3, 3)
    as_chain = policy.plan([branching(0, fixed=6, branches=False)])
    policy.configure(policy.config)
    as_tree = policy.plan([branching(0, fixed=6, tree=tree, branches=False)])
    assert as_chain.seconds - as_tree.seconds == pytest.approx(4 * STEP_S, rel=0.1)
    assert as_tree.ks == [6]
    assert as_tree.tokens < as_chain.tokens


def test_a_requests_tree_whose_drafter_is_gone_is_priced_all_the_same() -> None:
    """Nobody may branch, so only the values of chains are known."""
    tree = (ROOT, 0, 0, ROOT, 3, 3)
    decision = control().plan([branching(0, fixed=6, tree=tree, source=None, offered=0, gap=0, branches=False)])
    assert (decision.ks, decision.shapes, decision.tokens) == ([6], [tree], 1.0)


def test_what_a_sequence_would_get_alone_is_mostly_its_plan_alone() -> None:
    """Trees that end before a dear forward are left out."""
    random, same = np.random.default_rng(6), list[bool]()
    for _ in range(60):
        observation = instance(random, reads=False)
        cost = replace(costs(random, 6, rising=True), padding_s=np.zeros(9), token_s=0.0, tree=1.1)
        observation = replace(observation, alone=cost)
        for n, k in enumerate(lone_ks(observation).tolist()):
            names = ("limits", "survival", "sibling_chances", "gaps", "horizon")
            one = {name: getattr(observation, name)[n : n + 1] for name in names}
            same.append(k == plan(observe([0.0], cost, **one)).ks[0])
    assert np.mean(same) > 0.85


@pytest.mark.parametrize("alpha", [0.4, 0.5, 0.6])
def test_a_sequence_alone_gets_a_chain_where_trees_take_too_long(alpha: float) -> None:
    """A sibling among the drafts that are worth most must not hide the chain."""
    cost = machine(tree=1.5, step_s=1e-5)
    observation = observe([alpha], cost, alone=cost, sibling_chances=np.full((1, RANKS - 1), 0.9))
    chosen = plan(observation)
    assert chosen.shapes == (None,)
    assert lone_ks(observation).tolist() == chosen.ks.tolist()
