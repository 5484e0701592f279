"""The texts of an engine on the device, in fp64: with drafts against without, and against the texts of an engine on the
CPU, which computes with torch's operations and no kernel. In fp32 a sum's order may change a text, so those are told
only."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers.utils import logging

from benchmarks.gpu import parity
from benchmarks.gpu.machine import give_back
from benchmarks.gpu.parity import DRAWN, GREEDY, make_pair, prompts, small_engine
from benchmarks.gpu.steps import Recorder
from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import Request, SamplingParams, Verifier

K = 4
TEXTS, DRY_TEXTS = 8, 3  # of each kind


@dataclass(frozen=True, slots=True)
class TextKind:
    """What all requests of a comparison ask for."""

    params: Mapping[str, Any]
    verifier: Verifier = "match"
    tree: tuple[int, ...] | None = None  # children of each draft by depth, K drafts in all; None: a chain of K


PENALISED = {**DRAWN, "repetition_penalty": 1.2, "frequency_penalty": 0.1, "top_k": 50}
KINDS = {
    "greedy": TextKind(GREEDY),
    "drawn": TextKind(DRAWN),
    "penalties": TextKind(PENALISED),
    "rejection": TextKind(DRAWN, "rejection"),
    "block, penalties": TextKind(PENALISED, "block"),
    "tree": TextKind(DRAWN, tree=(2, 1)),
    "tree, rejection": TextKind(DRAWN, "rejection", (2, 1)),
}


@dataclass(frozen=True, slots=True)
class Written:
    texts: list[list[int]]  # token ids
    accepted: int  # drafts


def compare_texts(recorder: Recorder) -> None:
    """Fails if an fp64 text differs, or if no draft was accepted."""
    logging.disable_progress_bar()
    count = DRY_TEXTS if recorder.dry else TEXTS
    with tempfile.TemporaryDirectory() as folder:
        pair = make_pair(Path(folder))
        expected = _write_all(_start(pair, "cpu", "float64"), count, recorder)
        for dtype in ("float64",) if recorder.dry else ("float64", "float32"):
            recorder.check_time(5)
            engine = _start(pair, recorder.device, dtype)
            found = _write_all(engine, count, recorder)
            for name, kind in KINDS.items():
                accepted, same = found[name].accepted, _equal(found[name], expected[name])
                if dtype == "float64":
                    recorder.at_least(f"{name}, fp64: accepted drafts", accepted, 1)
                    recorder.at_least(f"{name}, fp64: share of texts that are those of the CPU", same, 1)
                else:
                    recorder.note(f"{name}, fp32: share of texts that are the CPU's in fp64", same)
                if kind.verifier != "match":
                    continue
                share = _equal(found[name], write(engine, f"{name}, plain", replace(kind, tree=None), 0, count))
                if dtype == "float64":
                    recorder.at_least(f"{name}, fp64: share of texts that are the same with drafts", share, 1)
                else:
                    recorder.note(f"{name}, fp32: share of texts that are the same with drafts", share)
            del engine
            give_back()


def _start(pair: tuple[Path, Path], device: str, dtype: str) -> Engine:
    target, draft = map(str, pair)
    return Engine.from_config(EngineConfig(target, draft, device=device, dtype=dtype, **small_engine()))


def _write_all(engine: Engine, count: int, recorder: Recorder) -> dict[str, Written]:
    """By kind."""
    written = {}
    for name, kind in KINDS.items():
        recorder.check_time(2)
        written[name] = write(engine, name, kind, None if kind.tree else K, count)
    return written


def write(engine: Engine, name: str, kind: TextKind, k: int | None, count: int) -> Written:
    """Raises RuntimeError if a request ends with an error."""
    texts: dict[str, list[int]] = {}
    accepted = 0
    for i, prompt in enumerate(prompts(count)):
        params = SamplingParams(**kind.params, seed=i, max_tokens=parity.NEW_TOKENS)
        request = Request(f"{name} {i}", tuple(prompt), params, k, verifier=kind.verifier, tree=kind.tree)
        engine.check(request)
        engine.submit(request)
        texts[request.id] = []
    while engine.has_work:
        for output in engine.step().outputs:
            texts[output.request_id] += output.token_ids
            if output.error is not None:
                raise RuntimeError(f"{output.request_id}: {output.error}")
            if output.record is not None:
                accepted += sum(output.record.column("accepted"))
    return Written(list(texts.values()), accepted)


def _equal(one: Written, other: Written) -> float:
    """The share of texts that both wrote."""
    return sum(a == b for a, b in zip(one.texts, other.texts, strict=True)) / len(one.texts)
