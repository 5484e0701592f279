"""Products with weights for a few rows on a CPU, compiled by Numba for the CPU that it runs on.

A few rows cost what reading the weights costs, if each weight is read once, in order, and as it is stored.
Libraries lay weights out for many rows, and read them for one at half of the memory's speed (docs/log.md).
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from engine.kernels.cpu_code import CHANNELS, HAS_PAIRS, LANES, compiled_exactly
from engine.kernels.cpu_integers import ACTIVATION, OFFSET, add_up
from engine.kernels.cpu_vectors import multiply_tile, store_row

LEAST_STEP = np.float32(1e-30)  # of a row of zeros, as in quantize.py
PER_LARGEST = np.float32(1 / 127)
MAGNITUDE = np.int32(0x7FFFFFFF)  # the bits of an fp32 number but for its sign


@compiled_exactly
def bounds(channels: int, part: int, parts: int) -> tuple[int, int]:
    """The first channel of a part and the first one behind it. Parts begin at whole tiles, so none computes channels of
    another."""
    tiles = channels // CHANNELS
    return tiles * part // parts * CHANNELS, channels if part + 1 == parts else tiles * (part + 1) // parts * CHANNELS


def as_multiplied(x: Any, weight: Any) -> Any:
    """x as `multiply_tile` takes it: rounded to bfloat16 beside such weights where the CPU multiplies these."""
    raise NotImplementedError("compiled code only")


@overload(as_multiplied, strict=False)
def _as_multiplied(x: Any, weight: Any) -> Any:
    if weight.dtype != types.uint16 or not HAS_PAIRS:
        return lambda x, weight: x

    def rounded(x: Any, weight: Any) -> Any:
        numbers = np.empty(x.shape, np.uint16)
        for row in range(x.shape[0]):
            store_row(x, row, 0, numbers, row)
        return numbers

    return rounded


@compiled_exactly
def multiply_some(x: Any, weight: Any, first: int, last: int, out: Any) -> None:
    """out [rows, channels] = x [rows, inner] · weightᵀ for the channels first … last − 1.

    weight [≥ CHANNELS, inner], with integers for numbers of 16 bits; x and out are fp32 then. All rows multiply some
    channels before the next ones are read. The last ones may be computed twice, with the same result.
    """
    channels, rows, x = weight.shape[0], x.shape[0], as_multiplied(x, weight)
    passes = (rows + LANES - 1) // LANES
    for begin in range(first, last, CHANNELS):
        for n in range(passes):
            row = rows * n // passes
            multiply_tile(x, row, rows * (n + 1) // passes - row, weight, min(begin, channels - CHANNELS), out)


@compiled_exactly
def multiply(x: Any, weight: Any, out: Any, part: int, parts: int) -> None:
    """As `multiply_some`: one part of the channels, which `parts` calls compute together."""
    first, last = bounds(weight.shape[0], part, parts)
    multiply_some(x, weight, first, last, out)


@compiled_exactly
def round_rows(x: Any, codes: Any, steps: Any) -> None:
    """x fp32 [rows, inner] ≈ (codes − OFFSET) · steps fp32 [rows], for codes of type ACTIVATION. The largest of a row
    becomes ±127.

    A row that is not finite gets a step that is not finite: its bits are compared as integers, so NaN is the largest.
    """
    bits, largest = x.view(np.int32), np.zeros(1, np.int32)
    for row in range(x.shape[0]):
        top = np.int32(0)
        for i in range(x.shape[1]):
            top = max(top, bits[row, i] & MAGNITUDE)
        largest[0] = top
        step = LEAST_STEP + largest.view(np.float32)[0] * PER_LARGEST
        steps[row] = step
        for i in range(x.shape[1]):
            codes[row, i] = ACTIVATION(np.int32(np.rint(x[row, i] / step)) + OFFSET)


@compiled_exactly
def multiply_some_codes(x: Any, weight: Any, bias: Any, first: int, last: int, sums: Any, out: Any) -> None:
    """out [rows, channels] = x · weightᵀ + bias for the channels first … last − 1.

    x: (codes [rows, inner], steps [rows]) of `round_rows`; weight: (codes int8 [≥ CHANNELS, inner], steps fp32
    [channels], what OFFSET adds to their sums, int32 [channels]); sums int32 [rows, channels]: room.
    """
    codes, row_steps = x
    integers, steps, offsets = weight
    channels, rows = integers.shape[0], codes.shape[0]
    passes = (rows + LANES - 1) // LANES
    for begin in range(first, last, CHANNELS):
        for n in range(passes):
            row = rows * n // passes
            add_up(codes, row, rows * (n + 1) // passes - row, integers, min(begin, channels - CHANNELS), sums)
    for row in range(rows):
        for channel in range(first, last):
            exact = np.float32(sums[row, channel] - offsets[channel])
            out[row, channel] = exact * steps[channel] * row_steps[row] + bias[channel]


@compiled_exactly
def multiply_codes(x: Any, weight: Any, bias: Any, sums: Any, out: Any, part: int, parts: int) -> None:
    """As `multiply_some_codes`: one part of the channels, which `parts` calls compute together."""
    first, last = bounds(weight[0].shape[0], part, parts)
    multiply_some_codes(x, weight, bias, first, last, sums, out)
