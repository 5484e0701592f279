"""The engine on the device against transformers on the same device.

fp32: log-probabilities within TOLERANCE, and each greedy token is the best one by transformers, but for ties within the
tolerance. bf16: the mean difference from transformers' fp32 is at most BF16_FACTOR times that of transformers' own
bf16, plus BF16_FLOOR.
"""

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from benchmarks.gpu.checkpoints import DRY_FAMILIES, FAMILIES, VOCAB, SmallModel, make_checkpoint
from benchmarks.gpu.machine import give_back
from benchmarks.gpu.steps import Recorder
from engine.llm import LLM, Completion
from engine.types import SamplingParams

TOLERANCE = 1e-3  # nats
BF16_FACTOR, BF16_FLOOR = 2.0, 0.01
TOP = 5  # log-probabilities that are compared at each position
PROMPT_TOKENS, NEW_TOKENS = 40, 24
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
DRAWN: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "ignore_eos": True}


def compare_families(recorder: Recorder) -> None:
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        for name in DRY_FAMILIES if recorder.dry else FAMILIES:
            recorder.check_time(5)
            compare_family(recorder, name, FAMILIES[name], Path(folder) / name)


def compare_family(recorder: Recorder, name: str, family: SmallModel, directory: Path) -> None:
    make_checkpoint(family, directory)
    exact = _reference(directory, torch.float32, recorder.device)
    done = _generate(directory, "float32", recorder.device)
    differences = torch.cat([_differences(one, _logprobs(exact, one, recorder.device)) for one in done])
    recorder.at_most(f"{name}, fp32: largest difference of a log-probability", differences.max().item(), TOLERANCE)
    wrong = sum(_wrong_tokens(one, _logprobs(exact, one, recorder.device)) for one in done)
    recorder.at_most(f"{name}, fp32: greedy tokens that are not transformers' own", wrong, 0)
    if family.experts:
        return
    rounded = _reference(directory, torch.bfloat16, recorder.device)
    done = _generate(directory, "bfloat16", recorder.device)
    expected = [_logprobs(exact, one, recorder.device) for one in done]
    own = torch.cat([_differences(one, table) for one, table in zip(done, expected, strict=True)]).mean().item()
    pairs = [(table, _logprobs(rounded, one, recorder.device)) for one, table in zip(done, expected, strict=True)]
    theirs = torch.cat([(a - b).abs().gather(1, a.topk(TOP).indices).flatten() for a, b in pairs]).mean().item()
    limit = BF16_FACTOR * theirs + BF16_FLOOR
    recorder.at_most(f"{name}, bf16: mean difference of a log-probability from fp32", own, limit)


def make_pair(folder: Path) -> tuple[Path, Path]:
    """A small target, and a draft that agrees with it now and then."""
    target = make_checkpoint(FAMILIES["llama"], folder / "target")
    return target, make_checkpoint(FAMILIES["llama"], folder / "draft", seed=8, like=target)


def small_engine(**more: Any) -> dict[str, Any]:
    """Settings of an engine over small checkpoints. Without kv_tokens it would take most of the GPU, in a million
    blocks."""
    lengths = {"max_spec_length": 4, "max_model_len": 512, "kv_tokens": 8192}
    return {"max_running": 4, **lengths, "generation_config": "none"} | more


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(count)
    return [[draw.randrange(2, VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def _generate(directory: Path, dtype: str, device: str) -> list[Completion]:
    llm = LLM(str(directory), device=device, dtype=dtype, **small_engine(max_spec_length=0))
    params = SamplingParams(**GREEDY, max_tokens=NEW_TOKENS, logprobs=TOP, prompt_logprobs=TOP)
    done = llm.generate(prompts(2), params)
    del llm
    give_back()
    return done


def _reference(directory: Path, dtype: torch.dtype, device: str) -> Any:
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **eager)
    return model.to(device)


def _logprobs(model: Any, done: Completion, device: str) -> Tensor:
    """transformers' log-probabilities [prompt + output − 1, vocab] of each next token, fp32."""
    ids = torch.tensor([[*done.prompt_token_ids, *done.token_ids]], device=device)
    with torch.inference_mode():
        table: Tensor = model(ids).logits[0, :-1].float().log_softmax(-1).cpu()
    return table


def _reported(done: Completion) -> Iterator[tuple[int, int, float]]:
    """(row, token, log-probability) of all that the engine told of the next tokens."""
    known = [*done.prompt_logprobs, *done.logprobs]
    first = len(done.prompt_token_ids) + len(done.token_ids) - 1 - len(known)
    for row, entry in enumerate(known, first):
        yield row, entry.token, entry.logprob
        yield from ((row, token, value) for token, value in entry.top)


def _differences(done: Completion, expected: Tensor) -> Tensor:
    rows, tokens, values = zip(*_reported(done), strict=True)
    return (torch.tensor(values) - expected[list(rows), list(tokens)]).abs()


def _wrong_tokens(done: Completion, expected: Tensor) -> int:
    """Emitted tokens that transformers finds worse than another by more than the tolerance."""
    rows = expected[len(done.prompt_token_ids) - 1 :]
    emitted = rows.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
    return int((rows.amax(1) - emitted > TOLERANCE).sum())
