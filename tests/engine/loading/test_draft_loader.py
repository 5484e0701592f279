"""Drafts are loaded beside the engine's thread: streams go on, the latest wish counts, a failure changes nothing."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import pytest

from engine.config import ConfigError
from engine.engine import Engine
from engine.loading.draft_swap import DraftLoader, NewDraft, OldDraft
from engine.types import EngineStopped, Output, Request, SamplingParams
from engine.worker import EngineWorker
from tests.engine.driving import drive, load, model_drafters
from tests.engine.pairs import Pair, Shape, save_checkpoint
from tests.engine.test_worker import PATIENCE_S, Desk
from tests.examples import in_proofs

LONG = Request("long", (5, 6, 7), SamplingParams(temperature=0.8, seed=3, max_tokens=80, ignore_eos=True))


class Gate:
    """Holds every load until it is let through."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str | None] = []
        self.begun = threading.Semaphore(0)
        self.open = threading.Semaphore(0)
        self._load: Callable[[str | None], NewDraft] = engine.load_draft
        monkeypatch.setattr(engine, "load_draft", self.load)

    def load(self, draft: str | None) -> NewDraft:
        self.asked.append(draft)
        self.begun.release()
        assert self.open.acquire(timeout=PATIENCE_S)
        return self._load(draft)

    def wait_until_begun(self) -> None:
        assert self.begun.acquire(timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def other(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("other") / "draft"
    return save_checkpoint(path, Shape(), seed=3, like=Path(pair.target), noise=0.3)


@pytest.fixture
def engine(pair: Pair) -> Engine:
    return load(pair, max_running=2, max_step_tokens=40)


@pytest.fixture
def gate(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(engine, monkeypatch)


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def worker(engine: Engine, gate: Gate, desk: Desk) -> Iterator[EngineWorker]:
    worker = EngineWorker(engine, desk.deliver)
    worker.start()
    yield worker
    gate.open.release(100)
    worker.stop()


def tokens(desk: Desk, name: str) -> list[int]:
    return [token for output in desk.outputs[name] for token in output.token_ids]


def wait_for_command(worker: EngineWorker) -> None:
    """On the engine's thread: wait until another thread wants something of it."""
    give_up = time.monotonic() + PATIENCE_S
    while worker._inbox.empty():
        assert time.monotonic() < give_up
        time.sleep(0.001)


def test_a_stream_goes_on_while_drafts_are_loaded_and_exchanged(
    pair: Pair,
    worker: EngineWorker,
    gate: Gate,
    desk: Desk,
    engine: Engine,
    other: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    want = drive(load(pair), [LONG]).tokens["long"]
    put_draft, exchanged_at = engine.put_draft, list[int]()
    before = model_drafters(engine)

    def put(new: NewDraft) -> OldDraft:
        exchanged_at.append(len(desk.outputs["long"]))
        return put_draft(new)

    monkeypatch.setattr(engine, "put_draft", put)
    changes = iter([other, None, pair.draft, other])
    futures = list[Future[None]]()

    def exchange(outputs: list[Output]) -> None:
        """After each delivery, on the engine's thread. The four wishes come first, while the first one is loaded. Then
        the last one is loaded while the stream has tokens left."""
        if (draft := next(changes, "")) != "":
            futures.append(worker.change_draft(draft))
        elif not exchanged_at and any(output.request_id == "long" for output in outputs):
            gate.open.release(100)
            wait_for_command(worker)

    desk.on_delivery = exchange
    worker.submit(LONG)
    desk.wait_for_end("long")
    futures[-1].result(PATIENCE_S)
    assert [future.cancelled() for future in futures] == [True, True, True, False]
    (deliveries,) = exchanged_at
    outputs = desk.outputs["long"]
    for part in (outputs[:deliveries], outputs[deliveries:]):  # one draft drafted, then the other
        assert any(output.drafts for output in part)
    assert tokens(desk, "long") == want
    assert engine.config.draft == other
    assert set(model_drafters(engine)).isdisjoint(before)
    assert worker.loading_draft is None


@pytest.mark.parametrize("step", ["adopt", *in_proofs("put_drafters", "begin_draft")])
def test_an_exchange_that_fails_on_its_way_leaves_the_old_draft(
    step: str, pair: Pair, worker: EngineWorker, gate: Gate, desk: Desk, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No draft is put in place of a draft while it drafts for a stream."""
    want = drive(load(pair), [LONG]).tokens["long"]
    before, drafters, room = model_drafters(engine), engine.intake.drafters, engine._room
    owner = engine.speculator.control if step == "begin_draft" else engine.intake
    failed_at = list[int]()
    right = getattr(owner, step)

    def fail_once(*arguments: Any) -> None:
        if not failed_at:
            failed_at.append(len(desk.outputs["long"]))
            raise RuntimeError("planted")
        right(*arguments)

    monkeypatch.setattr(owner, step, fail_once)
    futures = list[Future[None]]()

    def exchange(_: list[Output]) -> None:
        if not futures:
            futures.append(worker.change_draft(None))
            gate.open.release(100)
            wait_for_command(worker)

    desk.on_delivery = exchange
    worker.submit(LONG)
    desk.wait_for_end("long")
    with pytest.raises(RuntimeError, match="planted"):
        futures[0].result(PATIENCE_S)
    assert model_drafters(engine) == before
    assert (engine.intake.drafters, engine._room, engine.config.draft) == (drafters, room, pair.draft)
    assert any(output.drafts for output in desk.outputs["long"][failed_at[0] :])
    assert tokens(desk, "long") == want


def test_the_latest_wish_counts(pair: Pair, worker: EngineWorker, gate: Gate, engine: Engine, other: str) -> None:
    first = worker.change_draft(other)
    gate.wait_until_begun()
    assert worker.loading_draft == other
    assert worker.change_draft(other) is first
    second = worker.change_draft(None)
    assert first.cancelled()
    assert worker.loading_draft == "none"
    third = worker.change_draft(pair.draft)  # what serves already
    gate.open.release(100)
    third.result(PATIENCE_S)
    assert second.cancelled()
    assert gate.asked == [other]
    assert engine.config.draft == pair.draft
    worker.change_draft(None).result(PATIENCE_S)
    assert not engine.config.draft
    assert not model_drafters(engine)


def test_a_swap_to_what_is_there_does_nothing(pair: Pair, worker: EngineWorker, gate: Gate, engine: Engine) -> None:
    before = model_drafters(engine)
    worker.change_draft(pair.draft).result(PATIENCE_S)
    assert gate.asked == []
    assert model_drafters(engine) == before


def test_a_failure_changes_nothing_and_the_next_wish_is_served(
    worker: EngineWorker, gate: Gate, engine: Engine, desk: Desk, other: str, tmp_path: Path
) -> None:
    before = model_drafters(engine)
    gate.open.release(100)
    failing = worker.change_draft(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="there is no directory"):
        failing.result(PATIENCE_S)
    assert worker.loading_draft is None
    worker.submit(LONG)
    desk.wait_for_end("long")
    assert any(output.drafts for output in desk.outputs["long"])
    assert model_drafters(engine) == before
    worker.change_draft(other).result(PATIENCE_S)
    assert engine.config.draft == other


def test_a_fault_in_the_exchange_is_told(
    worker: EngineWorker, gate: Gate, engine: Engine, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: NewDraft) -> None:
        raise RuntimeError("planted")

    gate.open.release(100)
    monkeypatch.setattr(engine, "put_draft", fail)
    with pytest.raises(RuntimeError, match="planted"):
        worker.change_draft(other).result(PATIENCE_S)
    assert worker.stats().healthy


def test_a_worker_that_stops_while_a_draft_is_loaded(
    worker: EngineWorker, gate: Gate, engine: Engine, other: str
) -> None:
    wish = worker.change_draft(other)
    gate.wait_until_begun()
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    with pytest.raises(CancelledError):
        wish.result(PATIENCE_S)
    gate.open.release(100)
    stopping.join(PATIENCE_S)
    assert not stopping.is_alive()
    assert "draft" not in {thread.name for thread in threading.enumerate()}
    assert engine.config.draft != other
    assert worker.change_draft(None).cancelled()


def test_an_engine_that_ended_takes_no_draft(worker: EngineWorker, engine: Engine, other: str) -> None:
    """Its thread may end between the load and the exchange."""
    cost = engine.speculator.control.cost.draft_cost(())
    new = NewDraft(engine.config.with_draft(other), None, cost)
    worker.stop()
    with pytest.raises(EngineStopped):
        worker._put_draft(new)


def test_an_idle_engine_profiles_after_a_swap(
    worker: EngineWorker, gate: Gate, engine: Engine, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiled = threading.Event()

    def repeat_profile(interrupted: Callable[[], bool]) -> bool:
        profiled.set()
        return True

    monkeypatch.setattr(engine, "repeat_profile", repeat_profile)
    worker._calm_s = 1e6  # requests have interrupted the profile of the draft before
    gate.open.release(100)
    worker.change_draft(other).result(PATIENCE_S)
    assert profiled.wait(PATIENCE_S)


class Weights:
    """Memory that a load has taken."""


@pytest.mark.parametrize("where", [*in_proofs("load"), "put"])
def test_a_failure_frees_the_memory_of_the_new_draft_at_once(where: str) -> None:
    """Without the garbage collector: the traceback would hold the frames, and these the weights."""
    taken: list[weakref.ref[Weights]] = []

    def take() -> Weights:
        weights = Weights()
        taken.append(weakref.ref(weights))
        return weights

    def load_draft(_: str | None) -> Any:
        weights = take()
        if where == "put":
            return weights
        try:
            raise RuntimeError(f"planted, with {weights}")
        except RuntimeError as error:
            raise ConfigError("planted") from error

    def put(_: NewDraft) -> Any:
        raise ConfigError("planted")

    loader = DraftLoader(lambda: None, load_draft, put)
    gc.collect()
    gc.disable()
    try:
        wish = loader.want("new")
        error = wish.exception(PATIENCE_S)
        loader.stop(PATIENCE_S)
        assert isinstance(error, ConfigError)
        assert error.__traceback__ is not None  # the lines stay for the log
        assert [ref() for ref in taken] == [None]
    finally:
        gc.enable()
