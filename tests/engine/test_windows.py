"""Every family through the whole engine: drafts, batches, prefix hits and preemption change no text."""

import itertools
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch

from cache.paged import HIDDEN, PagedCache
from engine.config import ConfigError
from engine.engine import Engine
from engine.models.decoder import Decoder
from engine.models.feeds import Feed
from engine.sequence import Sequence
from engine.types import Request, SamplingParams
from tests.engine.driving import drive, load, make_sequence
from tests.engine.fresh import Checker, memory
from tests.engine.models.families import CASES, random_checkpoint, reference
from tests.engine.pairs import VOCAB, Pair, edit_json

ALL_SLIDE = ("mistral", "phi3")  # every layer: blocks that no layer sees any more are freed
SLIDING = ("mistral", "gemma2", "gemma3", "phi3", "gpt_oss", "qwen2 with a window in its last layers")
GREEDY = sorted(set(CASES) - {"llama, dynamic beyond its context"})  # which is served nowhere
MAX_LEN = 96
PROMPT, OUTPUT = 40, 30  # windows are 9 tokens, blocks 16: both are crossed in the prompt and in the output


def save_families(name: str, directory: Path) -> Pair:
    """A checkpoint and a draft that agrees with it now and then."""
    target = random_checkpoint(CASES[name], directory / "target")
    return Pair(target, random_checkpoint(CASES[name], directory / "draft", seed=8, like=target))


def prompts() -> list[tuple[int, ...]]:
    """Two share their first 32 tokens, two others nothing."""
    rng = random.Random(3)
    shared = tuple(rng.randrange(2, VOCAB) for _ in range(32))
    return [
        (*(shared if i < 2 else ()), *(rng.randrange(2, VOCAB) for _ in range(PROMPT - (32 if i < 2 else 0))))
        for i in range(4)
    ]


def make_requests(k: int) -> list[Request]:
    """Every other one is sampled."""
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=OUTPUT, ignore_eos=True) for i in range(4)]
    return [Request(f"r{i}", ids, params[i], k=k) for i, ids in enumerate(prompts())]


def tight(pair: Pair, **config: Any) -> Engine:
    """Memory for hardly more than one of the four requests."""
    settings = {"max_running": 4, "max_spec_length": 4, "max_step_tokens": 28, **memory("mapped", 112)}
    return load(pair, max_model_len=MAX_LEN, **{**settings, **config})


def preempt_at_times(engine: Engine) -> None:
    """Every seventh plan preempts a sequence if it is not alone."""
    scheduler, numbers = engine.scheduler, itertools.count(1)
    reserve = scheduler._reserve_next_tokens

    def reserve_and_preempt() -> list[Sequence]:
        preempted = reserve()
        if next(numbers) % 7 == 0 and len(scheduler.running) > 1:
            preempted.append(scheduler._preempt())
        return preempted

    scheduler._reserve_next_tokens = reserve_and_preempt  # type: ignore[method-assign]


def few(names: Seq[str], default: Callable[[str], bool]) -> list[Any]:
    """The parameters of a test; those that are not `default` are proofs."""
    return [name if default(name) else pytest.param(name, marks=pytest.mark.proofs) for name in names]


@pytest.mark.parametrize("name", few(SLIDING, lambda name: name == "mistral"))
def test_windows_with_prefix_hits_preemption_and_rollback(name: str, tmp_path: Path) -> None:
    pair = save_families(name, tmp_path)
    ample = tight(pair, kv_tokens=640)
    alone = {r.id: drive(ample, [r]).tokens[r.id] for r in make_requests(0)}
    first, *others = make_requests(4)
    engine = tight(pair, kv_tokens=72 if name in ALL_SLIDE else 112)
    if name in ALL_SLIDE:  # 72 tokens are enough for three requests of 70
        preempt_at_times(engine)
    # The first ends its prompt before the second, which begins alike, comes.
    run = drive(engine, {0: [first], 4: others}, after_step=Checker(engine, logits=False, every=2))
    assert run.tokens == alone
    assert sum(s.preempted for s in run.steps) > 0
    assert sum(s.cached_tokens for s in run.steps) >= 32
    assert 0.05 < run.accepted / run.drafted < 0.95


def test_a_text_longer_than_the_memory(tmp_path: Path) -> None:
    """Every layer of both models sees 9 tokens, so 64 tokens of memory are enough for 94."""
    pair = save_families("mistral", tmp_path)
    prompt = tuple(random.Random(5).randrange(2, VOCAB) for _ in range(50))
    requests = [
        Request("r", prompt, SamplingParams(temperature=0.0, max_tokens=44, ignore_eos=True), k=k) for k in (0, 4)
    ]
    plain, speculative = (drive(tight(pair, kv_tokens=640), [request]) for request in requests)
    engine = tight(pair, kv_tokens=64)
    assert engine.target.layout.tokens < len(prompt) + 44
    used = []
    run = drive(engine, [requests[1]], after_step=lambda: used.append(engine.target.cache.used))
    assert run.tokens == speculative.tokens == plain.tokens
    assert run.drafted > 0
    assert used[0] > used[20]  # a pass of 28 tokens, then one of five
    with pytest.raises(ConfigError, match="one request of max_model_len 96 needs 104, with one block"):
        tight(save_families("gemma2", tmp_path / "sees all"), kv_tokens=64)
    assert engine.target.layout.held(30) == 30
    assert engine.target.layout.held(MAX_LEN) == 9 + 28 + 8


def test_a_long_text_starts_although_it_holds_a_found_prefix(tmp_path: Path) -> None:
    """The memory is hardly enough for one text: 24 tokens that a query sees, 28 of a pass, and two blocks."""
    pair = save_families("mistral", tmp_path)
    for checkpoint in (pair.target, pair.draft):
        edit_json(Path(checkpoint) / "config.json", sliding_window=24)
    draw = random.Random(5)
    prompt = tuple(draw.randrange(2, VOCAB) for _ in range(90))
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    first, second = Request("first", prompt[:36], params, k=0), Request("second", prompt, params, k=0)
    alone = drive(tight(pair, kv_tokens=640), [second])
    engine = tight(pair, kv_tokens=72)
    drive(engine, [first])
    engine.submit(second)
    started = engine.step()
    assert started.stats.cached_tokens == 32
    tokens = [token for _ in range(8) for output in engine.step().outputs for token in output.token_ids]
    assert tokens == alone.tokens["second"]
    assert not engine.has_work


def test_memory_that_is_not_finite_is_not_given_away(tmp_path: Path) -> None:
    """A chunk of a prompt gives no scores, so nobody has seen yet whether its memory is finite."""
    runner = tight(save_families("mistral", tmp_path)).target
    assert isinstance(runner.cache, PagedCache)
    sequence = make_sequence(0, prompts()[0])
    with torch.inference_mode():
        runner.run([Feed(sequence, 28, outputs=0)])
    row = list(runner.storage.row_numbers(runner.cache.slot(0), 3, 4))
    for value, left in ((torch.nan, 0), (1.0, 2)):
        runner.storage.rows[0][row] = value
        runner.publish(sequence)
        assert runner.cache.table(0).count(HIDDEN) == left


def test_a_prompt_whose_memory_is_not_finite_ends_alone(tmp_path: Path) -> None:
    """No chunk's scores are looked at, and nothing is freed, so its prompt does not fit into the memory."""
    pair = save_families("mistral", tmp_path)
    engine = tight(pair, kv_tokens=64, max_running=2)
    decoder = engine.target.decoder
    assert isinstance(decoder, Decoder)
    bad, *good = range(2, VOCAB)
    draw = random.Random(5)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    healthy, rest = (tuple(draw.choice(good) for _ in range(n)) for n in (20, 86))
    poisoned = (*healthy[:3], bad, *rest)
    alone = drive(engine, [Request("healthy", healthy, params, k=0)])
    decoder.embedding[bad] = torch.nan
    run = drive(engine, [Request("poisoned", poisoned, params, k=0), Request("healthy", healthy, params, k=0)])
    assert run.received["poisoned"].error == "the model gave no valid distribution for this request"
    assert run.tokens["healthy"] == alone.tokens["healthy"]


@pytest.mark.parametrize("name", few(GREEDY, lambda name: name in ("gpt_oss", "mistral")))
def test_64_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Four drafts per round by a draft model of the same family."""
    pair = save_families(name, tmp_path)
    engine = load(pair, max_model_len=MAX_LEN, max_running=2)
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    prompt = prompts()[0][:20]
    run = drive(engine, [Request("r", prompt, params, k=4)])
    tokens = run.tokens["r"]
    assert len(tokens) == 64
    assert 0 < run.accepted < run.drafted
    assert len(set(tokens)) > 4
    with reference(pair.target) as logits:
        theirs = logits([[*prompt, *tokens]])[0].argmax(-1)
    assert theirs[len(prompt) - 1 : -1].tolist() == tokens
