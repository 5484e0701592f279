"""Speed of pairs with the shapes of known models and a set acceptance: against byte floors and plain decoding."""

import gc
import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import cast
from unittest.mock import patch

import torch

from benchmarks.common import Chooser, Spec
from benchmarks.gpu.generated import ModelShape, Texts, fill, write_sparse
from benchmarks.gpu.kernels import tell_kernels
from benchmarks.gpu.machine import bandwidth
from benchmarks.gpu.steps import Recorder, Skipped
from benchmarks.measure import Run, timed_run
from benchmarks.stats import decode_steps
from benchmarks.stepping import Driver, greedy
from engine import engine as engine_module
from engine.config import ConfigError, EngineConfig
from engine.drafters.chain import ChainedDrafter
from engine.drafters.model import ModelDrafter
from engine.engine import Engine
from engine.models.decoder import Decoder
from engine.models.runner import Runner
from engine.profiling.round_profile import profile
from engine.types import StepStats
from policies.config import PolicyConfig

ACCEPTANCE = 0.8
PROMPT_TOKENS = 64
FLOOR_AIM = 1.25
ROWS = 5  # drafts that are verified beside one row
ROWS_AIMS = {1: 1.10, 16: 1.25}  # batch → time of 1 + ROWS rows over that of one
GOODPUT_AIMS = {1: 2.2, 8: 1.8, 32: 1.3, 128: 1.0}  # batch → tokens per second over plain decoding's
REPEATS = 2
MEASURED_TEXTS = 12  # of each policy at least: one text of 96 tokens accepts up to a tenth more or less than the mean
MOST_SETTLING = 6  # runs before the measured ones
MOST_WEIGHTS = 0.85  # share of the device's free memory


@dataclass(frozen=True, slots=True)
class PairShapes:
    target: ModelShape
    draft: ModelShape
    has_aims: tuple[str, ...]  # which of the aims were set for this pair: floor, goodput


LLAMA_1B = ModelShape("llama", 16, 2048, 8192, 32, 8, 64, 128256)
LLAMA_3B = ModelShape("llama", 28, 3072, 8192, 24, 8, 128, 128256)
LLAMA_8B = ModelShape("llama", 32, 4096, 14336, 32, 8, 128, 128256)
QWEN_HALF_B = ModelShape("qwen2", 24, 896, 4864, 14, 2, 64, 151936)
QWEN_7B = ModelShape("qwen2", 28, 3584, 18944, 28, 4, 128, 152064)
PAIRS = {
    "0.5B → 7B": PairShapes(QWEN_7B, QWEN_HALF_B, ("goodput",)),
    "1B → 3B": PairShapes(LLAMA_3B, LLAMA_1B, ("floor",)),
    "1B → 8B": PairShapes(LLAMA_8B, LLAMA_1B, ("floor",)),
}
DRY_PAIR = PairShapes(
    ModelShape("qwen2", 2, 128, 256, 4, 2, 64, 4352), ModelShape("llama", 1, 128, 128, 2, 1, 64, 4096), ()
)


class Bench:
    """An engine over a generated pair, and its texts."""

    def __init__(
        self, shapes: PairShapes, acceptance: float, recorder: Recorder, folder: Path, batches: tuple[int, ...]
    ) -> None:
        """Raises ConfigError for a pair that does not fit. batches: that will be measured, the largest one last."""
        self.batches = batches
        self.new_tokens = 24 if recorder.dry else 96
        self.measured_texts = 1 if recorder.dry else MEASURED_TEXTS
        dtype = torch.float32 if recorder.dry else torch.bfloat16
        self.texts = Texts.draw(min(shapes.target.vocab, shapes.draft.vocab), acceptance)
        target = write_sparse(folder / "target", shapes.target, dtype)
        draft = write_sparse(folder / "draft", shapes.draft, dtype)
        with patch.object(engine_module, "PROFILE_S", 0.0):  # all weights are zero yet
            self.engine = Engine.from_config(_config(target, draft, recorder, dtype, self.batches[-1]))
        models = zip(self.runners, (self.texts.target, self.texts.draft), strict=True)
        for seed, (runner, followers) in enumerate(models, 1):
            fill(cast(Decoder, runner.decoder), self.texts.tokens, followers, seed)
        self._profile()
        self.driver = Driver(self.engine)
        self._chooser = Chooser(self.engine)
        self._draw = random.Random(0)

    @property
    def runners(self) -> list[Runner]:
        """The target's, then the draft's."""
        assert isinstance(self.engine.drafter, ChainedDrafter)
        model = self.engine.drafter.model
        assert isinstance(model, ModelDrafter)
        return [self.engine.target, model.runner]

    def _profile(self) -> None:
        """With the weights as they are: numbers that are all zero take a GPU less power, so less time."""
        engine, config = self.engine, self.engine.config
        limits = (config.max_running, config.max_spec_length, engine_module.PROFILE_S)
        engine.speculator.control.begin(profile(engine.target, engine.drafter, *limits, kept=False))

    def settle(self, batch: int, spec: Spec) -> None:
        """Run until nothing is left to capture, and a policy has learned the acceptance."""
        graphs = self.engine.target.staging.graphs
        for _ in range(MOST_SETTLING):
            known = graphs and graphs.discovered
            self.run(batch, spec)
            if known == (graphs and graphs.discovered):
                break

    def run(self, batch: int, spec: Spec) -> Run:
        """`batch` prompts at once, continued by new_tokens tokens each."""
        self._chooser.use(str(spec), spec)
        firsts = self._draw.choices(self.texts.tokens.tolist(), k=batch)
        prompts = [self.texts.after(first, PROMPT_TOKENS) for first in firsts]
        run = timed_run(self.driver, prompts, greedy(self.new_tokens), None)
        if (most := max(step.sequences for step in run.steps)) < batch:
            raise RuntimeError(f"memory holds only {most} of {batch} sequences at once")
        for prompt, output in zip(prompts, run.outputs, strict=True):
            if output != self.texts.after(prompt[-1], 1 + len(output))[1:]:
                raise RuntimeError("a text is not what the pair was made to write")
        return run


def _config(target: str, draft: str, recorder: Recorder, dtype: torch.dtype, max_running: int) -> EngineConfig:
    drafts = 8
    return EngineConfig(
        target,
        draft,
        device=recorder.device,
        dtype=str(dtype).removeprefix("torch."),
        products="plain" if recorder.device == "cpu" else "auto",  # the weights are drawn in the memory that is used
        graphs=recorder.device != "cpu",
        policy=PolicyConfig("off"),
        max_spec_length=drafts,
        max_running=max_running,
        max_model_len=512,
        max_step_tokens=max(512, max_running * (1 + drafts)),
        generation_config="none",
    )


def measure_pair(shapes: PairShapes, recorder: Recorder) -> None:
    """All figures of one pair."""
    _check_memory(shapes, recorder)
    began = perf_counter()
    with tempfile.TemporaryDirectory(dir=_in_memory()) as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # no profile of other weights is found, and none is kept
        bench = _largest_bench(shapes, recorder, Path(folder))
    recorder.note("seconds until the pair was ready", perf_counter() - began)
    measures: list[Callable[[Bench, PairShapes, Recorder], None]] = [_measure_floor, _measure_rows, _measure_goodput]
    for measure in measures:
        measure(bench, shapes, recorder)
    _measure_without_graphs(bench, shapes, recorder)
    _tell_kernels(bench, recorder)


def _largest_bench(shapes: PairShapes, recorder: Recorder, folder: Path) -> Bench:
    """Run as many of the batches as there is memory for. Raises ConfigError if there is none for the smallest."""
    batches = (1, 2) if recorder.dry else tuple(GOODPUT_AIMS)
    while True:
        try:
            return Bench(shapes, ACCEPTANCE, recorder, folder / f"pair-{batches[-1]}", batches)
        except ConfigError as error:
            if len(batches) == 1:
                raise
            recorder.note(f"batch {batches[-1]} is left out", str(error))
            recorder.check_time(30)
            batches = batches[:-1]
        gc.collect()  # what the failed start holds on the device


def _check_memory(shapes: PairShapes, recorder: Recorder) -> None:
    if recorder.device == "cpu":
        return
    needed = sum(shape.num_bytes(torch.bfloat16) for shape in (shapes.target, shapes.draft))
    free = torch.cuda.mem_get_info(recorder.device)[0]
    if needed > MOST_WEIGHTS * free:
        raise Skipped(f"the weights take {needed / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free")


def _in_memory() -> str | None:
    """A folder whose files lie in memory, where holes cost nothing to read; None: there is none."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _measure_floor(bench: Bench, shapes: PairShapes, recorder: Recorder) -> None:
    recorder.check_time(5)
    steps = _plain_steps(bench)
    decoder = cast(Decoder, bench.engine.target.decoder)
    read = decoder.weight_bytes - decoder.embedding.nbytes + _kv_bytes(bench)
    floor_us = 1e6 * read / bandwidth(recorder.device)
    step_us, forward_us = (_median(steps, name) for name in ("step_us", "target_forward_us"))
    recorder.note("plain step at batch 1, ms", step_us / 1000)
    recorder.note("its byte floor, ms", floor_us / 1000)
    recorder.note("target's forward over its byte floor, batch 1", forward_us / floor_us)
    what = "decode step over its byte floor, batch 1"
    if "floor" in shapes.has_aims:
        recorder.at_most(what, step_us / floor_us, FLOOR_AIM)
    else:
        recorder.note(what, step_us / floor_us)


def _plain_steps(bench: Bench) -> list[StepStats]:
    bench.settle(1, 0)
    return decode_steps(bench.run(1, 0).steps)


def _kv_bytes(bench: Bench) -> int:
    """Keys and values that a plain step reads of one sequence, on average."""
    config, dtype = bench.engine.target.decoder.config, bench.engine.target.decoder.dtype
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
    return (PROMPT_TOKENS + bench.new_tokens // 2) * token_bytes


def _measure_rows(bench: Bench, shapes: PairShapes, recorder: Recorder) -> None:
    """What the rows of drafts add to the target's pass."""
    for batch, aim in ROWS_AIMS.items():
        if batch > bench.batches[-1]:
            continue
        recorder.check_time(5)
        for k in (0, ROWS):
            bench.settle(batch, k)
        one, many, alphas = list[StepStats](), list[StepStats](), list[float]()
        for _ in range(REPEATS):
            one += decode_steps(bench.run(batch, 0).steps)
            drafted = bench.run(batch, ROWS)
            many += [step for step in decode_steps(drafted.steps) if _is_whole(step, batch)]
            alphas.append(drafted.alpha or 0.0)
        recorder.note(f"accepted share of reached drafts, batch {batch}", mean(alphas))
        recorder.note(
            f"drafts' time over the pass, batch {batch}", _median(many, "draft_us") / _median(many, "score_us")
        )
        for name, what in (("target_forward_us", "target's forward"), ("score_us", "pass with its verdict")):
            times = [_median(steps, name) for steps in (many, one)]
            recorder.at_most(f"{what}, 1 + {ROWS} rows over one, batch {batch}", times[0] / times[1], aim)


def _is_whole(step: StepStats, batch: int) -> bool:
    """Whether each sequence had all drafts: near the end of a text there are fewer."""
    return step.drafted == ROWS * batch


def _measure_goodput(bench: Bench, shapes: PairShapes, recorder: Recorder) -> None:
    for batch in bench.batches:
        recorder.check_time(5)
        fast, plain = _repeat(bench, batch)
        rates = _rate(fast), _rate(plain)
        what = f"goodput over plain at acceptance {ACCEPTANCE:g}, batch {batch}"
        if "goodput" in shapes.has_aims:
            recorder.at_least(what, rates[0] / rates[1], GOODPUT_AIMS[batch])
        else:
            recorder.note(what, rates[0] / rates[1])
        recorder.note(f"plain tokens per second, batch {batch}", rates[1])
        recorder.note(f"drafts per round and sequence, batch {batch}", median(run.mean_k or 0.0 for run in fast))
        recorder.note(f"step over its forwards, goodput, batch {batch}", median(run.overhead for run in fast))
        for name, runs in (("goodput", fast), ("plain", plain)):
            recorder.note(f"{name} step: drafts, pass, policy, rest, ms, batch {batch}", _parts(runs))


def _repeat(bench: Bench, batch: int) -> tuple[list[Run], list[Run]]:
    """Runs with the drafts that pay, and plain ones; they take turns."""
    bench.settle(batch, "goodput")
    plain, fast = list[Run](), list[Run]()
    for _ in range(max(REPEATS, bench.measured_texts // batch)):
        plain.append(bench.run(batch, 0))
        fast.append(bench.run(batch, "goodput"))
    return fast, plain


def _rate(runs: list[Run]) -> float:
    return median(run.decode_tokens_per_s for run in runs)


def _parts(runs: list[Run]) -> str:
    """The median of each part of a step. The rest is the host's, while the device waits."""
    steps = [step for run in runs for step in decode_steps(run.steps)]
    rest = [s.step_us - s.draft_us - s.score_us - s.policy_us for s in steps]
    medians = [*(_median(steps, name) for name in ("draft_us", "score_us", "policy_us")), median(rest)]
    return ", ".join(f"{us / 1000:.2f}" for us in medians)


def _tell_kernels(bench: Bench, recorder: Recorder) -> None:
    kinds = ((1, 0), (1, ROWS), (bench.batches[-1], 0))
    for batch, spec in kinds[:1] if recorder.dry else kinds:
        recorder.check_time(5)
        tell_kernels(recorder, f"batch {batch}, {spec} drafts", partial(bench.run, batch, spec))


def _measure_without_graphs(bench: Bench, shapes: PairShapes, recorder: Recorder) -> None:
    """The account of the graphs, and what batch 1 takes on the same engine without them."""
    staging = bench.engine.target.staging
    if staging.graphs is None:
        return
    for what, number in staging.graphs.stats.items():
        recorder.note(f"graphs: {what}", number)
    recorder.check_time(10)
    with patch.object(staging, "graphs", None):
        recorder.note("plain step at batch 1 without graphs, ms", _median(_plain_steps(bench), "step_us") / 1000)
        fast, plain = _repeat(bench, 1)
    recorder.note("goodput over plain without graphs, batch 1", _rate(fast) / _rate(plain))
    recorder.note("plain tokens per second without graphs, batch 1", _rate(plain))


def _median(steps: list[StepStats], name: str) -> float:
    return median(getattr(step, name) for step in steps)
