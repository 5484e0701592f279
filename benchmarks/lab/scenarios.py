"""Machines made of tables, and loads whose acceptance drifts, for simulator.py."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from benchmarks.lab.simulator import Job, Machine, make_job, timing_of
from policies.observation import Floats, Ints, RoundCost, Timing
from policies.trees import RANKS

GRAPHS = np.array([1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)])  # tokens of passes that were captured
US = 1e-6


@lru_cache(maxsize=1024)
def gpu(depth: int, batch: int, prefill: int) -> RoundCost:
    """Like an 8B target with a 0.5B draft model on one large GPU.

    A pass reads 16 GB of weights in 5.2 ms and computes up to 200 tokens in this time. Each further token takes 26 µs.
    Up to 512 tokens it replays the smallest captured graph that holds them. A longer pass is launched kernel by kernel.
    """
    tokens = batch + prefill + np.arange(1 + batch * depth)
    return RoundCost(
        base_s=(300 + 2 * batch) * US,
        drafting_s=100 * US,
        model_s=150 * US,
        step_s=(350 + 1.5 * _captured(np.array([max(1, batch)])).item()) * US,
        token_s=1.7 * US,
        verify_s=_gpu_pass(tokens),
        padding_s=np.zeros(1 + depth),
    )


def _gpu_pass(tokens: Ints) -> Floats:
    computed = _captured(tokens)
    eager_s = np.where(tokens > GRAPHS[-1], 2500 * US, 0.0)
    return np.maximum(5200, 26 * computed) * US + (200 + 3 * computed) * US + eager_s


def _captured(tokens: Ints) -> Ints:
    """Tokens that a pass computes: those of its graph, or whole tiles of 64 without a graph."""
    places = np.minimum(np.searchsorted(GRAPHS, tokens), len(GRAPHS) - 1)
    return np.where(tokens > GRAPHS[-1], -(-tokens // 64) * 64, GRAPHS[places])


# Measured on the demo pair with two cores: tokens of a pass, and its microseconds without the padding.
CPU_TOKENS = [1, 2, 8, 16, 24, 40, 72]
CPU_PASS_US = [1800, 2150, 3240, 3575, 3840, 4430, 5000]
CPU_TOKEN_US = 30  # microseconds of each token beyond these


@lru_cache(maxsize=1024)
def cpu(depth: int, batch: int, prefill: int) -> RoundCost:
    """Like the demo pair on two cores: no plateau, dear drafts, and attention as if every k were the largest."""
    tokens = batch + prefill + np.arange(1 + batch * depth)
    beyond = np.maximum(0, tokens - CPU_TOKENS[-1])
    return RoundCost(
        base_s=(90 + 13 * batch) * US,
        drafting_s=80 * US,
        model_s=250 * US,
        step_s=(135 + 7 * batch) * US,
        token_s=22 * US,
        verify_s=(np.interp(tokens, CPU_TOKENS, CPU_PASS_US) + CPU_TOKEN_US * beyond) * US,
        padding_s=batch * np.interp(np.arange(1 + depth), [0, 4, 8, 16], [0, 212, 340, 600]) * US,
    )


# Measured on the demo target with its EAGLE head, one thread: microseconds of a pass by its tokens.
HEAD_TOKENS = [1, 2, 3, 5, 9, 17, 33, 72]
HEAD_PASS_US = [5000, 5500, 5900, 6600, 8000, 11000, 17000, 32000]


@lru_cache(maxsize=1024)
def head(depth: int, batch: int, prefill: int) -> RoundCost:
    """Like the demo target with its EAGLE head on one core: dear passes, cheap drafts that are mostly right."""
    tokens = batch + prefill + np.arange(1 + batch * depth)
    slope = (HEAD_PASS_US[-1] - HEAD_PASS_US[-2]) / (HEAD_TOKENS[-1] - HEAD_TOKENS[-2])
    beyond = np.maximum(0, tokens - HEAD_TOKENS[-1])
    return RoundCost(
        base_s=(200 + 20 * batch) * US,
        drafting_s=250 * US,
        model_s=200 * US,
        step_s=(420 + 10 * batch) * US,
        token_s=40 * US,
        verify_s=(np.interp(tokens, HEAD_TOKENS, HEAD_PASS_US) + slope * beyond) * US,
        padding_s=np.zeros(1 + depth),
    )


PROFILED_KS = (0, 1, 2, 4, 8, 16)
PROFILED_GAP = 64  # tokens that the draft model must read first, once per batch


def profile(machine: Machine, depth: int, largest: int) -> list[Timing]:
    """The measurements of a start-up: batches of a power of two up to the largest, at a few k.

    Each batch also has a round in which every other sequence drafts, and one in which the draft model reads gaps.
    """
    timings: list[Timing] = []
    for batch in sorted({*(2**i for i in range(largest.bit_length())), largest}):
        cost = machine(batch, 0)
        timings += [timing_of(cost, batch, batch * k, k, 0, k, batch * k) for k in PROFILED_KS if k <= depth]
        half, k = batch // 2, min(4, depth)
        if half:
            timings.append(timing_of(cost, batch, half * k, k, 0, k, half * k))
        timings.append(timing_of(cost, batch, batch, 1, 0, 1, batch * PROFILED_GAP))
    return timings


def drifting(
    batch: int, seed: int, beta: tuple[float, float] = (3.0, 1.6), switch: float = 0.01, tokens: float = 256
) -> Iterator[Job]:
    """Endless requests, `batch` at a time. Their lengths are geometric with mean `tokens`, from 8 to 1,024.

    The chance of a draft comes from Beta(*beta). At each position it is drawn anew with probability `switch`.
    """
    index = 0
    while True:
        rng = np.random.default_rng([seed, index])
        length = int(np.clip(rng.geometric(1 / tokens), 8, 1024))
        regimes = np.cumsum(rng.random(length) < switch)
        alphas = rng.beta(*beta, regimes[-1] + 1)[regimes]
        yield drawn(rng, alphas, prompt=int(rng.integers(32, 256)), beside=batch)
        index += 1


def easy_and_hard(batch: int, seed: int, tokens: int = 64) -> Iterator[Job]:
    """Endless requests of a drafter that is right with chance .93 in the mean: .985 in easy stretches, .65 in hard.

    A fifth of the stretches are hard, and one lasts 12 tokens in the mean.
    """
    index = 0
    while True:
        rng = np.random.default_rng([seed, index])
        stretches = np.cumsum(rng.random(tokens + 16) < 0.08)
        alphas = np.where(rng.random(stretches[-1] + 1) < 0.8, 0.985, 0.65)[stretches]
        yield drawn(rng, alphas, prompt=96, beside=batch, length=tokens)
        index += 1


def branching(batch: int, seed: int) -> Iterator[Job]:
    """The requests of `drifting`, where the second, third and fourth guess for a position may be right instead."""
    for index, job in enumerate(drifting(batch, seed, beta=(3.0, 2.0))):
        hits = np.random.default_rng([seed, index, 1]).random((len(job.runs), 3)) < (0.34, 0.15, 0.08)
        further = np.where(hits.any(1), 1 + hits.argmax(1), RANKS)
        yield replace(job, ranks=tuple(np.where(np.array(job.runs) > 0, 0, further).tolist()))


def drawn(rng: np.random.Generator, alphas: Floats, **fields: Any) -> Job:
    """A job with bits drawn with these chances. fields: other fields of Job."""
    return make_job(rng.random(len(alphas)) < alphas, alphas, **fields)


RAMP = (1, 2, 4, 8, 16, 8, 4, 2, 1)


def mixed(seed: int, tokens: int = 128, each: int = 4, ramp: Iterable[int] = RAMP) -> list[Job]:
    """A ramp of load in which every other request copies: its drafts are right with chance 0.95, the others' with 0.5.

    Each level has `each` times as many requests as run at once.
    """
    rng = np.random.default_rng(seed)
    besides = [level for level in ramp for _ in range(each * level)]
    chances = [0.5 if i % 2 else 0.95 for i in range(len(besides))]
    return [
        drawn(rng, np.full(tokens, alpha), prompt=64, beside=beside)
        for alpha, beside in zip(chances, besides, strict=True)
    ]


MEAN_ROUNDS = 10  # rounds over which a level is a mean


def recovery(mean_ks: list[float], broken: range) -> tuple[int | None, int | None]:
    """(rounds until a broken drafter is left alone, rounds from its repair until it is used again); None: never.

    It is left alone once a round's mean k is below a tenth of the mean before the damage. It is used again once the
    mean of ten rounds is at least half of it.
    """
    before = float(np.mean(mean_ks[: broken.start]))
    left = next((i for i, k in enumerate(mean_ks[broken.start : broken.stop]) if k < before / 10), None)
    after = mean_ks[broken.stop :]
    means = [float(np.mean(after[i : i + MEAN_ROUNDS])) for i in range(len(after) - MEAN_ROUNDS + 1)]
    return left, next((i for i, mean in enumerate(means) if mean >= before / 2), None)
