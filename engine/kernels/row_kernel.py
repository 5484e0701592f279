"""A layer's work between its products as Triton kernels, which treat each row by itself."""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from engine.kernels.early_start import begin, early_options, starts_early

TILE = 1024  # numbers that a program of the gate takes of a row
PAIRS = 256  # that a program of the rotation takes of a row
NUMBERS_PER_WARP = 256  # of a row that one program takes whole: 16 bytes for each thread
MOST_WARPS = 16


def normalise(x: Tensor, weight: Tensor, eps: float, offset: float, added: Tensor | None = None) -> Tensor:
    """As engine.kernels.row_work.normalise()."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x[:, None], added, weight, out, eps, offset)
    return out


def add_parts_(x: Tensor, parts: Tensor) -> None:
    """As engine.kernels.row_work.add_parts_()."""
    _launch_norm(x[:, None], parts, None, None, 0.0, 0.0)


def normalise_heads_(x: Tensor, weight: Tensor, eps: float, offset: float) -> None:
    """As engine.kernels.row_work.normalise_heads_()."""
    _launch_norm(x, None, weight, None, eps, offset)


def _launch_norm(
    x: Tensor, added: Tensor | None, weight: Tensor | None, out: Tensor | None, eps: float, offset: float
) -> None:
    """x [N, heads, size]. weight: None: x is not normalised. out: None: x."""
    rows, heads, size = x.shape
    if x.numel():
        width = triton.next_power_of_2(size)
        parts = 0 if added is None else added.numel() // x.numel()
        weight_stride = size if weight is not None and weight.dim() == 2 else 0
        norm_kernel[(rows * heads,)](
            x, added, weight, out, parts, heads, x.stride(0), x.stride(1), weight_stride, eps, offset, size, width,
            starts_early(x.device), num_warps=max(1, min(MOST_WARPS, width // NUMBERS_PER_WARP)),
            **early_options(x.device),
        )  # fmt: skip


def rotate_and_store(queries: Tensor, kv: Tensor, factors: Tensor, stored: Tensor, rows: Tensor) -> None:
    """As engine.kernels.row_work.rotate_and_store()."""
    count, heads, size = queries.shape
    own, pairs = heads * size // 2, factors.shape[1]
    if count:
        rotate_kernel[(count, triton.cdiv(pairs, PAIRS))](
            queries, kv, torch.view_as_real(factors), stored, rows, queries.stride(0), kv.stride(0), own, pairs, PAIRS,
            starts_early(queries.device), **early_options(queries.device),
        )  # fmt: skip


def silu_gate(both: Tensor) -> Tensor:
    """As engine.kernels.row_work.silu_gate()."""
    size = both.shape[1] // 2
    out = both.new_empty(both.shape[0], size)
    if out.numel():
        gate_kernel[(both.shape[0], triton.cdiv(size, TILE))](both, out, size, TILE)
    return out


@triton.jit(do_not_specialize=["parts"])
def norm_kernel(
    x: tl.tensor,
    added: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    heads: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    weight_stride: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One head of a row."""
    begin(EARLY)
    place, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    row, head, inside = place // heads, place % heads, column < SIZE
    own = x + row * row_stride + head * head_stride + column
    value = tl.load(own, mask=inside, other=0.0)
    if added is not None:
        more = tl.zeros([WIDTH], tl.float32)
        for part in range(parts):
            source = added + (part * tl.num_programs(0) + place) * SIZE
            more += tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) + more).to(x.dtype.element_ty)
        tl.store(own, value, mask=inside)
    if weight is not None:
        wide = value.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(wide * wide) / SIZE + eps)
        factor = offset + tl.load(weight + head * weight_stride + column, mask=inside, other=0.0).to(tl.float32)
        result = (wide * scale * factor).to(x.dtype.element_ty)
        tl.store(own if out is None else out + place * SIZE + column, result, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def rotate_kernel(
    queries: tl.tensor,
    kv: tl.tensor,
    factors: tl.tensor,
    stored: tl.tensor,
    rows: tl.tensor,
    query_stride: tl.tensor,
    kv_stride: tl.tensor,
    own: tl.tensor,
    pairs: tl.tensor,
    PAIRS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """PAIRS pairs of a row, the first `own` of which are of queries."""
    begin(EARLY)
    row, pair = tl.program_id(0).to(tl.int64), tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    inside, is_query = pair < pairs, pair < own
    query = queries + row * query_stride + 2 * pair
    source = kv + row * kv_stride + 2 * (pair - own)
    target = stored + tl.load(rows + row) * (2 * (pairs - own)) + 2 * (pair - own)
    factor = factors + 2 * (row * pairs + pair)
    a = _either(query, source, inside, is_query)
    b = _either(query + 1, source + 1, inside, is_query)
    cosine = tl.load(factor, mask=inside, other=0.0)
    sine = tl.load(factor + 1, mask=inside, other=0.0)
    first = (a * cosine - b * sine).to(stored.dtype.element_ty)
    second = (a * sine + b * cosine).to(stored.dtype.element_ty)
    tl.store(query, first, mask=is_query)
    tl.store(query + 1, second, mask=is_query)
    tl.store(target, first, mask=inside & ~is_query)
    tl.store(target + 1, second, mask=inside & ~is_query)


@triton.jit
def _either(query: tl.tensor, source: tl.tensor, inside: tl.tensor, is_query: tl.tensor) -> tl.tensor:
    own = tl.load(query, mask=is_query, other=0.0)
    return (own + tl.load(source, mask=inside & ~is_query, other=0.0)).to(tl.float32)


@triton.jit
def gate_kernel(both: tl.tensor, out: tl.tensor, size: tl.tensor, TILE: tl.constexpr) -> None:
    """TILE numbers of a row."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside, first = column < size, both + row * 2 * size + column
    value = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(first + size, mask=inside, other=0.0).to(tl.float32)
    gated = value / (1.0 + tl.exp(-value)) * up
    tl.store(out + row * size + column, gated.to(out.dtype.element_ty), mask=inside)
