"""Rounds without drafts: the policy rests in some, and measures others to check its prices."""

import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from policies import spec_length
from policies.config import PolicyConfig, PolicyName
from policies.control import SpecControl
from policies.held_choice import NEWCOMER_WAIT, HeldChoice
from policies.observation import FEW, SETTLING, STALE, Drafted, Prefill, Timing
from policies.spec_length import HOLDS, LONGEST_HOLD, LONGEST_REST, ProbeBudget, make_policy
from tests.policies.observing import observe
from tests.policies.test_control import DEPTH, candidate, control, play, timings
from tests.policies.test_spec_length import choose

FIXED: dict[int, int | None] = dict.fromkeys(range(4))
MODEL = ["model"] * 4


def tire(policy: SpecControl, count: int = 4) -> HeldChoice:
    """Reject all drafts until the policy rests. Returns its choice."""
    play(policy, [False] * count, 60)
    while policy._held is None or not policy._held.rest_left:
        play(policy, [False] * count, 1)
    return policy._held


def rested() -> HeldChoice:
    return tire(control(probe_share=0.0))


def test_drafts_that_never_pay_end_in_a_rest() -> None:
    held, rounds = rested(), LONGEST_REST - HOLDS  # no probe may come
    assert held.rest_left == rounds
    served = [held.rest(FIXED, MODEL) is not None for _ in range(rounds + 1)]
    assert served == [True] * rounds + [False]
    good = control(probe_share=0.0)
    play(good, [True] * 4, 60)
    assert good.rest(FIXED, MODEL) is None


@pytest.mark.parametrize(
    ("fixed", "drafters", "serves"),
    [
        (FIXED, MODEL, True),
        ({0: None, 1: None, 2: 0, 3: None}, ["model", "model", None, "model"], True),  # a request that wants no drafts
        ({0: None, 1: None, 2: 3, 3: None}, MODEL, False),  # a request that wants drafts
        ({0: None, 1: None, 2: None, 9: None}, MODEL, True),  # one newcomer of four
        ({0: None, 1: None, 8: None, 9: None}, MODEL, False),
        ({0: None, 1: None}, MODEL[:2], True),
        ({0: None}, MODEL[:1], False),  # another load
        (FIXED, [*MODEL[:3], "lookup"], False),  # it may have a guess
    ],
)
def test_what_ends_a_rest(fixed: dict[int, int | None], drafters: list[str | None], serves: bool) -> None:
    assert (rested().rest(fixed, drafters) is not None) is serves


def test_a_newcomer_does_not_wait_for_the_end_of_a_long_rest() -> None:
    held = rested()
    assert held.rest_left > 2 * NEWCOMER_WAIT
    with_another: dict[int, int | None] = {0: None, 1: None, 2: None, 9: None}
    served = [held.rest(with_another, MODEL) is not None for _ in range(2 * NEWCOMER_WAIT)]
    assert sum(served) == 1 + NEWCOMER_WAIT


def test_what_a_rest_answers() -> None:
    held = rested()
    assert held.rest(FIXED, MODEL) is held.decision
    other = held.rest({0: None, 1: None, 2: 0, 7: None}, MODEL)
    assert other is not None
    assert (other.ks, other.shapes) == ([0] * 4, [None] * 4)
    assert other.reasons == [*held.decision.reasons[:2], "user", "policy"]
    assert (other.seconds, other.tokens) == (0.0, 0.0)


def test_a_rest_decides_anew_for_other_sequences_only() -> None:
    held = rested()
    first = held.rest({0: None, 1: None, 2: None, 9: None}, MODEL)
    assert first is not None
    assert held.rest({0: None, 1: None, 2: None, 9: None}, MODEL) is first
    for fixed in ({0: None, 1: None, 2: None, 9: 0}, {9: None, 2: None, 1: None, 0: None}, {0: None, 1: None, 2: None}):
        answer = held.rest(fixed, MODEL[: len(fixed)])
        assert answer is not None
        own = [held.decision.reasons[handle] if handle < 4 else "policy" for handle in fixed]
        assert answer.reasons == ["user" if k == 0 else reason for k, reason in zip(fixed.values(), own, strict=True)]
    assert held.rest(FIXED, MODEL) is held.decision


def test_a_rest_averages_chances_once_per_round() -> None:
    """Not once for each newcomer: policy off rests for good, and all that it began with are gone soon."""

    class Alphas(list[float]):
        reads = 0

        def __iter__(self) -> Iterator[float]:
            self.reads += 1
            return super().__iter__()

    policy = control("off")
    chosen = policy.plan([candidate(n, source=None, offered=0, gap=0) for n in range(4)])
    assert policy._held is not None
    policy._held.decision = replace(chosen, alphas=(alphas := Alphas(chosen.alphas)))
    answer = policy.rest(dict.fromkeys(range(10, 40)), [None] * 30)
    assert answer is not None
    assert answer.alphas == [sum(chosen.alphas) / 4] * 30
    assert alphas.reads == 1


def test_policy_off_rests_for_good_whoever_joins() -> None:
    policy = control("off")
    policy.plan([candidate(0, source=None, offered=0, gap=0)])
    assert all(policy.rest({n: None, n + 1: 0}, ["lookup", None]) for n in range(2000))
    answer = policy.rest({5: None, 6: 0}, ["model", "model"])
    assert answer is not None
    assert answer.reasons == ["policy", "user"]
    assert policy.rest({5: 2}, ["model"]) is None


def test_guesses_forbid_a_rest() -> None:
    """A drafter without a model may have a guess in any round."""
    policy = control(probe_share=0.0)
    for _ in range(60):
        decision = policy.plan([candidate(source="lookup", gap=0, offered=3)])
        policy.observe(Timing(1, decision.ks[0], 3, 0, 0, 0, 0.0, 9e-3, 0.0), [Drafted(0, "lookup", 3, 0)])
        assert policy.rest({0: None}, ["lookup"]) is None


def test_a_rest_counts_as_rounds_without_drafts() -> None:
    """What was believed of a sequence fades in a rest as it does in rounds that are observed."""
    beliefs = []
    for resting in (True, False):
        policy = control(probe_share=0.0)
        tire(policy, 1)
        if resting:
            for _ in range(20):
                policy.rested(1e-3)
        else:
            policy.estimator.observe([], {0: 20})
        policy.configure(policy.config)
        beliefs.append(policy.plan([candidate(0)]).alphas[0])
    assert beliefs[0] == pytest.approx(beliefs[1])


@pytest.mark.parametrize("name", ["off", "goodput"])
def test_a_rest_of_days_ends_at_once(name: str) -> None:
    """Its end takes no memory for each of its rounds."""
    policy = control(name, probe_share=0.0)
    tire(policy)
    for _ in range(10**5):
        policy.rested(1e-3)
    tracemalloc.start()
    policy.configure(policy.config)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**5


def test_those_who_leave_while_nothing_is_learned_do_not_pile_up() -> None:
    policy = control("off")
    for handle in range(1000):
        policy.forget(handle)
    assert len(policy._gone) < 100


@pytest.mark.parametrize(
    ("alpha", "unmeasured", "share", "drafts"),
    [
        (0.5, STALE, 0.01, False),  # plain rounds were not measured for long
        (0.5, STALE - 1, 0.01, True),
        (0.5, STALE, 0.0, True),
        (0.5, STALE, 0.9 * (SETTLING + FEW) / STALE, True),  # the share does not cover it
        (0.5, STALE, 1.1 * (SETTLING + FEW) / STALE, False),
    ],
)
def test_drafts_are_compared_with_real_rounds(alpha: float, unmeasured: int, share: float, drafts: bool) -> None:
    budget = ProbeBudget(unmeasured=unmeasured - 1)
    choice = choose("goodput", observe([alpha]), budget, probe_share=share)
    assert choice.ks.any() == drafts
    assert drafts or (choice.reasons, choice.holds) == (("probe",), SETTLING + FEW)


def test_rounds_without_drafts_are_measured_once_there_were_a_few() -> None:
    policy = make_policy(PolicyConfig())
    for drafts, rounds, measured in (
        (0, SETTLING + FEW, True),
        (0, SETTLING + FEW - 1, False),
        (2, SETTLING + FEW, False),
    ):
        _, budget = policy(observe([0.9], rounds=rounds), ProbeBudget(unmeasured=20, drafts=drafts))
        assert budget.unmeasured == (0 if measured else 20 + rounds)


def served(policy: SpecControl, plain_s: float, draft_s: float, rounds: int, prompts_every: int = 0) -> list[int]:
    """The ks of rounds of one sequence, half of whose drafts are accepted. A round with k drafts takes
    plain_s + k · draft_s seconds. prompts_every: rounds from one that also reads 20 tokens of prompts to the next."""
    random, ks = np.random.default_rng(0), []
    for n in range(rounds):
        prefill = 20 if prompts_every and n % prompts_every == 0 else 0
        if policy.rest({0: None}, ["model"]):
            policy.rested(plain_s)
            ks.append(0)
            continue
        k = policy.plan([candidate()], Prefill(prefill)).ks[0]
        accepted = min(k, int(random.geometric(0.5)) - 1)
        score_s = plain_s + prefill * 5e-5 + k * (draft_s - 1e-4)
        timing = Timing(1, k, k, prefill, k, k, k * 1e-4, score_s, 0.0)
        policy.observe(timing, [Drafted(0, "model", k, accepted)] if k else [], [] if k else [0])
        ks.append(k)
    return ks


@pytest.mark.parametrize(("checked", "left_alone"), [(True, True), (False, False)])
def test_a_profile_that_made_plain_rounds_look_dear_is_found_out(
    checked: bool, left_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour was busy while plain rounds were profiled. With drafts, which take what the profile says, rounds are
    slower than without, and the engine would never run a plain round that shows it. The second case does not look."""
    disturbed = [
        Timing(1, k, k, 0, k, k, 1e-4 * k, (1.6e-3 if k == 0 else 1e-3 + 4e-4 * k), 0.0) for k in (0, 1, 2, 4, 8)
    ]
    if not checked:
        monkeypatch.setattr(spec_length, "STALE", 10**9)
    policy = SpecControl(PolicyConfig(), DEPTH, disturbed)
    ks = served(policy, plain_s=0.8e-3, draft_s=7e-4, rounds=200)
    assert (sum(k > 0 for k in ks[100:]) < 10) == left_alone


@pytest.mark.parametrize("prompts_every", [1, 4])
def test_prompts_in_the_rounds_do_not_hide_what_plain_rounds_take(prompts_every: int) -> None:
    """If these rounds did not count as a comparison, all rounds would be spent on one."""
    profiled = [Timing(1, k, k, 0, k, k, 1e-4 * k, 1e-3 + 1e-4 * k, 0.0) for k in (0, 1, 2, 4, 8)]
    policy = SpecControl(PolicyConfig(), DEPTH, profiled)
    ks = served(policy, plain_s=1e-3, draft_s=3e-4, rounds=600, prompts_every=prompts_every)
    assert sum(k == 0 for k in ks) <= 2 * HOLDS


@pytest.mark.parametrize(
    ("chose", "policy_s", "drafts"),
    [(False, 0.0, True), (False, 3e-3, False), (True, 3e-3, True), (True, 2.4e-2, False)],
)
def test_the_policys_own_time_is_a_cost_of_drafts(chose: bool, policy_s: float, drafts: bool) -> None:
    """A choice's is shared by the rounds for which it may be used."""
    policy = SpecControl(PolicyConfig(probe_share=0.0), DEPTH, timings())
    for spends_s in (0.0, policy_s) if chose else (policy_s,):
        policy._chose = chose and spends_s > 0
        for _ in range(32):
            policy.spent(spends_s)
    assert (policy.plan([candidate()]).ks[0] > 0) == drafts


def drafting_s(policy: SpecControl) -> float:
    return policy._observation([candidate()]).cost.drafting_s


@pytest.mark.parametrize(("name", "shared_by"), [("goodput", HOLDS), ("heuristic", 1)])
def test_the_rounds_of_a_choice_share_its_time(name: PolicyName, shared_by: int) -> None:
    """The first rounds with drafts have more choices. They say no less about rounds that go on with drafts."""
    policy = SpecControl(PolicyConfig(name), DEPTH, timings())
    play(policy, [True], 40)
    before = drafting_s(policy)
    for chose, policy_s in ((False, 1e-4), (True, 3e-3), (True, 3e-3)):
        policy._chose = chose
        policy.spent(policy_s)
    assert drafting_s(policy) - before == pytest.approx(1e-4 + (3e-3 - 1e-4) / shared_by)
    assert policy._observation([candidate()]).choice_s == pytest.approx(3e-3 - 1e-4)


@pytest.mark.parametrize(("choice_s", "holds"), [(0.0, HOLDS), (1e-4, HOLDS), (3.1e-4, 12), (2e-3, LONGEST_HOLD)])
def test_a_choice_that_takes_long_is_used_for_longer(choice_s: float, holds: int) -> None:
    """A round takes 1 ms."""
    choice, _ = make_policy(PolicyConfig("goodput"))(observe([0.9], choice_s=choice_s), ProbeBudget())
    assert choice.holds == holds


def test_a_choice_that_guesses_end_has_its_round_alone() -> None:
    policy = control("fixed", k=3)
    for _ in range(FEW):
        policy.plan([candidate(source="lookup", gap=0, offered=3)])
    before = drafting_s(policy)
    policy.spent(3e-3)
    assert drafting_s(policy) - before == pytest.approx(3e-3)


def test_held_rounds_without_drafts_need_no_candidates() -> None:
    """What is decided without them is what is decided with them."""
    one, other = control(probe_share=0.0), control(probe_share=0.0)
    for policy in (one, other):
        while tire(policy).rounds_left < HOLDS - 1 or policy._budget.rounds < 2 * HOLDS:
            play(policy, [False] * 4, 1)
    assert one._held is not None
    assert other._held is not None
    one._held.rest_left = 0
    others: dict[int, int | None] = {0: None, 1: 0, 2: None, 7: None}
    for asked in (FIXED, others, FIXED):
        assert one.plain(asked, MODEL) == other.plan([candidate(handle, fixed=k) for handle, k in asked.items()])
        assert one._held.same_sequences == other._held.same_sequences == (asked is FIXED)
    assert one._held.rounds_left == other._held.rounds_left == HOLDS - 4
    assert one.plain({**FIXED, 1: 3}, MODEL) is None
    assert one.plain(FIXED, [*MODEL[:3], "lookup"]) is None
    one._held.newcomer_k = 2
    assert one.plain(FIXED, MODEL) is None
    one._held.newcomer_k, one._held.decision = 0, replace(one._held.decision, ks=[0, 0, 1, 0])
    assert one.plain(FIXED, MODEL) is None
    other._held.rounds_left = 0
    assert other.plain(FIXED, MODEL) is None


@pytest.mark.parametrize("drafted", [lambda n: n % 2 == 0, lambda n: n < 20])
def test_rounds_in_a_row_are_learned_from(drafted: Callable[[int], bool]) -> None:
    """The first of a kind finds less in the processor's caches. Here it takes twice as long."""
    policy, last = control(), False
    for n in range(40):
        k = 4 if drafted(n) else 0
        slow = 2.0 if (k > 0) != last else 1.0
        last = k > 0
        policy.observe(Timing(1, k, k, 0, k, k, 1e-4 * k, slow * (1e-3 + 2e-5 * (1 + k)), 0.0), [], [0])
    policy.cost.refresh()
    assert float(policy.cost.round_cost(1, 0).verify_s[0]) == pytest.approx(1.02e-3, rel=0.05)
