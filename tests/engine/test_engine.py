"""Admission, cancelling, records: what the engine promises whatever it generates."""

import time
from dataclasses import replace

import pytest

from engine.drafters.model import ModelDrafter
from engine.engine import Engine
from engine.sequence import State
from engine.types import InvalidRequest, Request, SamplingParams, Verifier, acceptance_of
from tests.engine.driving import drive, load, model_drafter
from tests.engine.pairs import VOCAB, Pair, Shape, save_checkpoint
from tests.examples import in_proofs

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture
def engine(pair: Pair) -> Engine:
    return load(pair, max_running=2, max_spec_length=4, max_step_tokens=10)


def free(engine: Engine) -> tuple[int, int]:
    """Free slots of the target and of the draft."""
    return engine.target.cache.free_slots, model_drafter(engine).runner.cache.free_slots


def request(name: str, length: int = 3, k: int = 2) -> Request:
    return Request(name, tuple(range(5, 5 + length)), PARAMS, k=k)


def finishes(engine: Engine) -> dict[str, str]:
    """Step until nothing is left; how each request ended."""
    ended: dict[str, str] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.request_id not in ended
            if output.finish_reason:
                ended[output.request_id] = output.finish_reason
    return ended


def test_cancel_while_waiting(engine: Engine) -> None:
    for name in ("a", "b", "c"):
        engine.submit(request(name))
    engine.step()
    assert [s.request_id for s in engine.scheduler.waiting] == ["c"]
    engine.cancel("c")
    assert not engine.scheduler.waiting
    assert finishes(engine) == {"a": "length", "b": "length", "c": "cancelled"}
    engine.audit()


def test_cancel_before_anything_ran(engine: Engine) -> None:
    engine.submit(request("a"))
    engine.cancel("a")
    assert engine.has_work  # somebody has to hear of it
    result = engine.step()
    assert [o.finish_reason for o in result.outputs] == ["cancelled"]
    assert result.outputs[0].record is not None
    assert result.outputs[0].record.admitted is None
    assert not engine.has_work


def test_cancel_while_prefilling(engine: Engine) -> None:
    engine.submit(request("a", length=60))
    engine.step()
    (sequence,) = engine.scheduler.running
    assert sequence.num_output == 0
    assert 0 < engine.target.cache.length(sequence.handle) < 60
    engine.cancel("a")
    assert free(engine) == (2, 2)
    assert finishes(engine) == {"a": "cancelled"}


def test_cancel_while_decoding(engine: Engine) -> None:
    engine.submit(request("a"))
    engine.submit(request("b", length=4))
    while not engine.scheduler.running or engine.scheduler.running[0].num_output < 5:
        engine.step()
    assert free(engine) == (0, 0)
    engine.cancel("a")
    assert free(engine) == (1, 1)
    engine.cancel("a")  # idempotent
    engine.cancel("never seen")
    assert finishes(engine) == {"a": "cancelled", "b": "length"}
    engine.cancel("b")
    assert not engine.has_work
    engine.audit()


def test_a_cancelled_slot_goes_to_the_next_in_the_same_step(engine: Engine) -> None:
    for name in ("a", "b", "c"):
        engine.submit(request(name))
    engine.step()
    engine.cancel("a")
    engine.step()
    assert {s.request_id for s in engine.scheduler.running} == {"b", "c"}
    assert all(s.state is State.RUNNING for s in engine.scheduler.running)


def test_an_id_is_unique_among_running_requests_and_free_afterwards(engine: Engine) -> None:
    engine.submit(request("a"))
    with pytest.raises(InvalidRequest, match="'a' is in use"):
        engine.submit(request("a", length=9))
    assert finishes(engine) == {"a": "length"}
    engine.submit(request("a", length=9))
    engine.cancel("a")
    engine.submit(request("a", length=9))  # a cancelled one's id, too, at once
    events = [o.finish_reason for _ in range(30) for o in engine.step().outputs if o.finish_reason]
    assert events == ["cancelled", "length"]


def test_abort_ends_everything(engine: Engine) -> None:
    for name in ("a", "b", "c"):
        engine.submit(request(name))
    engine.step()
    outputs = engine.abort("gone")
    assert sorted(o.request_id for o in outputs) == ["a", "b", "c"]
    assert {(o.finish_reason, o.error) for o in outputs} == {("error", "gone")}
    assert not engine.has_work
    assert free(engine) == (2, 2)
    engine.audit()


def test_first_come_first_served(engine: Engine) -> None:
    run = drive(engine, [request(name) for name in "abcdef"])
    admitted = [told.record.admitted for told in run.received.values() if told.record and told.record.admitted]
    assert admitted == sorted(admitted)
    assert len(admitted) == 6
    assert max(s.running for s in run.steps) <= 2


def test_decoding_goes_on_while_a_long_prompt_is_read(engine: Engine) -> None:
    run = drive(engine, {0: [request("stream", k=0)], 3: [request("long", length=70)]})
    reading = [s for s in run.steps if s.prefill_tokens]
    assert len(reading) >= 70 // 10
    assert all(s.emitted for s in run.steps[1:-1])
    assert all(s.prefill_tokens + (s.sequences - 1) + s.drafted <= 10 for s in reading)


def test_records_of_rounds(engine: Engine) -> None:
    run = drive(engine, [request("a", k=3), request("b", k=0)])
    a, b = (run.received[name].record for name in "ab")
    assert a is not None
    assert b is not None
    assert (a.prompt_tokens, a.output_tokens, a.k_max, b.k_max) == (3, 20, 3, 0)
    assert b.column("drafted") == b.column("accepted") == [0] * 20
    assert b.column("emitted") == [1] * 20
    assert (acceptance_of(b).rounds, acceptance_of(b).histogram) == (0, (0,))
    assert acceptance_of(a).rounds == sum(1 for k in a.column("drafted") if k)
    assert all(e == acc + 1 for e, acc in zip(a.column("emitted"), a.column("accepted"), strict=True))
    assert None not in (a.admitted, a.first_token, a.finished)
    assert a.arrived <= (a.admitted or 0) <= (a.first_token or 0) <= (a.finished or 0)
    assert sum(a.column("drafted")) + sum(b.column("drafted")) == run.drafted
    assert sum(a.column("accepted")) + sum(b.column("accepted")) == run.accepted
    assert sum(s.emitted for s in run.steps) == 40


def test_accepted_counts_what_the_verifier_kept_not_what_a_stop_left(twins: Pair) -> None:
    engine = load(twins, max_spec_length=8)
    prompt = tuple(range(5, 9))
    plain = drive(engine, [Request("p", prompt, PARAMS, k=0)]).tokens["p"]
    n = next(n for n in range(3, 9) if plain[n] not in plain[:n])
    engine.intake.eos_ids = frozenset({plain[n]})
    record = drive(engine, [Request("r", prompt, replace(PARAMS, ignore_eos=False), k=8)]).received["r"].record
    assert record is not None
    assert record.column("accepted") == [0, 8]
    assert record.column("emitted") == [1, n]
    assert acceptance_of(record).histogram[8] == 1


@pytest.mark.parametrize(
    ("bad", "param", "message"),
    [
        (Request("r", ()), "prompt", "no tokens"),
        (Request("r", (1, VOCAB)), "prompt", f"id {VOCAB} is outside"),
        (Request("r", (1, -1)), "prompt", "id -1 is outside"),
        (Request("r", (5,) * 90, PARAMS), "max_tokens", "90 tokens and max_tokens 20 exceed the context of 96"),
        (Request("r", (5,) * 96, replace(PARAMS, max_tokens=1)), "prompt", "exceed the context"),
        (Request("r", (5,), PARAMS, k=5), "speculation.k", "between 0 and this server's maximum, 4"),
        (Request("r", (5,), PARAMS, k=-1), "speculation.k", "between 0 and this server's maximum, 4"),
    ],
)
def test_requests_that_can_never_be_served(engine: Engine, bad: Request, param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        engine.check(bad)
    assert caught.value.param == param


def test_what_just_fits_is_served(engine: Engine) -> None:
    fits = [
        Request("context", (5,) * 76, PARAMS, k=4),
        Request("one", (VOCAB - 1,), replace(PARAMS, max_tokens=95), k=4),
        Request("zero", (0,), replace(PARAMS, max_tokens=1), k=4),
    ]
    run = drive(engine, fits)
    assert [len(t) for t in run.tokens.values()] == [20, 95, 1]
    assert {told.reason for told in run.received.values()} == {"length"}


def test_a_draft_with_a_smaller_table(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tables are padded as their makers like; ids that only the target's has are no fault of anyone's."""
    small = save_checkpoint(tmp_path_factory.mktemp("small"), Shape(vocab=330), seed=2)
    engine = load(Pair(pair.target, small), max_running=2, max_spec_length=4)
    prompts = {"inside": (5, 6, 7), "outside": (5, 399, 398)}
    requests = [Request(name, ids, PARAMS, k=3) for name, ids in prompts.items()]
    plain = drive(engine, [replace(r, k=0) for r in requests]).tokens
    assert any(t >= 330 for t in plain["inside"] + plain["outside"])
    run = drive(engine, requests)
    assert run.tokens == plain
    assert run.drafted
    assert sum(s.draft_faults for s in run.steps) == 0


@pytest.mark.parametrize("verifier", [*in_proofs("match"), "rejection"])
@pytest.mark.parametrize("tree", [None, (2, 1)])
def test_a_request_may_exclude_all_that_a_draft_with_a_smaller_table_knows(
    pair: Pair,
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
    tree: tuple[int, ...] | None,
    verifier: Verifier,
) -> None:
    """Its drafts are rejected. That is no fault of the model, whose memory others share."""
    small = save_checkpoint(tmp_path_factory.mktemp("small"), Shape(vocab=330), seed=2)
    engine = load(Pair(pair.target, small), max_running=1, max_spec_length=4)
    params = replace(PARAMS, temperature=0.8, seed=1, allowed_token_ids=(340, 350, 360))
    k = 3 if tree is None else None
    run = drive(engine, [Request("r", (5, 6, 7), params, k=k, tree=tree, verifier=verifier)])
    assert set(run.tokens["r"]) <= {340, 350, 360}
    assert all(stats.drafted for stats in run.steps[1:-1])
    assert not run.accepted
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_idle_steps_do_nothing(engine: Engine) -> None:
    result = engine.step()
    assert result.outputs == []
    assert result.stats.sequences == result.stats.emitted == 0


def test_audit_sees_a_slot_without_a_sequence(engine: Engine) -> None:
    engine.target.cache.allocate(99)
    with pytest.raises(AssertionError, match=r"1 slots held by sequences that are gone: \[99\]"):
        engine.audit()


def test_audit_sees_a_sequence_without_a_slot(engine: Engine) -> None:
    engine.submit(request("a"))
    engine.step()
    engine.target.cache.release(engine.scheduler.running[0].handle)
    with pytest.raises(AssertionError, match="1 running sequences hold no cache slot"):
        engine.audit()


def test_audit_sees_a_draft_slot_that_was_not_given_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.submit(request("a"))
    while engine.scheduler.waiting or engine.target.cache.free_slots == 2 or free(engine)[1] == 2:
        engine.step()
    engine.audit()
    monkeypatch.setattr(ModelDrafter, "forget", lambda *_: None)
    engine.cancel("a")
    with pytest.raises(AssertionError, match="1 slots held by sequences that are gone"):
        engine.audit()


def test_a_request_may_have_arrived_before_it_was_submitted(engine: Engine) -> None:
    before = time.monotonic()
    engine.submit(request("a"), arrived=before - 7.0)
    engine.submit(request("b"))
    arrived = [s.record.arrived for s in engine.scheduler.waiting]
    assert arrived[0] == before - 7.0
    assert before <= arrived[1] <= time.monotonic()


def test_drawn_seeds_survive_javascript(engine: Engine) -> None:
    """Numbers there are doubles. Fifty seeds from one more bit would all pass with probability 2⁻⁵⁰."""
    for n in range(50):
        engine.submit(request(f"r{n}"))
    seeds = [s.record.seed for s in engine.scheduler.waiting]
    assert all(0 <= seed < 2**53 for seed in seeds)
    assert len(set(seeds)) == 50
