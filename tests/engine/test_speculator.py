"""The policy in the engine: what it sees, that its k is drafted, and that records give the reason."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import count
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.config import ConfigError
from engine.drafters.base import Offer
from engine.engine import MOST_REPEATS, Engine
from engine.models.decoder import Decoder
from engine.models.feeds import Feed
from engine.sequence import Sequence
from engine.types import InvalidRequest, Request, RequestRecord, SamplingParams, acceptance_of
from policies.config import REASONS, PolicyConfig, Reason
from policies.cost import CostModel
from policies.held_choice import Decision, HeldChoice
from policies.observation import Candidate, Drafted, Prefill, RoundCost, Timing
from tests.engine.driving import Drive, drive, load, model_drafter
from tests.engine.fresh import memory
from tests.engine.pairs import Pair
from tests.examples import in_proofs, usual_and_proofs

pytestmark = pytest.mark.usefixtures("shared_weights")

PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
PROMPTS = ((5, 6, 7), (8, 9), (10, 11, 12, 13))
POLICIES = ("off", "fixed", "heuristic", "optimal", "confidence", "goodput")


def requests(params: SamplingParams = PARAMS, **changes: object) -> list[Request]:
    return [Request(f"r{n}", prompt, params, **changes) for n, prompt in enumerate(PROMPTS)]  # type: ignore[arg-type]


def records(run: Drive) -> list[RequestRecord]:
    return [told.record for told in run.received.values() if told.record is not None]


def reasons(record: RequestRecord) -> set[Reason | None]:
    return {None if code < 0 else REASONS[code] for code in record.column("reason")}


@pytest.mark.parametrize("name", usual_and_proofs(POLICIES, ("confidence", "goodput")))
def test_the_text_is_the_same_whatever_the_policy(pair: Pair, name: str) -> None:
    plain = drive(load(pair), requests(k=0)).tokens
    run = drive(load(pair, policy=PolicyConfig(name, k=3)), requests())  # type: ignore[arg-type]
    assert run.tokens == plain
    if name not in ("optimal", "goodput"):  # these two depend on the clock
        assert (run.drafted > 0) == (name != "off")


def test_a_draft_that_is_always_right_is_trusted_more_than_one_that_is_not(pair: Pair, twins: Pair) -> None:
    """Two drafts of the same cost: the target itself, and one that agrees now and then."""
    params = replace(PARAMS, max_tokens=60)
    means = []
    for models in (twins, pair):
        run = drive(load(models, policy=PolicyConfig("heuristic", k=2)), requests(params))
        planned = [k for record in records(run) for k in record.column("k")[4:-2]]
        means.append(sum(planned) / len(planned))
    assert means[0] > 2 * means[1]


def test_what_the_policy_expects_is_what_happens(twins: Pair) -> None:
    """Drafts are always right: the policy expects all tokens after some rounds of learning."""
    engine = load(twins, policy=PolicyConfig("fixed", k=3), max_running=1)
    drive(engine, [Request("before", (8, 9), replace(PARAMS, max_tokens=90))])
    run = drive(engine, [Request("r", (5, 6, 7), replace(PARAMS, max_tokens=80))])
    settled = [s for s in run.steps[10:-2] if s.decoding]
    assert len(settled) > 5
    assert all(s.predicted_tokens == pytest.approx(s.emitted, rel=0.1) for s in settled)
    assert all(s.predicted_us > 0 for s in settled)
    (record,) = records(run)
    assert min(record.column("alpha")[10:]) > 850
    assert all(s.policy_us <= s.step_us for s in run.steps)


def test_why_k_was_what_it_was(pair: Pair) -> None:
    run = drive(load(pair, policy=PolicyConfig("fixed", k=3)), [*requests(k=2), Request("auto", (5, 6), PARAMS)])
    fixed, *_, auto = records(run)
    assert fixed.fixed_k == 2
    assert auto.fixed_k is None
    assert fixed.rounds[0].reason == auto.rounds[0].reason == -1  # the round that ends a prompt drafts nothing
    assert reasons(fixed) <= {None, "user", "cap"}
    assert reasons(auto) <= {None, "policy", "cap"}
    codes, decisions = auto.column("reason"), acceptance_of(auto).decisions
    assert decisions == {
        name: codes.count(REASONS.index(name)) for name in ("policy", "cap") if REASONS.index(name) in codes
    }
    assert sum(decisions.values()) == len(codes) - 1


def test_no_more_than_what_is_left_to_say(twins: Pair) -> None:
    run = drive(load(twins, policy=PolicyConfig("fixed", k=5)), [Request("r", (5, 6), replace(PARAMS, max_tokens=9))])
    (record,) = records(run)
    assert record.column("k") == [0, 5, 1]
    assert [None if c < 0 else REASONS[c] for c in record.column("reason")] == [None, "policy", "cap"]


def test_a_requests_own_maximum(twins: Pair) -> None:
    run = drive(load(twins, policy=PolicyConfig("fixed", k=5)), [*requests(max_k=2), Request("free", (5, 6), PARAMS)])
    *capped, free = records(run)
    assert all(max(record.column("k")) == 2 and record.k_max == 2 for record in capped)
    assert all("user" in reasons(record) for record in capped)
    assert max(free.column("k")) == 5


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_k": -1}, "speculation.max_k"),
        ({"max_k": 17}, "speculation.max_k"),
        ({"k": 2, "max_k": 2}, "speculation.max_k"),
        ({"k": 0, "max_k": 2}, "speculation.max_k"),
    ],
)
def test_a_maximum_that_cannot_act_is_refused(pair: Pair, changes: dict[str, int], param: str) -> None:
    engine = load(pair)
    with pytest.raises(InvalidRequest) as caught:
        engine.check(Request("r", (5,), PARAMS, **changes))  # type: ignore[arg-type]
    assert caught.value.param == param
    engine.check(Request("r", (5,), PARAMS, max_k=16))


def test_memory_is_named_where_it_was_the_reason(twins: Pair) -> None:
    engine = load(
        twins, policy=PolicyConfig("fixed", k=5), max_running=4, max_model_len=48, kv_tokens=64, block_size=4,
        cache="paged", prefix_cache=False,
    )  # fmt: skip
    run = drive(engine, [Request(f"r{n}", (5 + n, 6), replace(PARAMS, max_tokens=40)) for n in range(4)])
    assert any("cache" in reasons(record) for record in records(run))
    roomy = drive(load(twins, policy=PolicyConfig("fixed", k=5)), requests())
    assert not any("cache" in reasons(record) for record in records(roomy))


def test_the_policy_names_memory_as_its_reason(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a policy's k and for a request's own. The scheduler has no part in it."""
    engine = load(pair, policy=PolicyConfig("fixed", k=3))
    for name, k in (("policy", None), ("own", 3)):
        engine.submit(Request(name, (5, 6, 7), PARAMS, k))
    engine.step()
    sequences = engine.scheduler.running
    assert len(sequences) == 2
    for room, ks, reasons_of_both in ((100, (3, 3), {"policy", "user"}), (2, (1, 1), {"cache"})):
        monkeypatch.setattr(engine.target.cache, "room", lambda handle, room=room: room)
        decision = engine.speculator.plan(sequences, Prefill())
        assert tuple(decision.ks) == ks
        assert set(decision.reasons) == reasons_of_both
    monkeypatch.undo()
    engine.cancel_all()


def test_a_policy_is_replaced_while_sequences_run(twins: Pair) -> None:
    plain = drive(load(twins), requests(k=0)).tokens
    engine = load(twins, policy=PolicyConfig("fixed", k=2))
    switches = {4: PolicyConfig("off"), 7: PolicyConfig("fixed", k=4)}

    def switch() -> None:
        if engine.steps in switches:
            engine.configure(switches[engine.steps])
            assert engine.policy == switches[engine.steps]

    run = drive(engine, requests(), after_step=switch)
    assert run.tokens == plain
    for record in records(run):
        planned = dict(zip(record.column("step"), record.column("k"), strict=True))
        assert [planned[n] for n in (2, 3, 4, 5, 6, 7, 8)] == [2, 2, 2, 0, 0, 0, 4]
        assert record.policy == "fixed"
    late = drive(engine, [Request("late", (5,), PARAMS)])
    assert max(records(late)[0].column("k")) == 4


def test_a_policy_that_does_not_fit_changes_nothing(pair: Pair) -> None:
    engine = load(pair, policy=PolicyConfig("fixed", k=2), max_spec_length=4)
    with pytest.raises(ConfigError, match="k 5 exceeds max_spec_length, which is 4"):
        engine.configure(PolicyConfig("fixed", k=5))
    assert engine.policy == PolicyConfig("fixed", k=2)


def test_the_policy_sees_what_there_is(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates of a round: one per decoding sequence, with its limits and the draft's gap."""
    engine = load(pair, policy=PolicyConfig("fixed", k=3))
    seen: list[list[Candidate]] = []
    plan = engine.speculator.control.plan

    def spy(candidates: Seq[Candidate], prefill: Prefill) -> Decision:
        seen.append(list(candidates))
        return plan(candidates, prefill)

    monkeypatch.setattr(engine.speculator.control, "plan", spy)
    short = replace(PARAMS, max_tokens=3, temperature=0.0)
    asked = [Request("a", (5, 6, 7), short, max_k=2), Request("b", (5, 6), PARAMS, k=0), Request("c", (5,), short, k=1)]
    drive(engine, asked)
    a, b, c = seen[0]
    assert (a.fixed, a.max_k, a.left, a.source, a.offered, a.gap) == (None, 2, 1, "model", 1, 4)
    assert (b.fixed, b.source, b.gap) == (0, None, 0)
    assert (c.fixed, c.source, c.offered, c.gap) == (1, "model", 1, 2)
    assert all(len(handles) == len(set(handles)) for handles in ([s.handle for s in batch] for batch in seen))


def test_rounds_are_timed_for_the_cost_model(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(pair, policy=PolicyConfig("fixed", k=3), max_running=2)
    seen: list[Timing] = []
    observe = engine.speculator.control.observe

    def spy(timing: Timing, drafted: Seq[Drafted], idle: Iterable[int]) -> None:
        seen.append(timing)
        observe(timing, drafted, idle)

    monkeypatch.setattr(engine.speculator.control, "observe", spy)
    run = drive(engine, {0: [Request("a", (5, 6, 7), PARAMS)], 3: [Request("b", tuple(range(5, 45)), PARAMS, k=0)]})
    first, second = seen[:2]
    assert (first.batch, first.drafts, first.depth, first.prefill, first.forwards, first.read) == (1, 0, 0, 2, 0, 0)
    assert (second.batch, second.drafts, second.depth, second.prefill) == (1, 3, 3, 0)
    assert (second.forwards, second.read) == (3, 4 + 2)  # the prompt and the first token, then a token each
    assert any(t.prefill >= 39 for t in seen[2:])
    assert [t.drafts for t in seen] == [s.drafted for s in run.steps]
    for timing, step in zip(seen, run.steps, strict=True):
        assert round(timing.draft_s * 1e6) == step.draft_us
        assert round(timing.score_s * 1e6) == step.score_us
        assert 0 <= timing.host_s * 1e6 <= step.step_us


def test_a_pass_that_was_lost_teaches_nothing_of_the_hosts_work(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the estimate of plain decoding would take in what failed drafts cost, and show no loss."""
    engine = load(pair, max_spec_length=2)
    run, timings = engine.target.run, list[Timing]()
    failed: list[bool] = []

    def fail_once(feeds: Seq[Feed], drafts: Tensor | None = None) -> Tensor:
        if drafts is not None and not failed:
            failed.append(True)
            raise RuntimeError("planted")
        return run(feeds, drafts)

    monkeypatch.setattr(engine.target, "run", fail_once)
    monkeypatch.setattr(engine.speculator.control, "observe", lambda timing, *_: timings.append(timing))
    drive(engine, requests(k=2)[:1])
    assert failed
    assert [timing.host_s > 0 for timing in timings].count(False) == 1


def test_nothing_is_kept_of_sequences_that_are_gone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(pair, policy=PolicyConfig("goodput"))
    forgotten: list[int] = []
    monkeypatch.setattr(engine.speculator.control, "forget", forgotten.append)
    drive(engine, requests(), cancels={3: ["r1"]})
    assert sorted(forgotten) == [0, 1, 2]


def profiled(engine: Engine) -> Seq[Timing]:
    return engine.speculator.control.timings


@pytest.mark.usefixtures("full_profile")
def test_costs_are_measured_at_the_start(pair: Pair) -> None:
    timings = profiled(load(pair, max_running=4, max_spec_length=4))
    assert {t.batch for t in timings} >= {1, 2, 4}
    assert {t.depth for t in timings} >= {0, 1, 2, 4}
    assert all(t.score_s > 0 and (t.draft_s > 0) == (t.drafts > 0) for t in timings)


class Priced(CostModel):
    """A pass takes 2 ms and 20 µs per token, a forward of the draft 0.1 ms, a token that it reads 2 µs."""

    def round_cost(self, batch: int, prefill: int) -> RoundCost:
        verify = 2e-3 + 2e-5 * (batch + prefill + np.arange(1.0 + batch * 16))
        return RoundCost(0.0, 0.0, 0.0, 1e-4, 2e-6, verify, np.zeros(17))

    def observe(self, timing: Timing) -> None:
        pass


def priced(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace measured times, so that the policy does not depend on the clock."""
    control = engine.speculator.control
    control.cost = Priced(16)
    observe = control.observe

    def timeless(timing: Timing, drafted: Seq[Drafted], idle: Iterable[int] = ()) -> None:
        observe(replace(timing, draft_s=0.0, score_s=2e-3, host_s=0.0), drafted, idle)

    monkeypatch.setattr(control, "observe", timeless)
    monkeypatch.setattr(control, "spent", lambda policy_s: None)  # what choosing takes is part of a round's price


def drafts_per_round(engine: Engine, changes: dict[int, Callable[[], None]], rounds: int) -> list[float]:
    """Mean drafts of a decoding sequence in each round, with four at a time. changes: round → call before it."""
    numbers, drafts = count(), list[float]()
    while len(drafts) < rounds:
        while len(engine.scheduler.running) + len(engine.scheduler.waiting) < 4:
            n = next(numbers)
            engine.submit(Request(str(n), (5 + n % 50, 6 + n // 50), replace(PARAMS, seed=n, max_tokens=90)))
        if len(drafts) in changes:
            changes.pop(len(drafts))()
        stats = engine.step().stats
        if stats.decoding:
            drafts.append(stats.drafted / stats.decoding)
    return drafts


@pytest.mark.proofs
def test_a_draft_model_gone_bad_is_left_alone_and_taken_up_again(
    twins: Pair, monkeypatch: pytest.MonkeyPatch, shared_weights: dict[Any, Any]
) -> None:
    """Left alone within 20 rounds, used again within 200 after its repair. In between, newcomers try it briefly."""
    shared_weights.clear()
    engine = load(twins, policy=PolicyConfig("goodput"), max_running=4, max_spec_length=8)
    shared_weights.clear()  # nobody else gets the weights that are spoiled here
    priced(engine, monkeypatch)
    decoder = model_drafter(engine).runner.decoder
    assert isinstance(decoder, Decoder)
    table = decoder.embedding
    good = table.clone()

    def spoil() -> None:
        table.copy_(torch.randn(table.shape, generator=torch.Generator().manual_seed(0), dtype=table.dtype))

    def repair() -> None:
        table.copy_(good)

    changes = {60: spoil, 120: repair}  # after the rounds that measure plain ones
    drafts = drafts_per_round(engine, changes, 335)
    assert not changes
    usual = mean(drafts[45:60])
    assert usual > 4
    assert min(drafts[60:80]) == 0
    assert mean(drafts[80:120]) < 0.15 * usual
    assert mean(drafts[320:]) > 0.8 * usual


def test_a_drafter_that_always_fails_is_left_alone(twins: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round that asks it costs an attempt and a traceback."""
    engine = load(twins, policy=PolicyConfig("goodput"), max_running=1)
    priced(engine, monkeypatch)

    def fail(*args: object) -> None:
        raise RuntimeError("no drafts today")

    monkeypatch.setattr(model_drafter(engine), "propose", fail)
    run = drive(engine, [Request("r", (5, 6), replace(PARAMS, max_tokens=60))])
    planned = records(run)[0].column("k")
    assert max(planned[1:4]) > 0
    assert sum(k > 0 for k in planned[30:]) <= 5


@pytest.mark.parametrize(("name", "asked"), [("off", False), ("fixed", False), ("goodput", False), ("heuristic", True)])
def test_a_rest_runs_no_policy_code(pair: Pair, name: str, asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `off`, and while a rest of goodput lasts. The text is the same."""
    prompts = [Request(str(n), (5 + n, 6), replace(PARAMS, max_tokens=24)) for n in range(2)]
    plain = drive(load(pair), [replace(request, k=0) for request in prompts]).tokens
    engine = load(pair, policy=PolicyConfig(name, k=0), max_running=2)  # type: ignore[arg-type]
    control, calls = engine.speculator.control, list[str]()
    if name == "goodput":
        decision = Decision([0, 0], [None, None], ["acceptance"] * 2, [0.1, 0.1], 0.0, 2e-3, 2.0)
        control._held = HeldChoice(decision, {0: 0, 1: 1}, frozenset(["model"]), 0, 0, rest_left=200)
    monkeypatch.setattr(control, "observe", lambda *_: calls.append("observe"))
    plan = control.plan

    def asked_to_plan(candidates: Seq[Candidate], prefill: Prefill) -> Decision:
        calls.append("plan")
        return plan(candidates, prefill)

    monkeypatch.setattr(control, "plan", asked_to_plan)
    run = drive(engine, prompts, after_step=lambda: calls.clear() if engine.steps == 2 else None)
    assert run.tokens == plain
    assert len(calls) <= 8 if name == "goodput" else (len(calls) > 20) == asked
    if name in ("off", "fixed"):
        assert not calls
        assert all(step.policy_us == 0 for step in run.steps[2:])
    if name == "goodput":
        assert control._held is not None
        assert control._rested == 200 - control._held.rest_left >= 20
        assert control._since_choice.seconds > 0


def test_held_rounds_without_drafts_are_observed_and_nobody_is_asked(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(pair, policy=PolicyConfig("goodput"), max_running=2)
    control, calls = engine.speculator.control, list[str]()
    decision = Decision([0, 0], [None, None], ["acceptance"] * 2, [0.1, 0.1], 0.0, 2e-3, 2.0)
    control._held = HeldChoice(decision, {0: 0, 1: 1}, frozenset(["model"]), 0, 200)
    monkeypatch.setattr(control, "observe", lambda *_: calls.append("observe"))
    monkeypatch.setattr(control, "plan", lambda *_: pytest.fail("the choice holds"))
    monkeypatch.setattr(engine.drafter, "offer", lambda *_: pytest.fail("the choice holds"))
    run = drive(engine, [Request(str(n), (5 + n, 6), replace(PARAMS, max_tokens=24)) for n in range(2)])
    assert not any(max(part.column("k"), default=0) for part in records(run))
    assert len(calls) == len(run.steps)
    assert control._held.rounds_left == 200 - (len(run.steps) - 1)  # the first step reads the prompts


@pytest.mark.parametrize(("drafter", "always"), [("model", False), ("lookup", True)])
def test_a_kept_choice_asks_no_draft_model(
    pair: Pair, drafter: str, always: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model always has drafts. What look-up has differs from round to round."""
    request = Request("r", (5, 6, 7) * 4, replace(PARAMS, temperature=0.0), drafter=drafter)  # type: ignore[arg-type]
    plain = drive(load(pair), [replace(request, k=0)]).tokens
    engine = load(pair, policy=PolicyConfig("fixed", k=3))
    asked, offer = list[int](), engine.drafter.offer

    def counted(sequence: Sequence, k: int) -> Offer:
        asked.append(k)
        return offer(sequence, k)

    monkeypatch.setattr(engine.drafter, "offer", counted)
    run = drive(engine, [request])
    assert run.tokens == plain
    rounds = len(records(run)[0].column("k"))
    assert (len(asked) >= rounds - 2) == always
    assert len(asked) <= 1 + rounds // 4 or always


@pytest.mark.usefixtures("full_profile")
@pytest.mark.parametrize(("factor", "repeats"), [(10.0, 1), (1.0, 0)])
def test_a_disturbed_profile_is_repeated_when_the_engine_is_idle(
    pair: Pair, factor: float, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rounds that are served disagree with it: those with two drafts take less than it says, the others as long."""
    shapes = [Timing(1, k, k, 0, k, k, 1e-4 * k, (1 + 0.1 * k) * 1e-3, 0.0) for k in (0, 1, 2)]
    profiles = list[dict[str, object]]()

    def scripted(*_: object, **how: object) -> list[Timing]:
        profiles.append(how)
        if len(profiles) > 1:
            return shapes
        return [replace(t, score_s=t.score_s * (factor if t.drafts > 1 else 1)) for t in shapes]

    monkeypatch.setattr("engine.engine.profile", scripted)
    engine = load(pair, max_spec_length=2, max_running=1)
    control = engine.speculator.control
    for shape in (shapes[0], shapes[2]) * 2:
        for _ in range(8):
            control.cost.observe(shape)
    control.cost.refresh()
    engine.repeat_profile(lambda: False)
    assert len(profiles) == 1 + repeats
    assert [how.get("kept") for how in profiles[1:]] == [False] * repeats
    assert control.cost.misfit < 1.05
    assert control.timings == tuple(shapes)
    assert float(control.cost.round_cost(1, 0).verify_s[0]) == pytest.approx(1e-3, rel=0.05)
    engine.repeat_profile(lambda: False)
    assert len(profiles) == 1 + repeats, "it fits"


def test_a_profile_that_is_interrupted_changes_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(pair, max_spec_length=2, max_running=1)
    control, before = engine.speculator.control, engine.speculator.control.timings
    monkeypatch.setattr(CostModel, "misfit", 9.0)
    monkeypatch.setattr("engine.engine.PROFILE_S", 60.0)
    looks = count()
    engine.repeat_profile(lambda: next(looks) > 3)
    assert control.timings is before
    engine.repeat_profile(lambda: False)
    assert len(control.timings) > len(before)
    assert engine.target.cache.used == 0


@pytest.mark.usefixtures("full_profile")
@pytest.mark.parametrize("kind", ["mapped", *in_proofs("gathered")])
def test_a_repeated_profile_leaves_the_prefixes_of_requests_and_keeps_what_it_did_not_reach(
    pair: Pair, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(pair, max_spec_length=2, max_running=4, **memory(kind, 112))
    prompt = tuple(5 + i % 20 for i in range(80))
    asked = [Request(name, prompt, SamplingParams(temperature=0.0, max_tokens=4)) for name in "ab"]
    drive(engine, {0: asked[:1]})
    control = engine.speculator.control
    before = {(t.batch, t.drafts, t.depth): t.score_s for t in control.timings}
    slower = [replace(t, score_s=1e6 * t.score_s) for t in control.timings]
    control.begin(slower)
    monkeypatch.setattr(CostModel, "misfit", 9.0)
    monkeypatch.setattr("engine.engine.PROFILE_S", 60.0)
    engine.repeat_profile(lambda: False)
    after = {(t.batch, t.drafts, t.depth): t.score_s for t in control.timings}
    assert after.keys() == before.keys(), "fewer shapes fit beside the prefixes than at the start"
    assert all(seconds < 1e4 * before[shape] for shape, seconds in after.items())
    record = drive(engine, {0: asked[1:]}).received["b"].record
    assert record is not None
    assert record.cached_tokens > 60


def test_a_profile_that_fails_leaves_the_engine_as_it_was(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(pair, max_spec_length=2, max_running=1)
    tries = list[bool]()

    def failing(*_: object, **how: object) -> list[Timing]:
        tries.append(True)
        raise RuntimeError("planted")

    monkeypatch.setattr(CostModel, "misfit", 9.0)
    monkeypatch.setattr("engine.engine.profile", failing)
    before = engine.speculator.control.timings
    for _ in range(10):
        engine.repeat_profile(lambda: False)
    assert engine.speculator.control.timings is before
    assert len(tries) == MOST_REPEATS
    assert drive(engine, requests(k=2)[:1]).tokens
