"""Attention of packed, ragged rows over the blocks of a paged cache, as one operation: foretoken::paged_attention.

It has two implementations that agree within rounding. `reference` gathers the blocks, masks, and computes in fp32, or
in fp64 for fp64 inputs. It runs on every device. On CUDA the Triton kernels of paged_launch.py run instead, where
triton can run them and has a kernel for the case. Both have static shapes: sizes depend on the shapes of the inputs and
on the host's numbers, never on what the tensors hold, so that a captured graph may contain them and nothing waits for
the device.

torch.nn.attention.varlen.varlen_attn is not used. Its block tables take pages of 256 places only. With split keys and
more than one sequence it returned wrong rows (pytorch/pytorch#194167). It knows no trees, soft caps or sinks.
"""

from typing import Any

import torch
from torch import Tensor

from engine.kernels.operations import operation
from engine.kernels.paged_rows import PagedRows, ScoreRule
from engine.kernels.triton_modules import triton_module

REFERENCE_SCORES = 1 << 24  # scores of all heads and sequences that the reference holds at once


def attend(queries: Tensor, pool: Tensor, rows: PagedRows, scoring: ScoreRule) -> Tensor:
    """queries [N, heads, head_dim] → [N, heads·head_dim], over the keys and values that the pass has stored already.

    pool [blocks, block_size, 2·kv_heads, head_dim]: per place the keys of all kv heads, then their values. Queries and
    keys are rotated, and of one type.
    """
    scale = queries.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    return paged_attention(
        queries,
        pool,
        rows.tables,
        rows.first_rows,
        rows.lengths,
        rows.owners,
        rows.positions,
        rows.last_visible,
        rows.paths,
        rows.bases,
        rows.max_rows,
        rows.split_rows,
        rows.max_keys,
        rows.covered,
        scale,
        scoring.window,
        scoring.softcap,
        scoring.sinks,
    )


def reference(
    queries: Tensor,
    pool: Tensor,
    rows: PagedRows,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """As `attend`, from torch's operations."""
    heads, head_dim = queries.shape[1:]
    if 0 in (queries.shape[0], rows.tables.numel(), rows.max_rows, rows.max_keys):
        return queries.new_zeros(queries.shape[0], heads * head_dim)
    dtype = torch.float32 if queries.dtype.itemsize == 2 else queries.dtype
    present, keys, values = _gather(pool, rows, dtype)
    if sinks is not None:
        sinks = sinks.to(dtype).view(1, keys.shape[1], 1, -1, 1)  # [1, kv_heads, 1, group, 1]
    step = max(1, REFERENCE_SCORES // (heads * present.numel()))
    parts = []
    for first in range(0, rows.max_rows, step):
        numbers = torch.arange(first, min(first + step, rows.max_rows), device=pool.device)
        index = rows.first_rows[:-1, None] + numbers  # [S, rows of the part]: packed row
        seen = _seen(rows, index, present, window)
        chosen = queries[index.clamp(max=queries.shape[0] - 1)].to(dtype)
        parts.append(_weigh(chosen, keys, values, seen, scale, softcap, sinks))
    return _packed(torch.cat(parts, 1), rows).to(queries.dtype)


def _gather(pool: Tensor, rows: PagedRows, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(which places are keys of their sequence [S, places], keys and values [S, kv_heads, places, head_dim])."""
    blocks, size, both = pool.shape[:3]
    tables = rows.tables[:, : -(-rows.max_keys // size)]
    known = (tables >= 0) & (tables < blocks)
    places = torch.arange(tables.shape[1] * size, device=pool.device)
    present = known[:, :, None].expand(-1, -1, size).flatten(1) & (places < rows.lengths[:, None])
    gathered = pool[torch.where(known, tables, 0).long()].flatten(1, 2).to(dtype)
    gathered = gathered.masked_fill(~present[:, :, None, None], 0).transpose(1, 2)
    return present, gathered[:, : both // 2], gathered[:, both // 2 :]


def _seen(rows: PagedRows, index: Tensor, present: Tensor, window: int | None) -> Tensor:
    """Which places each packed row sees: index [S, rows], present [S, places] → [S, rows, places]."""
    places = torch.arange(present.shape[1], device=present.device)
    real = index < rows.first_rows[1:, None]
    index = index.clamp(max=rows.positions.shape[0] - 1)
    seen = places <= rows.last_visible[index][..., None]
    if window is not None:
        seen &= places > rows.positions[index][..., None] - window
    if rows.paths is not None and rows.bases is not None:
        bit = places - rows.bases[:, None]  # [S, places]
        on_path = (rows.paths[index][..., None] >> bit.clamp(0, 62)[:, None]) & 1
        seen |= on_path.bool() & ((bit >= 0) & (bit < 63))[:, None]
    return seen & present[:, None] & real[..., None]


def _weigh(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """queries [S, rows, heads, head_dim], keys and values [S, kv_heads, places, head_dim] → as queries."""
    sequences, count, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.view(sequences, count, kv_heads, heads // kv_heads, head_dim).transpose(1, 2)
    scores = grouped.flatten(2, 3) @ keys.transpose(2, 3) * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.view(*grouped.shape[:4], -1).masked_fill(~seen[:, None, :, None], -torch.inf)
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    top = top.masked_fill(top == -torch.inf, 0)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks - top).exp()
    out = (weights.flatten(2, 3) @ values).view(grouped.shape) / total.masked_fill(total == 0, 1)
    return out.transpose(1, 2).reshape(queries.shape)


def _packed(padded: Tensor, rows: PagedRows) -> Tensor:
    """padded [S, max_rows, heads, head_dim] → [N, heads·head_dim], with zeros for rows that are in no sequence."""
    sequences = padded.shape[0]
    owners = rows.owners.clamp(0, sequences - 1)
    index = torch.arange(owners.shape[0], device=owners.device)
    first = rows.first_rows[owners]
    real = (rows.owners == owners) & (index >= first) & (index < rows.first_rows[owners + 1])
    chosen = padded[owners, (index - first).clamp(0, padded.shape[1] - 1)]
    return chosen.flatten(1).masked_fill(~real[:, None], 0)


def _shapes(queries: Tensor, *others: object) -> Tensor:
    return queries.new_empty(queries.shape[0], queries.shape[1] * queries.shape[2])


@operation(shapes=_shapes)
def paged_attention(
    queries: Tensor,
    pool: Tensor,
    tables: Tensor,
    first_rows: Tensor,
    lengths: Tensor,
    owners: Tensor,
    positions: Tensor,
    last_visible: Tensor,
    paths: Tensor | None,
    bases: Tensor | None,
    max_rows: int,
    split_rows: int,
    max_keys: int,
    covered: bool,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """As `attend`, with the fields of PagedRows and ScoreRule one by one."""
    visible = (positions, last_visible, paths, bases)
    rows = PagedRows(tables, first_rows, lengths, owners, *visible, max_rows, split_rows, max_keys, covered)
    kernels: Any = triton_module("engine.kernels.paged_launch") if queries.is_cuda else None
    run = reference if kernels is None or not kernels.supports(queries, pool) else kernels.attend
    return run(queries, pool, rows, scale, window, softcap, sinks)
