"""Memory that is not finite, or may not be: nobody gets it before it is cleared, and all requests end."""

import logging
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cache.paged import PagedCache
from cache.storage import Blocks, Storage
from engine.engine import Engine
from engine.models.feeds import Feed
from engine.models.runner import Runner
from engine.sequence import Sequence
from engine.types import Request, SamplingParams
from tests.engine.driving import Drive, drive, load, model_drafter
from tests.engine.pairs import VOCAB, Pair
from tests.kv import without_prefixes

pytestmark = pytest.mark.usefixtures("shared_weights", "unprofiled")


@pytest.fixture(scope="module")
def pair(thin: Pair) -> Pair:
    return thin


LONG = "r4"  # whose prompt takes several passes


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "engine")


@pytest.fixture
def engine(pair: Pair) -> Engine:
    return load(pair, max_running=3, max_spec_length=4, max_step_tokens=20)


def make_requests(k: int = 4) -> list[Request]:
    rng = random.Random(8)
    return [
        Request(
            f"r{i}",
            tuple(rng.randrange(2, VOCAB) for _ in range(n)),
            SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=12, ignore_eos=True),
            k=k,
        )
        for i, n in enumerate((3, 12, 1, 30, 70, 2, 9, 20))
    ]


@pytest.fixture(scope="module")
def expected(pair: Pair) -> dict[str, list[int]]:
    return drive(load(pair, max_running=3, max_spec_length=4, max_step_tokens=20), make_requests(0)).tokens


def memory(runner: Runner) -> tuple[Tensor, ...]:
    storage = runner.storage
    return (storage.pool,) if isinstance(storage, Blocks) else storage.rows


def all_finite(runner: Runner) -> bool:
    return all(bool(part.isfinite().all()) for part in memory(runner))


def poison(runner: Runner, handle: int) -> None:
    """All that the sequence holds becomes NaN."""
    cache = runner.cache
    held = len(cache.table(handle)) * cache.block_size if isinstance(cache, PagedCache) else cache.max_len
    runner.storage.prepare()
    for rows in runner.storage.rows:
        rows[list(runner.storage.row_numbers(cache.slot(handle), 0, held))] = torch.nan


def broken(*args: Any) -> Any:
    raise torch.OutOfMemoryError("the secret")


def reading(engine: Engine, name: str = LONG) -> list[Sequence]:
    """The sequence of that name, while it has read a part of its prompt and not all."""
    cache = engine.target.cache
    return [s for s in engine.scheduler.running if s.request_id == name and 0 < cache.length(s.handle) < s.num_prompt]


class Cancels:
    """Cancels requests that are being read, each once; `before` is called first."""

    def __init__(self, engine: Engine, *names: str) -> None:
        self.engine, self.names = engine, list(names)
        self.before: Callable[[Sequence], None] = lambda sequence: None
        self.after: Callable[[], None] = lambda: None

    def __call__(self) -> None:
        for name in tuple(self.names):
            for sequence in reading(self.engine, name):
                self.names.remove(name)
                self.before(sequence)
                self.engine.cancel(name)
                self.after()


def check(run: Drive, expected: dict[str, list[int]], **ends: str) -> None:
    """`ends` as named, all others with their tokens."""
    for name, told in run.received.items():
        assert told.reason == ends.get(name, "length")
        assert told.tokens == (expected[name] if name not in ends else expected[name][: len(told.tokens)])


def test_a_request_ends_though_its_memory_cannot_be_looked_at(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cancels, finite = Cancels(engine, LONG), list[bool]()
    monkeypatch.setattr(engine.target.storage, "is_finite", broken)
    cancels.before = lambda sequence: poison(engine.target, sequence.handle)
    cancels.after = lambda: finite.append(all_finite(engine.target))
    run = drive(engine, make_requests(), after_step=cancels)
    assert finite == [True]
    check(run, expected, **{LONG: "cancelled"})


def test_memory_that_cannot_be_cleared_is_nobodys_until_it_can_be(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that wait run with what is left, and no step fails."""
    cancels, storage, cache = Cancels(engine, "r3"), engine.target.storage, engine.target.cache
    clear, clear_withheld, withheld = storage.clear, storage.clear_withheld, list[int]()
    monkeypatch.setattr(storage, "clear", broken)
    monkeypatch.setattr(storage, "clear_withheld", broken)

    def withhold() -> None:
        assert not all_finite(engine.target)
        withheld.extend(cache.withheld)
        engine.audit()

    def restore(sequence: Sequence) -> None:
        """The next one that is to be cleared."""
        assert sorted(cache.withheld) == sorted(withheld)
        assert engine.steps > 5
        poison(engine.target, sequence.handle)
        monkeypatch.setattr(storage, "clear", clear)
        monkeypatch.setattr(storage, "clear_withheld", clear_withheld)

    cancels.before, cancels.after = lambda sequence: poison(engine.target, sequence.handle), withhold
    late = Cancels(engine, "late")
    late.before = restore
    params = SamplingParams(max_tokens=4)
    arrivals = {0: make_requests(), 40: [Request("late", tuple(range(2, 60)), params)]}

    def after_step() -> None:
        cancels()
        late()

    run = drive(engine, arrivals, after_step=after_step)
    assert withheld
    assert not cache.withheld
    check(Drive({n: t for n, t in run.received.items() if n != "late"}), expected, r3="cancelled")
    assert run.received["late"].reason == "cancelled"
    assert all_finite(engine.target)


class ClearsLater:
    """A sequence's memory cannot be cleared, nor what is withheld at the first two tries."""

    def __init__(self, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.withheld = 0
        self.tried = 0
        cache, storage = runner.cache, runner.storage
        clear_withheld, quarantine = storage.clear_withheld, cache.quarantine

        def trying() -> None:
            self.tried += 1
            if self.tried < 3:
                broken()
            clear_withheld()

        def withholding(handle: int) -> None:
            quarantine(handle)
            self.withheld += len(cache.withheld)

        monkeypatch.setattr(storage, "clear", broken)
        monkeypatch.setattr(storage, "clear_withheld", trying)
        monkeypatch.setattr(cache, "quarantine", withholding)


def test_withheld_memory_is_had_again_though_nobody_else_runs(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it was all there is, nobody runs whose memory would be cleared with it."""
    engine = load(pair, max_running=1, max_spec_length=4, max_step_tokens=20)
    cancels, later = Cancels(engine, LONG), ClearsLater(engine.target, monkeypatch)
    cancels.before = lambda sequence: poison(engine.target, sequence.handle)

    def after_step() -> None:
        cancels()
        assert engine.steps < 400

    requests = [r for r in make_requests() if r.id in (LONG, "r6", "r7")]
    run = drive(engine, requests, after_step=after_step)
    assert {name: told.reason for name, told in run.received.items()} == {
        LONG: "cancelled",
        "r6": "length",
        "r7": "length",
    }
    assert later.withheld
    assert later.tried == 3
    assert not engine.target.cache.withheld
    assert all_finite(engine.target)


def test_withheld_memory_of_the_draft_is_had_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(pair, max_running=1, max_spec_length=4, max_step_tokens=20)
    runner = model_drafter(engine).runner
    later = ClearsLater(runner, monkeypatch)
    run = drive(engine, make_requests(), after_step=poisoned_once(engine, "r1", 3))
    assert {told.reason for told in run.received.values()} == {"length"}
    assert later.withheld
    assert later.tried == 3
    assert not runner.cache.withheld
    assert all_finite(runner)
    record = run.received["r7"].record
    assert record is not None
    assert any(record.column("drafted"))


def test_negative_control_memory_that_is_not_cleared_is_handed_on(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at when the request has ended: those that come next may overwrite it before they read it."""
    cancels, finite = Cancels(engine, "r3"), list[bool]()
    cancels.before = lambda sequence: poison(engine.target, sequence.handle)
    cancels.after = lambda: finite.append(all_finite(engine.target))
    monkeypatch.setattr(engine.target.storage, "is_finite", lambda handle: True)
    drive(engine, make_requests(), after_step=cancels)
    assert finite == [False]


def test_who_was_read_again_after_a_preemption_is_looked_at_again(pair: Pair) -> None:
    """That it emitted before says nothing of what it reads now."""
    engine = load(pair, max_running=3, max_spec_length=4, max_step_tokens=20, **without_prefixes())
    poisoned: list[int] = []

    def after_step() -> None:
        for sequence in tuple(engine.scheduler.running):
            if sequence.request_id == LONG and sequence.num_output >= 3 and not sequence.record.preemptions:
                engine.scheduler.running.remove(sequence)
                engine.scheduler.running.append(sequence)
                if len(engine.scheduler.running) > 1:
                    engine.drafter.forget(engine.scheduler._preempt())
        for sequence in reading(engine):
            if sequence.record.preemptions and not poisoned:
                poisoned.append(sequence.handle)
                poison(engine.target, sequence.handle)
                engine.cancel(LONG)

    run = drive(engine, make_requests(0), after_step=after_step)
    assert poisoned
    assert run.received[LONG].reason == "cancelled"
    assert all_finite(engine.target)


def test_what_a_failed_pass_wrote_goes_to_nobody(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that is tried again, without its drafts: it writes less."""
    run_target, cache, storage, hits = engine.target.run, engine.target.cache, engine.target.storage, list[int]()

    def raising(feeds: Seq[Feed], drafts: Tensor | None = None) -> Tensor:
        logits = run_target(feeds, drafts)
        if not any(feed.drafts for feed in feeds) or len(hits) > 3:
            return logits
        hits.append(len(feeds))
        for feed in feeds:
            handle = feed.sequence.handle
            end = cache.length(handle)
            places = list(storage.row_numbers(cache.slot(handle), end - feed.committed - feed.drafts, end))
            for rows in storage.rows:
                rows[places] = torch.nan
        raise RuntimeError("out of ideas")

    monkeypatch.setattr(engine.target, "run", raising)
    run = drive(engine, make_requests())
    assert len(hits) > 3
    check(run, expected)
    assert all_finite(engine.target)


def test_what_the_last_pass_of_a_request_wrote_is_looked_at(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_target, hits = engine.target.run, list[int]()

    def raising(feeds: Seq[Feed], drafts: Tensor | None = None) -> Tensor:
        logits = run_target(feeds, drafts)
        for feed in feeds:
            if feed.sequence.request_id == "r1" and feed.sequence.num_output >= 3:
                hits.append(len(feeds))
                if len(feeds) == 1:
                    poison(engine.target, feed.sequence.handle)
                raise RuntimeError("out of ideas")
        return logits

    monkeypatch.setattr(engine.target, "run", raising)
    run = drive(engine, make_requests())
    assert hits[-1] == 1
    check(run, expected, r1="error")
    assert all_finite(engine.target)


# --- the draft model -------------------------------------------------------------------------------------------------


def poisoned_once(engine: Engine, name: str, output: int) -> Callable[[], None]:
    """The draft's memory of that request, once it has so many tokens."""
    done: list[int] = []
    runner = model_drafter(engine).runner

    def after_step() -> None:
        for sequence in engine.scheduler.running:
            known = runner.cache.holds(sequence.handle) and runner.cache.length(sequence.handle)
            if sequence.request_id == name and sequence.num_output >= output and known and not done:
                done.append(sequence.handle)
                poison(runner, sequence.handle)

    return after_step


@pytest.mark.parametrize("name", ["r0", "r1"], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("verifier", "tree"),
    [
        ("match", None),
        ("rejection", (2, 1)),
        *(pytest.param(v, tree, marks=pytest.mark.proofs) for v, tree in (("rejection", None), ("match", (2, 1)))),
        pytest.param("block", None, marks=pytest.mark.proofs),
    ],
)
def test_a_draft_that_is_not_finite_costs_its_own_request_its_drafts(
    pair: Pair, expected: dict[str, list[int]], name: str, verifier: str, tree: tuple[int, ...] | None
) -> None:
    """And leaves nothing of it to those that get its memory next."""
    engine = load(pair, max_running=3, max_spec_length=4, max_step_tokens=20, verifier=verifier)
    requests = [r if tree is None else replace(r, k=None, tree=tree) for r in make_requests()]
    run = drive(engine, requests, after_step=poisoned_once(engine, name, 3))
    if verifier == "match":
        assert run.tokens == expected
    assert {told.reason for told in run.received.values()} == {"length"}
    assert all_finite(model_drafter(engine).runner)
    record = run.received[name].record
    assert record is not None
    first = next(i for i in range(len(record.column("emitted"))) if sum(record.column("emitted")[: i + 1]) >= 3)
    drafted = record.column("drafted")[first + 1 :]
    assert drafted[0] > 0
    assert not any(drafted[1:])
    assert sum(s.draft_faults for s in run.steps) == 1
    for other, told in run.received.items():
        assert told.record is not None
        assert other == name or told.record.column("drafted")[-2:] != [0, 0]


def test_a_draft_that_was_not_looked_at_is_cleared_when_it_is_forgotten(pair: Pair) -> None:
    """A prompt that the draft reads in pieces: nothing was drawn behind it yet."""
    engine = load(pair, max_running=1, max_spec_length=5, max_step_tokens=8)
    runner, cancelled = model_drafter(engine).runner, list[int]()

    def after_step() -> None:
        for sequence in tuple(engine.scheduler.running):
            if runner.cache.holds(sequence.handle) and 0 < runner.cache.length(sequence.handle) < 40:
                cancelled.append(sequence.handle)
                poison(runner, sequence.handle)
                engine.cancel("r")

    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    drive(engine, [Request("r", tuple(range(10, 60)), params, k=5)], after_step=after_step)
    assert cancelled
    assert all_finite(runner)


def test_a_draft_whose_memory_is_known_to_be_finite_is_not_looked_at(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That would read all of it at the end of every request."""
    looked: list[Storage] = []
    for runner in (engine.target, model_drafter(engine).runner):
        monkeypatch.setattr(runner.storage, "is_finite", looking(runner.storage, looked))
    run = drive(engine, make_requests())
    assert run.accepted
    assert not looked


def looking(storage: Storage, looked: list[Storage]) -> Callable[[int], bool]:
    def is_finite(handle: int) -> bool:
        looked.append(storage)
        return True

    return is_finite
