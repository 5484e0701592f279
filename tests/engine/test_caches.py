"""After every round both models' caches hold what a fresh prefill of the committed tokens would put there (I1, I2)."""

import random
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
from torch import Tensor

from engine.drafters.base import DraftBatch
from engine.drafters.model import ModelDrafter
from engine.engine import Engine
from engine.models.feeds import Feed
from engine.models.runner import Runner
from engine.sampling.acceptance import Verdict
from engine.types import Request, SamplingParams
from tests.engine.driving import Drive, drive, load, model_drafter
from tests.engine.fresh import Checker
from tests.engine.pairs import VOCAB, Pair

pytestmark = pytest.mark.usefixtures("shared_weights", "unprofiled")


def fuzz(engine: Engine, checker: Checker, seed: int, count: int = 14) -> Drive:
    """Random prompts, k, temperatures, arrivals and cancels."""
    rng = random.Random(seed)
    arrivals: dict[int, list[Request]] = {}
    cancels: dict[int, list[str]] = {}
    for i in range(count):
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.7, 1.0)),
            top_p=rng.choice((1.0, 0.9)),
            seed=rng.randrange(1000),
            max_tokens=rng.randint(1, 24),
            min_tokens=rng.choice((0, 1)),
        )
        prompt = tuple(rng.randrange(2, VOCAB) for _ in range(rng.choice((1, 2, 5, 17, 40, 60))))
        arrivals.setdefault(rng.randint(0, 12), []).append(Request(f"r{i}", prompt, params, k=rng.choice((0, 1, 3, 6))))
        if rng.random() < 0.3:
            cancels.setdefault(rng.randint(3, 20), []).append(f"r{i}")
    return drive(engine, arrivals, cancels, checker)


USUAL = (("pair", 3), ("twins", 1))


@pytest.mark.parametrize(
    ("which", "seed"),
    [
        pytest.param(which, seed, marks=() if (which, seed) in USUAL else pytest.mark.proofs)
        for which in ("pair", "twins")
        for seed in range(6)
    ],
)
def test_caches_hold_the_committed_tokens(which: str, seed: int, request: pytest.FixtureRequest) -> None:
    """Partial acceptance with `pair`, full acceptance with `twins`; 28 tokens a pass chunk most prompts."""
    engine = load(request.getfixturevalue(which), max_running=4, max_spec_length=6, max_step_tokens=28)
    checker = Checker(engine)
    run = fuzz(engine, checker, seed)
    assert run.drafted
    assert run.accepted
    assert min(checker.compared.values()) > 300
    if which == "twins":
        assert run.accepted == run.drafted


def test_switching_speculation_off_and_on_again(pair: Pair) -> None:
    """Plain rounds leave the draft behind by any number of tokens; the next draft catches up, in pieces if need be."""
    engine = load(pair, max_running=1, max_spec_length=4, max_step_tokens=8)
    checker = Checker(engine)
    prompt = tuple(range(30, 50))
    ks = [0, 0, 0, 4, 0, 4, 4, 0, 0, 0, 0, 0, 1, 0]

    def switch() -> None:
        checker()
        for sequence in engine.scheduler.running:
            sequence.k = ks[engine.steps % len(ks)]

    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    run = drive(engine, [Request("r", prompt, params, k=4)], after_step=switch)
    plain = drive(engine, [Request("r", prompt, params, k=0)])
    assert run.tokens == plain.tokens
    assert {s.drafted for s in run.steps} >= {0, 1, 4}


def test_negative_control_hole_after_full_acceptance(twins: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that counts its last proposal as cached, which was never fed, misses a token from then on."""
    observe = ModelDrafter.observe

    def hole(self: ModelDrafter, batch: DraftBatch, verdict: Verdict) -> None:
        observe(self, batch, verdict)
        for sequence, accepted in zip(batch.sequences, verdict.accepted, strict=True):
            cache = self.runner.cache
            if accepted and cache.length(sequence.handle) < len(sequence.tokens) + accepted:
                cache.reserve(sequence.handle, 1)
                cache.extend(sequence.handle, 1)

    monkeypatch.setattr(ModelDrafter, "observe", hole)
    engine = load(twins, max_running=4, max_spec_length=6, max_step_tokens=28)
    with pytest.raises(AssertionError, match="draft: keys of layer 0 are not those"):
        fuzz(engine, Checker(engine), 0)


def test_negative_control_no_rollback(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected drafts that stay in the draft's cache are found."""

    def keep(self: ModelDrafter, batch: DraftBatch, verdict: Verdict) -> None:
        pass

    monkeypatch.setattr(ModelDrafter, "observe", keep)
    engine = load(pair, max_running=4, max_spec_length=6, max_step_tokens=28)
    with pytest.raises(AssertionError, match=r"draft: (\d+ cached of|keys of layer|values of layer)"):
        fuzz(engine, Checker(engine), 0)


def test_negative_control_wrong_drafts_scored(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that is fed other drafts than were accepted keeps their keys and values."""
    run = Runner.run

    def swapped(self: Runner, feeds: Seq[Feed], drafts: Tensor | None = None) -> Tensor:
        return run(self, feeds, None if drafts is None else drafts.flip(0))

    monkeypatch.setattr(Runner, "run", swapped)
    engine = load(pair, max_running=4, max_spec_length=6, max_step_tokens=28)
    with pytest.raises(AssertionError, match="target: keys of layer"):
        fuzz(engine, Checker(engine), 0)


def test_draft_memory_is_made_when_first_needed(pair: Pair) -> None:
    engine = load(pair, max_running=2, max_spec_length=2, max_step_tokens=8)
    cache = model_drafter(engine).runner.cache
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    plain = Request("plain", (5, 6, 7), params, k=0)
    seen: list[int] = []
    drive(engine, [plain], after_step=lambda: seen.append(cache.free_slots))
    assert set(seen) == {2}
    drive(engine, [replace(plain, id="drafted", k=2)], after_step=lambda: seen.append(cache.free_slots))
    assert 1 in seen


def test_no_round_makes_the_draft_read_more_than_a_pass(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three long prompts at once are caught up with in pieces, 18 tokens a round between them, and then drafted for."""
    engine = load(pair, max_running=3, max_spec_length=5, max_step_tokens=18)
    draft, read = model_drafter(engine).runner, [0]
    run = draft.run

    def counting(feeds: Seq[Feed], drafts: Tensor | None = None) -> Tensor:
        read[-1] += sum(feed.committed for feed in feeds)
        return run(feeds, drafts)

    monkeypatch.setattr(draft, "run", counting)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    requests = [Request(f"r{i}", tuple(range(10 + i, 60 + i)), params, k=5) for i in range(3)]
    result = drive(engine, requests, after_step=lambda: read.append(0))
    assert max(read) == 18
    for told in result.received.values():
        assert told.record is not None
        assert sum(told.record.column("accepted")) > 0
