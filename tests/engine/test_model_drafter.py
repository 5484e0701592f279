"""The draft model's side of a round: catching up, and the order of its pass."""

import random
from collections.abc import Sequence as Seq

import pytest
from torch import Tensor

from deployments.engine.models import attention
from deployments.engine.models.attention import AttentionPlan
from deployments.engine.runner import Feed
from deployments.engine.types import Request, SamplingParams
from tests.engine.driving import drive, load, model_drafter
from tests.engine.pairs import VOCAB, Pair


def make_request(name: str, prompt: int, k: int | None = 4, max_tokens: int = 30) -> Request:
    rng = random.Random(name)
    ids = tuple(rng.randrange(2, VOCAB) for _ in range(prompt))
    return Request(name, ids, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True), k)


def test_a_long_prompt_takes_nobody_elses_drafts(pair: Pair) -> None:
    """Its gap is fed in pieces over many rounds; the neighbour in a higher slot drafts in every one of them."""
    engine = load(pair, max_running=2, max_spec_length=4, max_step_tokens=12, max_model_len=128)
    arrivals = {0: [make_request("long", 80, max_tokens=40)], 2: [make_request("short", 3, max_tokens=100)]}
    run = drive(engine, arrivals)
    short = run.told["short"].record
    assert short is not None
    assert short.drafted[0] == 0  # it comes with the prompt
    assert short.drafted[1:15] == [4] * 14
    long = run.told["long"].record
    assert long is not None
    assert long.drafted[:6] == [0] * 6  # catching up
    assert max(long.drafted) == 4  # caught up


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

    monkeypatch.setattr("deployments.engine.runner.plan_attention", spy)
    # The long prompt has the target's lowest slot, but the others are drafted for first.
    lengths = (70, 3, 4, 5)
    drive(engine, [make_request(f"r{i}", n, max_tokens=50) for i, n in enumerate(lengths)])
    steps = [p for p in plans if len(p.positions) == 4]
    assert len(steps) > 10
    assert all(len(p.groups) == 1 for p in steps)
