"""The laws of the policies: their ks and reasons; the default one neither flaps nor stops learning."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lab import analysis
from policies.config import REASONS, PolicyConfig, PolicyName
from policies.observation import Choice, Observation
from policies.planner import fixed_drafts_only, plan, seconds
from policies.spec_length import HOLDS, LONGEST_REST, PROBE_EVERY, PROBE_ROUNDS, Goodput, ProbeBudget, make_policy
from tests.policies.observing import DEPTH, machine, observe

NAMES = get_args(PolicyName)


def choose(name: PolicyName, observation: Observation, budget: ProbeBudget | None = None, **fields: Any) -> Choice:
    return make_policy(PolicyConfig(name, **fields))(observation, budget or ProbeBudget())[0]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"name": "best"}, "name"),
        ({"k": -1}, "k must"),
        ({"max_k": -1}, "max_k"),
        ({"threshold": -0.1}, "threshold"),
        ({"threshold": 1.1}, "threshold"),
        ({"threshold": float("nan")}, "threshold"),
        ({"hysteresis": -0.01}, "hysteresis"),
        ({"hysteresis": 1.0}, "hysteresis"),
        ({"probe_share": -0.01}, "probe_share"),
        ({"probe_share": 0.51}, "probe_share"),
    ],
)
def test_bad_values_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}"):
        PolicyConfig(**fields)


def test_values_at_their_bounds_are_taken() -> None:
    PolicyConfig("fixed", k=0, max_k=0, threshold=0.0, hysteresis=0.0, probe_share=0.0)
    PolicyConfig("confidence", threshold=1.0, hysteresis=0.99, probe_share=0.5)
    assert PolicyConfig().name == "goodput"


def limited(**changes: Any) -> Observation:
    """Four sequences: no limit in the way, a limit of 2 by memory, a limit of 0, and a k of 3 fixed by its request."""
    usual: dict[str, Any] = {
        "limits": np.array([DEPTH, 2, 0, 3]),
        "bounds": ("cap", "cache", "cap", "user"),
        "fixed": np.array([-1, -1, -1, 3]),
    }
    return observe([0.9] * 4, **(usual | changes))


def test_off_is_no_drafts_but_for_those_that_a_request_fixed() -> None:
    choice = choose("off", limited())
    assert choice.ks.tolist() == [0, 0, 0, 3]
    assert choice.reasons == ("policy", "policy", "policy", "user")


def test_fixed_is_the_same_for_everybody_within_the_limits() -> None:
    choice = choose("fixed", limited(), k=5)
    assert choice.ks.tolist() == [5, 2, 0, 3]
    assert choice.reasons == ("policy", "cache", "cap", "user")
    assert choose("fixed", limited(), k=1).ks.tolist() == [1, 1, 0, 3]


def test_confidence_leaves_it_to_the_drafter() -> None:
    choice = choose("confidence", limited(), threshold=0.3)
    assert choice.ks.tolist() == [DEPTH, 2, 0, 3]
    assert choice.reasons == ("cap", "cache", "cap", "user")
    assert choice.confidence == 0.3
    assert all(choose(name, limited()).confidence == 0.0 for name in NAMES if name != "confidence")


@pytest.mark.parametrize(
    ("last", "k"), [(None, 5), ((5, 5), 7), ((5, 4), 4), ((5, 0), 4), ((1, 0), 1), ((1, 1), 3), ((7, 7), 8)]
)
def test_heuristic_is_two_more_or_one_less(last: tuple[int, int] | None, k: int) -> None:
    choice = choose("heuristic", observe([0.5], last=(last,)), k=5)
    assert choice.ks.tolist() == [k]
    assert choice.reasons == ("policy" if k < DEPTH else "cap",)


def test_heuristic_forgets_nothing_in_rounds_without_drafts() -> None:
    """It does not act twice upon the same outcome."""
    policy, budget = make_policy(PolicyConfig("heuristic")), ProbeBudget()
    for limit in (DEPTH, 0, 0, DEPTH):
        choice, budget = policy(observe([0.5], last=((4, 4),), limits=np.array([limit])), budget)
    assert choice.ks.tolist() == [6]


@given(
    alphas=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6),
    limit=st.integers(0, DEPTH),
    step_s=st.floats(1e-6, 2e-3),
)
def test_optimal_is_the_best_of_the_theorem(alphas: list[float], limit: int, step_s: float) -> None:
    cost = machine(len(alphas), step_s=step_s)
    observation = observe(alphas, cost, limits=np.full(len(alphas), limit))
    ratio = (cost.step_s + len(alphas) * cost.token_s) / cost.verify_s[0]
    for alpha, k in zip(alphas, choose("optimal", observation).ks.tolist(), strict=True):
        factors = [analysis.walltime_factor(alpha, length, ratio) for length in range(limit + 1)]
        assert factors[k] == pytest.approx(max(factors), rel=1e-12)


def test_optimal_takes_drafts_without_a_model_for_free() -> None:
    observation = observe([0.3, 0.3, 0.0], machine(3, step_s=5e-4), gaps=np.array([0, 1, 0]))
    assert choose("optimal", observation).ks.tolist() == [DEPTH, 0, 0]


def test_goodput_is_the_planners() -> None:
    observation = limited()
    assert choose("goodput", observation).ks.tolist() == plan(observation).ks.tolist()


@pytest.mark.parametrize("name", ["goodput", "optimal"])
def test_what_more_drafts_would_need(name: PolicyName) -> None:
    """Few drafts in a round of many sequences, where more would pay alone; few drafts because they are rejected."""
    many = machine(32, per_token_s=2e-4, step_s=3e-3)
    loaded = choose(name, observe([0.75] * 32, many))
    assert set(loaded.reasons) == {"load"}
    rejected = choose(name, observe([0.05] * 2), ProbeBudget(rounds=1))
    assert rejected.ks.tolist() == [0, 0]
    assert rejected.reasons == ("acceptance", "acceptance")
    mixed = choose(name, observe([0.999, 0.5, 0.05]))
    assert mixed.reasons == ("cap", "acceptance", "acceptance")


def rounds_that_changed(hysteresis: float) -> int:
    """Rounds of 300 with another plan, where chances are noisy estimates of the same ones."""
    random, policy = np.random.default_rng(0), make_policy(PolicyConfig(hysteresis=hysteresis))
    budget, changed = ProbeBudget(), 0
    last: list[int] | None = None
    for _ in range(300):
        held = None if last is None else (np.array(last), (None,) * 3)
        noisy = (np.array([0.7, 0.6, 0.5]) + random.normal(0, 0.05, 3)).tolist()
        choice, budget = policy(observe(noisy, held=held), budget)
        changed += last is not None and choice.ks.tolist() != last
        last = choice.ks.tolist()
    return changed


def test_noise_does_not_change_the_plan() -> None:
    assert rounds_that_changed(0.02) <= 10
    assert rounds_that_changed(0.0) >= 100  # negative control


def test_drafts_that_hardly_pay_are_left_alone() -> None:
    """The planner itself would take them, but they gain less than the hysteresis."""
    cost = machine(1, step_s=2e-4)
    gains: dict[float, float] = {}
    for alpha in np.arange(0.05, 0.6, 0.01).tolist():
        observation = observe([alpha], cost)
        if plan(observation).ks.any():
            gains[alpha] = plan(observation).goodput / fixed_drafts_only(observation).goodput
    assert min(gains.values()) < 1.02
    for alpha, gain in gains.items():
        assert choose("goodput", observe([alpha], cost), hysteresis=0.02).ks.any() == (gain >= 1.02)


def after(observation: Observation, ks: list[int], **fields: Any) -> list[int]:
    """The default policy's ks after a last plan with `ks`."""
    held = np.array(ks), (None,) * len(ks)
    return choose("goodput", replace(observation, held=held), **fields).ks.tolist()


def test_the_last_plan_stands_until_another_gains_enough() -> None:
    observation = observe([0.8, 0.5])
    best = plan(observation).ks.tolist()
    near = [best[0] - 1, best[1]]
    assert after(observation, near) == near
    assert after(observation, [0, 0]) == best


class Idle:
    """Sequences whose drafts never pay. Each idle round adds a token to every gap.

    Counts the seconds that drafts add to the rounds, by the same costs.
    """

    def __init__(self, batch: int, token_s: float = 2e-6, **fields: Any) -> None:
        self.policy = make_policy(PolicyConfig(**fields))
        self.cost = machine(batch, token_s=token_s)
        self.observation = observe([0.05] * batch, self.cost, alone=self.cost, round_s=0.0)
        self.budget = ProbeBudget()
        self.total_s = self.probes_s = 0.0
        self.probes: list[tuple[int, Choice]] = []

    def run(self, rounds: int) -> "Idle":
        number = 0
        while number < rounds:
            choice, self.budget = self.policy(self.observation, self.budget)
            if choice.ks.any():
                self.probes.append((number, choice))
            held = choice.holds if choice.ks.any() else 1
            for _ in range(held):
                round_s = seconds(self.observation, choice.ks, choice.shapes, amortised=False)
                self.total_s += round_s
                self.probes_s += round_s - seconds(self.observation, 0 * choice.ks, choice.shapes, amortised=False)
                gaps = np.where(choice.ks > 0, 1, self.observation.gaps + 1)
                self.observation = replace(self.observation, gaps=gaps, round_s=round_s, rounds=held)
            number += held
        return self


@pytest.mark.parametrize("batch", [4, *(pytest.param(batch, marks=pytest.mark.proofs) for batch in (1, 32))])
def test_probes_take_their_share_of_the_time(batch: int) -> None:
    run = Idle(batch).run(1_200)
    assert len(run.probes) >= 1_200 / 400
    assert 0.005 * run.total_s <= run.probes_s <= 0.01 * run.total_s
    assert all("probe" in choice.reasons for _, choice in run.probes)


def test_the_share_is_what_was_configured() -> None:
    assert not Idle(4, probe_share=0.0).run(300).probes
    more = Idle(4, probe_share=0.05).run(400)
    assert 0.01 * more.total_s < more.probes_s <= 0.05 * more.total_s  # negative control of the share


def test_what_a_probe_reads_is_part_of_its_cost() -> None:
    """A draft model that reads slowly gets fewer probes. If a token takes it 1 % of a round, its gaps grow too fast."""
    fast, slow, never = (Idle(1, token_s).run(500) for token_s in (2e-6, 8e-6, 2e-5))
    assert len(fast.probes) > 1.5 * len(slow.probes) > len(never.probes)
    assert all(run.probes_s <= 0.01 * run.total_s for run in (fast, slow, never))


def test_a_probe_is_a_few_drafts_at_once_where_the_least_is_to_read() -> None:
    gaps = np.array([500, 3, 900, 2, 700, 800])
    observation = observe([0.05] * 6, gaps=gaps, limits=np.array([DEPTH, DEPTH, DEPTH, 1, DEPTH, 0]))
    choice = choose("goodput", observation, ProbeBudget(saved_s=1.0, rounds=PROBE_EVERY))
    assert set(np.flatnonzero(choice.ks)) <= {1, 3}
    assert 1 <= choice.ks.sum() <= 4
    assert [reason == "probe" for reason in choice.reasons] == (choice.ks > 0).tolist()


def test_a_probe_is_not_the_plan() -> None:
    """The next choice is without drafts again."""
    policy = make_policy(PolicyConfig())
    choice, budget = policy(observe([0.05, 0.05]), ProbeBudget(saved_s=1.0, rounds=PROBE_EVERY))
    assert "probe" in choice.reasons
    assert choice.holds == PROBE_ROUNDS
    choice, _ = policy(observe([0.05, 0.05]), budget)
    assert choice.reasons == ("acceptance", "acceptance")


def test_probes_keep_a_distance() -> None:
    numbers = [number for number, _ in Idle(4, probe_share=0.5).run(200).probes]
    assert len(numbers) > 5
    assert min(np.diff(numbers)) >= PROBE_EVERY


@pytest.mark.parametrize(("rounds", "probed"), [(PROBE_EVERY - 1, False), (PROBE_EVERY, True)])
def test_a_probe_waits_for_so_many_rounds(rounds: int, probed: bool) -> None:
    choice = choose("goodput", observe([0.05, 0.05], rounds=0), ProbeBudget(saved_s=1.0, rounds=rounds))
    assert ("probe" in choice.reasons) == probed
    choice = choose("goodput", observe([0.05, 0.05], rounds=1), ProbeBudget(saved_s=1.0, rounds=rounds - 1))
    assert ("probe" in choice.reasons) == probed


def test_rounds_with_drafts_put_off_the_next_probe() -> None:
    """A probe soon after the last drafts would learn what is known."""
    policy = make_policy(PolicyConfig(probe_share=0.5))
    choice, budget = policy(observe([0.9, 0.9]), ProbeBudget(saved_s=1.0, rounds=10 * PROBE_EVERY))
    assert choice.ks.any()
    waited = 0
    while "probe" not in choice.reasons:
        choice, budget = policy(observe([0.05, 0.05]), budget)
        waited += 1
    assert waited == 1 + PROBE_EVERY  # the round before the first one had drafts


@pytest.mark.parametrize(("limit", "holds"), [(4, 1), (5, HOLDS)])
def test_half_of_the_drafts_is_a_choice_for_one_round(limit: int, holds: int) -> None:
    """Its result is looked at again at once. A choice of a little more than half is held."""
    observation = observe([0.95, 0.95], limits=np.full(2, limit))
    choice = choose("goodput", observation, ProbeBudget(drafts=2 * DEPTH))
    assert choice.ks.tolist() == [limit, limit]
    assert choice.holds == holds


@pytest.mark.parametrize(
    ("changes", "probed"),
    [
        ({}, True),
        ({"fixed": np.array([-1, 2])}, True),  # a fixed k may be drafted by another drafter
        ({"limits": np.zeros(2, np.int64)}, False),
        ({"fixed": np.zeros(2, np.int64)}, False),
        ({"cost": machine(2, step_s=5e-3)}, False),  # not even certain drafts would pay
    ],
)
def test_probes_only_where_there_is_something_to_learn(changes: dict[str, Any], probed: bool) -> None:
    choice = choose("goodput", observe([0.02, 0.02], **changes), ProbeBudget(saved_s=1.0, rounds=PROBE_EVERY))
    assert ("probe" in choice.reasons) == probed


@pytest.mark.parametrize(
    ("saved_share", "rests"),
    [(1.0, PROBE_EVERY), (0.5, 50), (0.2, 80), (0.9, PROBE_EVERY), (0.0, 100), (-9.0, LONGEST_REST)],
)
def test_a_rest_lasts_until_a_probe_may_come(saved_share: float, rests: int) -> None:
    """A probe costs what 100 rounds save up. Nothing can be learned before it, and a choice takes time."""
    observation = observe([0.05, 0.05], rounds=0, round_s=1e-3)
    policy = Goodput(hysteresis=0.02, probe_share=0.01)
    best = policy._plan(observation)
    cost_s = policy._probe(observation, best, 0)[1]
    observation = replace(observation, round_s=cost_s)  # so that a round saves 1 % of a probe
    choice, _ = policy(observation, ProbeBudget(saved_s=saved_share * cost_s, rounds=PROBE_EVERY - 1))
    assert choice.rests == pytest.approx(rests - HOLDS, abs=1)


def test_the_rounds_before_a_rest_are_without_drafts() -> None:
    """The rounds of the first choice had drafts. Their lessons are fresh, so the policy chooses again soon."""
    policy = make_policy(PolicyConfig())
    _, budget = policy(observe([0.9, 0.9], rounds=HOLDS), ProbeBudget())
    choice, budget = policy(observe([0.02, 0.02], rounds=HOLDS), budget)
    assert [choice.ks.sum(), choice.rests, budget.rounds] == [0, 0, 0]
    choice, budget = policy(observe([0.02, 0.02], rounds=HOLDS), budget)
    assert [choice.ks.sum(), budget.rounds] == [0, HOLDS]
    assert choice.rests >= PROBE_EVERY - HOLDS


def test_drafts_that_cannot_pay_are_not_looked_at_soon() -> None:
    observation = observe([0.02, 0.02], cost=machine(2, step_s=5e-3), rounds=0)
    choice = choose("goodput", observation, ProbeBudget(saved_s=1.0, rounds=PROBE_EVERY))
    assert choice.rests == LONGEST_REST - HOLDS


def test_what_is_saved_up_is_bounded() -> None:
    policy, budget = make_policy(PolicyConfig(probe_share=0.5)), ProbeBudget()
    for _ in range(8 * PROBE_EVERY):
        _, budget = policy(observe([0.9], round_s=1e-3), budget)
    assert budget.saved_s == pytest.approx(PROBE_EVERY * 1e-3)


def test_what_was_saved_while_drafts_paid_finds_out_when_they_pay_again() -> None:
    """Even where reading a token takes longer than the share of a round, so that nothing more can be saved."""
    saved, nothing = Idle(1, token_s=2e-5), Idle(1, token_s=2e-5)
    saved.budget = ProbeBudget(saved_s=1e-2)
    assert len(saved.run(400).probes) >= len(nothing.run(400).probes) + 3


@st.composite
def observations(draw: st.DrawFn) -> Observation:
    """Up to 5 sequences in any situation."""
    batch = draw(st.integers(1, 5))

    def several(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=batch, max_size=batch))

    limits = np.array(several(st.integers(0, DEPTH)))
    fixed = np.minimum(several(st.integers(-1, DEPTH)), limits)
    outcome = st.tuples(st.integers(1, DEPTH), st.integers(0, DEPTH)).map(lambda pair: (pair[0], min(pair)))
    held = np.where(fixed < 0, np.minimum(several(st.integers(0, DEPTH)), limits), fixed)
    return observe(
        several(st.floats(0.0, 1.0)),
        machine(batch, per_token_s=draw(st.floats(0.0, 2e-3))),
        limits=limits,
        fixed=fixed,
        bounds=tuple("user" if k >= 0 else "cache" for k in fixed),
        gaps=np.array(several(st.integers(0, 50))),
        held=draw(st.sampled_from((None, (held, (None,) * batch)))),
        last=tuple(several(st.none() | outcome)),
        round_s=draw(st.floats(0.0, 1.0)),
    )


def check(name: PolicyName, observation: Observation, choice: Choice) -> None:
    """Laws of every policy."""
    ks, fixed = choice.ks, observation.fixed
    assert ((ks >= 0) & (ks <= observation.limits)).all()
    assert (ks == fixed)[fixed >= 0].all()
    assert len(choice.reasons) == len(ks)
    own = {"goodput": {"acceptance", "load", "probe"}, "optimal": {"acceptance", "load"}}.get(name, {"policy"})
    binding = (ks == observation.limits) | (fixed >= 0)
    for binds, reason, bound in zip(binding, choice.reasons, observation.bounds, strict=True):
        assert reason in REASONS
        assert reason in own or reason == bound
        assert (reason == bound) == binds or reason in {"probe", "policy"}


@given(st.lists(st.tuples(st.sampled_from(NAMES), observations()), min_size=1, max_size=8))
def test_every_policy_goes_on_from_what_another_one_left(rounds: list[tuple[PolicyName, Observation]]) -> None:
    budget = ProbeBudget()
    for name, observation in rounds:
        policy = make_policy(PolicyConfig(name))
        choice, following = policy(observation, budget)
        check(name, observation, choice)
        again, _ = policy(observation, budget)
        assert (again.ks == choice.ks).all()
        assert following.saved_s >= 0.0
        budget = following


@pytest.mark.parametrize(
    "broken",
    [
        lambda choice: replace(choice, ks=choice.ks + 9),
        lambda choice: replace(choice, ks=choice.ks * 0),
        lambda choice: replace(choice, reasons=("load",) * 4),
        lambda choice: replace(choice, reasons=choice.reasons[1:]),
    ],
)
def test_the_check_tells_policies_that_break_the_rules(broken: Callable[[Choice], Choice]) -> None:
    choice = choose("fixed", limited())
    check("fixed", limited(), choice)
    with pytest.raises(AssertionError):
        check("fixed", limited(), broken(choice))
