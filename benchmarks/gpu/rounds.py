"""Captured graphs against rounds without them, and how often a round lets the host wait for the device."""

import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.machine import give_back
from benchmarks.gpu.parity import DRAWN, GREEDY, make_pair, prompts, small_engine
from benchmarks.gpu.steps import Recorder, Skipped
from engine.config import EngineConfig
from engine.engine import Engine
from engine.llm import LLM
from engine.types import Request, SamplingParams, Verifier
from policies.config import PolicyConfig

ROUNDS, DRY_ROUNDS = 1000, 60  # of all kinds together
ALLOWED_WAITS = 1.0  # per round: its one download
K = 4
DTYPES = ("float64", "float32", "bfloat16")
KINDS: dict[str, tuple[dict[str, Any], Verifier]] = {
    "greedy, match": (GREEDY, "match"),
    "drawn, match": (DRAWN, "match"),
    "drawn with penalties, block": ({**DRAWN, "repetition_penalty": 1.1, "frequency_penalty": 0.2}, "block"),
}
SYNCHRONIZING = "synchronizing CUDA operation"  # of torch's warning


def compare_graphs(recorder: Recorder) -> None:
    """The texts of captured rounds are those of rounds that are not captured, and rounds are captured.

    A captured round has padding rows, and a product of other rows may be added up in another order. fp64 hides that.
    """
    if not recorder.device.startswith("cuda"):
        raise Skipped("graphs are captured on CUDA only")
    with tempfile.TemporaryDirectory() as folder:
        target, draft = make_pair(Path(folder))
        for dtype in DTYPES:
            recorder.check_time(10)
            off, _ = _texts(target, draft, recorder.device, dtype, graphs=False)
            on, stats = _texts(target, draft, recorder.device, dtype, graphs=True)
            # What cannot be captured gives the same texts.
            recorder.at_least(f"{dtype}: graphs that were captured", stats["kept"], 1)
            recorder.at_most(f"{dtype}: captures that failed", stats["failed captures"], 0)
            for what, number in stats.items():
                recorder.note(f"{dtype}: graphs: {what}", number)
            equal = sum(a == b for a, b in zip(off, on, strict=True))
            if dtype == "float64":
                recorder.at_least(f"{dtype}: texts of {len(off)} that are the same with graphs", equal, len(off))
            else:
                recorder.note(f"{dtype}: texts of {len(off)} that are the same with graphs", equal)


def _texts(
    target: Path, draft: Path, device: str, dtype: str, *, graphs: bool
) -> tuple[list[list[int]], dict[str, int]]:
    """The texts of an engine that is gone afterwards, and the account of its graphs."""
    settings: dict[str, Any] = small_engine(graphs=graphs, device=device, dtype=dtype)
    llm = LLM(str(target), str(draft), **settings)
    params = [SamplingParams(**(DRAWN if i % 2 else GREEDY), seed=i, max_tokens=100) for i in range(8)]
    done = [llm.generate(prompts(8), params, k=k) for k in (0, K)]
    captured = llm.engine.target.staging.graphs
    stats = {} if captured is None else captured.stats
    del llm, captured
    give_back()
    return [one.token_ids for part in done for one in part], stats


def count_waits(recorder: Recorder) -> None:
    """How often a round lets the host wait for the device. Its one download must, and nothing else."""
    rounds = (DRY_ROUNDS if recorder.dry else ROUNDS) // len(KINDS)
    with tempfile.TemporaryDirectory() as folder:
        target, draft = make_pair(Path(folder))
        settings: dict[str, Any] = small_engine(device=recorder.device, policy=PolicyConfig("fixed", k=K))
        engine = Engine.from_config(EngineConfig(str(target), str(draft), **settings))
        for kind, (params, verifier) in KINDS.items():
            recorder.check_time(5)
            places = count_places(engine, rounds, params, verifier)
            if engine.target.device.type != "cuda":
                recorder.note(f"{kind}: rounds, whose waits torch counts on CUDA only", rounds)
                continue
            waits = sum(places.values()) / rounds
            recorder.at_most(f"{kind}: waits per round, over {rounds} rounds", waits, ALLOWED_WAITS)
            for place, count in places.most_common(5):
                recorder.note(f"{kind}: waits per round at {place}", count / rounds)


def count_places(engine: Engine, rounds: int, params: dict[str, Any], verifier: Verifier) -> Counter[str]:
    """Tells where the host waited for the device in rounds that only decode, and how often, by torch's own account."""
    places: Counter[str] = Counter()
    counted = 0
    while counted < rounds:
        if not engine.has_work:
            _submit(engine, params, verifier)
        with _counted_waits(engine.target.device) as waits:
            stats = engine.step().stats
        if stats.parts and not stats.prefill_tokens:
            places.update(waits)
            counted += 1
    engine.cancel_all()
    engine.step()
    return places


def _submit(engine: Engine, params: dict[str, Any], verifier: Verifier) -> None:
    for i, prompt in enumerate(prompts(engine.config.max_running)):
        drawn = SamplingParams(**params, seed=i, max_tokens=engine.max_model_len - len(prompt))
        engine.submit(Request(f"{verifier}-{i}-{engine.steps}", tuple(prompt), drawn, verifier=verifier))


@contextmanager
def _counted_waits(device: torch.device) -> Iterator[list[str]]:
    """The lines at which torch finds that the host waits for the device; filled at the end. None on a CPU."""
    places: list[str] = []
    if device.type != "cuda":
        yield places
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # "error" would not let the one download pass
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")
    root = Path(__file__).resolve().parents[2]
    for warning in caught:
        if SYNCHRONIZING in str(warning.message):
            path = Path(warning.filename)
            places.append(f"{path.relative_to(root) if path.is_relative_to(root) else path.name}:{warning.lineno}")
