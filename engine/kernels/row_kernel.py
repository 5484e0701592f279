"""A layer's work between its products as Triton kernels, which treat each row by itself."""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

TILE = 1024  # numbers, or pairs, that a program takes of a row
NUMBERS_PER_WARP = 256  # of a row that one program takes whole: 16 bytes for each thread
MOST_WARPS = 16


def normalise(x: Tensor, weight: Tensor, eps: float, offset: float, added: Tensor | None = None) -> Tensor:
    """As engine.kernels.row_work.normalise()."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x[:, None], added, weight, out, eps, offset)
    return out


def normalise_heads_(x: Tensor, weight: Tensor, eps: float, offset: float) -> None:
    """As engine.kernels.row_work.normalise_heads_()."""
    _launch_norm(x, None, weight, None, eps, offset)


def _launch_norm(
    x: Tensor, added: Tensor | None, weight: Tensor, out: Tensor | None, eps: float, offset: float
) -> None:
    """x [N, heads, size]. out: None: x."""
    rows, heads, size = x.shape
    if x.numel():
        width = triton.next_power_of_2(size)
        norm_kernel[(rows * heads,)](
            x, added, weight, out, heads, x.stride(0), x.stride(1), size if weight.dim() == 2 else 0, eps, offset,
            size, width, num_warps=max(1, min(MOST_WARPS, width // NUMBERS_PER_WARP)),
        )  # fmt: skip


def rotate_(x: Tensor, factors: Tensor) -> None:
    """As engine.kernels.row_work.rotate_()."""
    pairs = factors.shape[1]
    if x.numel():
        rotate_kernel[(x.shape[0], triton.cdiv(pairs, TILE))](x, torch.view_as_real(factors), pairs, TILE)


def silu_gate(both: Tensor) -> Tensor:
    """As engine.kernels.row_work.silu_gate()."""
    size = both.shape[1] // 2
    out = both.new_empty(both.shape[0], size)
    if out.numel():
        gate_kernel[(both.shape[0], triton.cdiv(size, TILE))](both, out, size, TILE)
    return out


@triton.jit
def norm_kernel(
    x: tl.tensor,
    added: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    weight_stride: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """One head of a row."""
    place, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    row, head, inside = place // heads, place % heads, column < SIZE
    own = x + row * row_stride + head * head_stride + column
    value = tl.load(own, mask=inside, other=0.0)
    if added is not None:
        more = tl.load(added + place * SIZE + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(own, value, mask=inside)
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide) / SIZE + eps)
    factor = offset + tl.load(weight + head * weight_stride + column, mask=inside, other=0.0).to(tl.float32)
    result = (wide * scale * factor).to(x.dtype.element_ty)
    if out is None:
        tl.store(own, result, mask=inside)
    else:
        tl.store(out + place * SIZE + column, result, mask=inside)


@triton.jit
def rotate_kernel(x: tl.tensor, factors: tl.tensor, pairs: tl.tensor, TILE: tl.constexpr) -> None:
    """TILE pairs of a row."""
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    first, inside = 2 * (tl.program_id(0).to(tl.int64) * pairs + column), column < pairs
    a = tl.load(x + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + first + 1, mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(factors + first, mask=inside, other=0.0)
    sine = tl.load(factors + first + 1, mask=inside, other=0.0)
    tl.store(x + first, (a * cosine - b * sine).to(x.dtype.element_ty), mask=inside)
    tl.store(x + first + 1, (a * sine + b * cosine).to(x.dtype.element_ty), mask=inside)


@triton.jit
def gate_kernel(both: tl.tensor, out: tl.tensor, size: tl.tensor, TILE: tl.constexpr) -> None:
    """TILE numbers of a row."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside, first = column < size, both + row * 2 * size + column
    value = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(first + size, mask=inside, other=0.0).to(tl.float32)
    gated = value / (1.0 + tl.exp(-value)) * up
    tl.store(out + row * size + column, gated.to(out.dtype.element_ty), mask=inside)
