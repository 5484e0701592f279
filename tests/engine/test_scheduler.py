"""What a plan holds, and in which order."""

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch

from cache.paged import PagedCache
from cache.storage import Blocks
from engine import scheduler
from engine.config import CPU_CHUNK, EngineConfig
from engine.engine import Engine
from engine.scheduler import FEW_TOKENS, Plan
from engine.sequence import Sequence
from engine.types import Request, SamplingParams
from policies.config import PolicyConfig
from policies.held_choice import Decision
from policies.observation import Prefill
from tests.engine.driving import drive, load
from tests.engine.pairs import Pair
from tests.kv import without_prefixes

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture
def engine(pair: Pair) -> Engine:
    return load(pair, max_running=3, max_spec_length=4, max_step_tokens=15, **without_prefixes())


def submit(engine: Engine, name: str, length: int, k: int = 4, group: str = "", emits: int = 20) -> None:
    params = replace(PARAMS, max_tokens=emits)
    engine.submit(Request(name, tuple(range(5, 5 + length)), params, k=k, group=group))


def described(plan: Plan) -> list[tuple[str, int, int, bool]]:
    return [(s.sequence.request_id, s.committed, s.k, s.emits) for s in plan.slices]


def test_slices_are_in_the_order_of_their_slots(engine: Engine) -> None:
    """Neighbours in memory are neighbours in the pass, whatever the order of arrival and of prefill and decode."""
    for name in ("a", "b", "c"):
        submit(engine, name, 1)
    engine.step()
    engine.cancel("a")
    submit(engine, "late", 9)  # takes slot 0
    plan = engine.scheduler.plan()
    assert [s.request_id for s in engine.scheduler.running] == ["b", "c", "late"]
    assert described(plan) == [("late", 5, 0, False), ("b", 1, 4, True), ("c", 1, 4, True)]
    assert [engine.target.cache.slot(s.sequence.handle) for s in plan.slices] == [0, 1, 2]


def test_a_sequence_for_which_no_token_is_left_holds_no_memory(engine: Engine) -> None:
    for name, length in (("a", 20), ("b", 9), ("c", 9)):
        submit(engine, name, length, group="one")
    assert described(engine.scheduler.plan()) == [("a", 15, 0, False)]
    assert [s.request_id for s in engine.scheduler.waiting] == ["b", "c"]
    engine.step()
    assert described(engine.scheduler.plan()) == [("a", 5, 0, True), ("b", 9, 0, True), ("c", 1, 0, False)]


@pytest.fixture
def expected(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Prefill]:
    """What the scheduler tells the policy of prompts, by choice."""
    told, choose = list[Prefill](), engine.scheduler._choose_k

    def spy(decoding: Seq[Sequence], prefill: Prefill) -> Decision:
        told.append(prefill)
        return choose(decoding, prefill)

    monkeypatch.setattr(engine.scheduler, "_choose_k", spy)
    return told


def test_prompts_are_expected_of_those_for_whom_there_is_a_place(engine: Engine, expected: list[Prefill]) -> None:
    for name, length in (("a", 1), ("b", 1), ("c", 1), ("d", 3), ("e", 4)):
        submit(engine, name, length, k=0)
    for _ in range(3):
        engine.step()
    assert set(expected) == {Prefill()}
    engine.cancel("a")
    engine.step()
    assert expected[-1] == Prefill(tokens=3)  # it may wait for long


@pytest.mark.parametrize(("emits", "joining"), [(FEW_TOKENS, 0), (FEW_TOKENS + 1, 1)])
def test_a_long_prompt_is_expected_to_take_several_passes(
    emits: int, joining: int, engine: Engine, expected: list[Prefill], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sequence joins the others if it is there for more than a few rounds."""
    monkeypatch.setattr(engine.scheduler, "_chunk", lambda rows: 4)
    submit(engine, "a", 1, k=0)
    engine.step()
    submit(engine, "b", 9, k=0, emits=emits)
    engine.step()
    engine.step()
    waits, is_read = expected[-2:]
    assert waits == Prefill(tokens=4)
    assert is_read == Prefill(tokens=4, sequences=joining, passes=2)


def test_without_drafts(engine: Engine) -> None:
    submit(engine, "a", 1)
    engine.step()
    plan = engine.scheduler.plan()
    assert described(plan) == [("a", 1, 4, True)]
    assert described(plan.without_drafts()) == [("a", 1, 0, True)]


def test_removing_twice_is_removing_once(engine: Engine) -> None:
    for name in ("a", "b", "c", "waits"):
        submit(engine, name, 3)
    engine.scheduler.plan()
    running, waiting = list(engine.scheduler.running), list(engine.scheduler.waiting)
    for sequence in (running[0], waiting[0], running[0], waiting[0]):
        engine.scheduler.remove(sequence)
    assert engine.scheduler.running == running[1:]
    assert not engine.scheduler.waiting
    assert engine.target.cache.free_slots == 1


# --- memory, and who waits for whom ----------------------------------------------------------------------------------

RNG = random.Random(3)
COMMON = tuple(RNG.randrange(2, 400) for _ in range(40))
PAGED: dict[str, Any] = {
    "cache": "paged",
    "block_size": 8,
    "max_model_len": 96,
    "policy": PolicyConfig("off"),
    "max_step_tokens": 24,
}


def paged(pair: Pair, max_running: int = 4, **config: Any) -> Engine:
    return load(pair, max_running=max_running, max_spec_length=4, **(PAGED | config))


def ask(name: str, prompt: tuple[int, ...], max_tokens: int, **more: Any) -> Request:
    return Request(name, prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True), k=0, **more)


def first_steps(engine: Engine, requests: list[Request]) -> dict[str, int]:
    """The step in which each request said something first."""
    for request in requests:
        engine.submit(request)
    first: dict[str, int] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            first.setdefault(output.request_id, engine.steps)
    return first


def test_who_overtakes_a_waiting_follower_leaves_it_a_slot(pair: Pair) -> None:
    """The follower waits for what its leader reads, not for who came after both."""
    requests = [ask("leader", COMMON, 50), ask("follower", (*COMMON, 5), 3), ask("late", (7, 8, 9), 60)]
    first = first_steps(paged(pair, 2), requests)
    assert first["leader"] < first["follower"] < first["leader"] + 4
    assert first["late"] > first["follower"]


def test_arrival_decides_who_gives_way(pair: Pair) -> None:
    """Whoever started first: `late` does, while `follower` waits for what `leader` reads."""
    engine = paged(pair, kv_tokens=128)
    requests = [ask("leader", COMMON, 50), ask("follower", (*COMMON, 5), 40), ask("late", COMMON[9:18], 60)]
    run = drive(engine, requests)
    preempted = {name: told.record.preemptions for name, told in run.received.items() if told.record}
    assert preempted.pop("late")
    assert set(preempted.values()) == {0}


def test_what_does_not_start_evicts_nothing(pair: Pair) -> None:
    engine = paged(pair, kv_tokens=112)
    cache = engine.target.cache
    assert isinstance(cache, PagedCache)
    drive(engine, [ask("before", COMMON, 1)])
    engine.submit(ask("running", tuple(range(50, 80)), 60))
    engine.step()
    engine.step()
    engine.submit(ask("too large", tuple(range(100, 170)), 20))
    findable = len(cache._index.nodes)
    engine.step()
    assert [s.request_id for s in engine.scheduler.waiting] == ["too large"]
    assert len(cache._index.nodes) >= findable
    engine.cancel_all()


@pytest.mark.parametrize("headroom", [scheduler.HEADROOM, 0])
def test_nobody_starts_who_would_soon_have_to_give_way(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, headroom: int
) -> None:
    """The second case is the first one's negative control."""
    monkeypatch.setattr(scheduler, "HEADROOM", headroom)
    requests = [ask(name, tuple(range(first, first + 40)), 16) for name, first in (("a", 10), ("b", 60), ("c", 110))]
    run = drive(paged(pair, kv_tokens=128), requests)
    assert (sum(s.preempted for s in run.steps) == 0) == (headroom > 0)


def test_nobody_waits_for_another_salt(pair: Pair) -> None:
    """Its time to first token would tell that somebody else sent the same."""
    engine = paged(pair)
    for name, salt in (("leader", "a"), ("same", "a"), ("other", "b")):
        engine.submit(ask(name, COMMON, 4, cache_salt=salt, group="one"))
    engine.step()
    leaders = {s.request_id: engine.scheduler._leader(s)[0] for s in engine.scheduler.waiting}
    assert leaders["other"] is None
    assert leaders["same"] is engine.scheduler.running[0]
    engine.cancel_all()


def test_a_prompt_gets_its_chunk_beside_streams_and_the_whole_pass_alone(pair: Pair) -> None:
    for config, rows, chunk in (
        ({"prefill_chunk": 7}, 100, 7),
        ({}, 4, CPU_CHUNK),
        ({}, 100, 200),
        ({"device": "cuda"}, 4, 512),
    ):
        assert EngineConfig("target", **config).chunk(rows) == chunk
    engine = paged(pair, prefill_chunk=7)
    engine.submit(ask("alone", COMMON, 30))
    assert [s.committed for s in engine.scheduler.plan().slices] == [24]
    while engine.scheduler.running[0].num_output < 2:
        engine.step()
    engine.submit(ask("beside", tuple(range(50, 90)), 4))
    assert sorted(s.committed for s in engine.scheduler.plan().slices) == [1, 7]
    engine.cancel_all()


@pytest.mark.parametrize("leave", ["cancel", "preempt"])
@pytest.mark.parametrize("looks", [True, False])
def test_what_is_not_finite_goes_with_a_request_that_leaves_before_its_first_token(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, leave: str, looks: bool
) -> None:
    """No verdict has looked at it yet. Not looking is the negative control."""
    engine = paged(pair)
    engine.submit(ask("other", (5, 6, 7), 40))
    engine.step()
    engine.submit(ask("reads", tuple(range(50, 130)), 4))
    engine.step()
    cache, storage, sequence = engine.target.cache, engine.target.storage, engine.scheduler.running[1]
    assert isinstance(cache, PagedCache)
    assert isinstance(storage, Blocks)
    assert not sequence.num_output
    storage.pool[:, cache.table(sequence.handle)[1]] = torch.nan
    if not looks:
        monkeypatch.setattr(type(storage), "is_finite", lambda *_: True)
    exits: dict[str, Callable[[], object]] = {
        "cancel": lambda: engine.cancel("reads"),
        "preempt": engine.scheduler._preempt,
    }
    exits[leave]()
    assert bool(storage.pool.isfinite().all()) is looks
    engine.cancel_all()
