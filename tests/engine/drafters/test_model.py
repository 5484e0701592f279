"""The draft model's side of a round: catching up, and the order of its pass."""

import random
from collections.abc import Sequence as Seq

import pytest
import torch
from torch import Tensor

from engine.drafters.base import Draft, DraftBatch
from engine.drafters.model import ModelDrafter
from engine.engine import Engine
from engine.models import attention
from engine.models.attention import AttentionPlan
from engine.models.cpu_attention import BlockReader
from engine.models.feeds import Feed
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence
from engine.types import Request, SamplingParams, Verifier
from tests.engine.driving import drive, load, make_sequence, model_drafter
from tests.engine.law.tables import DRAFT, row_of, table_engine
from tests.engine.pairs import VOCAB, Pair


def make_request(name: str, prompt: int, k: int | None = 4, max_tokens: int = 30) -> Request:
    rng = random.Random(name)
    ids = tuple(rng.randrange(2, VOCAB) for _ in range(prompt))
    return Request(name, ids, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True), k)


def test_a_long_prompt_does_not_delay_the_drafts_of_others(pair: Pair) -> None:
    """Its gap is fed in pieces over many rounds; the neighbour in a higher slot drafts in every one of them."""
    engine = load(pair, max_running=2, max_spec_length=4, max_step_tokens=12, max_model_len=128)
    arrivals = {0: [make_request("long", 80, max_tokens=40)], 2: [make_request("short", 3, max_tokens=100)]}
    run = drive(engine, arrivals)
    short = run.received["short"].record
    assert short is not None
    assert short.column("drafted")[0] == 0  # it comes with the prompt
    assert short.column("drafted")[1:15] == [4] * 14
    long = run.received["long"].record
    assert long is not None
    assert long.column("drafted")[:6] == [0] * 6  # catching up
    assert max(long.column("drafted")) == 4  # caught up


def test_a_gap_is_closed_piece_by_piece(pair: Pair) -> None:
    """Each round feeds max_step_tokens of it while one more token is emitted; after that it is one or two tokens."""
    engine = load(pair, max_running=1, max_spec_length=4, max_step_tokens=12, max_model_len=128)
    drafter = model_drafter(engine)
    gaps: list[int] = []

    def watch() -> None:
        if engine.scheduler.running and engine.scheduler.running[0].num_output:
            gaps.append(drafter.runner.uncached(engine.scheduler.running[0]))

    drive(engine, [make_request("r", 60)], after_step=watch)
    assert gaps[:6] == [61, 50, 39, 28, 17, 6]
    assert set(gaps[6:]) <= {1, 2}


def test_a_gap_beside_other_streams_is_closed_in_chunks(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many of the draft's tokens as take the time of prefill_chunk of the target's; alone, a whole pass."""
    engine = load(pair, max_running=2, max_spec_length=4, max_step_tokens=60, prefill_chunk=5, max_model_len=128)
    runner, read = model_drafter(engine).runner, [0]
    run = runner.run

    def counting(feeds: Seq[Feed], drafts: Tensor | None = None) -> Tensor:
        read.append(sum(feed.committed for feed in feeds))
        return run(feeds, drafts)

    monkeypatch.setattr(runner, "run", counting)
    drive(engine, [make_request("alone", 70)])
    assert max(read) == 60
    read.clear()
    drive(engine, {0: [make_request("stream", 3, max_tokens=90)], 4: [make_request("long", 70)]})
    ratio = engine.target.decoder.weight_bytes / runner.decoder.weight_bytes
    assert 4 < max(read) <= 5 * ratio < 30


def test_a_draft_pass_is_in_the_order_of_its_own_slots(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences reach the draft in another order than the target; one attention group still serves a whole step."""
    engine = load(pair, max_running=4, max_spec_length=4, max_step_tokens=20, max_model_len=128)
    plans: list[AttentionPlan] = []
    plan_attention = attention.plan_attention

    def spy(*args: object, **kwargs: object) -> AttentionPlan:
        plans.append(plan_attention(*args, **kwargs))  # type: ignore[arg-type]
        return plans[-1]

    monkeypatch.setattr("engine.models.attention_plans.plan_attention", spy)
    monkeypatch.setattr(BlockReader, "takes", lambda *_: False)  # which takes any order
    # The long prompt has the target's lowest slot, but the others are drafted for first.
    lengths = (70, 3, 4, 5)
    drive(engine, [make_request(f"r{i}", n, max_tokens=50) for i, n in enumerate(lengths)])
    steps = [p for p in plans if len(p.positions) == 4]
    assert len(steps) > 10
    assert all(len(p.groups) == 1 for p in steps)


# What it says of itself


def test_an_offer_is_what_it_then_drafts_and_reads(pair: Pair) -> None:
    """It offers k drafts. The gap is the whole text at first, then the tokens emitted since."""
    drafter = model_drafter(load(pair, max_running=2, max_spec_length=4, max_model_len=128))
    sequence = make_sequence(0, range(2, 12))
    sequence.drafter = "model"
    assert drafter.offer(sequence, 4) == ("model", 4, 10, True)
    assert ask(drafter, [sequence], [4]).read == 10 + 3
    drafter.runner.cache.truncate_to(0, 10)
    sequence.tokens += [5, 6, 7]
    assert drafter.offer(sequence, 2) == ("model", 2, 3, True)
    assert drafter.offer(sequence, 0).max_k == 0


def test_an_offer_is_no_larger_than_the_memory(pair: Pair) -> None:
    engine = load(pair, max_running=1, max_spec_length=4, max_model_len=32)
    drafter = model_drafter(engine)
    sequence, other = make_sequence(0, [2] * 10), make_sequence(1, [2] * 10)
    ask(drafter, [sequence], [1])
    assert drafter.offer(other, 4).max_k == 0  # no slot is left
    most = drafter.runner.cache.max_len
    sequence.tokens += [2] * (most - 12)
    assert drafter.offer(sequence, 4).max_k == 3  # two fit, and the last draft is not fed
    assert ask(drafter, [sequence], [4]).ks == (3,)


def ask(drafter: ModelDrafter, sequences: Seq[Sequence], ks: Seq[int], confidences: tuple[float, ...] = ()) -> Draft:
    sampler = Sampler(sequences, ks, drafter.runner.vocab_size, torch.device("cpu"))
    with torch.inference_mode():
        return drafter.propose(DraftBatch(tuple(sequences), sampler, confidences), ks)


def test_steps_and_tokens_are_those_of_its_forwards(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every round of a busy engine: drafts, pieces of a prompt beside them, and rounds of pieces alone."""
    engine = load(pair, max_running=3, max_spec_length=4, max_step_tokens=15, max_model_len=128)
    drafter = model_drafter(engine)
    made: list[int] = []
    runner, propose = drafter.runner, drafter.propose
    run, step = runner.run, runner.step
    told: list[tuple[int, int, list[int]]] = []

    def running(feeds: Seq[Feed]) -> Tensor:
        made.append(sum(feed.committed for feed in feeds))
        return run(feeds)

    def stepping(sequences: Seq[Sequence], tokens: Tensor) -> Tensor:
        made.append(len(tokens))
        return step(sequences, tokens)

    def watching(batch: DraftBatch, ks: Seq[int]) -> Draft:
        made.clear()
        draft = propose(batch, ks)
        told.append((draft.steps, draft.read, list(made)))
        return draft

    monkeypatch.setattr(runner, "run", running)
    monkeypatch.setattr(runner, "step", stepping)
    monkeypatch.setattr(drafter, "propose", watching)
    lengths = {"long": 80, "short": 3, "other": 20}
    drive(engine, {2 * i: [make_request(n, length, k=4 - i)] for i, (n, length) in enumerate(lengths.items())})
    assert all((steps, read) == (len(passes), sum(passes)) for steps, read, passes in told)
    assert {steps for steps, _, _ in told} >= {1, 3, 4}


# Confidence


def unsure(verifier: Verifier) -> tuple[Engine, list[Sequence]]:
    engine = table_engine()
    sequences = [make_sequence(i, [i % 3, i // 3 % 3, i // 9 % 3], key=i * 7919) for i in range(27)]
    for sequence in sequences:
        sequence.verifier = verifier
    return engine, sequences


@pytest.mark.parametrize("verifier", ["match", "rejection", "block"])
def test_a_draft_ends_before_it_becomes_unsure(verifier: Verifier) -> None:
    """What is drafted is what would be without the limit, cut where the tables say; the model runs no further."""
    engine, sequences = unsure(verifier)
    limits = tuple((0.0, 0.2, 0.35, 0.5, 0.9)[i % 5] for i in range(27))
    whole = ask(model_drafter(engine), sequences, [3] * 27)
    engine, sequences = unsure(verifier)
    draft = ask(model_drafter(engine), sequences, [3] * 27, limits)
    assert whole.tokens is not None
    assert draft.tokens is not None
    forwards = [0] * 3
    for i, sequence in enumerate(sequences):
        tokens, joint, k = whole.tokens[i].tolist(), 1.0, 0
        while k < 3:
            forwards[k] += 1
            joint *= DRAFT[row_of(sequence.tokens + tokens[:k])].softmax(0).max().item()
            if joint < limits[i]:
                break
            k += 1
        assert draft.ks[i] == k
        assert draft.tokens[i, :k].tolist() == tokens[:k]
        if verifier != "match" and k:
            assert draft.logq is not None
            assert whole.logq is not None
            assert draft.logq[draft.logq_rows[i], :k].equal(whole.logq[whole.logq_rows[i], :k])
        assert (i in draft.logq_rows) == (verifier != "match" and k > 0)
    assert set(draft.ks) == {0, 1, 2, 3}
    assert (draft.steps, draft.read) == (3, 3 * forwards[0] + forwards[1] + forwards[2])


def test_a_confidence_that_no_draft_reaches() -> None:
    engine, sequences = unsure("rejection")
    draft = ask(model_drafter(engine), sequences, [3] * 27, (1.0,) * 27)
    assert (draft.ks, draft.tokens, draft.logq, draft.logq_rows) == ((0,) * 27, None, None, {})
    assert (draft.steps, draft.read) == (1, 3 * 27)


def test_without_a_limit_no_law_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied to the host between a draft's forwards."""
    (engine, sequences), (other, others) = unsure("match"), unsure("match")
    monkeypatch.setattr(Tensor, "tolist", None)
    monkeypatch.setattr(Tensor, "item", None)
    assert ask(model_drafter(engine), sequences, [3] * 27, (0.0,) * 27).ks == (3,) * 27
    with pytest.raises(TypeError):
        ask(model_drafter(other), others, [3] * 27, (0.1,) * 27)
