"""Taking memory back costs time and nothing else: no token, no text, no log-probability is lost or told twice."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cache.layout import Layout
from cache.paged import PagedCache
from engine import engine as engine_module
from engine.drafters.chain import ChainedDrafter
from engine.drafters.guess import GuessDrafter
from engine.engine import Engine
from engine.models.runner import Runner
from engine.scheduler import Scheduler
from engine.sequence import Sequence, State
from engine.types import DrafterName, Request, SamplingParams, Verifier
from tests.engine.driving import Drive, drive, load, model_drafter
from tests.engine.fresh import memory
from tests.engine.pairs import VOCAB, Pair
from tests.engine.sampling.test_logprobs import equal, hear
from tests.examples import in_proofs

pytestmark = pytest.mark.usefixtures("shared_weights", "unprofiled")


@pytest.fixture(scope="module")
def pair(thin: Pair) -> Pair:
    return thin


AMPLE, TIGHT = 416, 104  # tokens of memory: for everybody, and for hardly more than the longest sequence
PROMPT, OUTPUT = 20, 40

usual_kind = pytest.mark.parametrize("kind", ["mapped", pytest.param("gathered", marks=pytest.mark.proofs)])


def load_with(pair: Pair, kind: str, kv_tokens: int, **config: Any) -> Engine:
    kv_tokens += 1 if kind == "gathered" and kv_tokens == TIGHT else 0  # 21 blocks of 5
    return load(
        pair, **{"max_running": 4, "max_spec_length": 4, "max_step_tokens": 28, **memory(kind, kv_tokens), **config}
    )


def make_requests(count: int = 4, k: int = 4, **params: Any) -> list[Request]:
    """Prompts that have nothing in common; every other one is sampled."""
    rng = random.Random(3)
    requests = []
    for i in range(count):
        prompt = tuple(rng.randrange(2, VOCAB) for _ in range(PROMPT))
        temperature = 0.8 * (i % 2)
        given = {"temperature": temperature, "seed": i, "max_tokens": OUTPUT, "ignore_eos": True, **params}
        requests.append(Request(f"r{i}", prompt, SamplingParams(**given), k=k))
    return requests


def total_preempted(run: Drive) -> int:
    return sum(s.preempted for s in run.steps)


def force(engine: Engine, when: Callable[[Sequence], bool]) -> list[tuple[int, int]]:
    """Take back the youngest's memory whenever `when` says so, as if there were none; returns what is filled with
    (positions cached, tokens emitted) at these moments."""
    scheduler, secure = engine.scheduler, engine.scheduler._reserve_next_tokens
    done: list[tuple[int, int]] = []

    def forced() -> list[Sequence]:
        preempted = secure()
        youngest = scheduler.running[-1] if len(scheduler.running) > 1 else None
        if youngest is not None and when(youngest):
            done.append((engine.target.cache.length(youngest.handle), youngest.num_output))
            preempted.append(scheduler._preempt())
        return preempted

    scheduler._reserve_next_tokens = forced  # type: ignore[method-assign]
    return done


def once_each(*conditions: Callable[[Sequence], bool]) -> Callable[[Sequence], bool]:
    """True the first time that the next of these holds."""
    left = list(conditions)
    return lambda sequence: bool(left) and left[0](sequence) and bool(left.pop(0))


def after(count: int) -> Callable[[Sequence], bool]:
    return lambda sequence: sequence.num_output >= count


def reading(engine: Engine) -> Callable[[Sequence], bool]:
    """In the middle of its prompt."""
    return lambda sequence: 0 < engine.target.cache.length(sequence.handle) < sequence.num_prompt - 1


# --- who, and what becomes of its stream -----------------------------------------------------------------------------


class Order:
    """Who ran after the last step, oldest first, and whose memory the step took back."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.preempted: list[str] = []
        self._before: list[tuple[Sequence, int]] = []

    def __call__(self) -> None:
        gone = [s for s, count in self._before if s.record.preemptions > count]
        stay = [s for s, count in self._before if s.record.preemptions == count]
        assert not gone or stay, "nobody is left"
        assert all(old.handle < young.handle for old in stay for young in gone), "an older one gave way to a younger"
        assert all(s.state is State.WAITING for s in gone)
        self.preempted += [s.request_id for s in gone]
        self._before = [(s, s.record.preemptions) for s in self.engine.scheduler.running]
        self.engine.audit()


@usual_kind
@pytest.mark.parametrize("verifier", ["match", *in_proofs("rejection", "block")])
@pytest.mark.parametrize("k", [0, 4])
def test_the_youngest_gives_way_and_goes_on_where_it_was(pair: Pair, kind: str, k: int, verifier: Verifier) -> None:
    """`rejection` and `block` draw with the round's own noise, so that their texts are another's; but not at T = 0, nor
    where one token is all that the law holds."""
    sharp = {} if verifier == "match" else {"top_k": 1}
    requests = [replace(r, verifier=verifier) for r in make_requests(k=k, **sharp)]
    undisturbed = drive(load_with(pair, kind, AMPLE), requests)
    engine = load_with(pair, kind, TIGHT)
    order = Order(engine)
    run = drive(engine, requests, after_step=order)
    assert total_preempted(undisturbed) == 0
    assert total_preempted(run) == len(order.preempted) > 1
    assert "r0" not in order.preempted
    for name, told in run.received.items():
        assert told.record is not None
        assert told.record.preemptions == order.preempted.count(name)
        assert (told.tokens, told.text) == (undisturbed.received[name].tokens, undisturbed.received[name].text)
        assert len(told.tokens) == OUTPUT
    if k:
        assert run.accepted


@usual_kind
@pytest.mark.parametrize("verifier", ["rejection", *in_proofs("block")])
def test_verifiers_with_noise_of_their_own_finish(pair: Pair, kind: str, verifier: Verifier) -> None:
    requests = [replace(r, verifier=verifier) for r in make_requests(temperature=0.8, top_k=20)]
    run = drive(load_with(pair, kind, TIGHT), requests)
    assert total_preempted(run) > 1
    assert run.accepted
    assert all(len(told.tokens) == OUTPUT and told.reason == "length" for told in run.received.values())


@usual_kind
def test_negative_control_another_gives_way(pair: Pair, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler._preempt

    def last_but_one(self: Scheduler) -> Sequence:
        self.running.append(self.running.pop(-2))
        return preempt(self)

    monkeypatch.setattr(Scheduler, "_preempt", last_but_one)
    engine = load_with(pair, kind, TIGHT)
    with pytest.raises(AssertionError, match="an older one gave way to a younger"):
        drive(engine, make_requests(), after_step=Order(engine))


@usual_kind
def test_negative_control_the_output_is_forgotten(pair: Pair, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler._preempt

    def forgetful(self: Scheduler) -> Sequence:
        youngest = preempt(self)
        del youngest.tokens[youngest.num_prompt :]
        return youngest

    monkeypatch.setattr(Scheduler, "_preempt", forgetful)
    requests = make_requests()
    run = drive(load_with(pair, kind, TIGHT), requests)
    assert run.tokens != drive(load_with(pair, kind, AMPLE), requests).tokens


@usual_kind
def test_a_stop_string_across_a_preemption(pair: Pair, kind: str) -> None:
    """At every twelfth token of the text, and at each of the last six: the stop string may have begun by then."""
    engine = load_with(pair, kind, AMPLE)
    companion, plain = make_requests(2, k=0)
    text = drive(engine, [plain]).received[plain.id].text
    stop = text[15:21]
    assert text.index(stop) == 15
    request = replace(plain, k=1, params=replace(plain.params, stop=(stop,)))
    expected = drive(engine, [request]).received[plain.id]
    assert (expected.reason, expected.text) == ("stop", text[:15])
    moment: list[int] = []  # tokens after which it is preempted, until it was
    done = force(engine, lambda s: bool(moment) and s.num_output >= moment[0] and bool(moment.pop()))
    end = len(expected.tokens)
    moments = [count for count in range(1, end) if count % 12 == 1 or count >= end - 6]
    for count in moments:
        moment[:] = [count]
        told = drive(engine, [companion, request]).received[plain.id]
        assert (told.tokens, told.text, told.reason) == (expected.tokens, expected.text, "stop")
    assert len({emitted for _, emitted in done}) > len(moments) // 2


# --- log-probabilities -----------------------------------------------------------------------------------------------

MOMENTS = [*in_proofs("reading", "after"), "both"]


def disturb(engine: Engine, moment: str) -> list[tuple[int, int]]:
    conditions = {
        "reading": (reading(engine),),
        "after": (after(3), after(9)),
        "both": (reading(engine), after(1), after(8)),
    }
    return force(engine, once_each(*conditions[moment]))


def logprob_requests() -> list[Request]:
    """The younger one takes several passes to read its prompt."""
    companion, younger = make_requests(2, logprobs=2, prompt_logprobs=3)
    rng = random.Random(4)
    return [companion, replace(younger, prompt_ids=tuple(rng.randrange(2, VOCAB) for _ in range(50)))]


@usual_kind
@pytest.mark.parametrize("moment", MOMENTS)
def test_logprobs_are_told_once(pair: Pair, kind: str, moment: str) -> None:
    requests = logprob_requests()
    undisturbed = hear(load_with(pair, kind, AMPLE), requests)
    engine = load_with(pair, kind, AMPLE, max_step_tokens=20)
    done = disturb(engine, moment)
    heard = hear(engine, requests)
    assert len(done) == {"reading": 1, "after": 2, "both": 3}[moment] == total_preempted(heard.run)
    assert heard.run.tokens == undisturbed.run.tokens
    for request in requests:
        assert len(heard.prompts[request.id]) == len(request.prompt_ids) - 1
        assert equal(heard.prompts[request.id], undisturbed.prompts[request.id])
        assert len(heard.logprobs[request.id]) == OUTPUT
        assert equal(heard.logprobs[request.id], undisturbed.logprobs[request.id])


@usual_kind
@pytest.mark.parametrize("moment", ["reading", *in_proofs("both")])
def test_negative_control_what_was_told_of_the_prompt_is_kept(
    pair: Pair, kind: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keeping(self: Sequence) -> None:
        self._move("preempt")
        self.record.preemptions += 1

    monkeypatch.setattr(Sequence, "preempt", keeping)
    requests = logprob_requests()
    engine = load_with(pair, kind, AMPLE, max_step_tokens=20)
    disturb(engine, moment)
    heard = hear(engine, requests)
    assert len(heard.prompts["r1"]) > len(requests[1].prompt_ids) - 1


# --- deadlines -------------------------------------------------------------------------------------------------------


class Clock:
    """The engine's time, which passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def perf_counter_ns(self) -> int:
        return 0


def overdue(engine: Engine, monkeypatch: pytest.MonkeyPatch, state: str) -> Drive:
    """The younger of two requests runs out of time while it is running, waiting or preempted."""
    clock = Clock()
    monkeypatch.setattr(engine_module, "time", clock)
    older, younger = make_requests(2)
    if state == "preempted":
        force(engine, lambda s: s.num_output > 4)

    def after_step() -> None:
        for sequence in engine._sequences.values():
            if sequence.request_id == younger.id and (
                (state == "waiting" and sequence.state is State.WAITING)
                or (state == "preempted" and sequence.state is State.WAITING and sequence.record.preemptions > 0)
                or (state == "running" and sequence.num_output > 4)
            ):
                clock.now = 106.0
        engine.audit()
        if isinstance(engine.target.cache, PagedCache) and younger.id not in engine._sequences:
            (left,) = engine.scheduler.running or (None,)
            tables = 0 if left is None else len(engine.target.cache.table(left.handle))
            assert engine.target.cache.used_blocks == tables, "an overdue request still holds memory"

    return drive(engine, [older, replace(younger, deadline_s=5.0)], after_step=after_step)


@usual_kind
@pytest.mark.parametrize("state", ["running", *in_proofs("waiting"), "preempted"])
def test_a_request_that_is_overdue_ends_with_an_error_and_frees_its_memory(
    pair: Pair, kind: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, younger = make_requests(2)
    expected = drive(load_with(pair, kind, AMPLE), [older, younger])
    engine = load_with(pair, kind, AMPLE, max_running=1 if state == "waiting" else 4)
    codes: list[str] = []
    step = engine.step

    def listening() -> Any:
        result = step()
        codes.extend(o.error_code for o in result.outputs if o.finish_reason == "error")
        return result

    monkeypatch.setattr(engine, "step", listening)
    run = overdue(engine, monkeypatch, state)
    told = run.received[younger.id]
    assert (told.reason, told.error) == ("error", "the request was not finished within 5 s")
    assert codes == ["deadline_exceeded"]
    assert told.record is not None
    assert told.record.preemptions == (state == "preempted")
    assert told.tokens == expected.tokens[younger.id][: len(told.tokens)]
    assert (len(told.tokens) > 4) == (state != "waiting")
    assert run.received[older.id].tokens == expected.tokens[older.id]


@usual_kind
def test_negative_control_an_overdue_request_keeps_its_memory(
    pair: Pair, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(self: Scheduler, sequence: Sequence) -> None:
        self.running.remove(sequence)

    monkeypatch.setattr(Scheduler, "remove", remove)
    with pytest.raises(AssertionError, match="held by sequences that are gone"):
        overdue(load_with(pair, kind, AMPLE), monkeypatch, "running")


# --- drafters --------------------------------------------------------------------------------------------------------


def guessing(engine: Engine, handle: int) -> bool:
    """Whether any drafter without a model knows something of the sequence."""
    assert isinstance(engine.drafter, ChainedDrafter)
    return any(isinstance(part, GuessDrafter) and handle in part._states for part in engine.drafter.drafters)


@usual_kind
@pytest.mark.parametrize("drafter", ["ngram", "cascade", *in_proofs("lookup", "prediction", "suffix", "lookahead")])
def test_drafters_begin_anew(pair: Pair, kind: str, drafter: DrafterName) -> None:
    """They forget a sequence whose memory is taken back, catch up when it runs again, and the record says the same."""
    companion, plain = make_requests(2, k=0, temperature=0.0)
    plain = replace(plain, prompt_ids=plain.prompt_ids[:5] * 4)
    engine = load_with(pair, kind, AMPLE)
    output = drive(engine, [plain]).tokens[plain.id]
    guess = (*output[:12], 5, 6, *output[14:]) if drafter in ("prediction", "cascade") else ()
    # What they copy has to have been there: the prompt holds the output.
    prompt = plain.prompt_ids if guess else (*plain.prompt_ids, *output[:25], *plain.prompt_ids[:5])
    request = replace(plain, k=4, drafter=drafter, prompt_ids=prompt, prediction_ids=guess)
    undisturbed = drive(engine, [request]).received[plain.id]
    forgotten: list[bool] = []

    def after_step() -> None:
        gone = [s for s in engine.scheduler.waiting if s.record.preemptions]
        forgotten.extend(not guessing(engine, sequence.handle) for sequence in gone)

    done = force(engine, once_each(after(4), after(20)))
    told = drive(engine, [companion, request], after_step=after_step).received[plain.id]
    assert len(done) == 2
    assert forgotten
    assert all(forgotten)
    assert told.tokens == undisturbed.tokens
    assert told.record is not None
    assert undisturbed.record is not None
    assert told.record.prediction_accepted == undisturbed.record.prediction_accepted
    assert told.record.prediction_tokens == len(guess)
    if guess:
        assert told.record.prediction_accepted >= 30
        late = sum(told.record.column("accepted")[-5:])
        assert late > 0  # it caught up


def small_draft(engine: Engine, tokens: int) -> Engine:
    """The draft model gets memory for so many tokens only."""
    drafter = model_drafter(engine)
    given = drafter.runner
    size = given.layout.block_size
    layout = Layout(given.layout.slots, given.layout.max_len, size, tokens // size)
    drafter.runner = Runner(given.decoder, layout, given.device)
    return engine


@usual_kind
def test_a_draft_without_memory_costs_the_drafts_of_its_sequence(pair: Pair, kind: str) -> None:
    requests = make_requests()
    expected = drive(load_with(pair, kind, AMPLE), requests)
    engine = small_draft(load_with(pair, kind, AMPLE), 80)
    run = drive(engine, requests, after_step=engine.audit)
    assert run.tokens == expected.tokens
    assert sum(s.draft_faults for s in run.steps) == 0
    assert 0 < run.drafted < expected.drafted
    starved = [told.record.column("drafted").count(0) for told in run.received.values() if told.record is not None]
    assert max(starved) > 5


@usual_kind
def test_negative_control_a_draft_that_does_not_look(pair: Pair, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserving without asking for room is a fault of the drafter."""
    engine = small_draft(load_with(pair, kind, AMPLE), 80)
    monkeypatch.setattr(model_drafter(engine).runner.cache, "room", lambda _: 1000)
    run = drive(engine, make_requests())
    assert sum(s.draft_faults for s in run.steps) > 0
