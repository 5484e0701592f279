"""What running streams notice of a long prompt that comes in, and what that prompt notices of them.

Part `interference` of benchmarks/memory.py. In each repeat --streams sequences decode for --window steps; then a prompt
of --long-prompt tokens comes, to be read --prefill-chunk tokens at a time. Gaps are the wall times between a stream's
outputs: `without` those before it came, `with` those from then on until it has its first token and, where it drafts,
until the draft model has read it, too. `control` is the p99 of the second half of `without` over that of the first:
what it differs from 1 is noise. A fresh prompt of that length on an idle engine says how long it takes alone.
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
from benchmarks.stepping import Driver, Text, Told, greedy, make_engine
from engine.types import StepStats

JOINING_TOKENS = 16  # that the newcomer may emit before it drafts: the draft model reads its prompt meanwhile
SETTLED = 3  # outputs of a stream after which nothing is left of its own beginning


@dataclass(frozen=True)
class Passage:
    """One long prompt's arrival; seconds."""

    halves: tuple[list[float], list[float]]  # gaps before it came
    during: list[float]
    first: float  # its time to the first token
    alone: float  # the same on an idle engine

    @property
    def without(self) -> list[float]:
        return self.halves[0] + self.halves[1]


def percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(values, 100 * share))


def gaps(streams: Sequence[Told], after: float, until: float) -> list[float]:
    """Times between outputs of the same stream, of those outputs that came in (after, until]."""
    pairs = (pair for stream in streams for pair in itertools.pairwise(stream.times))
    return [now - before for before, now in pairs if after < now <= until]


def pass_through(busy: Driver, idle: Driver, args: argparse.Namespace, text: Text, k: int) -> Passage:
    streams = settled(busy, args, text, k)
    first, second = (window(busy, streams, args.window // 2) for _ in range(2))
    arrived = time.perf_counter()
    newcomer = greedy(JOINING_TOKENS if k else 1)
    told = busy.submit(text.take(args.long_prompt), newcomer, k)
    join(busy, streams, told, k)
    during = gaps(streams, arrived, time.perf_counter())
    busy.clear()
    alone = idle.submit(text.take(args.long_prompt), newcomer, k)
    idle.run()
    return Passage((first, second), during, told.first_token_s, alone.first_token_s)


def step(busy: Driver, streams: Sequence[Told]) -> StepStats:
    """Raises RuntimeError if a stream ends: from then on there are fewer to delay, or to be delayed."""
    stats = busy.step().stats
    if any(stream.ended for stream in streams):
        raise RuntimeError("a stream ended before the prompt was read: ask for a smaller window or prompt")
    return stats


def settled(busy: Driver, args: argparse.Namespace, text: Text, k: int) -> list[Told]:
    """Streams that have all that they need to read behind them, and the rest of the context before them."""
    room = greedy(args.max_model_len - args.prompt_tokens)
    streams = [busy.submit(text.take(args.prompt_tokens), room, k) for _ in range(args.streams)]
    while min(len(stream.times) for stream in streams) < SETTLED:
        step(busy, streams)
    return streams


def window(busy: Driver, streams: Sequence[Told], steps: int) -> list[float]:
    began = time.perf_counter()
    for _ in range(steps):
        step(busy, streams)
    return gaps(streams, began, time.perf_counter())


def join(busy: Driver, streams: Sequence[Told], newcomer: Told, k: int) -> None:
    """Step until the newcomer has its first token and, with k, drafts, and no stream is still waiting for its turn."""
    joined = False
    while not joined or min(stream.times[-1] for stream in streams) < newcomer.times[-1]:
        stats = step(busy, streams)
        # Every stream drafts k a round; more than that is the newcomer's.
        joined = joined or newcomer.ended is not None or stats.drafted > len(streams) * k


def measure_interference(args: argparse.Namespace, text: Text) -> list[dict[str, object]]:
    """Every chunk size and k once per repeat."""
    running = args.streams + 1
    settings = {"block_size": args.block_size, "kv_tokens": running * args.max_model_len}
    pairs = {
        chunk: [Driver(make_engine(args, "paged", running, prefill_chunk=chunk, **settings)) for _ in ("busy", "idle")]
        for chunk in args.prefill_chunk
    }
    passages: dict[tuple[int, int], list[Passage]] = {}
    for repeat, chunk, k in itertools.product(range(-1, args.repeats), pairs, args.spec):
        busy, idle = pairs[chunk]
        passage = pass_through(busy, idle, args, text, k)
        if repeat >= 0:
            passages.setdefault((chunk, k), []).append(passage)
    return [summarise(chunk, k, own) for (chunk, k), own in passages.items()]


def summarise(chunk: int, k: int, passages: Sequence[Passage]) -> dict[str, object]:
    """Percentiles are of all repeats' gaps together, other ratios medians of those within a repeat."""
    without = [gap for passage in passages for gap in passage.without]
    during = [gap for passage in passages for gap in passage.during]
    halves = [[gap for passage in passages for gap in passage.halves[i]] for i in (0, 1)]
    return {
        "chunk": chunk,
        "k": common.spec_name(k),
        "without ms": median(without) * 1e3,
        "with ms": median(during) * 1e3,
        "median ratio": median_ratio([median(p.during) for p in passages], [median(p.without) for p in passages]),
        "without p99": percentile(without, 0.99) * 1e3,
        "with p99": percentile(during, 0.99) * 1e3,
        "with max": max(during) * 1e3,
        "p99 ratio": percentile(during, 0.99) / percentile(without, 0.99),
        "control": percentile(halves[1], 0.99) / percentile(halves[0], 0.99),
        "first token ms": median(p.first for p in passages) * 1e3,
        "alone ms": median(p.alone for p in passages) * 1e3,
        "first token ratio": median_ratio([p.first for p in passages], [p.alone for p in passages]),
    }
