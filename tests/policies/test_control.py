"""The control around estimator, cost model and policy: what a policy sees of a batch, and that it learns."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from policies.config import PolicyConfig
from policies.control import SpecControl
from policies.held_choice import Decision, HeldChoice
from policies.observation import WINDOW, Candidate, Choice, Drafted, Observation, Prefill, Timing
from policies.spec_length import HOLDS, ProbeBudget

DEPTH = 8


def candidate(handle: int = 0, **changes: object) -> Candidate:
    usual: dict[str, object] = {
        "fixed": None,
        "max_k": None,
        "left": 100,
        "room": 100,
        "source": "model",
        "offered": DEPTH,
        "gap": 1,
    }
    return Candidate(handle, **(usual | changes))  # type: ignore[arg-type]


def timings() -> list[Timing]:
    """A machine whose pass takes 1 ms and 20 µs per token, and whose draft step takes 0.1 ms in any batch."""
    return [
        Timing(b, b * k, k, 0, k, b * k, 1e-4 * k, 1e-3 + 2e-5 * b * (1 + k), 0.0)
        for b in (1, 2, 4, 8)
        for k in (0, 1, 2, 4, 8)
    ]


def control(name: str = "goodput", **changes: object) -> SpecControl:
    return SpecControl(PolicyConfig(name, **changes), DEPTH, timings())  # type: ignore[arg-type]


def play(policy: SpecControl, good: Sequence[bool], rounds: int) -> list[list[int]]:
    """Play rounds in which all drafts of a sequence are accepted, or none. Returns the ks."""
    played = []
    for _ in range(rounds):
        ks = policy.plan([candidate(n) for n in range(len(good))]).ks
        drafted = [Drafted(n, "model", k, k if good[n] else 0) for n, k in enumerate(ks) if k]
        depth, count = max(ks), sum(ks)
        timing = Timing(len(ks), count, depth, 0, depth, count, 1e-4 * depth, 1e-3 + 2e-5 * (len(ks) + count), 0.0)
        policy.observe(timing, drafted, [n for n, k in enumerate(ks) if not k])
        played.append(ks)
    return played


def anew(policy: SpecControl, candidates: Sequence[Candidate], prefill: int = 0) -> Decision:
    """By a new choice, not by one that is still held."""
    policy.configure(policy.config)
    return policy.plan(candidates, Prefill(prefill))


@pytest.mark.parametrize(
    ("changes", "k", "reason"),
    [
        ({"fixed": 3}, 3, "user"),
        ({"fixed": 0}, 0, "user"),
        ({"fixed": 5, "left": 2}, 2, "cap"),
        ({"fixed": 5, "room": 1}, 1, "cache"),
        ({"fixed": 5, "offered": 0, "source": None}, 5, "user"),
        ({"max_k": 2}, 2, "user"),
        ({"max_k": 0}, 0, "user"),
        ({"left": 2}, 2, "cap"),
        ({"left": 0}, 0, "cap"),
        ({"offered": 1}, 1, "cap"),
        ({"source": None, "offered": 0, "gap": 0}, 0, "cap"),
        ({"room": 1}, 1, "cache"),
        ({"room": 0}, 0, "cache"),
        ({"max_k": 2, "room": 1}, 1, "cache"),
        ({"max_k": 2, "left": 1}, 1, "cap"),
    ],
)
def test_what_bounds_k(changes: dict[str, object], k: int, reason: str) -> None:
    """Every draft is accepted, so the sequence would get more."""
    policy = control()
    play(policy, [True], 20)
    decision = anew(policy, [candidate(0, **changes)])
    assert (decision.ks, decision.reasons) == ([k], [reason])


def test_the_operators_maximum() -> None:
    policy = control(max_k=3)
    assert play(policy, [True], 20)[-1] == [3]
    assert policy.plan([candidate(fixed=5)]).ks == [5]  # a request's own k may exceed it


def test_each_sequence_gets_what_its_own_drafts_have_earned() -> None:
    policy = control()
    last = play(policy, [True, False, True, False], 60)[-1]
    assert last[0] >= 4
    assert last[2] >= 4
    assert max(last[1], last[3]) <= 1
    decision = policy.plan([candidate(n) for n in range(4)])
    assert min(decision.alphas[0], decision.alphas[2]) > 0.8 > 0.4 > max(decision.alphas[1], decision.alphas[3])


def test_what_is_expected_of_a_round() -> None:
    policy = control("fixed", k=4)
    play(policy, [True], 100)
    decision = policy.plan([candidate()])
    assert decision.tokens == pytest.approx(5, abs=0.4)
    assert decision.seconds == pytest.approx(4e-4 + 1e-3 + 2e-5 * 5, rel=0.05)


def test_prompts_beside_a_round_do_not_make_drafts_look_cheap() -> None:
    """Drafts that do not pay alone do not pay beside a long prompt. The predicted seconds include the prompt."""
    policy = control()
    play(policy, [True, False], 40)
    alone, beside = (anew(policy, [candidate(2)], prefill) for prefill in (0, 4_000))
    assert beside.ks == alone.ks
    assert beside.seconds - alone.seconds == pytest.approx(4_000 * 2e-5, rel=0.1)


def test_choices_go_by_the_prompts_that_rounds_really_had() -> None:
    """Tokens cost something from the 33rd on. A choice is also used for later rounds, which may have no prompts."""
    steep = [
        Timing(b, b * k, k, 0, k, b * k, 1e-5 * k, 1e-3 + 2e-3 * max(0, b * (1 + k) - 32), 0.0)
        for b in (1, 2, 4, 8)
        for k in (0, 1, 2, 4, 8)
    ]
    policy = SpecControl(PolicyConfig(probe_share=0.0), DEPTH, steep)
    play(policy, [True], 40)
    assert anew(policy, [candidate()], prefill=400).ks == [DEPTH]
    busy = Timing(1, 4, 4, 400, 4, 4, 4e-5, 1e-3 + 2e-3 * (1 + 4 + 400 - 32), 0.0)
    policy.observe(busy, [Drafted(0, "model", 4, 4)])
    assert anew(policy, [candidate()]).ks[0] < DEPTH


def test_another_draft_does_not_inherit_the_rounds_of_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would count as rounds without drafts."""
    policy, seen = control(), list[int]()
    play(policy, [True], 3)
    choose = policy._policy

    def recording(observation: Observation, budget: ProbeBudget) -> tuple[Choice, ProbeBudget]:
        seen.append(observation.rounds)
        return choose(observation, budget)

    monkeypatch.setattr(policy, "_policy", recording)
    policy.begin_draft("model", policy.cost.draft_cost(()))
    policy.plan([candidate()])
    assert seen == [0]


def test_what_was_learned_outlives_a_change_of_policy() -> None:
    policy = control("fixed", k=4)
    play(policy, [False], 40)
    policy.configure(PolicyConfig("goodput", probe_share=0.0))
    assert policy.plan([candidate()]).ks == [0]
    assert control().plan([candidate()]).ks != [0]  # it knows nothing, and tries


def test_a_sequence_that_is_gone_leaves_no_trace_but_in_the_mean() -> None:
    policy = control("fixed", k=4)
    play(policy, [True, False], 40)
    good, bad = policy.plan([candidate(0), candidate(1)]).alphas
    for handle in (0, 1, 1):
        policy.forget(handle)
    again = anew(policy, [candidate(0), candidate(1)]).alphas
    assert again[0] == again[1]
    assert bad < again[0] < good


def sure(policy: SpecControl, rounds: int, handles: Sequence[int] = (0, 1), **changes: object) -> list[list[int]]:
    """Returns the ks of rounds from which nothing is learned."""
    return [policy.plan([candidate(n, **changes) for n in handles]).ks for _ in range(rounds)]


def test_a_choice_is_used_for_a_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = control(probe_share=0.0)
    play(policy, [True, True], 40)
    made: list[Observation] = []
    choose = policy._policy
    policy.configure(policy.config)

    def spy(observation: Observation, budget: ProbeBudget) -> tuple[Choice, ProbeBudget]:
        made.append(observation)
        return choose(observation, budget)

    monkeypatch.setattr(policy, "_policy", spy)
    sure(policy, 2 * HOLDS)
    assert len(made) == 2


def test_a_choice_that_turns_out_wrong_is_made_anew() -> None:
    """All drafts are suddenly rejected."""
    policy = control(probe_share=0.0)
    play(policy, [True, True], 40)
    anew(policy, [candidate(0), candidate(1)])
    rejected = play(policy, [False, False], HOLDS)
    assert min(rejected[0]) == DEPTH
    assert max(rejected[3]) < DEPTH // 2


@pytest.mark.parametrize(
    ("tokens", "accepted", "surprised"),
    [(6, 1, False), (6, 0, True), (6, 8, False), (6, 9, True), (4, 1, False), (4, 0, True), (3, 0, False)],
)
def test_what_is_no_surprise(tokens: float, accepted: int, surprised: bool) -> None:
    """Less than half or more than twice as many accepted drafts as expected are one, unless chance explains it or fewer
    than two were expected."""
    decision = Decision([4, 4], [None] * 2, ["policy", "policy"], [0.5, 0.5], 0.0, 1e-3, tokens)
    held = HeldChoice(decision, {0: 0, 1: 1}, frozenset(["model"]), 0, HOLDS)
    held.observe(accepted)
    assert held.rounds_left == (0 if surprised else HOLDS)


@pytest.mark.parametrize(("accepted", "surprised"), [(11, False), (9, True), (39, False), (41, True)])
def test_many_rounds_surprise_beyond_a_factor_of_two(accepted: int, surprised: bool) -> None:
    """Two drafts are expected of each of ten rounds. The standard deviation is 6.3."""
    decision = Decision([4, 4], [None] * 2, ["policy", "policy"], [0.5, 0.5], 0.0, 1e-3, 4.0)
    held = HeldChoice(decision, {0: 0, 1: 1}, frozenset(["model"]), 0, HOLDS, expected=18.0, drafting=18)
    held.observe(accepted)
    assert (held.rounds_left == 0) == surprised


@pytest.mark.parametrize("rounds", [1, 2])
def test_one_round_of_one_sequence_is_chance(rounds: int) -> None:
    """Where three of six drafts are accepted on average, none are in some rounds. Two such rounds are a surprise."""
    decision = Decision([6], [None], ["policy"], [0.75], 0.0, 1e-3, 4.0)
    held = HeldChoice(decision, {0: 0}, frozenset(["model"]), 0, HOLDS)
    for _ in range(rounds):
        held.observe(0)
    assert (held.rounds_left == 0) == (rounds == 2)


@pytest.mark.parametrize(("name", "again"), [("fixed", HOLDS - 2), ("confidence", HOLDS - 2), ("goodput", 0)])
def test_only_goodput_chooses_anew_after_a_surprise(name: str, again: int) -> None:
    """The other policies give the same k whatever is accepted."""
    policy = control(name, probe_share=0.0)
    play(policy, [True, True], 40)
    anew(policy, [candidate(0), candidate(1)])
    play(policy, [False, False], 1)
    held = policy._held
    assert held is not None
    assert held.rounds_left == again


def test_a_choice_is_used_within_todays_limits() -> None:
    policy = control()
    play(policy, [True, False], 40)
    first = anew(policy, [candidate(0), candidate(1)])
    again = policy.plan([candidate(0, left=1), candidate(1)])
    assert again.ks == [1, first.ks[1]]
    assert again.reasons == ["cap", first.reasons[1]]
    assert policy.plan([candidate(1), candidate(0, fixed=3)]).ks == [first.ks[1], 3]  # in any order


def test_a_probe_is_not_the_plan() -> None:
    """The next choice is compared with the plan, which gave the probed sequence no drafts."""
    decision = Decision([4, 0, 3], [None] * 3, ["probe", "acceptance", "user"], [0.1] * 3, 0.0, 1e-3, 3.0)
    held = HeldChoice(decision, {7: 0, 8: 1, 9: 2}, frozenset(["model"]), 0, 0)
    assert planned(held, candidate(9, fixed=3), candidate(8), candidate(7)) == [3, 0, 0]


def planned(held: HeldChoice, *candidates: Candidate) -> list[int] | None:
    plan = held.planned(candidates, DEPTH)
    return None if plan is None else plan[0].tolist()


def test_the_last_plan_is_compared_with_the_next_one_of_the_same_sequences_within_their_limits() -> None:
    decision = Decision([3, 3], [None] * 2, ["acceptance"] * 2, [0.5] * 2, 0.0, 1e-3, 3.0)
    held = HeldChoice(decision, {0: 0, 1: 1}, frozenset(["model"]), 0, 0)
    assert planned(held, candidate(0, left=2), candidate(1)) == [2, 3]
    assert planned(held, candidate(0), candidate(1, fixed=1)) == [3, 1]
    for others in ((0,), (0, 1, 2), (0, 2)):
        assert planned(held, *map(candidate, others)) is None


def test_newcomers_get_the_middle_k_of_the_plan() -> None:
    """Among few sequences a newcomer makes a new choice due. In a larger batch it waits for the next one."""
    policy = control(probe_share=0.0)
    last = play(policy, [True, True, True, False], 60)[-1]
    anew(policy, [candidate(n) for n in range(4)])
    assert last[3] == 0
    (joined,) = sure(policy, 1, (0, 1, 2, 3, 7))
    assert joined[4] == DEPTH


@pytest.mark.parametrize(("before", "asked"), [(1, True), (2, False), (4, False)])
def test_less_than_half_join_without_a_new_choice(before: int, asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = control("fixed", k=3)
    policy.plan([candidate(n) for n in range(before)])
    choose, made = policy._policy, list[Observation]()

    def spy(observation: Observation, budget: ProbeBudget) -> tuple[Choice, ProbeBudget]:
        made.append(observation)
        return choose(observation, budget)

    monkeypatch.setattr(policy, "_policy", spy)
    assert policy.plan([candidate(n) for n in range(before + 1)]).ks == [3] * (before + 1)
    assert bool(made) == asked


def test_a_newcomer_gets_the_k_of_a_fixed_policy_at_once() -> None:
    policy = control("fixed", k=3)
    assert sure(policy, 1) == [[3, 3]]
    assert sure(policy, 1, (0, 1, 7)) == [[3, 3, 3]]


def test_guesses_are_chosen_about_in_every_round() -> None:
    """The offer differs from round to round."""
    policy = control()
    play(policy, [True], 20)
    offered = [policy.plan([candidate(source="lookup", gap=0, offered=n)]).ks for n in (8, 0, 3, 8)]
    assert offered == [[8], [0], [3], [8]]


def test_what_was_chosen_for_a_guess_is_not_used_for_a_models_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = control()
    play(policy, [True], 20)
    policy.plan([candidate(source="lookup", gap=0, offered=8)])
    choose, made = policy._policy, list[Observation]()

    def spy(observation: Observation, budget: ProbeBudget) -> tuple[Choice, ProbeBudget]:
        made.append(observation)
        return choose(observation, budget)

    monkeypatch.setattr(policy, "_policy", spy)
    policy.plan([candidate(gap=300)])
    assert [o.gaps.tolist() for o in made] == [[300]]


def test_a_request_that_fixes_its_k_does_not_end_probes() -> None:
    """It may have another drafter, or one without an offer."""

    def probes(**companion: object) -> int:
        policy, found = control(), 0
        play(policy, [False], 40)
        for _ in range(400):
            decision = policy.plan([candidate(0), candidate(1, **companion)])
            found += "probe" in decision.reasons
            k = decision.ks[0]
            drafted = [Drafted(0, "model", k, 0)] if k else []
            policy.observe(Timing(2, k, k, 0, k, k, 1e-4 * k, 1e-3 + 2e-5 * (2 + k), 0.0), drafted, [0, 1])
        return found

    assert probes(fixed=0, source=None, offered=0, gap=0) > 0
    assert probes(fixed=4, source=None, offered=0, gap=0) > 0


def test_expectations_are_of_those_for_whom_they_were_made() -> None:
    policy = control("fixed", k=4)
    both = policy.plan([candidate(0), candidate(1)])
    assert both.tokens > 2
    assert both.seconds > 0
    again = policy.plan([candidate(0), candidate(1)])
    assert (again.tokens, again.seconds) == (both.tokens, both.seconds)
    one = policy.plan([candidate(0)])
    assert (one.tokens, one.seconds) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("prefill", "drafts"),
    [
        (Prefill(), True),
        (Prefill(tokens=8, sequences=1, passes=1), True),  # the choice goes on for three
        (Prefill(tokens=8, sequences=2, passes=1), False),
        (Prefill(tokens=8, sequences=2, passes=100), True),
    ],
)
def test_a_gap_must_pay_until_the_batch_doubles(prefill: Prefill, drafts: bool) -> None:
    reading = [Timing(b, b, 1, 0, 1, 64 * b, 1e-4 + 64e-5 * b, 1e-3 + 4e-5 * b, 0.0) for b in (1, 2, 4, 8)]
    policy = SpecControl(PolicyConfig(), DEPTH, [*timings(), *reading])
    assert any(policy.plan([candidate(n, gap=300) for n in range(2)], prefill).ks) == drafts


@pytest.mark.parametrize(("passes", "gap"), [(1, 300), (3, 900)])
def test_a_choice_ends_when_the_batch_should_have_doubled(passes: int, gap: int) -> None:
    """A request whose prompt was being read may be cancelled. Nobody rests for it."""
    reading = [Timing(b, b, 1, 0, 1, 64 * b, 1e-4 + 64e-5 * b, 1e-3 + 4e-5 * b, 0.0) for b in (1, 2, 4, 8)]
    policy = SpecControl(PolicyConfig(), DEPTH, [*timings(), *reading])
    for _ in range(2):  # the second choice might rest
        decision = policy.plan([candidate(gap=gap)], Prefill(tokens=8, sequences=1, passes=passes))
        assert decision.ks == [0]
        assert decision.reasons == ["load"]  # by itself it would get drafts
        assert policy.rest({0: None}, ["model"]) is None
        held = [policy.plain({0: None}, ["model"]) is not None for _ in range(HOLDS)]
        assert sum(held) == passes - 1
        policy._budget = replace(policy._budget, rounds=2 * HOLDS)
    assert any(policy.plan([candidate(gap=gap)]).ks)


def test_off_rests_whoever_joins() -> None:
    policy = control("off")
    policy.plan([candidate()], Prefill(tokens=8, sequences=4, passes=1))
    assert policy.rest({0: None}, ["model"]) is not None


@pytest.mark.parametrize(("gap", "prefill"), [(400, 0), (1, 4_000)])
def test_a_choice_that_is_used_again_expects_neither_prompts_nor_gaps(gap: int, prefill: int) -> None:
    reading = [Timing(b, b, 1, 0, 1, 64 * b, 1e-4 + 64e-5 * b, 1e-3 + 4e-5 * b, 0.0) for b in (1, 2, 4, 8)]
    policy = SpecControl(PolicyConfig("fixed", k=4), DEPTH, [*timings(), *reading])
    first = policy.plan([candidate(gap=gap)], Prefill(prefill))
    again = policy.plan([candidate()])
    usual = anew(policy, [candidate()], 0).seconds
    assert first.seconds > 2 * usual
    assert again.ks == first.ks
    assert again.seconds == pytest.approx(usual, rel=0.1)


def test_a_crowd_that_joins_makes_a_new_choice_due() -> None:
    policy = control()
    play(policy, [True], 40)
    assert anew(policy, [candidate(0)]).ks == [DEPTH]
    crowd = [candidate(0), *(candidate(n, gap=300) for n in range(1, 8))]
    assert policy.plan(crowd).tokens > 0  # chosen for them


def test_what_happened_where_nothing_is_chosen_is_learned_from_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that only read prompts do not pile up."""
    policy = control()
    learned: list[Timing] = []
    monkeypatch.setattr(policy.cost, "observe", learned.append)
    for _ in range(WINDOW):
        policy.observe(Timing(1, 0, 0, 50, 0, 0, 0.0, 2e-3, 0.0), [], [0])
    assert len(learned) == WINDOW


def test_no_candidates_and_no_drafts_at_all() -> None:
    assert control().plan([]).ks == []
    nothing = SpecControl(PolicyConfig(), 0)
    decision = nothing.plan([candidate(source=None, offered=0, gap=0)])
    assert (decision.ks, decision.reasons, decision.tokens) == ([0], ["cap"], 1.0)
