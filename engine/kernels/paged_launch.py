"""Launches the Triton kernels of paged attention. Needs triton.

The keys of a sequence with more than SPLIT_ROWS rows are not split: it has programs enough, and needs no memory for
parts. It has a launch of its own, so that sequences with few rows keep their tiles and their parts beside it.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from engine.kernels import paged_kernel
from engine.kernels.early_start import early_options, starts_early
from engine.kernels.paged_rows import SPLIT_ROWS, PagedRows

MAX_PARTS = 32
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes at once, and with what."""

    rows: int  # packed rows: a power of two, at least 16
    keys: int  # a power of two that divides SEGMENT, at least 16
    warps: int
    stages: int  # of the compiler's pipeline of loads


@dataclass(frozen=True, slots=True)
class LaunchShare:
    """The sequences that a launch computes, by their number of rows, and into how many parts their keys are split."""

    fewest: int
    most: int
    parts: int


def choose_tile(packed: int, width: int, itemsize: int, wgmma: bool) -> Tile:
    """For `packed` rows of one sequence and kv head, and heads of `width` numbers of that many bytes. wgmma: what
    has_wgmma() says. The number of keys does not depend on the rows, so that a row of a verification has the bits of a
    decoding row.

    Registers must not be spilled, and shared memory must fit in the 99 KB of compute capabilities 8.6 and 8.9
    (benchmarks/compiled_kernels.py). Within these bounds the tiles of 16 bits for heads of up to 128 numbers are those
    that took the least time on an H100: long tiles without a pipeline, 0.5 to 0.8 times as long as short tiles with one
    (docs/log.md). The others are not chosen by measured times.
    """
    if itemsize == 4:  # computed without tensor cores
        return Tile(16, 32, 8, 1) if width <= 128 else Tile(16, 16, 4, 1)
    rows = 16 if packed <= 16 else 32 if packed <= 32 else 64
    if width <= 128:
        return Tile(rows, 128 if width <= 64 else 64, 4 if wgmma or rows * width <= 4096 else 8, 1)
    return Tile(rows, 32, 4 if rows <= 16 else 8, 3)


@cache
def has_wgmma(device: torch.device) -> bool:
    """Whether four warps compute products together, which leaves registers for larger tiles."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def count_parts(rows: PagedRows) -> int:
    """Into how many parts the keys of each sequence with few rows are split."""
    return max(1, min(MAX_PARTS, -(-rows.max_keys // paged_kernel.SEGMENT.value)))


def supports(queries: Tensor, pool: Tensor) -> bool:
    """Whether the kernels can compute attention of these, on their device."""
    known = queries.dtype in (torch.float32, torch.bfloat16, torch.float16) and pool.dtype == queries.dtype
    fits = queries.shape[-1] <= MAX_HEAD_DIM and pool.is_contiguous()
    return known and fits and torch.cuda.get_device_capability(queries.device) >= (8, 0)


def attend(
    queries: Tensor,
    pool: Tensor,
    rows: PagedRows,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """As engine.kernels.paged_attention.attend."""
    count, heads, head_dim = queries.shape
    if 0 in (count, rows.tables.numel(), rows.max_rows, rows.max_keys):
        return queries.new_zeros(count, heads * head_dim)
    rule = (scale, window or 0, softcap or 0.0)
    few, parts, many = rows.split_rows, count_parts(rows), rows.max_rows > SPLIT_ROWS
    split = few > 0 and parts > 1
    whole = rows.covered or (split and not many)  # then each row is written
    out = (queries.new_empty if whole else queries.new_zeros)(count, heads, head_dim)
    if split:
        slots = rows.lengths.shape[0] * few
        sums = queries.new_empty(slots, heads, parts, head_dim, dtype=torch.float32)
        # Each has memory of its own, whose address is a multiple of 16: half of one would be compiled for anew.
        tops, totals = (queries.new_empty(slots, heads, parts, dtype=torch.float32) for _ in range(2))
        _attend(queries, pool, rows, LaunchShare(0, few, parts), rule, (sums, tops, totals), None)
        _join(sums, tops, totals, rows, pool.shape[1], sinks, out)
    elif few:
        _attend(queries, pool, rows, LaunchShare(0, few, 1), rule, (out, None, None), sinks)
    if many:
        _attend(queries, pool, rows, LaunchShare(few + 1, rows.max_rows, 1), rule, (out, None, None), sinks)
    return out.flatten(1)


def _attend(
    queries: Tensor,
    pool: Tensor,
    rows: PagedRows,
    share: LaunchShare,
    rule: tuple[float, int, float],
    results: tuple[Tensor, Tensor | None, Tensor | None],
    sinks: Tensor | None,
) -> None:
    """rule: scale, window and soft cap, 0 for none. results: as the kernel's out, tops and totals."""
    scale, window, softcap = rule
    (_, heads, head_dim), (blocks, block_size, both, _) = queries.shape, pool.shape
    kv_heads = both // 2
    group, width = heads // kv_heads, _width(head_dim)
    tile = choose_tile(share.most * group, width, queries.dtype.itemsize, has_wgmma(queries.device))
    grid = (rows.lengths.shape[0] * share.parts, triton.cdiv(share.most * group, tile.rows), kv_heads)
    if queries.stride()[1:] != (head_dim, 1):
        queries = queries.contiguous()
    memory = (queries, pool, sinks, *results, queries.stride(0))
    visible = (rows.positions, rows.last_visible, rows.paths, rows.bases)
    numbers = (queries.shape[0], blocks, rows.tables.shape[1], rows.tables.stride(0), share.parts)
    paged_kernel.attend_keys[grid](
        *memory,
        rows.tables,
        rows.first_rows,
        rows.lengths,
        *visible,
        *numbers,
        share.fewest,
        share.most,
        scale if softcap else scale * paged_kernel.LOG2_E.value,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        WIDTH=width,
        BLOCK_SIZE=block_size,
        ROWS=tile.rows,
        KEYS=tile.keys,
        WINDOW=window,
        SOFTCAP=softcap,
        EARLY=starts_early(queries.device),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **early_options(queries.device),
    )


def _join(
    sums: Tensor, tops: Tensor, totals: Tensor, rows: PagedRows, block_size: int, sinks: Tensor | None, out: Tensor
) -> None:
    """Join the parts [S · most, heads, parts …] of each row and head into out [N, heads, head_dim]."""
    slots, _, parts, head_dim = sums.shape
    sequences = rows.lengths.shape[0]
    numbers = (sequences, rows.tables.shape[1] * block_size, parts, slots // sequences)
    paged_kernel.join_parts[out.shape[:2]](
        sums,
        tops,
        totals,
        sinks,
        out,
        rows.owners,
        rows.first_rows,
        rows.lengths,
        *numbers,
        HEAD_DIM=head_dim,
        WIDTH=_width(head_dim),
        ROOM=triton.next_power_of_2(MAX_PARTS),
        EARLY=starts_early(out.device),
        num_warps=1,
        **early_options(out.device),
    )


def _width(head_dim: int) -> int:
    """Numbers of a head in a tile: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(head_dim))
