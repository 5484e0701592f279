"""What a plan holds, and in which order."""

import pytest

from deployments.engine.engine import Engine
from deployments.engine.scheduler import Plan
from deployments.engine.types import Request, SamplingParams
from tests.engine.driving import load
from tests.engine.pairs import Pair
from tests.kv import without_prefixes

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture
def engine(pair: Pair) -> Engine:
    return load(pair, max_running=3, max_spec_length=4, max_step_tokens=15, **without_prefixes())


def submit(engine: Engine, name: str, length: int, k: int = 4) -> None:
    engine.submit(Request(name, tuple(range(5, 5 + length)), PARAMS, k=k))


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
        submit(engine, name, length)
    assert described(engine.scheduler.plan()) == [("a", 15, 0, False)]
    assert [s.request_id for s in engine.scheduler.waiting] == ["b", "c"]
    engine.step()
    assert described(engine.scheduler.plan()) == [("a", 5, 0, True), ("b", 9, 0, True), ("c", 1, 0, False)]


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
