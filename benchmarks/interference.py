"""How a long prompt and the running streams slow each other down.

Part `interference` of benchmarks/memory.py. In each repeat --streams sequences decode for --window steps. Then a prompt
of --long-prompt tokens arrives and is read --prefill-chunk tokens at a time. A gap is the wall time between two outputs
of a stream. `without` are the gaps before the arrival. `with` are the gaps from the arrival until the prompt has its
first token and, if it drafts, the draft model has read it too. `control` is the p99 of the second half of `without`
over that of the first: its difference from 1 is noise. `alone` is the same prompt length on an idle engine.
"""

import argparse
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks import common
from benchmarks.stats import median_ratio
from benchmarks.stepping import DrivenRequest, Driver, Text, greedy, make_engine
from engine.types import StepStats

JOINING_TOKENS = 16  # that the newcomer may emit while the draft model still reads its prompt
SETTLED = 3  # outputs of a stream after which its own prefill no longer matters


@dataclass(frozen=True)
class InterferenceRun:
    """The arrival of one long prompt. Times in seconds."""

    halves: tuple[list[float], list[float]]  # gaps before the arrival, in two halves
    during: list[float]  # gaps from the arrival on
    first: float  # the prompt's time to its first token
    alone: float  # the same on an idle engine

    @property
    def without(self) -> list[float]:
        return self.halves[0] + self.halves[1]


def percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(values, 100 * share))


def gaps(streams: Sequence[DrivenRequest], after: float, until: float) -> list[float]:
    """Seconds between two outputs of one stream, if the second one came in (after, until]."""
    pairs = (pair for stream in streams for pair in itertools.pairwise(stream.times))
    return [now - before for before, now in pairs if after < now <= until]


def run_interference(busy: Driver, idle: Driver, args: argparse.Namespace, text: Text, k: int) -> InterferenceRun:
    streams = settled_streams(busy, args, text, k)
    first, second = (window(busy, streams, args.window // 2) for _ in range(2))
    arrived = time.perf_counter()
    params = greedy(JOINING_TOKENS if k else 1)
    newcomer = busy.submit(text.take(args.long_prompt), params, k)
    join(busy, streams, newcomer, k)
    during = gaps(streams, arrived, time.perf_counter())
    busy.clear()
    alone = idle.submit(text.take(args.long_prompt), params, k)
    idle.run()
    return InterferenceRun((first, second), during, newcomer.first_token_s, alone.first_token_s)


def step(busy: Driver, streams: Sequence[DrivenRequest]) -> StepStats:
    """One step. Raises RuntimeError if a stream ends, since fewer streams would not compare."""
    stats = busy.step().stats
    if any(stream.ended for stream in streams):
        raise RuntimeError("a stream ended before the prompt was read: lower --window or --long-prompt")
    return stats


def settled_streams(busy: Driver, args: argparse.Namespace, text: Text, k: int) -> list[DrivenRequest]:
    """Streams whose prompts are read and that may decode to the end of the context."""
    params = greedy(args.max_model_len - args.prompt_tokens)
    streams = [busy.submit(text.take(args.prompt_tokens), params, k) for _ in range(args.streams)]
    while min(len(stream.times) for stream in streams) < SETTLED:
        step(busy, streams)
    return streams


def window(busy: Driver, streams: Sequence[DrivenRequest], steps: int) -> list[float]:
    """The gaps of this many steps."""
    began = time.perf_counter()
    for _ in range(steps):
        step(busy, streams)
    return gaps(streams, began, time.perf_counter())


def join(busy: Driver, streams: Sequence[DrivenRequest], newcomer: DrivenRequest, k: int) -> None:
    """Step until the newcomer has its first token, drafts (if k > 0), and every stream has an output after that."""
    joined = False
    while not joined or min(stream.times[-1] for stream in streams) < newcomer.times[-1]:
        stats = step(busy, streams)
        # Every stream drafts k tokens a round. If there are more, the newcomer drafts.
        joined = joined or newcomer.ended is not None or stats.drafted > len(streams) * k


def measure_interference(args: argparse.Namespace, text: Text) -> list[dict[str, object]]:
    """Rows: every chunk size and k, each measured once per repeat."""
    running = args.streams + 1
    settings = {"block_size": args.block_size, "kv_tokens": running * args.max_model_len}
    pairs = {
        chunk: [Driver(make_engine(args, "paged", running, prefill_chunk=chunk, **settings)) for _ in ("busy", "idle")]
        for chunk in args.prefill_chunk
    }
    runs: dict[tuple[int, int], list[InterferenceRun]] = {}
    for repeat, chunk, k in itertools.product(range(-1, args.repeats), pairs, args.spec):
        busy, idle = pairs[chunk]
        run = run_interference(busy, idle, args, text, k)
        if repeat >= 0:
            runs.setdefault((chunk, k), []).append(run)
    return [summarise(chunk, k, of_setting) for (chunk, k), of_setting in runs.items()]


def summarise(chunk: int, k: int, runs: Sequence[InterferenceRun]) -> dict[str, object]:
    """Percentiles are over the gaps of all repeats. Other ratios are medians of the ratios within each repeat."""
    without = [gap for run in runs for gap in run.without]
    during = [gap for run in runs for gap in run.during]
    halves = [[gap for run in runs for gap in run.halves[i]] for i in (0, 1)]
    return {
        "chunk": chunk,
        "k": common.spec_name(k),
        "without ms": median(without) * 1e3,
        "with ms": median(during) * 1e3,
        "median ratio": median_ratio([median(p.during) for p in runs], [median(p.without) for p in runs]),
        "without p99": percentile(without, 0.99) * 1e3,
        "with p99": percentile(during, 0.99) * 1e3,
        "with max": max(during) * 1e3,
        "p99 ratio": percentile(during, 0.99) / percentile(without, 0.99),
        "control": percentile(halves[1], 0.99) / percentile(halves[0], 0.99),
        "first token ms": median(p.first for p in runs) * 1e3,
        "alone ms": median(p.alone for p in runs) * 1e3,
        "first token ratio": median_ratio([p.first for p in runs], [p.alone for p in runs]),
    }
