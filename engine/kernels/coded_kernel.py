"""The Triton kernels of products by coded weights. Needs triton.

A program of `multiply_kernel` computes a tile of rows and output channels over one part of the input channels;
`join_kernel` adds the parts up. Codes are exact numbers of the activations' type, so that a tile's products are exact
and its sums are fp32. A group's step multiplies its sum, not its weights.

A row's sum is made in an order that follows from the weight's shape and from x's type alone, as long as the pass has at
most FEW_ROWS rows: with the same parts, the same tiles of input channels and the same tensor-core instruction. So a row
of a verification has the bits that it has alone. Larger passes have programs enough and are computed with larger tiles.
"""

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from engine.kernels.coded_product import FP8, INT4_PAIRS, INT4_ZERO, PAIRED

FEW_ROWS = 64
PROGRAMS = 256  # programs of a pass with few rows: about two for each processor of a large GPU
MOST_PARTS = 8
JOINED = 256  # channels that a program joins
MANY_CHANNELS = 2048  # from which on wide tiles leave programs enough

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_PAIRED, _ZERO = tl.constexpr(PAIRED), tl.constexpr(INT4_ZERO)
_KIND_INT8, _KIND_INT4, _KIND_FP8 = (tl.constexpr(n) for n in range(3))
_FP8_UNIT = tl.constexpr(256.0)  # e4m3's bits, moved to fp16's places, stand for a 256th of the number


@dataclass(frozen=True, slots=True)
class ProductTile:
    """What one program computes at once, and with what."""

    rows: int  # a power of two, at least 16
    channels: int  # of the output; a power of two, at least 16
    depth: int  # input channels; a power of two, at least 32
    warps: int
    stages: int  # of the compiler's pipeline of loads


def choose_tile(rows: int, channels: int, group: int, x: torch.dtype) -> ProductTile:
    """channels: of the output. group: columns that share a step; 0: all.

    Registers must not be spilled, and shared memory must fit in the 99 KB of compute capabilities 8.6 and 8.9
    (tests/engine/kernels/test_coded_compiled.py). Within these bounds the shallow tile of many channels and the tile of
    many rows took the least time of those tried on an H100, for one row and for 512 (docs/log.md). The others are not
    chosen by measured times. Tiles of at most 32 rows get no wgmma.
    """
    few = rows <= FEW_ROWS
    depth = 32 if x.itemsize == 4 else 128 if few else 64  # fp32 is computed without tensor cores
    if group:
        depth = min(depth, max(32, triton.next_power_of_2(group)))
    if x.itemsize == 4:
        return ProductTile(16, 32, depth, 4, 2)
    if not few:
        return ProductTile(64, 128, depth, 4, 3) if group or rows <= 128 else ProductTile(128, 128, depth, 8, 3)
    shallow = depth < 128  # such a tile has few bytes, so it takes more of them to keep memory busy
    tall = 16 if rows <= 16 else 32
    if shallow and channels >= MANY_CHANNELS:
        return ProductTile(tall, 128, depth, 8, 4)
    return ProductTile(tall, 64 if shallow else 32, depth, 4, 6 if shallow else 4)


def count_parts(rows: int, channels: int, inner: int, tile: ProductTile) -> int:
    """Into how many parts a product's input channels are split. The same for all numbers of few rows."""
    if rows > FEW_ROWS:
        return 1
    wanted = PROGRAMS // triton.cdiv(channels, tile.channels)
    return max(1, min(MOST_PARTS, wanted, triton.cdiv(inner, 4 * tile.depth)))


def supports(x: Tensor) -> bool:
    """Whether the kernels can compute products of x, on its device."""
    known = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return known and torch.cuda.get_device_capability(x.device) >= (8, 0)


def coded_product(x: Tensor, codes: Tensor, steps: Tensor, offsets: Tensor | None, bias: Tensor | None) -> Tensor:
    """As engine.kernels.coded_product.coded_product."""
    rows, channels = x.shape[0], codes.shape[0]
    if not rows:
        return x.new_empty(0, channels)
    kind = _KIND_INT4 if codes.dtype is INT4_PAIRS else _KIND_FP8 if codes.dtype is FP8 else _KIND_INT8
    inner = codes.shape[1] * (2 if kind is _KIND_INT4 else 1)
    group = 0 if steps.shape[0] == 1 and offsets is None else inner // steps.shape[0]
    tile = choose_tile(rows, channels, group, x.dtype)
    parts = count_parts(rows, channels, inner, tile)
    y = x.new_empty(rows, channels)
    sums = y if parts == 1 else x.new_empty(parts, rows, channels, dtype=torch.float32)
    grid = triton.cdiv(rows, tile.rows), triton.cdiv(channels, tile.channels), parts
    multiply_kernel[grid](
        _aligned(x),
        codes.view(torch.uint8) if kind is _KIND_FP8 else codes,
        steps,
        offsets,
        bias if parts == 1 else None,
        sums,
        rows,
        channels,
        x.shape[1],
        inner,
        parts,
        KIND=kind.value,
        GROUP=group,
        ROWS=tile.rows,
        CHANNELS=tile.channels,
        DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if parts > 1:
        join_kernel[rows, triton.cdiv(channels, JOINED)](
            sums, bias, y, rows, channels, parts, CHANNELS=JOINED, num_warps=2
        )
    return y


def _aligned(x: Tensor) -> Tensor:
    """x in memory whose address is a multiple of 16 bytes, as almost every x is: for others Triton would compile the
    kernel again."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@triton.jit(do_not_specialize=["row_count", "parts"])
def multiply_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    steps: tl.tensor,
    offsets: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    row_count: tl.tensor,
    channel_count: tl.tensor,
    width: tl.tensor,
    inner: tl.tensor,
    parts: tl.tensor,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """Program (tile of rows, tile of channels, part): the tiles of rows that read the same codes run side by side.

    GROUP: columns that share a step; 0: all. out: [rows, channels] for one part, else sums fp32 [parts, rows,
    channels].
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    live, real = row < row_count, channel < channel_count
    x_rows, code_rows = x + row.to(tl.int64) * width, codes + channel.to(tl.int64) * _bytes(inner, KIND)
    per_group: tl.constexpr = (GROUP + DEPTH - 1) // DEPTH if GROUP else 1
    tiles = inner // GROUP * per_group if GROUP else tl.cdiv(inner, DEPTH)
    share = tl.cdiv(tiles, parts)
    begin = tl.program_id(2) * share
    sums = tl.zeros([ROWS, CHANNELS], tl.float32)
    for tile in range(begin, tl.minimum(begin + share, tiles)):
        if GROUP:
            group = tile // per_group
            first, end = group * GROUP + tile % per_group * DEPTH, (group + 1) * GROUP
            none = tl.zeros([ROWS, CHANNELS], tl.float32)
            part, total = _multiply(x_rows, code_rows, live, real, first, end, width, none, KIND, DEPTH)
            at = group.to(tl.int64) * channel_count + channel
            sums = tl.fma(part, _spread(_step(steps, at, real, KIND), part), sums)
            if offsets is not None:
                offset = tl.load(offsets + at, mask=real, other=0.0).to(tl.float32)
                sums = tl.fma(tl.broadcast_to(total[:, None], part.shape), _spread(offset, part), sums)
        else:
            sums, total = _multiply(x_rows, code_rows, live, real, tile * DEPTH, inner, width, sums, KIND, DEPTH)
    if not GROUP:
        sums *= _step(steps, channel, real, KIND)[None, :]
    if bias is not None:
        sums += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)[None, :]
    to = (tl.program_id(2).to(tl.int64) * row_count + row) * channel_count
    tl.store(out + to[:, None] + channel[None, :], sums.to(out.dtype.element_ty), mask=live[:, None] & real[None, :])


@triton.jit(do_not_specialize=["row_count", "parts"])
def join_kernel(
    sums: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    row_count: tl.tensor,
    channel_count: tl.tensor,
    parts: tl.tensor,
    CHANNELS: tl.constexpr,
) -> None:
    """Program (row, tile of channels): add up its parts, one after the other."""
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < channel_count
    y = tl.zeros([CHANNELS], tl.float32)
    for part in range(parts):
        y += tl.load(sums + (part * row_count + row) * channel_count + channel, mask=real, other=0.0)
    if bias is not None:
        y += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * channel_count + channel, y.to(out.dtype.element_ty), mask=real)


@triton.jit
def _multiply(
    x_rows: tl.tensor,
    code_rows: tl.tensor,
    live: tl.tensor,
    real: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    width: tl.tensor,
    sums: tl.tensor,
    KIND: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tl.tensor:
    """(sums + x · codes over the columns from `first` on, at most DEPTH and before `end`; x's sums over them)."""
    if KIND == _KIND_INT4:
        place = tl.arange(0, DEPTH // 2)
        column = first + place // _PAIRED * (2 * _PAIRED) + place % _PAIRED  # of the lower bits
        pairs = _load_codes(code_rows, real, first // 2 + place, column < end)
        low, high = (pairs & 15).to(tl.int8) - _ZERO, (pairs >> 4).to(tl.int8) - _ZERO
        sums, total = _accumulate(x_rows, live, column, end, width, low, sums)
        sums, more = _accumulate(x_rows, live, column + _PAIRED, end, width, high, sums)
        return sums, total + more
    column = first + tl.arange(0, DEPTH)
    numbers = _load_codes(code_rows, real, column, column < end)
    if KIND == _KIND_FP8:
        bits = numbers.to(tl.uint16)
        numbers = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True)
    return _accumulate(x_rows, live, column, end, width, numbers, sums)


@triton.jit
def _accumulate(
    x_rows: tl.tensor,
    live: tl.tensor,
    column: tl.tensor,
    end: tl.tensor,
    width: tl.tensor,
    numbers: tl.tensor,
    sums: tl.tensor,
) -> tl.tensor:
    """(sums + x · numbers [columns, channels], x's sums): of columns that are before `end` and that x has."""
    kept = live[:, None] & (column < tl.minimum(end, width))[None, :]
    rows = tl.load(x_rows[:, None] + column[None, :], mask=kept, other=0.0)
    operands = _operand(rows), _operand(numbers.to(tl.float32).to(rows.dtype))
    return tl.dot(operands[0], operands[1], sums, input_precision="ieee"), tl.sum(rows.to(tl.float32), 1)


@triton.jit
def _operand(x: tl.tensor) -> tl.tensor:
    """Make x fit for a matrix product. The interpreter would multiply the bit patterns of bf16 numbers."""
    if _INTERPRETED:
        x = x.to(tl.float32)
    return x


@triton.jit
def _load_codes(code_rows: tl.tensor, real: tl.tensor, byte: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """[bytes, channels]"""
    return tl.load(code_rows[None, :] + byte[:, None], mask=inside[:, None] & real[None, :], other=0)


@triton.jit
def _step(steps: tl.tensor, at: tl.tensor, real: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    step = tl.load(steps + at, mask=real, other=0.0).to(tl.float32)
    if KIND == _KIND_FP8:
        step *= _FP8_UNIT
    return step


@triton.jit
def _spread(per_channel: tl.tensor, tile: tl.tensor) -> tl.tensor:
    return tl.broadcast_to(per_channel[None, :], tile.shape)


@triton.jit
def _bytes(inner: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    return inner // 2 if KIND == _KIND_INT4 else inner
