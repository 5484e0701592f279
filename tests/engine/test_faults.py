"""R9: a fault costs as little as it can, and never the text, the slots or the loop."""

import logging
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from torch import Tensor

from cache.paged import PagedCache
from cache.storage import Blocks
from engine.drafters.base import Draft, DraftBatch
from engine.drafters.model import ModelDrafter
from engine.engine import Engine
from engine.models.feeds import Feed
from engine.models.runner import Runner
from engine.sampling import matching
from engine.sampling.acceptance import Verdict
from engine.sampling.matching import match
from engine.sequence import Sequence
from engine.types import Request, SamplingParams
from tests.engine.driving import Drive, drive, load
from tests.engine.fresh import Checker
from tests.engine.pairs import VOCAB, Pair
from tests.examples import in_proofs, usual_and_proofs

pytestmark = pytest.mark.usefixtures("shared_weights", "unprofiled")


@pytest.fixture(scope="module")
def pair(thin: Pair) -> Pair:
    return thin


Propose = Callable[[ModelDrafter, DraftBatch, Seq[int]], Draft]


@pytest.fixture
def engine(pair: Pair) -> Engine:
    return load(pair, max_running=4, max_spec_length=4, max_step_tokens=20)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "engine")


def make_requests(k: int = 4) -> list[Request]:
    """Seven requests for four slots; some prompts take several passes."""
    rng = random.Random(6)
    lengths = (3, 30, 1, 9, 45, 2, 12)
    return [
        Request(
            f"r{i}",
            tuple(rng.randrange(2, VOCAB) for _ in range(n)),
            SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=16, ignore_eos=True),
            k=k,
        )
        for i, n in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def expected(pair: Pair) -> dict[str, list[int]]:
    return drive(load(pair, max_running=4, max_spec_length=4, max_step_tokens=20), make_requests(0)).tokens


class Sometimes:
    """True at the chosen calls (0 is the first); counts them."""

    def __init__(self, *when: int) -> None:
        self.when, self.calls, self.hits = set(when), 0, 0

    def __call__(self) -> bool:
        hit = self.calls in self.when
        self.calls += 1
        self.hits += hit
        return hit


def faults(run: Drive) -> int:
    return sum(s.draft_faults for s in run.steps)


# --- the drafter -----------------------------------------------------------------------------------------------------


def test_a_drafter_that_raises(engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    propose, now = ModelDrafter.propose, Sometimes(0, 1, 5, 9, 10)

    def raising(self: ModelDrafter, batch: DraftBatch, ks: Seq[int]) -> Draft:
        if now():
            raise RuntimeError("no idea")
        return propose(self, batch, ks)

    monkeypatch.setattr(ModelDrafter, "propose", raising)
    run = drive(engine, make_requests(), after_step=Checker(engine, every=3))
    assert run.tokens == expected
    assert faults(run) == now.hits == 5
    assert run.accepted


def test_a_drafter_that_raises_half_way(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache then holds drafts that were never proposed; they must not stay."""
    step, now = Runner.step, Sometimes(1, 5, 6, 14, 20)

    def raising(self: Runner, sequences: Seq[Any], tokens: Tensor) -> Tensor:
        logits = step(self, sequences, tokens)
        if now():
            raise RuntimeError("half way")
        return logits

    monkeypatch.setattr(Runner, "step", raising)
    run = drive(engine, make_requests(), after_step=Checker(engine, every=3))
    assert run.tokens == expected
    assert faults(run) == now.hits == 5


@pytest.mark.parametrize("calls", [(2, 5), *in_proofs(range(1000))], ids=["sometimes", "always"])
def test_a_drafter_that_cannot_observe(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, calls: Seq[int]
) -> None:
    """What its cache holds is unknown then: it starts again from nothing, and no request suffers."""
    observe, now = ModelDrafter.observe, Sometimes(*calls)

    def raising(self: ModelDrafter, batch: DraftBatch, verdict: Verdict) -> None:
        if now():
            raise RuntimeError("did not look")
        observe(self, batch, verdict)

    monkeypatch.setattr(ModelDrafter, "observe", raising)
    run = drive(engine, make_requests(), after_step=Checker(engine, every=3))
    assert run.tokens == expected
    assert faults(run) == now.hits > 0


def spoiled(draft: Draft, spoil: Callable[[Tensor], None]) -> Draft:
    if draft.tokens is not None:
        spoil(draft.tokens)
    return draft


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(-1, id="negative"),
        pytest.param(VOCAB, id="just beyond", marks=pytest.mark.proofs),
        pytest.param(2**40, id="far beyond", marks=pytest.mark.proofs),
    ],
)
def test_illegal_draft_ids_cost_their_own_sequence_its_drafts(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    propose = ModelDrafter.propose

    def illegal(self: ModelDrafter, batch: DraftBatch, ks: Seq[int]) -> Draft:
        at = [i for i, s in enumerate(batch.sequences) if s.request_id == "r0"]
        return spoiled(propose(self, batch, ks), lambda tokens: tokens.__setitem__((at, 0), bad))

    monkeypatch.setattr(ModelDrafter, "propose", illegal)
    run = drive(engine, make_requests(), after_step=Checker(engine, every=3))
    assert run.tokens == expected
    assert run.received["r0"].record is not None
    assert sum(run.received["r0"].record.column("accepted")) == 0
    assert faults(run) == sum(1 for k in run.received["r0"].record.column("drafted") if k) > 0
    assert run.accepted  # the others' drafts were kept


def too_many(self: ModelDrafter, batch: DraftBatch, ks: Seq[int]) -> Draft:
    return Draft(tuple(k + 1 for k in ks), torch.zeros(len(ks), max(ks) + 1, dtype=torch.int64))


def too_few_columns(self: ModelDrafter, batch: DraftBatch, ks: Seq[int]) -> Draft:
    return Draft(tuple(ks), torch.zeros(len(ks), max(ks) - 1, dtype=torch.int64))


def wrong_batch(self: ModelDrafter, batch: DraftBatch, ks: Seq[int]) -> Draft:
    return Draft((*ks, 1), torch.zeros(len(ks) + 1, max(ks), dtype=torch.int64))


def no_table(self: ModelDrafter, batch: DraftBatch, ks: Seq[int]) -> Draft:
    return Draft(tuple(ks), None)


def too_few_rows(self: ModelDrafter, batch: DraftBatch, ks: Seq[int]) -> Draft:
    return Draft(tuple(ks), torch.zeros(len(ks) - 1, max(ks), dtype=torch.int64))


def too_many_rows(self: ModelDrafter, batch: DraftBatch, ks: Seq[int]) -> Draft:
    return Draft(tuple(ks), torch.zeros(len(ks) + 1, max(ks), dtype=torch.int64))


def fractions(self: ModelDrafter, batch: DraftBatch, ks: Seq[int]) -> Draft:
    return Draft(tuple(ks), torch.zeros(len(ks), max(ks)))


def elsewhere(self: ModelDrafter, batch: DraftBatch, ks: Seq[int]) -> Draft:
    return Draft(tuple(ks), torch.zeros(len(ks), max(ks), dtype=torch.int64, device="meta"))


CONTRACT = [too_many, too_few_columns, wrong_batch, no_table, too_few_rows, too_many_rows, fractions, elsewhere]


@pytest.mark.parametrize("broken", usual_and_proofs(CONTRACT, CONTRACT[::3]))
def test_a_drafter_that_breaks_its_contract(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, broken: Propose
) -> None:
    asked, passes, run_target = [], [], engine.target.run

    def counting_passes(feeds: Seq[Feed], drafts: Tensor | None = None) -> Tensor:
        passes.append(len(feeds))
        return run_target(feeds, drafts)

    def counting(self: ModelDrafter, batch: DraftBatch, ks: Seq[int]) -> Draft:
        asked.append(ks)
        return broken(self, batch, ks)

    monkeypatch.setattr(engine.target, "run", counting_passes)
    monkeypatch.setattr(ModelDrafter, "propose", counting)
    run = drive(engine, make_requests())
    assert run.tokens == expected
    assert run.drafted == 0
    assert faults(run) == len(asked) > 0
    assert len(passes) == sum(s.sequences > 0 for s in run.steps)  # no pass was lost to it


def forgetful(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A drafter that frees what it holds and then raises; whose requests it was asked to forget."""
    forget, asked = ModelDrafter.forget, []

    def raising(self: ModelDrafter, sequence: Sequence) -> None:
        asked.append(sequence.request_id)
        forget(self, sequence)
        raise RuntimeError("cannot forget")

    monkeypatch.setattr(ModelDrafter, "forget", raising)
    return asked


def test_a_drafter_that_raises_when_requests_finish_or_are_cancelled(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = forgetful(monkeypatch)
    run = drive(engine, make_requests(), cancels={0: ["r6"], 6: ["r1"]})
    assert {run.received[name].reason for name in ("r1", "r6")} == {"cancelled"}
    assert {n: t for n, t in run.tokens.items() if n not in ("r1", "r6")} == {
        n: t for n, t in expected.items() if n not in ("r1", "r6")
    }
    assert faults(run) == len(asked) == 7


def test_a_drafter_that_raises_when_everything_is_aborted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = forgetful(monkeypatch)
    for request in make_requests():
        engine.submit(request)
    for _ in range(4):
        engine.step()
    outputs = engine.abort("gone")
    assert {o.request_id: o.error for o in outputs} == {f"r{i}": "gone" for i in range(7)}
    assert sorted(asked) == [f"r{i}" for i in range(7)]
    assert not engine.has_work
    engine.audit()


def test_a_drafter_that_can_neither_observe_nor_forget(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = forgetful(monkeypatch)
    monkeypatch.setattr(ModelDrafter, "observe", lambda *_: 1 / 0)
    run = drive(engine, make_requests(), after_step=Checker(engine, every=3))
    assert run.tokens == expected
    assert len(asked) > 7


def test_abort_after_a_step_that_died_half_way_through_admission(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequence is neither waiting nor running then."""
    for request in make_requests():
        engine.submit(request)
    with monkeypatch.context() as patch:
        patch.setattr(engine.target.cache, "allocate", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert len(engine.abort("gone")) == 7
    engine.audit()
    assert not engine.has_work


def test_abort_after_a_step_that_died_in_its_last_verb(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that the step has finished still get their ends (I5), with their tokens."""
    engine.submit(Request("cancelled", (5, 6), SamplingParams(max_tokens=9)))
    engine.submit(Request("done", (5, 6, 7), SamplingParams(max_tokens=1)))
    engine.cancel("cancelled")
    monkeypatch.setattr(engine.speculator, "spent_us", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    ends = {output.request_id: output for output in engine.abort("gone")}
    assert {name: end.finish_reason for name, end in ends.items()} == {"cancelled": "cancelled", "done": "length"}
    assert len(ends["done"].token_ids) == 1
    assert not engine.has_work


# --- the pass --------------------------------------------------------------------------------------------------------


def fail_run(engine: Engine, monkeypatch: pytest.MonkeyPatch, now: Callable[[], bool], *, after: bool) -> None:
    """The target's pass raises, before or after its forward and its bookkeeping are done."""
    run = engine.target.run

    def raising(feeds: Seq[Feed], drafts: Tensor | None = None) -> Tensor:
        hit = now()
        if hit and not after:
            raise RuntimeError("out of memory")
        logits = run(feeds, drafts)
        if hit:
            raise RuntimeError("out of memory, later")
        return logits

    monkeypatch.setattr(engine.target, "run", raising, raising=True)


@pytest.mark.parametrize(
    ("first", "after"),
    [pytest.param(n, late, marks=() if n == late else pytest.mark.proofs) for n in range(4) for late in (False, True)],
)
def test_a_failed_pass_is_tried_again(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, after: bool, first: int
) -> None:
    """Passes with prefill chunks, last chunks and decodes among them; every third fails once."""
    now = Sometimes(*range(first, 1000, 3))
    fail_run(engine, monkeypatch, now, after=after)
    run = drive(engine, make_requests(), after_step=Checker(engine, every=3))
    assert run.tokens == expected
    assert now.hits >= 5
    assert run.accepted


def test_a_pass_that_fails_on_drafts_is_tried_again_without_them(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_target, failed = engine.target.run, []

    def eager(self: ModelDrafter, batch: DraftBatch, ks: Seq[int]) -> Draft:
        return Draft(tuple(ks), torch.zeros(len(ks), max(ks), dtype=torch.int64))  # at any time, asked twice too

    def raising(feeds: Seq[Feed], drafts: Tensor | None = None) -> Tensor:
        if drafts is not None:
            failed.append(len(feeds))
            raise RuntimeError("these drafts are poison")
        return run_target(feeds, drafts)

    monkeypatch.setattr(ModelDrafter, "propose", eager)
    monkeypatch.setattr(engine.target, "run", raising)
    run = drive(engine, make_requests(), after_step=Checker(engine, every=3))
    assert run.tokens == expected
    assert run.drafted == 0
    assert faults(run) == len(failed) > 10
    assert not any(s.failed for s in run.steps)


def test_a_failed_verifier_is_tried_again(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = Sometimes(*range(0, 1000, 3))

    def raising(*args: Any) -> Verdict:
        if now():
            raise RuntimeError("cannot tell")
        return match(*args)

    monkeypatch.setattr(matching, "match", raising)
    assert drive(engine, make_requests(), after_step=Checker(engine, every=3)).tokens == expected


def test_a_pass_that_always_fails_ends_its_requests_and_only_those(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_run(engine, monkeypatch, lambda: engine.steps == 6, after=False)
    run = drive(engine, make_requests())
    ended = {name for name, told in run.received.items() if told.reason == "error"}
    assert 0 < len(ended) <= 4
    assert sum(s.failed for s in run.steps) == 1
    for name, told in run.received.items():
        assert told.tokens == (expected[name][: len(told.tokens)] if name in ended else expected[name])
    assert all(run.received[name].error == "the model failed to process this request" for name in ended)


def test_a_broken_model_ends_everything_and_then_serves_again(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_run(engine, patch, lambda: True, after=True)
        run = drive(engine, make_requests())
    assert {told.reason for told in run.received.values()} == {"error"}
    assert all(not told.tokens for told in run.received.values())
    assert "memory" not in "".join(told.error or "" for told in run.received.values())  # what failed is for the log
    engine.audit()
    assert drive(engine, make_requests()).tokens == expected


# --- one request -----------------------------------------------------------------------------------------------------


def poison(engine: Engine, name: str) -> Callable[[], None]:
    """Once, when that request has five tokens: all of the memory that it holds, beyond its length too, becomes NaN."""
    done: list[int] = []
    cache, storage = engine.target.cache, engine.target.storage

    def after_step() -> None:
        for sequence in engine.scheduler.running:
            if sequence.request_id == name and sequence.num_output >= 5 and not done:
                done.append(slot := cache.slot(sequence.handle))
                held = len(cache.table(sequence.handle)) * cache.block_size if isinstance(cache, PagedCache) else 96
                storage.prepare()
                for rows in storage.rows:
                    rows[list(storage.row_numbers(slot, 0, held))] = torch.nan

    return after_step


@pytest.mark.parametrize("name", [*in_proofs("r0"), "r1"], ids=["greedy", "sampled"])
@pytest.mark.parametrize("k", [0, 4])
def test_a_request_whose_logits_are_not_finite_ends_alone(
    engine: Engine, expected: dict[str, list[int]], name: str, k: int
) -> None:
    """And leaves nothing of it to those that get its memory next."""
    run = drive(engine, make_requests(k), after_step=poison(engine, name))
    bad = run.received.pop(name)
    assert bad.reason == "error"
    assert bad.error == "the model gave no valid distribution for this request"
    assert 5 <= len(bad.tokens) < 16
    assert bad.tokens == expected[name][: len(bad.tokens)]
    assert {n: told.tokens for n, told in run.received.items()} == {n: t for n, t in expected.items() if n != name}
    assert all_finite(engine)


def test_negative_control_memory_that_is_not_cleared(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.target.storage, "clear", lambda _: None)
    drive(engine, [make_requests(0)[0]], after_step=poison(engine, "r0"))
    assert not all_finite(engine)


def all_finite(engine: Engine) -> bool:
    storage = engine.target.storage
    memory = (storage.pool,) if isinstance(storage, Blocks) else storage.rows
    return all(bool(part.isfinite().all()) for part in memory)


def test_a_request_whose_text_fails_ends_alone(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = engine.intake.sequence

    def sabotaged(request: Request, handle: int, arrived: float) -> Any:
        sequence = make(request, handle, arrived)
        if request.id == "r3":
            push, count = sequence.text.push, Sometimes(7)

            def raising(token: int, *, may_stop: bool) -> tuple[str, bool]:
                if count():
                    raise ValueError("cannot decode the secret")
                return push(token, may_stop=may_stop)

            monkeypatch.setattr(sequence.text, "push", raising)
        return sequence

    monkeypatch.setattr(engine.intake, "sequence", sabotaged)
    run = drive(engine, make_requests())
    bad = run.received.pop("r3")
    assert {name: told.tokens for name, told in run.received.items()} == {
        n: t for n, t in expected.items() if n != "r3"
    }
    assert bad.reason == "error"
    assert bad.error is not None
    assert "secret" not in bad.error
    assert bad.tokens == expected["r3"][: len(bad.tokens)]
    assert bad.record is not None
    assert bad.record.output_tokens == len(bad.tokens)  # tokens that nobody got are not counted
