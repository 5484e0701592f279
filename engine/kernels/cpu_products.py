"""Products with weights for a few rows on a CPU, compiled by Numba for the CPU that it runs on.

A few rows cost what reading the weights costs, if each weight is read once, in order, and widened in registers.
Libraries lay weights out for many rows, and read them for one at half of the memory's speed (docs/log.md).
"""

from typing import Any

from engine.kernels.cpu_vectors import compiled, dots_1, dots_2, dots_3, dots_4

BLOCK_BYTES = 1 << 17  # of weights that all rows multiply before the next ones are read; they stay in a cache


@compiled
def multiply(x: Any, weight: Any, out: Any, part: int, parts: int) -> None:
    """out [rows, channels] = x [rows, inner] · weightᵀ: one part of the channels, which `parts` calls compute together.

    weight [channels, inner], with integers for numbers of 16 bits; x and out are fp32 then.
    """
    channels, rows = weight.shape[0], x.shape[0]
    begin, end = channels * part // parts, channels * (part + 1) // parts
    step = max(1, BLOCK_BYTES // (weight.shape[1] * weight.itemsize))
    for first in range(begin, end, step):
        last = min(first + step, end)
        row = 0
        while row + 4 <= rows:
            for channel in range(first, last):
                dots_4(x, row, weight, channel, out, channel)
            row += 4
        if rows - row == 3:
            for channel in range(first, last):
                dots_3(x, row, weight, channel, out, channel)
        elif rows - row == 2:
            for channel in range(first, last):
                dots_2(x, row, weight, channel, out, channel)
        elif rows - row == 1:
            for channel in range(first, last):
                dots_1(x, row, weight, channel, out, channel)
