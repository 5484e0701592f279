"""Exponentials and logarithms in explicit vectors, for code that Numba compiles (cpu_attention.py, cpu_laws.py, …)."""

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
# Cephes' logf: log(1 + m) = m − m² / 2 + m³ · p(m), 1 + m from √½ to √2. Coefficients of p from the highest power on.
LOG_POWERS = (
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
    *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)
ROOT_HALF = 0.70710678
LN_2, LN_2_REST = 0.693359375, -2.12194440e-4  # their sum is ln 2
PER_LN_2 = 1.44269504


def exponential(builder: Any, x: Any) -> Any:
    """exp of a vector. NaN stays. fp32: 2ⁿ · exp(r), with no call; numbers below LOWEST count as LOWEST."""
    kind = x.type
    if isinstance(kind.element, ir.DoubleType):
        return builder.call(declared(builder, f"llvm.exp.v{kind.count}f64", kind, [kind]), [x])
    r, p, power = _parts(builder, x)
    one = ir.Constant(kind, [1.0] * kind.count)
    return builder.fmul(multiply_add(builder, builder.fmul(r, r), p, builder.fadd(r, one)), power)


def exponential_less_one(builder: Any, x: Any) -> Any:
    """exp(x) − 1 of a vector in fp32, which is precise for small x, too. NaN stays."""
    r, p, power = _parts(builder, x)
    rest = builder.fadd(power, ir.Constant(x.type, [-1.0] * x.type.count))
    return multiply_add(builder, multiply_add(builder, builder.fmul(r, r), p, r), power, rest)


def _parts(builder: Any, x: Any) -> tuple[Any, Any, Any]:
    """(r, p(r), 2ⁿ) of a vector in fp32, where exp(x) = 2ⁿ · exp(r)."""
    kind = x.type

    def every(number: float) -> Any:
        return ir.Constant(kind, [number] * kind.count)

    x = builder.select(builder.fcmp_ordered("<", x, every(LOWEST)), every(LOWEST), x)
    floor = declared(builder, f"llvm.floor.v{kind.count}f32", kind, [kind])
    n = builder.call(floor, [multiply_add(builder, x, every(PER_LN_2), every(0.5))])
    r = multiply_add(builder, n, every(-LN_2_REST), multiply_add(builder, n, every(-LN_2), x))
    p = every(POWERS[0])
    for coefficient in POWERS[1:]:
        p = multiply_add(builder, p, r, every(coefficient))
    wide = ir.VectorType(ir.IntType(32), kind.count)
    exponent = builder.add(builder.fptosi(n, wide), ir.Constant(wide, [127] * kind.count))
    power = builder.bitcast(builder.shl(exponent, ir.Constant(wide, [23] * kind.count)), kind)
    return r, p, power


def logarithm(builder: Any, x: Any) -> Any:
    """log of a vector of normal fp32 numbers above 0."""
    count = x.type.count
    wide = ir.VectorType(ir.IntType(32), count)

    def every(number: float) -> Any:
        return ir.Constant(x.type, [number] * count)

    def whole(number: int) -> Any:
        return ir.Constant(wide, [number] * count)

    bits = builder.bitcast(x, wide)
    exponent = builder.sitofp(builder.sub(builder.lshr(bits, whole(23)), whole(126)), x.type)
    half = builder.bitcast(builder.or_(builder.and_(bits, whole(0x7FFFFF)), whole(0x3F000000)), x.type)
    small = builder.fcmp_ordered("<", half, every(ROOT_HALF))
    exponent = builder.select(small, builder.fsub(exponent, every(1)), exponent)
    m = builder.fsub(builder.select(small, builder.fadd(half, half), half), every(1))
    square, p = builder.fmul(m, m), every(LOG_POWERS[0])
    for coefficient in LOG_POWERS[1:]:
        p = multiply_add(builder, p, m, every(coefficient))
    rest = multiply_add(builder, exponent, every(LN_2_REST), builder.fmul(builder.fmul(p, m), square))
    rest = multiply_add(builder, square, every(-0.5), rest)
    return multiply_add(builder, exponent, every(LN_2), builder.fadd(m, rest))


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
