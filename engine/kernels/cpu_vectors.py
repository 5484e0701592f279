"""Products of rows in explicit vectors, for code that Numba compiles (cpu_attention.py, cpu_layers.py,
cpu_products.py).

A result is the same bits however many rows are computed beside it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from engine.kernels.cpu_code import (
    CACHE_LINE,
    INDEX,
    VECTOR_BYTES,
    Address,
    ask_for,
    behind,
    emitted,
    features,
    in_tiles,
    index,
    load,
    multiply_add,
    over_row,
    rounded,
    row_of,
    rows_of,
    spread,
    store,
    sum_type,
    totals_of,
    transposed,
    width_of,
    zero_sum,
)

BLOCK = 16 if "avx512f" in features() else 8  # queries, and keys: in fp32 the sums of a key are a register
# Sums that stay in registers while rows are added to them: lanes at once, largest first, and vectors of each.
AT_ONCE, VECTORS = ((4, 2, 1), 4) if "avx512f" in features() else ((2, 1), 2)


def _emit_dots(
    builder: Any, kinds: tuple[Any, Any], width: Any, by_lane: list[Address], by_row: list[Address]
) -> list[Any]:
    """For each lane the vector of its dot products with all rows.

    kinds: Numba's types of the arrays of lanes and rows.
    """
    lanes, rows = kinds
    kind, step = sum_type(lanes), VECTOR_BYTES // (lanes.dtype.bitwidth // 8)
    whole, rest = ([[zero_sum(builder, kind, count) for _ in by_row] for _ in by_lane] for count in (step, 1))

    def body(x: Any, count: int) -> None:
        values = [load(builder, row(x), rows.dtype, count) for row in by_row]
        for totals, lane in zip(rest if count == 1 else whole, by_lane, strict=True):
            numbers = load(builder, lane(x), lanes.dtype, count)
            for total, value in zip(totals, values, strict=True):
                builder.store(multiply_add(builder, numbers, value, builder.load(total)), total)

    over_row(builder, width, step, body)
    ends = [[totals_of(builder, [builder.load(one) for one in totals]) for totals in part] for part in (whole, rest)]
    return [builder.fadd(most, last) for most, last in zip(*ends, strict=True)]


@emitted
def dot(_context: Any, a: Any, row: Any, b: Any, number: Any, products: Any) -> Any:
    """(a [n, width], row, b [m, width], number, products [n, ..]): products[row, 0] becomes the dot product of a[row]
    with b[number]."""

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        left, of, right, other, out = arguments
        rows = [row_of(context, builder, a, left, of)], [row_of(context, builder, b, right, other)]
        (value,) = _emit_dots(builder, (a, b), width_of(context, builder, a, left), *rows)
        target = row_of(context, builder, products, out, of)(index(0))
        store(builder, value, target, products.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(a, types.intp, b, types.intp, products), code


@emitted
def score_keys(
    _context: Any, queries: Any, lane: Any, lanes: Any, rows: Any, numbers: Any, i: Any, ahead: Any, scores: Any
) -> Any:
    """(queries [n, width], lane, lanes, rows [m, width], numbers [1, ..], i, ahead, scores [n, ..]): scores[lane, i]
    becomes the dot product of queries[lane] with rows[numbers[0, i] + ahead], and so for `lanes` lanes and KEYS
    keys."""

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        q, first, count, keys, all_numbers, start, more, out = arguments
        width, number_at = (
            width_of(context, builder, queries, q),
            row_of(context, builder, numbers, all_numbers, index(0)),
        )

        def tile(of_lanes: list[Any], places: list[Any]) -> None:
            chosen = [builder.add(builder.load(number_at(place)), more) for place in places]
            by_lane, by_key = (
                rows_of(context, builder, queries, q, of_lanes),
                rows_of(context, builder, rows, keys, chosen),
            )
            made = _emit_dots(builder, (queries, rows), width, by_lane, by_key)
            for target, values in zip(rows_of(context, builder, scores, out, of_lanes), made, strict=True):
                store(builder, values, target(places[0]), scores.dtype.bitwidth // 8)

        in_tiles(builder, first, count, start, tile)
        return context.get_dummy_value()

    given = queries, types.intp, types.intp, rows, numbers, types.intp, types.intp, scores
    return types.void(*given), code


@emitted
def score_block(_context: Any, turned: Any, lane: Any, keys: Any, key: Any, scores: Any) -> Any:
    """(turned [width, n], lane, keys [m, width], key, scores [n, ..]): scores[lane + l, key + k] becomes the dot
    product of the query turned[:, lane + l] with keys[key + k], for l and k below BLOCK.

    The queries of a vector are multiplied by one number of a key. So a sum lies in one place of a vector, and the block
    is turned at the end.
    """

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        queries, first, rows, begin, out = arguments
        kind = sum_type(turned)
        width, size = width_of(context, builder, keys, rows), scores.dtype.bitwidth // 8
        by_key = rows_of(context, builder, keys, rows, behind(builder, begin, BLOCK))
        totals = [zero_sum(builder, kind, BLOCK) for _ in by_key]
        with cgutils.for_range(builder, width, intp=INDEX) as loop:
            lanes = load(builder, row_of(context, builder, turned, queries, loop.index)(first), turned.dtype, BLOCK)
            for row, total in zip(by_key, totals, strict=True):
                number = spread(builder, builder.load(row(loop.index)), BLOCK)
                builder.store(multiply_add(builder, number, lanes, builder.load(total)), total)
        made = transposed(builder, [builder.load(total) for total in totals])
        targets = rows_of(context, builder, scores, out, behind(builder, first, BLOCK))
        for target, values in zip(targets, made, strict=True):
            store(builder, values, target(begin), size)
        return context.get_dummy_value()

    return types.void(turned, types.intp, keys, types.intp, scores), code


@emitted
def add_rows(_context: Any, weights: Any, lanes: Any, rows: Any, tile: Any, ahead: Any, count: Any, sums: Any) -> Any:
    """(weights [n, ..], lanes, rows [m, width], tile: (numbers, behind [1, ..]), ahead, count, sums [n, width]): add to
    sums[lane] the rows numbers[0, i] + ahead by weights[lane, i], for i < count in turn, and so for the first lanes.
    The rows behind[0, i] + ahead are asked for meanwhile."""

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        w, most, values, both, more, end, out = arguments
        size = sums.dtype.bitwidth // 8
        width, length = width_of(context, builder, sums, out), VECTOR_BYTES // size
        here, following = (
            row_of(context, builder, kind, array, index(0))
            for kind, array in zip(tile, cgutils.unpack_tuple(builder, both), strict=True)
        )

        def row(numbers: Address, i: Any) -> Address:
            return row_of(context, builder, rows, values, builder.add(builder.load(numbers(i)), more))

        def add(by_lane: list[Address], places: list[Any], count: int, asks: Any, targets: list[Address]) -> None:
            """These parts of the sums stay in registers while the rows pass."""
            totals = [[zero_sum(builder, sum_type(sums), count) for _ in places] for _ in targets]
            addresses = [[target(x) for x in places] for target in targets]
            parts = list(zip(chain(*addresses), chain(*totals), strict=True))
            for address, part in parts:
                builder.store(load(builder, address, sums.dtype, count), part)
            with cgutils.for_range(builder, end, intp=INDEX) as loop:
                read = row(here, loop.index)
                loaded = [load(builder, read(x), rows.dtype, count) for x in places]
                with builder.if_then(asks):
                    for x in places:
                        ask_for(builder, row(following, loop.index)(x))
                for weight, of in zip(by_lane, totals, strict=True):
                    factor = spread(builder, builder.load(weight(loop.index)), count)
                    for value, part in zip(loaded, of, strict=True):
                        builder.store(multiply_add(builder, factor, value, builder.load(part)), part)
            for address, part in parts:
                store(builder, builder.load(part), address, size)

        first = index(0)
        for together in AT_ONCE:
            with _steps(builder, first, most, together) as (lane, last):
                of_lanes, start = behind(builder, lane, together), index(0)
                asks = builder.icmp_signed("==", lane, index(0))
                by_lane = rows_of(context, builder, weights, w, of_lanes)
                targets = rows_of(context, builder, sums, out, of_lanes)
                for vectors, count in ((VECTORS, length), (1, length), (1, 1)):
                    with _steps(builder, start, width, vectors * count) as (x, stop):
                        places = [builder.add(x, index(n * count)) for n in range(vectors)]
                        add(by_lane, places, count, asks, targets)
                    start = stop
            first = last
        return context.get_dummy_value()

    given = weights, types.intp, rows, tile, types.intp, types.intp, sums
    return types.void(*given), code


@contextmanager
def _steps(builder: Any, start: Any, end: Any, step: int) -> Iterator[tuple[Any, Any]]:
    """Emit a loop from `start` in steps that are whole below `end`: (where a step begins, where the last one ends)."""
    stop = builder.add(start, builder.mul(builder.sdiv(builder.sub(end, start), index(step)), index(step)))
    with cgutils.for_range_slice(builder, start, stop, index(step), INDEX) as (x, _):
        yield x, stop


@emitted
def store_row(_context: Any, numbers: Any, row: Any, first: Any, rows: Any, place: Any) -> Any:
    """(numbers [n, ..], row, first, rows [m, width], place): rows[place] becomes the numbers of numbers[row] from
    `first` on, rounded to what the rows hold."""

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        given, row, begin, stored, number = arguments
        read, target = row_of(context, builder, numbers, given, row), row_of(context, builder, rows, stored, number)

        def body(x: Any, count: int) -> None:
            value = load(builder, read(builder.add(begin, x)), numbers.dtype, count)
            store(builder, rounded(builder, value, rows.dtype), target(x), rows.dtype.bitwidth // 8)

        size = numbers.dtype.bitwidth // 8
        over_row(builder, width_of(context, builder, rows, stored), VECTOR_BYTES // size, body)
        return context.get_dummy_value()

    return types.void(numbers, types.intp, types.intp, rows, types.intp), code


@emitted
def prefetch(_context: Any, rows: Any, number: Any) -> Any:
    """Ask for the cache lines of rows[number]."""

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        array, number = arguments
        row, width = row_of(context, builder, rows, array, number), width_of(context, builder, rows, array)
        step = ir.Constant(INDEX, max(1, CACHE_LINE * 8 // rows.dtype.bitwidth))
        with cgutils.for_range_slice(builder, index(0), width, step, INDEX) as (x, _):
            ask_for(builder, row(x))
        return context.get_dummy_value()

    return types.void(rows, types.intp), code
