"""The engine's thread: every submitted request ends exactly once, whatever happens, and health tells the truth."""

import itertools
import logging
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from engine import engine as engine_module
from engine import worker as worker_module
from engine.commit import Committed, commit
from engine.device import round_clock
from engine.engine import Engine, StepResult
from engine.scheduler import Plan
from engine.sequence import Sequence
from engine.types import (
    EngineStopped,
    InvalidRequest,
    Output,
    Overloaded,
    Request,
    SamplingParams,
    StepStats,
)
from engine.worker import CALM_S, IDLE_WAIT_S, EngineWorker
from policies.admission import Ratio, TokenCost
from tests.engine.driving import load
from tests.engine.pairs import Pair
from tests.kv import kv_kind, without_prefixes

PATIENCE_S = 60.0


class Desk:
    """Collects what a worker delivers, and waits for it."""

    def __init__(self) -> None:
        self.outputs: defaultdict[str, list[Output]] = defaultdict(list)
        self.on_delivery: Callable[[list[Output]], None] = lambda outputs: None
        self._changed = threading.Condition()

    def deliver(self, outputs: list[Output], stats: StepStats | None) -> None:
        with self._changed:
            for output in outputs:
                self.outputs[output.request_id].append(output)
            self._changed.notify_all()
        self.on_delivery(outputs)

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE_S), dict(self.outputs)

    def ends(self, request_id: str) -> list[Output]:
        return [o for o in self.outputs[request_id] if o.finish_reason]

    def wait_for_end(self, *request_ids: str) -> None:
        self.wait(lambda: all(self.ends(r) for r in request_ids))


@pytest.fixture
def engine(pair: Pair) -> Engine:
    return load(pair, max_running=2, max_waiting=1, max_step_tokens=40)


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def stalled_after_s() -> float:
    return 0.2


@pytest.fixture
def worker(
    engine: Engine, desk: Desk, stalled_after_s: float, caplog: pytest.LogCaptureFixture
) -> Iterator[EngineWorker]:
    caplog.set_level(logging.CRITICAL, "engine")
    worker = EngineWorker(engine, desk.deliver, stalled_after_s=stalled_after_s)
    worker.start()
    yield worker
    worker.stop()


def make_request(name: str, max_tokens: int = 8) -> Request:
    return Request(name, (5, 6, 7), SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))


def test_requests_from_several_threads_each_end_once(worker: EngineWorker, desk: Desk) -> None:
    threads = [threading.Thread(target=worker.submit, args=(make_request(f"r{i}"),)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    desk.wait_for_end("r0", "r1", "r2")
    texts = {tuple(t for o in desk.outputs[f"r{i}"] for t in o.token_ids) for i in range(3)}
    assert len(texts) == 1  # the same prompt, greedy: the same tokens
    assert [len(desk.ends(f"r{i}")) for i in range(3)] == [1, 1, 1]


def test_a_cancelled_request_takes_part_in_no_further_round(worker: EngineWorker, desk: Desk) -> None:
    free: list[int] = []

    def cancel_after_the_second(outputs: list[Output]) -> None:
        free.append(worker.stats().free_slots)
        if len(desk.outputs["r"]) == 2:
            worker.cancel("r")

    desk.on_delivery = cancel_after_the_second
    worker.submit(make_request("r", max_tokens=80))
    desk.wait_for_end("r")
    first, second, last = desk.outputs["r"]
    assert first.token_ids
    assert second.token_ids
    assert (last.finish_reason, last.token_ids) == ("cancelled", ())
    assert free == [1, 1, 2]


def test_cancelling_what_is_unknown_or_over_does_nothing(worker: EngineWorker, desk: Desk) -> None:
    worker.cancel("never")
    worker.submit(make_request("r"))
    desk.wait_for_end("r")
    worker.cancel("r")
    worker.submit(make_request("next"))
    desk.wait_for_end("next")
    assert len(desk.ends("r")) == 1


def test_a_full_engine_refuses_at_once_and_admits_again_later(worker: EngineWorker, desk: Desk) -> None:
    gate = threading.Event()
    desk.on_delivery = lambda outputs: assert_set(gate)  # holds the engine thread in its first delivery
    for name in ("a", "b", "c"):
        worker.submit(make_request(name))
    with pytest.raises(Overloaded) as refused:
        worker.submit(make_request("d"))
    assert refused.value.retry_after >= 1
    gate.set()
    desk.wait_for_end("a", "b", "c")
    worker.submit(make_request("d"))
    desk.wait_for_end("d")


@pytest.mark.parametrize(("group", "least", "most"), [("", 7, 8), ("one", 1, 1)])
def test_who_is_refused_is_told_how_long_the_queue_is(
    engine: Engine, desk: Desk, monkeypatch: pytest.MonkeyPatch, group: str, least: int, most: int
) -> None:
    """Two slots, three requests of 8 tokens, half a second each. A newcomer goes before further choices of one that has
    a slot: it takes the second."""
    monkeypatch.setattr(TokenCost, "measured", lambda timings, most: TokenCost(0.0, 0.5))
    worker = EngineWorker(engine, desk.deliver)
    worker.start()
    held, gate = threading.Event(), threading.Event()

    def hold(outputs: list[Output]) -> None:
        held.set()
        assert_set(gate)

    desk.on_delivery = hold
    worker.submit(replace(make_request("a"), group=group))
    assert_set(held)
    for name in ("b", "c"):
        worker.submit(replace(make_request(name), group=group))
    with pytest.raises(Overloaded) as refused:
        worker.submit(make_request("d"))
    assert least <= refused.value.retry_after <= most
    gate.set()
    desk.wait_for_end("a", "b", "c")
    worker.stop()


class Told(Ratio):
    """Stays 1, and keeps what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[float] = []

    def add(self, part: float, whole: float) -> None:
        self.parts.append(part)


class Asks:
    """Tries one more request after every step, from when as many run as `running` until one ends, while as many wait as
    `waiting`; `retry_after_s` are the seconds after which it may come again. Slowness is not learned."""

    def __init__(
        self, engine: Engine, desk: Desk, monkeypatch: pytest.MonkeyPatch, more: Request, running: int, waiting: int
    ) -> None:
        monkeypatch.setattr(TokenCost, "measured", lambda timings, most: TokenCost(0.0, 0.25))
        self.worker, self.more, self.retry_after_s = EngineWorker(engine, desk.deliver), more, list[int]()
        self.worker._admission.slowness = Told()
        self._scheduler, self._state = engine.scheduler, (running, waiting)
        desk.on_delivery = self

    def __call__(self, outputs: list[Output]) -> None:
        if any(output.finish_reason for output in outputs):
            self._state = (-1, -1)
        if (len(self._scheduler.running), len(self._scheduler.waiting)) == self._state:
            with pytest.raises(Overloaded) as refused:
                self.worker.submit(self.more)
            self.retry_after_s.append(refused.value.retry_after)


def test_who_is_refused_waits_less_the_more_those_before_have_said(
    engine: Engine, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two slots: two requests of 80 tokens, a quarter of a second each, then one of 8 tokens, 2 seconds of one slot."""
    asks = Asks(engine, desk, monkeypatch, make_request("d"), running=2, waiting=1)
    asks.worker.submit(make_request("a", 80), make_request("b", 80), make_request("c"))
    asks.worker.start()
    desk.wait_for_end("a", "b", "c")
    asks.worker.stop()
    assert asks.retry_after_s == sorted(asks.retry_after_s, reverse=True)
    assert asks.retry_after_s[0] > 30
    assert asks.retry_after_s[-1] < 15


def test_a_slot_without_memory_is_none_to_wait_for(pair: Pair, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight slots, and memory for two requests: two more wait, and a fifth comes after them. Were there free slots, it
    would be told 1 second. Each has 20 tokens to say, a quarter of a second each."""
    if kv_kind() == "slotted":
        pytest.skip("a slot has memory for all its positions")
    engine = load(pair, max_running=8, kv_tokens=176, max_demand=2.0, **without_prefixes())
    requests = [
        Request(f"r{i}", (5 + i,) * 60, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)) for i in range(5)
    ]
    asks = Asks(engine, desk, monkeypatch, requests.pop(), running=2, waiting=2)
    asks.worker.submit(*requests)
    asks.worker.start()
    desk.wait_for_end(*(r.id for r in requests))
    asks.worker.stop()
    assert asks.retry_after_s[0] > 10


def test_requests_of_a_list_are_admitted_together_or_not_at_all(worker: EngineWorker, desk: Desk) -> None:
    """A list that does not fit takes nobody's place, not even for a moment."""
    gate = threading.Event()
    desk.on_delivery = lambda outputs: assert_set(gate)
    worker.submit(make_request("a"))
    with pytest.raises(Overloaded, match="1 requests are running or waiting; 3 more exceed 3") as refused:
        worker.submit(*(make_request(f"x{i}") for i in range(3)))
    assert refused.value.retry_after >= 1
    worker.submit(make_request("b"), make_request("c"))
    gate.set()
    desk.wait_for_end("a", "b", "c")
    with pytest.raises(InvalidRequest, match="in use"):
        worker.submit(make_request("e"), make_request("f"), make_request("e"))
    worker.submit(make_request("e"), make_request("f"))
    desk.wait_for_end("e", "f")
    assert not any(desk.ends(f"x{i}") for i in range(3))


def assert_set(gate: threading.Event) -> None:
    assert gate.wait(PATIENCE_S)


def test_an_impossible_request_is_refused_before_it_is_queued(worker: EngineWorker, desk: Desk) -> None:
    with pytest.raises(InvalidRequest):
        worker.submit(make_request("long", max_tokens=1000))
    assert not desk.outputs


def test_stopping_ends_what_runs_and_refuses_what_comes(worker: EngineWorker, desk: Desk) -> None:
    worker.submit(make_request("r", max_tokens=90))
    desk.wait(lambda: bool(desk.outputs["r"]))
    worker.stop()
    (end,) = desk.ends("r")
    assert end.finish_reason in ("cancelled", "length")  # the latter if it was faster than the stop
    with pytest.raises(EngineStopped):
        worker.submit(make_request("late"))
    assert not worker.stats().healthy


def test_a_step_that_raises_ends_its_requests_and_the_worker_goes_on(
    worker: EngineWorker, desk: Desk, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, broken = engine.step, [True]

    def sometimes() -> StepResult:
        if broken.pop() if broken else False:
            raise RuntimeError("boom")
        return step()

    monkeypatch.setattr(Engine, "step", lambda self: sometimes())
    worker.submit(make_request("unlucky"))
    desk.wait_for_end("unlucky")
    (end,) = desk.ends("unlucky")
    assert (end.finish_reason, end.error) == ("error", "the engine failed")
    worker.submit(make_request("lucky"))
    desk.wait_for_end("lucky")
    assert desk.ends("lucky")[0].finish_reason == "length"
    assert worker.stats().free_slots == 2


def test_a_request_that_cannot_be_started_ends_alone(
    worker: EngineWorker, desk: Desk, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "submit", lambda request, arrived: 1 / 0)
    worker.submit(make_request("bad"))
    desk.wait_for_end("bad")
    assert desk.ends("bad")[0].finish_reason == "error"
    monkeypatch.undo()
    worker.submit(make_request("good"))
    desk.wait_for_end("good")
    assert desk.ends("good")[0].finish_reason == "length"


def test_a_stalled_step_is_unhealthy_until_it_moves_again(worker: EngineWorker, desk: Desk) -> None:
    gate = threading.Event()
    desk.on_delivery = lambda outputs: assert_set(gate)
    assert worker.stats().healthy
    worker.submit(make_request("r"))
    _eventually(lambda: not worker.stats().healthy)
    assert "no progress" in worker.stats().reason
    gate.set()
    desk.wait_for_end("r")
    _eventually(lambda: worker.stats().healthy)


def test_choices_that_could_never_be_open_together_are_refused(pair: Pair) -> None:
    """Waiting would not help: there is no load under which they would be admitted."""
    engine = load(pair, max_running=2, max_waiting=20, **({} if kv_kind() == "slotted" else {"kv_tokens": 200}))
    worker = EngineWorker(engine, lambda outputs, stats: None)
    most = 8 * engine.target.layout.tokens
    requests = [replace(make_request(f"r{i}"), prompt_ids=(5,) * 80) for i in range(21)]
    while sum(80 + r.params.max_tokens for r in requests) <= most:
        requests.append(replace(requests[0], id=f"r{len(requests)}"))
    with pytest.raises(InvalidRequest, match=r"no more than .* are admitted at once") as caught:
        worker.submit(*requests)
    assert caught.value.param == "n"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failed_audit_ends_the_thread_and_health_says_so(worker: EngineWorker, desk: Desk, engine: Engine) -> None:
    def lose_a_slot_at_the_end(outputs: list[Output]) -> None:
        if outputs[-1].request_id == "r" and outputs[-1].finish_reason:
            engine.target.cache._slots._free.pop()  # type: ignore[attr-defined]
            worker.submit(make_request("late"))  # what is waiting goes before the audit

    desk.on_delivery = lose_a_slot_at_the_end
    worker.submit(make_request("r"))
    desk.wait_for_end("r", "late")
    assert desk.ends("late")[0].finish_reason == "length"
    _eventually(lambda: not worker.stats().healthy)
    assert worker.stats().reason == "the engine thread is not running"
    with pytest.raises(EngineStopped):
        worker.submit(make_request("later"))


def test_an_id_in_use_is_refused_until_its_request_ends(worker: EngineWorker, desk: Desk) -> None:
    gate = threading.Event()
    desk.on_delivery = lambda outputs: assert_set(gate)
    worker.submit(make_request("r"))
    with pytest.raises(InvalidRequest, match="in use") as refused:
        worker.submit(make_request("r"))
    assert refused.value.param == "id"
    gate.set()
    desk.wait_for_end("r")
    worker.submit(make_request("r"))
    desk.wait(lambda: len(desk.ends("r")) == 2)


def test_waiting_for_the_engines_attention_is_queue_time(worker: EngineWorker, desk: Desk) -> None:
    """A request that arrives while a step is under way has arrived then, and not when the step is over."""
    held, gate = threading.Event(), threading.Event()

    def hold(outputs: list[Output]) -> None:
        held.set()
        assert_set(gate)

    desk.on_delivery = hold
    worker.submit(make_request("first"))
    assert_set(held)
    worker.submit(make_request("second"))
    released = time.monotonic()
    gate.set()
    desk.wait_for_end("first", "second")
    record = desk.ends("second")[0].record
    assert record is not None
    assert record.admitted is not None
    assert record.arrived <= released <= record.admitted


@pytest.mark.parametrize("stalled_after_s", [2 * PATIENCE_S])  # an idle engine's heart beats slower than 0.2 s
def test_steps_that_all_fail_are_unhealthy_until_one_succeeds(
    worker: EngineWorker, desk: Desk, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that fails twice, and a step that raises, count alike; idle turns between them change nothing."""

    def broken(*args: object) -> None:
        raise RuntimeError("boom")

    def fail(name: str) -> None:
        worker.submit(make_request(name))
        desk.wait_for_end(name)
        assert desk.ends(name)[0].finish_reason == "error"

    run, step = engine.target.run, Engine.step
    monkeypatch.setattr(engine.target, "run", broken)
    fail("a")
    fail("b")
    monkeypatch.setattr(engine.target, "run", run)
    worker.submit(make_request("good"))
    desk.wait_for_end("good")
    monkeypatch.setattr(engine.target, "run", broken)
    fail("c")
    fail("d")
    assert worker.stats().healthy  # four in all, but never three in a row
    monkeypatch.setattr(Engine, "step", broken)
    fail("e")
    assert worker.stats().reason == "the engine's last 3 steps failed"
    _pass_idle_turns(worker)
    assert not worker.stats().healthy
    monkeypatch.setattr(Engine, "step", step)
    monkeypatch.setattr(engine.target, "run", run)
    worker.submit(make_request("better"))
    desk.wait_for_end("better")
    assert worker.stats().healthy


def _pass_idle_turns(worker: EngineWorker) -> None:
    """Until the idle engine has proved again that it lives."""

    def last_beat() -> float:
        return time.monotonic() - worker.stats().heartbeat_age_s

    start = last_beat()
    _eventually(lambda: last_beat() > start + IDLE_WAIT_S)


def test_rounds_are_measured_again_in_calms_that_double_when_a_request_comes(
    engine: Engine, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the test's thread and clock. Clients that ask one question after the other must never wait for it."""
    now, served_at, measured_after = [0.0], 0.0, list[float]()
    comes = True  # whether a request comes during the measurement
    names = (f"r{i}" for i in itertools.count())

    def repeat_profile(interrupted: Callable[[], bool]) -> bool:
        assert not interrupted()
        if comes:
            idle.submit(make_request(next(names)))
            assert interrupted()
        measured_after.append(now[0] - served_at)
        return not comes

    def serve_and_rest(seconds: float) -> list[float]:
        nonlocal served_at
        idle.submit(make_request(next(names)))
        idle._run_commands(wait=False)
        while engine.has_work:
            idle._step()
        served_at = now[0]
        measured_after.clear()
        while now[0] < served_at + seconds:
            now[0] += CALM_S / 16
            idle._step()
        return measured_after

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(engine, "repeat_profile", repeat_profile)
    idle = EngineWorker(engine, desk.deliver)
    for _ in range(3):
        assert serve_and_rest(CALM_S * 0.9) == []
    for calm_s in (CALM_S, 2 * CALM_S, 4 * CALM_S):
        assert serve_and_rest(1.1 * calm_s) == [calm_s]
    comes = False
    assert serve_and_rest(8.1 * CALM_S)[0] == 8 * CALM_S


def test_a_step_that_feeds_nothing_while_work_is_left_is_no_progress(
    worker: EngineWorker, desk: Desk, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = engine.scheduler.plan
    monkeypatch.setattr(engine.scheduler, "plan", lambda: Plan(()))
    worker.submit(make_request("r"))
    _eventually(lambda: not worker.stats().healthy)
    steps = worker.stats().steps
    _eventually(lambda: worker.stats().steps > steps)  # it turns, and feeds nothing
    assert "no progress" in worker.stats().reason
    monkeypatch.setattr(engine.scheduler, "plan", plan)
    desk.wait_for_end("r")
    _eventually(lambda: worker.stats().healthy)


def test_every_step_that_feeds_a_token_is_progress(
    worker: EngineWorker, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that moves only in deliveries, each by more than half of what counts as stalled."""
    now = [time.monotonic()]
    healthy: list[bool] = []

    def tick(outputs: list[Output]) -> None:
        now[0] += 0.15
        healthy.append(worker.stats().healthy)

    monkeypatch.setattr(worker_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    worker.submit(make_request("r", max_tokens=60))
    desk.on_delivery = tick
    desk.wait_for_end("r")
    _eventually(lambda: worker.stats().free_slots == 2)
    assert len(healthy) > 5
    assert all(healthy)


class Clock:
    """The worker's, which only the test moves: `step_s` with each step. The engine's stays real."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        self.step_s = 0.0
        step = Engine.step

        def ticking(engine: Engine) -> StepResult:
            self.now += self.step_s
            return step(engine)

        monkeypatch.setattr(worker_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(Engine, "step", ticking)


def healthy_after(worker: EngineWorker, clock: Clock, seconds: float) -> bool:
    clock.now += seconds
    healthy = worker.stats().healthy
    clock.now -= seconds
    return healthy


def test_a_stall_is_longer_than_recent_steps_were(engine: Engine, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 20 s: 70 s without progress may be a longer one. After many short steps they are a stall."""
    monkeypatch.setattr(Engine, "full_step_s", 0.0, raising=False)
    worker, clock, seen = EngineWorker(engine, desk.deliver), Clock(monkeypatch), list[bool]()
    clock.step_s = 20.0
    worker.start()

    def look(outputs: list[Output]) -> None:
        steps = len(desk.outputs["r"])
        if steps in (3, 60):
            seen.extend(healthy_after(worker, clock, seconds) for seconds in (29, 70, 1000))
            clock.step_s = 0.1

    desk.on_delivery = look
    worker.submit(replace(make_request("r", max_tokens=70), k=0))
    desk.wait_for_end("r")
    worker.stop()
    assert seen == [True, True, False, True, False, False]


@pytest.mark.parametrize("slow", [False, True])
def test_the_first_step_of_a_large_model_is_no_stall(
    pair: Pair, desk: Desk, monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    """Its passes were seen to take 10 s when it was loaded; those of the other one take next to nothing."""
    ticks = itertools.count()
    with monkeypatch.context() as patch:
        if slow:
            patch.setattr(round_clock, "perf_counter_ns", lambda: next(ticks) * 10**10)
        engine = load(pair, max_running=2, max_step_tokens=40)
    held, gate, run = threading.Event(), threading.Event(), engine.target.run

    def holding(*args: Any) -> Any:
        held.set()
        assert_set(gate)
        return run(*args)

    monkeypatch.setattr(engine.target, "run", holding)
    worker, clock = EngineWorker(engine, desk.deliver, stalled_after_s=30), Clock(monkeypatch)
    worker.start()
    worker.submit(make_request("r"))
    assert_set(held)
    seen = [healthy_after(worker, clock, seconds) for seconds in (29, 39, 1000)]
    gate.set()
    desk.wait_for_end("r")
    worker.stop()
    assert seen == [True, slow, False]


def test_a_delivery_that_fails_costs_only_its_outputs(worker: EngineWorker, desk: Desk) -> None:
    def fail_once(outputs: list[Output]) -> None:
        desk.on_delivery = lambda outputs: None
        raise RuntimeError("nobody there")

    for finish_first in (False, True):
        desk.on_delivery = fail_once
        worker.submit(make_request(f"r{finish_first}", max_tokens=1 if finish_first else 8))
        desk.wait_for_end(f"r{finish_first}")
    for name in ("a", "b", "c"):  # as many as there are places: none was lost
        worker.submit(make_request(name))
    desk.wait_for_end("a", "b", "c")


def test_a_command_that_fails_does_not_end_the_thread(
    worker: EngineWorker, desk: Desk, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    desk.on_delivery = lambda outputs: assert_set(gate)
    tried: list[str] = []

    def fail(request_id: str) -> None:
        tried.append(request_id)
        raise RuntimeError("boom")

    monkeypatch.setattr(engine, "cancel", fail)
    worker.submit(make_request("r"))
    worker.cancel("r")
    worker.submit(make_request("behind"))
    gate.set()
    desk.wait_for_end("r", "behind")
    assert tried == ["r"]
    assert [desk.ends(r)[0].finish_reason for r in ("r", "behind")] == ["length", "length"]


def test_only_requests_that_reach_their_own_end_teach_the_wait(
    worker: EngineWorker, desk: Desk, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker._admission.usage = usage = Told()
    desk.on_delivery = lambda outputs: worker.cancel("cancelled")
    worker.submit(make_request("cancelled", max_tokens=80))
    desk.wait_for_end("cancelled")
    assert usage.parts == []
    worker.submit(make_request("whole"))
    desk.wait_for_end("whole")
    assert len(usage.parts) == 1
    monkeypatch.setattr(engine, "submit", lambda *args: 1 / 0)
    worker.submit(make_request("bad"))
    desk.wait_for_end("bad")
    assert len(usage.parts) == 1


# --- demand is given back --------------------------------------------------------------------------------------------


class Ends:
    """Ends requests in every way there is; the way is the first word of a request's id."""

    WAYS = ("finished", "cancelled", "waiting", "overdue", "unstartable", "uncommittable", "aborted")

    def __init__(self, worker: EngineWorker, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
        self.worker, self.desk, self.names = worker, desk, list[str]()
        engine = worker.engine
        submit, step = engine.submit, engine.step

        def starting(request: Request, arrived: float) -> None:
            if request.id.startswith("unstartable"):
                raise RuntimeError("not this one")
            submit(request, arrived)

        def committing(sequence: Sequence, emitted: list[int]) -> Committed:
            if sequence.request_id.startswith("uncommittable"):
                raise RuntimeError("not this one")
            return commit(sequence, emitted)

        def stepping() -> StepResult:
            if any(s.request_id.startswith("aborted") for s in engine.scheduler.running):
                raise RuntimeError("not with this one")
            return step()

        monkeypatch.setattr(engine, "submit", starting)
        monkeypatch.setattr(engine, "step", stepping)
        monkeypatch.setattr(engine_module, "commit", committing)

    def __call__(self, way: str) -> None:
        name = f"{way} {len(self.names)}"
        self.names.append(name)
        request = make_request(name, max_tokens=4 if way == "finished" else 60)
        self.worker.submit(replace(request, deadline_s=1e-6 if way == "overdue" else None))
        if way == "waiting":  # as likely as not it has not begun
            self.worker.cancel(name)
        if way == "cancelled":
            self.desk.wait(lambda: bool(self.desk.outputs[name]))
            self.worker.cancel(name)


def fills_the_memory(worker: EngineWorker, desk: Desk) -> bool:
    """Whether requests are admitted that may need all the memory there may be demand for; a token more is refused."""
    most, gate = int(worker.engine.config.max_demand * worker.engine.target.layout.tokens), threading.Event()
    sizes = [90] * (most // 90) + [most % 90]
    while sizes[-1] < 10:
        sizes[-2:] = [sizes[-2] - 10, sizes[-1] + 10]
    requests = [make_request(f"fill {i}", max_tokens=size - 3) for i, size in enumerate(sizes)]
    larger = replace(requests[-1], params=replace(requests[-1].params, max_tokens=sizes[-1] - 2))
    desk.on_delivery = lambda outputs: assert_set(gate)
    worker.submit(requests[0])
    admitted = True
    with pytest.raises(Overloaded, match="KV memory"):
        worker.submit(*requests[1:-1], larger)
    try:
        worker.submit(*requests[1:])
    except Overloaded:
        admitted = False
    gate.set()
    desk.wait_for_end(*(r.id for r in (requests if admitted else requests[:1])))
    return admitted


@pytest.mark.parametrize(
    "ways",
    [
        pytest.param(Ends.WAYS, id="mixed"),
        *(pytest.param((way,), id=way, marks=pytest.mark.proofs) for way in Ends.WAYS),
    ],
)
def test_the_demand_of_a_request_is_given_back_however_it_ends(
    pair: Pair, desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ways: tuple[str, ...]
) -> None:
    caplog.set_level(logging.CRITICAL, "engine")
    kv = {} if kv_kind() == "slotted" else {"kv_tokens": 200}
    worker = EngineWorker(load(pair, max_running=2, max_waiting=60, max_demand=1.5, **kv), desk.deliver)
    worker.start()
    ends, rng = Ends(worker, desk, monkeypatch), random.Random(10)
    for way in rng.sample(2 * ways, 2 * len(ways)):
        before = set(ends.names)
        try:
            ends(way)
        except Overloaded:
            ends.names.pop()
        if rng.random() < 0.5:
            desk.wait_for_end(*before)
    desk.wait_for_end(*ends.names)
    assert ends.names
    assert fills_the_memory(worker, desk)
    if ways == Ends.WAYS:
        assert fills_the_memory(worker, desk)
    worker.stop()


def test_negative_control_demand_that_is_not_given_back(
    pair: Pair, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = {} if kv_kind() == "slotted" else {"kv_tokens": 200}
    worker = EngineWorker(load(pair, max_running=2, max_waiting=60, max_demand=1.5, **kv), desk.deliver)
    worker.start()
    worker._open_kv_tokens += 1
    assert not fills_the_memory(worker, desk)
    worker.stop()


def _eventually(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)
