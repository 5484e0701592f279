"""Products of rows of 8-bit integers, whose sums are exact, for code that Numba compiles (cpu_products.py).

Weights have 8 bits and a sign. Activations are stored as the CPU's instructions take them. VNNI takes 8 bits without a
sign, so OFFSET is added. Other instructions take 16 bits, and add pairs of products in 32. So nothing saturates.
"""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from engine.kernels.cpu_code import (
    CHANNELS,
    ask_for_rows,
    declared,
    emitted,
    features,
    in_tiles,
    index,
    load_as,
    over_row,
    picked,
    row_of,
    rows_of,
    store,
    totals_of,
    width_of,
    zero_sum,
)

BYTE, SUM = ir.IntType(8), ir.IntType(32)
AT_ONCE = 64 if "avx512vnni" in features() else 32 if "avxvnni" in features() else 16  # products of an instruction
HAS_VNNI = AT_ONCE > 16
OFFSET = 128 if HAS_VNNI else 0  # of activations
ACTIVATION = np.uint8 if HAS_VNNI else np.int16
SUMS = AT_ONCE // (4 if HAS_VNNI else 2)  # of neighbouring products


def _add_products(builder: Any, activations: Any, weights: Any, total: Any) -> Any:
    """total + activations · weights; each of its numbers gets the products of its neighbours."""
    if HAS_VNNI:
        name = f"llvm.x86.avx512.vpdpbusd.{AT_ONCE * 8}"
        function = declared(builder, name, total.type, [total.type, activations.type, weights.type])
        return builder.call(function, [total, activations, weights])
    products = _wide_products(builder, activations, weights)
    even, odd = (picked(builder, products, range(first, AT_ONCE, 2)) for first in (0, 1))
    return builder.add(total, builder.add(even, odd))


def _wide_products(builder: Any, activations: Any, weights: Any) -> Any:
    wide = ir.VectorType(SUM, weights.type.count)
    widen = builder.zext if HAS_VNNI else builder.sext
    return builder.mul(widen(activations, wide), builder.sext(weights, wide))


def _add_one(builder: Any, activation: Any, weight: Any, total: Any) -> Any:
    return builder.add(total, _wide_products(builder, activation, weight))


@emitted
def add_up(_context: Any, codes: Any, lane: Any, lanes: Any, weight: Any, channel: Any, sums: Any) -> Any:
    """(codes [n, width], lane, lanes, weight int8 [m, width], channel, sums int32 [n, m]): sums[lane, channel]
    becomes the dot product of codes[lane] with weight[channel], and so for `lanes` lanes and CHANNELS channels."""

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        x, first, count, w, first_channel, out = arguments
        number, size = ir.IntType(codes.dtype.bitwidth), codes.dtype.bitwidth // 8
        width = width_of(context, builder, codes, x)

        def tile(of_lanes: list[Any], channels: list[Any]) -> None:
            by_lane = rows_of(context, builder, codes, x, of_lanes)
            by_channel = rows_of(context, builder, weight, w, channels)
            following = row_of(context, builder, weight, w, builder.add(channels[0], index(CHANNELS)))
            whole, rest = ([[zero_sum(builder, SUM, n) for _ in by_channel] for _ in by_lane] for n in (SUMS, 1))

            def body(i: Any, numbers: int) -> None:
                add, totals_of_lanes = (_add_one, rest) if numbers == 1 else (_add_products, whole)
                if numbers > 1:
                    ask_for_rows(builder, following, i, (len(channels), width), numbers, 1)
                values = [load_as(builder, row(i), BYTE, numbers, 1) for row in by_channel]
                for totals, row in zip(totals_of_lanes, by_lane, strict=True):
                    read = load_as(builder, row(i), number, numbers, size)
                    for total, value in zip(totals, values, strict=True):
                        builder.store(add(builder, read, value, builder.load(total)), total)

            over_row(builder, width, AT_ONCE, body)
            targets = rows_of(context, builder, sums, out, of_lanes)
            for target, totals, others in zip(targets, whole, rest, strict=True):
                ends = [totals_of(builder, [builder.load(part) for part in parts]) for parts in (totals, others)]
                store(builder, builder.add(*ends), target(channels[0]), 4)

        in_tiles(builder, first, count, first_channel, tile)
        return context.get_dummy_value()

    return types.void(codes, types.intp, types.intp, weight, types.intp, sums), code
