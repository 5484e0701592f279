"""R9: a fault costs as little as it can, and never the text, the slots or the loop."""

import logging
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from torch import Tensor

import deployments.engine.round as round_module
from deployments.engine.acceptance import Verdict, match
from deployments.engine.drafters.base import Draft, DraftBatch
from deployments.engine.drafters.model import ModelDrafter
from deployments.engine.engine import Engine
from deployments.engine.runner import Feed, Runner
from deployments.engine.types import Request, SamplingParams
from tests.engine.driving import Drive, drive, load
from tests.engine.pairs import VOCAB, Pair
from tests.engine.test_caches import Checker

Propose = Callable[[ModelDrafter, DraftBatch, Seq[int]], Draft]


@pytest.fixture
def engine(pair: Pair) -> Engine:
    return load(pair, max_running=4, max_spec_length=4, max_step_tokens=20)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "deployments.engine")


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
    run = drive(engine, make_requests(), after_step=Checker(engine))
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
    run = drive(engine, make_requests(), after_step=Checker(engine))
    assert run.tokens == expected
    assert faults(run) == now.hits == 5


@pytest.mark.parametrize("calls", [(2, 5), range(1000)], ids=["sometimes", "always"])
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
    run = drive(engine, make_requests(), after_step=Checker(engine))
    assert run.tokens == expected
    assert faults(run) == now.hits > 0


def spoiled(draft: Draft, spoil: Callable[[Tensor], None]) -> Draft:
    if draft.tokens is not None:
        spoil(draft.tokens)
    return draft


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**40], ids=["negative", "just beyond", "far beyond"])
def test_illegal_draft_ids_cost_their_own_sequence_its_drafts(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    propose = ModelDrafter.propose

    def illegal(self: ModelDrafter, batch: DraftBatch, ks: Seq[int]) -> Draft:
        at = [i for i, s in enumerate(batch.sequences) if s.request_id == "r0"]
        return spoiled(propose(self, batch, ks), lambda tokens: tokens.__setitem__((at, 0), bad))

    monkeypatch.setattr(ModelDrafter, "propose", illegal)
    run = drive(engine, make_requests(), after_step=Checker(engine))
    assert run.tokens == expected
    assert run.told["r0"].record is not None
    assert sum(run.told["r0"].record.accepted) == 0
    assert faults(run) == sum(1 for k in run.told["r0"].record.drafted if k) > 0
    assert run.accepted  # the others' drafts were kept


def too_many(self: ModelDrafter, batch: DraftBatch, ks: Seq[int]) -> Draft:
    return Draft(tuple(k + 1 for k in ks), torch.zeros(len(ks), max(ks) + 1, dtype=torch.int64))


def too_few_columns(self: ModelDrafter, batch: DraftBatch, ks: Seq[int]) -> Draft:
    return Draft(tuple(ks), torch.zeros(len(ks), max(ks) - 1, dtype=torch.int64))


def wrong_batch(self: ModelDrafter, batch: DraftBatch, ks: Seq[int]) -> Draft:
    return Draft((*ks, 1), torch.zeros(len(ks) + 1, max(ks), dtype=torch.int64))


@pytest.mark.parametrize("broken", [too_many, too_few_columns, wrong_batch])
def test_a_drafter_that_breaks_its_contract(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, broken: Propose
) -> None:
    monkeypatch.setattr(ModelDrafter, "propose", broken)
    run = drive(engine, make_requests())
    assert run.tokens == expected
    assert run.drafted == 0


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


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("first", range(4))
def test_a_failed_pass_is_tried_again(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, after: bool, first: int
) -> None:
    """Passes with prefill chunks, last chunks and decodes among them; every third fails once."""
    now = Sometimes(*range(first, 1000, 3))
    fail_run(engine, monkeypatch, now, after=after)
    run = drive(engine, make_requests(), after_step=Checker(engine))
    assert run.tokens == expected
    assert now.hits >= 5
    assert run.accepted


def test_a_failed_verifier_is_tried_again(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = Sometimes(*range(0, 1000, 3))

    def raising(*args: Any) -> Verdict:
        if now():
            raise RuntimeError("cannot tell")
        return match(*args)

    monkeypatch.setattr(round_module, "match", raising)
    assert drive(engine, make_requests(), after_step=Checker(engine)).tokens == expected


def test_a_pass_that_always_fails_ends_its_requests_and_only_those(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = Sometimes(6, 7)  # one round's two attempts
    fail_run(engine, monkeypatch, now, after=False)
    run = drive(engine, make_requests())
    ended = {name for name, told in run.told.items() if told.reason == "error"}
    assert 0 < len(ended) <= 4
    for name, told in run.told.items():
        assert told.tokens == (expected[name][: len(told.tokens)] if name in ended else expected[name])
    assert all(run.told[name].error == "the model failed to process this request" for name in ended)


def test_a_broken_model_ends_everything_and_then_serves_again(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_run(engine, patch, lambda: True, after=True)
        run = drive(engine, make_requests())
    assert {told.reason for told in run.told.values()} == {"error"}
    assert all(not told.tokens for told in run.told.values())
    assert "memory" not in "".join(told.error or "" for told in run.told.values())  # what failed is for the log
    engine.audit()
    assert drive(engine, make_requests()).tokens == expected


# --- one request -----------------------------------------------------------------------------------------------------


def test_a_request_whose_text_fails_ends_alone(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = engine._make_sequence

    def sabotaged(request: Request) -> Any:
        sequence = make(request)
        if request.id == "r3":
            push, count = sequence.text.push, Sometimes(7)

            def raising(token: int, *, may_stop: bool) -> tuple[str, bool]:
                if count():
                    raise ValueError("cannot decode the secret")
                return push(token, may_stop=may_stop)

            monkeypatch.setattr(sequence.text, "push", raising)
        return sequence

    monkeypatch.setattr(engine, "_make_sequence", sabotaged)
    run = drive(engine, make_requests())
    bad = run.told.pop("r3")
    assert {name: told.tokens for name, told in run.told.items()} == {n: t for n, t in expected.items() if n != "r3"}
    assert bad.reason == "error"
    assert bad.error is not None
    assert "secret" not in bad.error
    assert bad.tokens == expected["r3"][: len(bad.tokens)]
    assert bad.record is not None
    assert bad.record.output_tokens == len(bad.tokens)  # tokens that nobody got are not counted
