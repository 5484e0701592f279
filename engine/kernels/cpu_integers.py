"""Products of rows of 8-bit integers, whose sums are exact, for code that Numba compiles (cpu_products.py).

Activations are integers plus OFFSET, without a sign, as the VNNI instructions take them; weights have a sign. A CPU
without VNNI adds pairs of products in 32 bits. So nothing saturates.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from engine.kernels.cpu_code import (
    CHANNELS,
    ask_for,
    declared,
    emitted,
    features,
    in_tiles,
    index,
    load_as,
    over_row,
    picked,
    rows_of,
    store,
    totals_of,
    width_of,
    zero_sum,
)

OFFSET = 128  # of activations
BYTE, SUM = ir.IntType(8), ir.IntType(32)


def _bytes_per_step() -> int:
    """Numbers that one step multiplies."""
    found = features()
    if "avx512vnni" in found:
        return 64
    return 32 if "avxvnni" in found else 16


STEP = _bytes_per_step()
SUMS = STEP // 4 if STEP > 16 else 8  # partial sums of a step


def _add_products(builder: Any, unsigned: Any, signed: Any, total: Any) -> Any:
    """total + unsigned · signed; each of its numbers gets the products of its neighbours."""
    if STEP > 16:
        name = f"llvm.x86.avx512.vpdpbusd.{STEP * 8}"
        function = declared(builder, name, total.type, [total.type, unsigned.type, signed.type])
        return builder.call(function, [total, unsigned, signed])
    products = _wide_products(builder, unsigned, signed)
    even, odd = (picked(builder, products, range(first, STEP, 2)) for first in (0, 1))
    return builder.add(total, builder.add(even, odd))


def _wide_products(builder: Any, unsigned: Any, signed: Any) -> Any:
    wide = ir.VectorType(SUM, unsigned.type.count)
    return builder.mul(builder.zext(unsigned, wide), builder.sext(signed, wide))


def _add_one(builder: Any, unsigned: Any, signed: Any, total: Any) -> Any:
    return builder.add(total, _wide_products(builder, unsigned, signed))


@emitted
def add_up(_context: Any, codes: Any, lane: Any, lanes: Any, weight: Any, channel: Any, sums: Any) -> Any:
    """(codes uint8 [n, width], lane, lanes, weight int8 [m, width], channel, sums int32 [n, m]): sums[lane, channel]
    becomes the dot product of codes[lane] with weight[channel], and so for `lanes` lanes and CHANNELS channels."""

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        x, first, count, w, first_channel, out = arguments

        def tile(of_lanes: list[Any], channels: list[Any]) -> None:
            by_lane = rows_of(context, builder, codes, x, of_lanes)
            by_channel = rows_of(context, builder, weight, w, channels)
            following = rows_of(context, builder, weight, w, [builder.add(n, index(CHANNELS)) for n in channels])
            whole, rest = ([[zero_sum(builder, SUM, n) for _ in by_channel] for _ in by_lane] for n in (SUMS, 1))

            def body(i: Any, numbers: int) -> None:
                add, totals_of_lanes = (_add_one, rest) if numbers == 1 else (_add_products, whole)
                values = [load_as(builder, row(i), BYTE, numbers, 1) for row in by_channel]
                for row in following if numbers > 1 else []:
                    ask_for(builder, row(i))
                for totals, row in zip(totals_of_lanes, by_lane, strict=True):
                    read = load_as(builder, row(i), BYTE, numbers, 1)
                    for total, value in zip(totals, values, strict=True):
                        builder.store(add(builder, read, value, builder.load(total)), total)

            over_row(builder, width_of(context, builder, codes, x), STEP, body)
            targets = rows_of(context, builder, sums, out, of_lanes)
            for target, totals, others in zip(targets, whole, rest, strict=True):
                ends = [totals_of(builder, [builder.load(part) for part in parts]) for parts in (totals, others)]
                store(builder, builder.add(*ends), target(channels[0]), 4)

        in_tiles(builder, first, count, first_channel, tile)
        return context.get_dummy_value()

    return types.void(codes, types.intp, types.intp, weight, types.intp, sums), code
