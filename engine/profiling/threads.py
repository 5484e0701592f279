"""Chooses at the start how many CPU threads the engine uses, by measurement, before any weight is loaded.

What is measured are passes over layers of the target's shape, with 1 row as in plain decoding and with 5 as in a
verification of 4 drafts. More threads do not always pay: each product waits for the slowest of its threads, and the
event loop and the proxy need CPUs too.
"""

import logging
from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from engine.models.decoder import DecoderConfig

log = logging.getLogger(__name__)

CLEARLY = 1.1  # more threads must be faster than fewer by this factor
ROWS = (1, 5)
PASSES = 5  # for each number of threads and of rows
SAMPLE_NUMBERS = 16 * 2**20  # numbers of the weights that a pass reads: 64 MiB of float32, more than most caches
TimedPass = Callable[[int, int], float]  # (threads, rows) → seconds of a pass


def choose_threads(shape: DecoderConfig, most: int, timed: TimedPass | None = None) -> int:
    """The number of threads: 1, 2, 4, … or `most`. torch has that many afterwards."""
    if most > 1:
        timed = timed or SamplePass(shape)
        seconds = {threads: _passes(timed, threads) for threads in _candidates(most)}
        chosen = fewest_that_pay(seconds)
        measured_text = ", ".join(f"{n}: {1e3 * sum(s):.2f} ms" for n, s in seconds.items())
        log.info("%d of %d CPUs compute: passes of 1 and 5 rows take, by threads, %s", chosen, most, measured_text)
    else:
        chosen = 1
        log.info("1 CPU computes: num_cpus allows no more")
    torch.set_num_threads(chosen)
    return chosen


def fewest_that_pay(seconds: Mapping[int, tuple[float, ...]]) -> int:
    """seconds: threads → seconds of a pass with each of ROWS. More threads must make both together clearly faster."""
    chosen = 1
    for threads in sorted(seconds):
        gains = [before / after for before, after in zip(seconds[chosen], seconds[threads], strict=True)]
        if median(gains) >= CLEARLY and min(gains) >= 1.0:
            chosen = threads
    return chosen


class SamplePass:
    """Passes over the products of some of the target's layers, with an activation and a sum between them."""

    def __init__(self, shape: DecoderConfig) -> None:
        hidden, inner = shape.hidden_size, shape.intermediate_size
        count = max(1, min(shape.num_layers, SAMPLE_NUMBERS // (hidden * (2 * hidden + 2 * inner))))
        sizes = ((2 * hidden, hidden), (hidden, hidden), (inner, hidden), (hidden, inner))
        self._layers = [[torch.full(size, 1e-3) for size in sizes] for _ in range(count)]
        self._hidden = hidden

    def __call__(self, threads: int, rows: int) -> float:
        torch.set_num_threads(threads)
        x = torch.ones(rows, self._hidden)
        with torch.inference_mode():
            started = perf_counter()
            for layer in self._layers:
                x = _layer(x, layer)
            return perf_counter() - started


def _layer(x: Tensor, weights: list[Tensor]) -> Tensor:
    linear = torch.nn.functional.linear
    mixed, out, up, down = weights
    x = x + linear(linear(torch.tanh(x), mixed)[:, : x.shape[1]], out)
    return x + linear(torch.nn.functional.silu(linear(torch.tanh(x), up)), down)


def _passes(timed: TimedPass, threads: int) -> tuple[float, ...]:
    """The median of a few passes with each of ROWS, after one that warms up."""
    for rows in ROWS:
        timed(threads, rows)
    return tuple(median(timed(threads, rows) for _ in range(PASSES)) for rows in ROWS)


def _candidates(most: int) -> list[int]:
    """1, 2, 4, … and `most` itself."""
    return sorted({*(1 << n for n in range(most.bit_length())), most})
