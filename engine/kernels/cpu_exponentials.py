"""Exponentials of rows in explicit vectors, for code that Numba compiles (cpu_attention.py, cpu_layers.py)."""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from engine.kernels.cpu_code import (
    INDEX,
    VECTOR_BYTES,
    declared,
    emitted,
    index,
    load,
    multiply_add,
    over_row,
    row_of,
    spread,
    store,
    sum_type,
    totals_of,
    width_of,
    zero_sum,
)

NOTHING = -1e30  # a score below all real ones; −inf − −inf would not be a number
LOWEST = -87.0  # exp of less is no normal fp32 number
# Cephes' expf: exp(r) = 1 + r + r² · p(r) for |r| ≤ ½ ln 2. Coefficients of p from the highest power on.
POWERS = (
    *(1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3),
    *(4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1),
)
LN_2, LN_2_REST = 0.693359375, -2.12194440e-4  # their sum is ln 2
PER_LN_2 = 1.44269504


def exponential(builder: Any, x: Any) -> Any:
    """exp of a vector. NaN stays. fp32: 2ⁿ · exp(r), with no call; numbers below LOWEST count as LOWEST."""
    kind = x.type
    if isinstance(kind.element, ir.DoubleType):
        return builder.call(declared(builder, f"llvm.exp.v{kind.count}f64", kind, [kind]), [x])

    def every(number: float) -> Any:
        return ir.Constant(kind, [number] * kind.count)

    x = builder.select(builder.fcmp_ordered("<", x, every(LOWEST)), every(LOWEST), x)
    floor = declared(builder, f"llvm.floor.v{kind.count}f32", kind, [kind])
    n = builder.call(floor, [multiply_add(builder, x, every(PER_LN_2), every(0.5))])
    r = multiply_add(builder, n, every(-LN_2_REST), multiply_add(builder, n, every(-LN_2), x))
    p = every(POWERS[0])
    for coefficient in POWERS[1:]:
        p = multiply_add(builder, p, r, every(coefficient))
    near = multiply_add(builder, builder.fmul(r, r), p, builder.fadd(r, every(1.0)))
    wide = ir.VectorType(ir.IntType(32), kind.count)
    exponent = builder.add(builder.fptosi(n, wide), ir.Constant(wide, [127] * kind.count))
    power = builder.bitcast(builder.shl(exponent, ir.Constant(wide, [23] * kind.count)), kind)
    return builder.fmul(near, power)


@emitted
def weigh(_context: Any, scores: Any, lane: Any, begin: Any, end: Any, top: Any) -> Any:
    """(scores [n, whole vectors], lane, begin, end, top) → (the largest of top and of the lane's scores at begin …
    end − 1, the sum of their weights). Each of these scores becomes its weight, exp(score − largest). All others, and
    those of NOTHING, become 0."""
    returned = types.UniTuple(scores.dtype, 2)

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        array, row, first, last, before = arguments
        size = scores.dtype.bitwidth // 8
        kind, count = sum_type(scores), VECTOR_BYTES // size
        at, width = row_of(context, builder, scores, array, row), width_of(context, builder, scores, array)
        nothing = ir.Constant(ir.VectorType(kind, count), [NOTHING] * count)
        numbers = ir.Constant(ir.VectorType(INDEX, count), list(range(count)))
        low, high = (spread(builder, bound, count) for bound in (first, last))

        def read(x: Any) -> Any:
            """NOTHING for places outside; NaN stays."""
            places = builder.add(spread(builder, x, count), numbers)
            inside = builder.and_(builder.icmp_signed(">=", places, low), builder.icmp_signed("<", places, high))
            return builder.select(inside, load(builder, at(x), scores.dtype, count), nothing)

        def larger(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        def one_of(vector: Any, combine: Any) -> Any:
            return builder.extract_element(totals_of(builder, [vector], combine), ir.Constant(ir.IntType(32), 0))

        largest = cgutils.alloca_once_value(builder, spread(builder, before, count))
        with cgutils.for_range_slice(builder, index(0), width, index(count), INDEX) as (x, _):
            builder.store(larger(read(x), builder.load(largest)), largest)
        top = one_of(builder.load(largest), larger)
        tops, total = spread(builder, top, count), zero_sum(builder, kind, count)
        with cgutils.for_range_slice(builder, index(0), width, index(count), INDEX) as (x, _):
            score = read(x)
            weight = exponential(builder, builder.fsub(score, tops))
            absent = builder.fcmp_ordered("<=", score, nothing)
            weight = builder.select(absent, ir.Constant(weight.type, None), weight)
            store(builder, weight, at(x), size)
            builder.store(builder.fadd(builder.load(total), weight), total)
        return context.make_tuple(builder, returned, [top, one_of(builder.load(total), builder.fadd)])

    return returned(scores, types.intp, types.intp, types.intp, scores.dtype), code


@emitted
def exponentials(_context: Any, numbers: Any, row: Any) -> Any:
    """(numbers [n, width], row): replace the numbers of a row by their exponentials."""

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        array, number = arguments
        at, size = row_of(context, builder, numbers, array, number), numbers.dtype.bitwidth // 8

        def body(x: Any, count: int) -> None:
            store(builder, exponential(builder, load(builder, at(x), numbers.dtype, count)), at(x), size)

        over_row(builder, width_of(context, builder, numbers, array), VECTOR_BYTES // size, body)
        return context.get_dummy_value()

    return types.void(numbers, types.intp), code
