"""Products with weights on a CPU, compiled by Numba for the CPU that it runs on.

A few rows cost what reading the weights costs, if the weights are one stream of memory (cpu_panels.py). Libraries lay
weights out for many rows, and read them for one at half of the memory's speed (docs/log.md).

A weight [channels, inner] is panels [m, width · PANEL]: width is `inner` rounded up to whole neighbours, with zeros.
The last panel holds the last PANEL channels, so it may have some in common with the one before, and then both write
the same products.
"""

from typing import Any

import numpy as np
from numba import typeof, types
from numba.extending import overload

from engine.kernels.cpu_code import HAS_PAIRS
from engine.kernels.cpu_compile import compiled_exactly
from engine.kernels.cpu_integers import ACTIVATION as ACTIVATION  # of the codes and offsets that callers give
from engine.kernels.cpu_integers import NEIGHBOURS
from engine.kernels.cpu_integers import OFFSET as OFFSET
from engine.kernels.cpu_panels import PANEL, ROWS, multiply_panel, neighbours_of, partners_of
from engine.kernels.cpu_vectors import store_row

LEAST_STEP = np.float32(1e-30)  # of a row of zeros, as in quantize.py
PER_LARGEST = np.float32(1 / 127)
MAGNITUDE = np.int32(0x7FFFFFFF)  # the bits of an fp32 number but for its sign


def neighbours_in(weight: Any) -> int:
    """How many numbers of a channel lie side by side in the panels of this weight, unless they are in a tuple."""
    return neighbours_of(typeof(weight).dtype)


def partners_in(weight: Any) -> int:
    """As `partners_of`, for panels of this weight in a tuple."""
    return partners_of(typeof(weight).dtype)


@compiled_exactly
def bounds(channels: int, part: int, parts: int) -> tuple[int, int]:
    """The first channel of a part and the first one behind it. Parts begin at whole panels, and the last one has the
    last whole panel. So none writes channels of another."""
    panels = channels // PANEL
    return panels * part // parts * PANEL, channels if part + 1 == parts else panels * (part + 1) // parts * PANEL


def as_multiplied(x: Any, weight: Any) -> Any:
    """x as `multiply_panel` takes it: rounded to bfloat16 beside such weights where the CPU multiplies these."""
    raise NotImplementedError("compiled code only")


@overload(as_multiplied, strict=False)
def _as_multiplied(x: Any, weight: Any) -> Any:
    if isinstance(weight, types.BaseTuple) or weight.dtype != types.uint16 or not HAS_PAIRS:
        return lambda x, weight: x
    neighbours = neighbours_of(weight.dtype)

    def rounded(x: Any, weight: Any) -> Any:
        width = (x.shape[1] + neighbours - 1) // neighbours * neighbours
        if width > x.shape[1]:
            padded = np.zeros((x.shape[0], width), x.dtype)
            padded[:, : x.shape[1]] = x
            x = padded
        numbers = np.empty(x.shape, np.uint16)
        for row in range(x.shape[0]):
            store_row(x, row, 0, numbers, row)
        return numbers

    return rounded


@compiled_exactly
def multiply_some(x: Any, weight: Any, bias: Any, first: int, last: int, out: Any) -> None:
    """out [rows, channels ≥ PANEL] = x [rows, inner] · weightᵀ + bias for the channels first … last − 1, and others of
    their panels.

    weight: panels, where integers stand for numbers of 16 bits; x, bias and out are fp32 then. (panels,): they are
    multiplied by x as it is, also where the CPU multiplies bfloat16 numbers. For 8-bit integers see `multiply_panel`;
    x is what `round_rows` makes. All rows multiply a panel before the next one is read.
    """
    (rows, channels), numbers = out.shape, as_multiplied(x, weight)
    tiles = (rows + ROWS - 1) // ROWS
    for panel in range(first // PANEL, (last + PANEL - 1) // PANEL):
        for n in range(tiles):
            row, channel = rows * n // tiles, min(panel * PANEL, channels - PANEL)
            multiply_panel(numbers, row, rows * (n + 1) // tiles - row, weight, panel, bias, channel, out)


@compiled_exactly
def multiply(x: Any, weight: Any, bias: Any, out: Any, part: int, parts: int) -> None:
    """As `multiply_some`: one part of the channels, which `parts` calls compute together."""
    first, last = bounds(out.shape[1], part, parts)
    multiply_some(x, weight, bias, first, last, out)


@compiled_exactly
def round_rows(x: Any, codes: Any, steps: Any, offset: Any) -> None:
    """x fp32 [rows, inner] ≈ (codes − offset) · steps fp32 [rows]. codes: [rows, width ≥ inner], of type ACTIVATION
    with OFFSET, or int8 with 0. The largest of a row becomes ±127.

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
            codes[row, i] = np.int32(np.rint(x[row, i] / step)) + np.int32(offset)
        codes[row, x.shape[1] :] = offset


@compiled_exactly
def sum_codes(panels: Any, sums: Any) -> None:
    """sums int32 [channels ≥ PANEL]: of the numbers of each channel; panels: of int8."""
    for panel in range(panels.shape[0]):
        first = min(panel * PANEL, len(sums) - PANEL)
        for channel in range(PANEL):
            total = np.int32(0)
            for i in range(channel * NEIGHBOURS, panels.shape[1], PANEL * NEIGHBOURS):
                for neighbour in range(NEIGHBOURS):
                    total += np.int32(panels[panel, i + neighbour])
            sums[first + channel] = total
