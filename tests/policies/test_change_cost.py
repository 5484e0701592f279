"""What drafts cost the rounds behind them: it is measured, kept out of other prices, and charged."""

from collections.abc import Iterable

import numpy as np
import pytest

from policies.config import PolicyConfig
from policies.control import SpecControl
from policies.corrections import ChangeCost
from policies.observation import FEW, SETTLING, Timing
from policies.spec_length import LASTING, PROBE_EVERY, ProbeBudget, make_policy
from tests.policies.observing import observe
from tests.policies.test_control import candidate, control
from tests.policies.test_spec_length import choose

PLAIN_S, LONGER_S = 1.02e-3, [8e-4, 6e-4, 4e-4, 3e-4, 2e-4, 1e-4]  # of the first rounds after drafts


def changing(drafts: int, plain: int, prefill: int = 0, times: int = 8, forwards: int = 1) -> SpecControl:
    """A control that has seen so many rounds with a draft, then without, several times. prefill: tokens of prompts
    that the very first plain round reads."""
    policy = control()
    for _ in range(times):
        for _ in range(drafts):
            policy.observe(Timing(1, 1, 1, 0, forwards, forwards, 1e-4 * forwards, PLAIN_S + 2e-5, 0.0), [], [0])
        for longer_s in [*LONGER_S, *[0.0] * plain][:plain]:
            policy.observe(Timing(1, 0, 0, prefill, 0, 0, 0.0, PLAIN_S + longer_s, 0.0), [], [0])
            prefill = 0
    policy.configure(policy.config)
    policy.cost.refresh()
    return policy


def change_s(policy: SpecControl) -> float:
    return policy._observation([candidate()]).change_s


def plain_s(policy: SpecControl) -> float:
    return float(policy.cost.round_cost(1, 0).verify_s[0])


def test_the_first_rounds_after_drafts_tell_what_the_change_costs_and_nothing_else() -> None:
    policy = changing(drafts=4, plain=3 * SETTLING)
    assert plain_s(policy) == pytest.approx(PLAIN_S)
    assert change_s(policy) == pytest.approx(sum(LONGER_S))


@pytest.mark.parametrize(("usual", "slower"), [(False, 1.0), (True, 50.0)])
def test_rounds_of_no_usual_time_teach_no_costs(usual: bool, slower: float) -> None:
    """First runs and captures of graphs. The control: the same rounds as usual ones."""
    policy = control()
    for _ in range(8):
        for drafts in (1, 1, 1, *[0] * 2 * SETTLING):
            taken_s = 50 * PLAIN_S
            timing = Timing(1, drafts, drafts, 0, drafts, drafts, drafts * taken_s, taken_s, 0.0)
            policy.observe(timing if usual else None, [])
    policy.configure(policy.config)
    policy.cost.refresh()
    assert plain_s(policy) == pytest.approx(slower * PLAIN_S, rel=0.05)
    assert change_s(policy) == pytest.approx(0.0, abs=1e-9)


def test_changes_that_are_too_short_tell_nothing() -> None:
    policy = changing(drafts=4, plain=SETTLING - 1, times=20)
    assert plain_s(policy) == pytest.approx(PLAIN_S)  # as profiled
    assert change_s(policy) == 0.0


def test_guesses_change_nothing() -> None:
    """Nothing runs but the target's pass, with or without them. So all rounds show what theirs cost."""
    policy = changing(drafts=1, plain=1, times=40, forwards=0)
    assert plain_s(policy) == pytest.approx(PLAIN_S + LONGER_S[0])


def test_rounds_with_prompts_are_no_change() -> None:
    """Their time shows how long the prompts take. Here the first of all changes has one."""
    assert change_s(changing(4, 3 * SETTLING, prefill=1, times=FEW)) == 0.0
    assert change_s(changing(4, 3 * SETTLING, prefill=1, times=FEW + 1)) == pytest.approx(sum(LONGER_S))


def test_the_first_round_with_drafts_teaches_nothing() -> None:
    policy = control()
    for n in range(80):
        drafts = n % 2
        policy.observe(Timing(1, drafts, drafts, 0, drafts, drafts, 1e-4 * drafts, 5e-3, 0.0), [], [0])
    assert plain_s(policy) == pytest.approx(PLAIN_S)
    assert float(policy.cost.round_cost(1, 0).verify_s[1]) == pytest.approx(PLAIN_S + 2e-5)


def fed(longer: Iterable[float]) -> ChangeCost:
    cost = ChangeCost()
    for longer_s in longer:
        cost.begin()
        for _ in range(2 * SETTLING):
            cost.observe(longer_s)
    return cost


@pytest.mark.parametrize(
    ("longer", "expected"),
    [
        ([1e-3] * (FEW - 1), 0.0),
        ([1e-3] * FEW, SETTLING * 1e-3),
        ([1e-3, 1e-3, 1e-3, 9.0], SETTLING * 1e-3),  # one was interrupted
        ([-1e-3] * FEW, 0.0),  # no change makes rounds faster
    ],
)
def test_a_change_costs_the_median_of_a_few(longer: list[float], expected: float) -> None:
    assert fed(longer).seconds == pytest.approx(expected)


def test_a_probe_pays_for_the_rounds_behind_it() -> None:
    policy, bad = make_policy(PolicyConfig()), [0.05, 0.05]
    saved = ProbeBudget(saved_s=1e-2, rounds=PROBE_EVERY)
    paid = []
    for extra_s in (0.0, 2e-3):
        choice, left = policy(observe(bad, round_s=0.0, change_s=extra_s), saved)
        assert "probe" in choice.reasons
        paid.append(saved.saved_s - left.saved_s)
    assert paid[1] - paid[0] == pytest.approx(2e-3)
    assert "probe" not in choose("goodput", observe(bad, round_s=0.0, change_s=1e-2), saved).reasons


def test_a_probe_beside_drafts_changes_nothing() -> None:
    policy, saved = make_policy(PolicyConfig()), ProbeBudget(saved_s=1e-2, rounds=PROBE_EVERY)
    observation = observe([0.05, 0.9], fixed=np.array([-1, 4]), round_s=0.0, change_s=1.0)
    choice, left = policy(observation, saved)
    assert choice.reasons[0] == "probe"
    assert saved.saved_s - left.saved_s < 1e-3


def test_drafts_after_none_pay_for_the_change_back() -> None:
    """Drafts that go on do not pay for it again."""
    best = choose("goodput", observe([0.6])).ks
    assert best.any()
    for share, drafts in ((0.1, True), (0.9, False)):
        dear = observe([0.6], change_s=share * LASTING * PLAIN_S)
        assert choose("goodput", dear).ks.any() == drafts
        going_on = observe([0.6], change_s=share * LASTING * PLAIN_S, held=(best, (None,)))
        assert choose("goodput", going_on).ks.tolist() == best.tolist()
