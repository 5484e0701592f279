"""Products of few rows as Triton kernels, with what a layer does to the rows before and after them. Needs triton.

A decoding pass reads each weight once and computes little with it. So what the rows need beside a product costs nothing
inside of it: the norm of its input, the rotation, the gate, the sum with the residual.

- `sum_kernel` computes one row, by fused multiply-adds. A program has few channels, so there are programs enough.
- `dot_kernel` computes up to most_rows() rows, by tensor cores. Its left operand are the weights, so that a tile of up
  to eight rows has eight columns. The input channels are split, where there are few output channels; the norm behind
  the product adds the parts up.

On an H100 a layer of a 7B model takes one row 161 µs and six rows some 173. Its bytes take 157; cuBLAS's products and
the kernels between them took 186 and 188 (docs/log.md).

Both may start early (early_start.py). `sum_kernel` reads its first weights before it waits: no kernel writes them.
"""

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]

from engine.kernels.early_start import early_options, starts_early

PROGRAMS = 224  # of a product whose input channels are split: some two for each processor of an H100
MOST_PARTS = 8
FEWEST_TILES = 3  # of input channels in a part

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

Rotation = tuple[Tensor, Tensor, Tensor]  # factors, stored, places: see row_products.project_and_store()


@dataclass(frozen=True, slots=True)
class RowProductTile:
    """What one program computes at once, and with what."""

    channels: int  # of the output; a power of two, at least 2
    depth: int  # input channels; a power of two
    warps: int
    stages: int = 1  # of the compiler's pipeline of loads


def choose_sum_tile(channels: int, inner: int, gated: bool) -> RowProductTile:
    """For one row. channels: of the output. inner: input channels.

    Those that took the least time on an H100. A thread reads 16 bytes at a time of one or two channels.
    """
    if gated:
        return RowProductTile(4, 256, 2)
    depth = 512 if 1024 < inner < 3072 else 1024
    return RowProductTile(2 if channels <= 1536 else 4, depth, depth // 256)


def choose_dot_tile(rows: int, inner: int, gated: bool) -> RowProductTile:
    """rows: a power of two from 8 on. Those that took the least time on an H100, for 8 and for 64 rows.

    A program reads its input channels of all rows. So it has more output channels where there are more rows.
    """
    if rows > 16:
        return RowProductTile(64, 128, 4, 4 if gated else 6)
    if gated and rows == 8 and inner % 256 == 0:
        return RowProductTile(32, 256, 4, 3)
    return RowProductTile(32, 128, 4, 4)


def count_parts(channels: int, inner: int, tile: RowProductTile) -> int:
    """Into how many parts the input channels of a product are split."""
    wanted = triton.next_power_of_2(triton.cdiv(PROGRAMS, triton.cdiv(channels, tile.channels)))
    tiles = triton.cdiv(inner, tile.depth)
    return max(1, min(MOST_PARTS, wanted, tiles // FEWEST_TILES))


def project_and_store(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    factors: Tensor,
    stored: Tensor,
    places: Tensor,
    width: int,
    gain: Tensor | None,
    eps: float,
    offset: float,
) -> Tensor:
    """As engine.kernels.row_products.project_and_store()."""
    out = x.new_empty(x.shape[0], width)
    _multiply(x, weight, bias, out, norm=(gain, eps, offset), rotation=(factors, stored, places))
    return out


def gated_product(x: Tensor, weight: Tensor, gain: Tensor | None, eps: float, offset: float) -> Tensor:
    """As engine.kernels.row_products.gated_product()."""
    out = x.new_empty(x.shape[0], len(weight) // 2)
    _multiply(x, weight, None, out, norm=(gain, eps, offset), gated=True)
    return out


def normalised_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, gain: Tensor | None, eps: float, offset: float
) -> Tensor:
    """As engine.kernels.row_products.normalised_product()."""
    out = x.new_empty(x.shape[0], len(weight))
    _multiply(x, weight, bias, out, norm=(gain, eps, offset))
    return out


def add_product_(x: Tensor, inputs: Tensor, weight: Tensor) -> None:
    """As engine.kernels.row_products.add_product_()."""
    _multiply(inputs, weight, None, x, adds=True)


def product_parts(x: Tensor, weight: Tensor) -> Tensor:
    """As engine.kernels.row_products.product_parts()."""
    (rows, inner), channels = x.shape, len(weight)
    parts = count_parts(channels, inner, choose_dot_tile(_height(rows), inner, False))
    out = x.new_empty(parts, rows, channels, dtype=torch.float32)
    _dot(x, weight, None, out, parts=parts)
    return out


def _multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    norm: tuple[Tensor | None, float, float] = (None, 0.0, 0.0),
    rotation: Rotation | None = None,
    gated: bool = False,
    adds: bool = False,
) -> None:
    """Write a product of x [N, inner] to out [N, width], or add it. rotation: out has the first `width` channels, and
    the others are stored."""
    if x.shape[0] != 1:
        assert norm[0] is None
        assert not adds
        _dot(x, weight, bias, out, rotation=rotation, gated=gated)
        return
    channels, inner = len(weight) // (2 if gated else 1), x.shape[1]
    tile, early = choose_sum_tile(channels, inner, gated), starts_early(x.device)
    gain, eps, offset = norm
    sum_kernel[triton.cdiv(channels, tile.channels),](
        x, gain, weight, bias, out, *_turning(rotation), inner, channels, out.shape[1], eps, offset,
        GATED=gated, ADDS=adds, CHANNELS=tile.channels, DEPTH=tile.depth, EARLY=early,
        num_warps=tile.warps, **early_options(x.device),
    )  # fmt: skip


def _dot(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    rotation: Rotation | None = None,
    gated: bool = False,
    parts: int = 1,
) -> None:
    rows, inner = x.shape
    if not rows:
        return
    channels, height = len(weight) // (2 if gated else 1), _height(rows)
    tile = choose_dot_tile(height, inner, gated)
    dot_kernel[triton.cdiv(channels, tile.channels), parts](
        x, weight, bias, out, *_turning(rotation), rows, inner, channels, out.shape[-1], parts,
        GATED=gated, EVEN=inner % tile.depth == 0, ROWS=height, CHANNELS=tile.channels, DEPTH=tile.depth,
        EARLY=starts_early(x.device), num_warps=tile.warps, num_stages=tile.stages, **early_options(x.device),
    )  # fmt: skip


def _height(rows: int) -> int:
    """Return the rows of the tile that computes so many rows."""
    return max(8, int(triton.next_power_of_2(rows)))


def _turning(rotation: Rotation | None) -> tuple[Tensor | None, ...]:
    if rotation is None:
        return None, None, None
    factors, stored, places = rotation
    return torch.view_as_real(factors), stored, places


@triton.jit(do_not_specialize_on_alignment=["places"])
def sum_kernel(
    x: tl.tensor,
    gain: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    factors: tl.tensor,
    stored: tl.tensor,
    places: tl.tensor,
    inner: tl.tensor,
    channels: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    GATED: tl.constexpr,
    ADDS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """CHANNELS output channels of one row. width: channels of `out`. The next weights are loaded before the last ones
    are used."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < channels
    own = weight + channel.to(tl.int64) * inner
    other = own + channels.to(tl.int64) * inner  # what the gate lets through
    numbers = _weights(own, real, 0, inner, DEPTH)
    more = _weights(other, real, 0, inner, DEPTH) if GATED else numbers
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    sums, ups = tl.zeros([CHANNELS, DEPTH], tl.float32), tl.zeros([CHANNELS, DEPTH], tl.float32)
    squares = tl.zeros([DEPTH], tl.float32)
    for first in range(0, inner, DEPTH):
        column = first + tl.arange(0, DEPTH)
        row = tl.load(x + column, mask=column < inner, other=0.0).to(tl.float32)
        if gain is not None:
            squares += row * row
            row *= offset + tl.load(gain + column, mask=column < inner, other=0.0).to(tl.float32)
        following = _weights(own, real, first + DEPTH, inner, DEPTH)
        sums += numbers.to(tl.float32) * row[None, :]
        numbers = following
        if GATED:
            following = _weights(other, real, first + DEPTH, inner, DEPTH)
            ups += more.to(tl.float32) * row[None, :]
            more = following
    y, up = tl.sum(sums, 1), tl.sum(ups, 1)
    if gain is not None:
        scale = 1.0 / tl.sqrt(tl.sum(squares) / inner + eps)
        y, up = y * scale, up * scale
    only = tl.arange(0, 1)
    kept = (only == 0)[:, None] & real[None, :]
    to = out + channel[None, :]
    y = _finish(y[None, :], up[None, :], bias, channel, real, GATED)
    if ADDS:
        y += tl.load(to, mask=kept, other=0.0).to(tl.float32)
    if stored is not None:
        y, kept = _turn_and_store(y, kept, only, channel, channels, width, factors, stored, places, 1, CHANNELS)
    tl.store(to, y.to(out.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["row_count", "parts"], do_not_specialize_on_alignment=["places"])
def dot_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    factors: tl.tensor,
    stored: tl.tensor,
    places: tl.tensor,
    row_count: tl.tensor,
    inner: tl.tensor,
    channels: tl.tensor,
    width: tl.tensor,
    parts: tl.tensor,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (tile of output channels, part of the input channels). out [parts, N, width]. EVEN: the tiles of input
    channels are whole."""
    if EARLY:
        gdc_wait()
    channel, row = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, ROWS)
    live, real = row < row_count, channel < channels
    own, rows = weight + channel.to(tl.int64) * inner, x + row * inner
    other = own + channels.to(tl.int64) * inner  # what the gate lets through
    sums, ups = tl.zeros([CHANNELS, ROWS], tl.float32), tl.zeros([CHANNELS, ROWS], tl.float32)
    tiles = tl.cdiv(inner, DEPTH)
    share = tl.cdiv(tiles, parts)
    begin = tl.program_id(1) * share
    for tile in range(begin, tl.minimum(begin + share, tiles)):
        column = tile * DEPTH + tl.arange(0, DEPTH)
        numbers = _tile(own, real, column, inner, EVEN)
        inputs = tl.trans(_tile(rows, live, column, inner, EVEN))
        sums = tl.dot(numbers, inputs, sums)
        if GATED:
            ups = tl.dot(_tile(other, real, column, inner, EVEN), inputs, ups)
    if EARLY:
        gdc_launch_dependents()
    kept = live[:, None] & real[None, :]
    y = _finish(tl.trans(sums), tl.trans(ups), bias, channel, real, GATED)
    if stored is not None:
        y, kept = _turn_and_store(y, kept, row, channel, channels, width, factors, stored, places, ROWS, CHANNELS)
    to = out + (tl.program_id(1) * row_count + row).to(tl.int64)[:, None] * width + channel[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _weights(own: tl.tensor, real: tl.tensor, first: tl.tensor, inner: tl.tensor, DEPTH: tl.constexpr) -> tl.tensor:
    """[channels, DEPTH]"""
    column = first + tl.arange(0, DEPTH)
    return tl.load(own[:, None] + column[None, :], mask=real[:, None] & (column < inner)[None, :], other=0.0)


@triton.jit
def _tile(own: tl.tensor, real: tl.tensor, column: tl.tensor, inner: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    """[rows, columns], as an operand of a matrix product: the interpreter would multiply bit patterns of bf16."""
    kept = real[:, None]
    if not EVEN:
        kept &= (column < inner)[None, :]
    numbers = tl.load(own[:, None] + column[None, :], mask=kept, other=0.0)
    if _INTERPRETED:
        numbers = numbers.to(tl.float32)
    return numbers


@triton.jit
def _finish(
    y: tl.tensor, up: tl.tensor, bias: tl.tensor, channel: tl.tensor, real: tl.tensor, GATED: tl.constexpr
) -> tl.tensor:
    """y [rows, channels] with its bias, or what it lets through as a gate."""
    if bias is not None:
        y += tl.load(bias + channel, mask=real, other=0.0)[None, :].to(tl.float32)
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * up
    return y


@triton.jit
def _turn_and_store(
    y: tl.tensor,
    kept: tl.tensor,
    row: tl.tensor,
    channel: tl.tensor,
    channels: tl.tensor,
    width: tl.tensor,
    factors: tl.tensor,
    stored: tl.tensor,
    places: tl.tensor,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> tl.tensor:
    """(y [ROWS, CHANNELS], whose pairs of neighbours are turned; which of it is left to be stored). Stores the channels
    from `width` on. factors: cosine and sine of each pair of each row."""
    numbers = tl.load(factors + row[:, None] * channels + channel[None, :], mask=kept, other=0.0)
    cosine, sine = tl.split(tl.reshape(numbers, [ROWS, CHANNELS // 2, 2]))
    a, b = tl.split(tl.reshape(y, [ROWS, CHANNELS // 2, 2]))
    y = tl.reshape(tl.join(a * cosine - b * sine, a * sine + b * cosine), [ROWS, CHANNELS])
    is_query = channel < width
    place = tl.load(places + row, mask=tl.max(kept.to(tl.int32), 1) > 0, other=0)
    to = stored + (place * (channels - width) - width)[:, None] + channel[None, :]
    tl.store(to, y.to(stored.dtype.element_ty), mask=kept & ~is_query[None, :])
    return y, kept & is_query[None, :]
