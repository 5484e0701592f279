"""Measures, on the machine that serves, up to how many rows a span's attention reads blocks (cpu_attention.py).

With few rows compiled code that reads each key once is faster, with many rows torch's products of matrices may be.
Whether and where they cross depends on the CPU, the number type and the size of heads.
"""

import logging
import sys
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from math import log2
from time import perf_counter

import torch

from cache.slotted import SlottedCache
from cache.storage import KVShape, SlottedStorage
from engine.models.attention import Attention, plan_attention
from engine.models.cpu_attention import BlockReader
from engine.models.spans import Span
from engine.profiling.quartile import lower_quartile

log = logging.getLogger(__name__)

ROWS = (1, 2, 3, 5, 9, 17, 40, 120)  # of a span: a plain step, verification, several guesses at once, a whole prompt
PROMPTS = 3  # weight of the last of ROWS: passes that read prompts take as long as many others
KEYS = 512  # of the longer of two spans
LAYERS = 4  # keys and values come from farther than the first-level cache, as in service
SWEEPS = 5
LONGER = 1.15  # reading blocks may take so many times as long: longer contexts come from memory, where it gains more
TimedSweeps = Callable[
    [int], tuple[list[float], list[float]]
]  # rows → seconds of sweeps that read blocks, and of torch


def rows_that_pay(timed: TimedSweeps, any_length: bool = False) -> int:
    """The one of ROWS up to which reading blocks gains most over torch's attention. 0: it never pays.

    All sizes up to it count together, the last one as PROMPTS, so that one disturbed measurement does not decide.
    any_length: where prompts read blocks, compiled layers serve all passes. Few rows read blocks there in any case, so
    prompts alone decide.
    """
    times = [timed(rows) for rows in ROWS]
    gains = [log2(LONGER * lower_quartile(theirs) / lower_quartile(ours)) for ours, theirs in times]
    if any_length and gains[-1] > 0:
        return ROWS[-1]
    gains[-1] *= PROMPTS
    together = [0.0, *accumulate(gains)]
    return (0, *ROWS)[together.index(max(together))]


@cache
def measured_lanes(heads: int, shape: KVShape, any_length: bool = False) -> int:
    """BlockReader.most_lanes for a model with so many query heads, on this machine with its number of threads. Where
    reading blocks pays up to the last of ROWS, it does for longer spans too, because they are computed in pieces.
    any_length: as in rows_that_pay."""
    group = heads // shape.kv_heads
    rows = rows_that_pay(SampleSweeps(heads, shape), any_length)
    if rows == ROWS[-1]:
        log.info("attention reads blocks")
        return sys.maxsize
    log.info("attention reads blocks where a span has at most %d rows, or %d queries for each key", rows, group * rows)
    return rows * group


class SampleSweeps:
    """Attention of two spans in some layers over random keys and values, by both ways in turn. The spans differ in
    length, as those of sequences do: torch's attention then needs a call for each, or a mask."""

    def __init__(self, heads: int, shape: KVShape) -> None:
        self._heads, self._shape = heads, shape
        like = KVShape(LAYERS, shape.kv_heads, shape.head_dim, shape.dtype, shape.device)
        self._storage = SlottedStorage(SlottedCache(2, KEYS), 2, KEYS, like)
        for layer in self._storage.rows:
            layer.normal_()
        self._reader = BlockReader.over(self._storage)

    def __call__(self, rows: int) -> tuple[list[float], list[float]]:
        shape = self._shape
        ways = [self._attention(rows, self._reader), self._attention(rows, None)]
        total = sum(span.size for span in spans_of(rows))
        queries = torch.randn(total, self._heads, shape.head_dim).to(shape.dtype)
        stored = torch.randn(total, *shape.row).to(shape.dtype)
        seconds: tuple[list[float], list[float]] = ([], [])
        with torch.inference_mode():
            for sweep in range(1 + SWEEPS):
                for attention, spent in zip(ways, seconds, strict=True):
                    started = perf_counter()
                    for layer in range(LAYERS):
                        attention(layer, queries, stored)
                    if sweep:  # the first one compiles
                        spent.append(perf_counter() - started)
        return seconds

    def _attention(self, rows: int, reader: BlockReader | None) -> Attention:
        if reader is not None:
            reader.most_lanes = rows * self._heads
        shape = self._shape
        plan = plan_attention(
            spans_of(rows),
            self._storage,
            num_heads=self._heads,
            num_kv_heads=shape.kv_heads,
            dtype=shape.dtype,
            device=shape.device,
            reader=reader,
        )
        return Attention(plan, self._storage, reader)


def spans_of(rows: int) -> list[Span]:
    """Two spans of so many rows at the end of KEYS and of three quarters of them; for the last of ROWS a whole prompt
    of so many and one of three quarters."""
    if rows == ROWS[-1]:
        return [Span.at(0, 0, rows), Span.at(1, 0, rows * 3 // 4)]
    return [Span.at(slot, end - rows, rows) for slot, end in enumerate((KEYS, KEYS * 3 // 4))]
