"""Sums and largest numbers over rows in explicit vectors, for code that Numba compiles (cpu_race.py, cpu_laws.py)."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from engine.kernels.cpu_code import (
    VECTOR_BYTES,
    emitted,
    load,
    over_row,
    picked,
    row_of,
    sum_type,
    totals_of,
    width_of,
    zero_sum,
)


def sum_of(builder: Any, width: Any, kind: Any, count: int, emit: Callable[[Any, int], Any]) -> Any:
    """The sum of emit(x, numbers) over a row, in vectors of `count` numbers of LLVM's type `kind`."""
    whole, rest = zero_sum(builder, kind, count), zero_sum(builder, kind, 1)

    def add(x: Any, numbers: int) -> None:
        total = whole if numbers > 1 else rest
        builder.store(builder.fadd(builder.load(total), emit(x, numbers)), total)

    over_row(builder, width, count, add)
    most, last = totals_of(builder, [builder.load(whole)]), builder.load(rest)
    return builder.extract_element(builder.fadd(most, last), ir.Constant(ir.IntType(32), 0))


def largest_of(builder: Any, width: Any, kind: Any, count: int, emit: Callable[[Any, int, Any], None]) -> Any:
    """The largest number in a variable of `count` numbers behind emit(x, numbers, the variable) for a whole row."""
    top = cgutils.alloca_once_value(builder, ir.Constant(ir.VectorType(kind, count), [-math.inf] * count))
    over_row(builder, width, count, lambda x, numbers: emit(x, numbers, top))
    largest = totals_of(builder, [builder.load(top)], partial(larger, builder))
    return builder.extract_element(largest, ir.Constant(ir.IntType(32), 0))


def larger(builder: Any, a: Any, b: Any) -> Any:
    """What is not a number stays."""
    neither = ir.Constant(a.type, [math.nan] * a.type.count)
    most = builder.select(builder.fcmp_ordered(">", a, b), a, b)
    return builder.select(builder.fcmp_unordered("uno", a, b), neither, most)


def keep_largest(builder: Any, top: Any, given: Any) -> None:
    """Let the variable hold the larger numbers of its vector and another one."""
    held = builder.load(top)
    if given.type.count == 1:
        given = picked(builder, given, [0] * held.type.count)
    builder.store(larger(builder, given, held), top)


@emitted
def largest(_context: Any, rows: Any, row: Any) -> Any:
    """(rows [n, width], row) → the largest number of a row. NaN stays."""

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        array, number = arguments
        at, width = row_of(context, builder, rows, array, number), width_of(context, builder, rows, array)

        def see(x: Any, count: int, top: Any) -> None:
            keep_largest(builder, top, load(builder, at(x), rows.dtype, count))

        return largest_of(builder, width, sum_type(rows), VECTOR_BYTES * 8 // rows.dtype.bitwidth, see)

    return rows.dtype(rows, types.intp), code
