"""Every family through the whole engine: drafts, batches, prefix hits and preemption change no text."""

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.types import Request, SamplingParams
from tests.engine.driving import drive, load
from tests.engine.fresh import Checker, memory
from tests.engine.models.families import CASES, random_checkpoint, reference
from tests.engine.pairs import VOCAB, Pair

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


def few(names: Seq[str], default: Callable[[str], bool]) -> list[Any]:
    """The parameters of a test; those that are not `default` are proofs."""
    return [name if default(name) else pytest.param(name, marks=pytest.mark.proofs) for name in names]


@pytest.mark.parametrize("name", few(SLIDING, lambda name: name in ("mistral", "gemma2")))
def test_windows_with_prefix_hits_preemption_and_rollback(name: str, tmp_path: Path) -> None:
    pair = save_families(name, tmp_path)
    ample = tight(pair, kv_tokens=640)
    alone = {r.id: drive(ample, [r]).tokens[r.id] for r in make_requests(0)}
    first, *others = make_requests(4)
    engine = tight(pair)
    # The first ends its prompt before the second, which begins alike, comes.
    run = drive(engine, {0: [first], 4: others}, after_step=Checker(engine, logits=False))
    assert run.tokens == alone
    assert sum(s.preempted for s in run.steps) > 0
    assert sum(s.cached_tokens for s in run.steps) >= 32
    assert 0.05 < run.accepted / run.drafted < 0.95


@pytest.mark.parametrize("name", few(GREEDY, lambda name: " " not in name))
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
