"""Finds where top-p and min-p cut rows of logits (engine/sampling/candidates.py), compiled by Numba.

Nothing is sorted. The cut is the largest logit such that the tokens from it on have the mass p. It is found by halving:
first what masses it may have, with sums over the row in fp32, then among the few tokens with such masses.
"""

import math
from typing import Any

import numpy as np
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
    over_row,
    row_of,
    spread,
    store,
    width_of,
)
from engine.kernels.cpu_compile import compiled
from engine.kernels.cpu_exponentials import exponential
from engine.kernels.cpu_reductions import largest

# As in long_row.py. A change of other files than cpu_*.py does not compile this anew, so it has its own constants.
OPERATIONS = 3  # on the way to an exponent
EXP_ERROR = 8  # bound on the relative error of an exponential, in units of an operation's rounding
MASS_MARGIN = 1e-3  # relative margin of a mass, for rounding in fp32
EDGE = 1e-5  # relative distance from which on two masses in fp32 have the order of their logits
HALVINGS = 7  # of the interval of masses, on a scale of logarithms: some tokens in a hundred are left in it
ROUNDING_PER_TOKEN = 2.0**-50  # bound on the error of a sum of masses in fp64, per token
NUMBERS = VECTOR_BYTES // 4  # of a vector


@compiled
def share_error(share: float, size: float, vocab: int) -> float:
    """Bound on the error of a share of the mass, as candidates._Masses.rounding has it, with sums in fp64; in units of
    an operation's rounding. size: bound on the exponents of the best logits."""
    both = share * (1 - share)
    return both * (OPERATIONS * (2 * (size + math.log(vocab)) - math.log(both)) + 2 * EXP_ERROR)


@compiled
def in_order(bits: Any, count: int, keys: Any) -> None:
    """keys int64 [≥ count], in the order of the fp32 numbers whose bits are given."""
    for i in range(count):
        number = np.int64(bits[i])
        keys[i] = number if number >= 0 else -(number & 0x7FFFFFFF)


@compiled
def mass_of(masses: Any, count: int) -> float:
    """The sum of the first masses."""
    total = 0.0
    for i in range(count):
        total += masses[i]
    return total


@compiled
def mass_from(keys: Any, masses: Any, count: int, least: Any) -> float:
    """The sum of the masses whose keys are at least `least`, in fp64. keys: numbers in the order of the logits."""
    total = 0.0
    for i in range(count):
        total += masses[i] if keys[i] >= least else 0.0
    return total


@compiled
def mass_at_least(masses: Any, least: float) -> Any:
    """The sum of the masses that are at least `least`, in fp32."""
    total = np.float32(0)
    for i in range(len(masses)):
        total += masses[i] if masses[i] >= least else np.float32(0)
    return total


@compiled
def narrowed(masses: Any, smallest: float, wanted: float, margin: float) -> tuple[float, float]:
    """(low, high): all tokens with a mass of low or more have more than the wanted mass together, those with high or
    more have less. margin: bound on the error of a sum in fp32. smallest: a mass with which the first holds."""
    low, high = smallest, 2.0
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        mass = mass_at_least(masses, np.float32(middle))
        if abs(mass - wanted) < margin:
            break
        if mass > wanted:
            low = middle
        else:
            high = middle
    return low, high


@emitted
def set_masses(_context: Any, logits: Any, row: Any, best: Any, inverse: Any, masses: Any) -> Any:
    """(logits [n, vocab], row, best, inverse, masses [1, ≥ vocab]): masses[0] become exp((logit − best) · inverse)."""

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        array, number, top, factor, out = arguments
        logit_at, mass_at = (
            row_of(context, builder, logits, array, number),
            row_of(context, builder, masses, out, index(0)),
        )

        def see(x: Any, count: int) -> None:
            below = builder.fsub(load(builder, logit_at(x), types.float32, count), spread(builder, top, count))
            score = builder.fmul(below, spread(builder, factor, count))
            store(builder, exponential(builder, score), mass_at(x), 4)

        over_row(builder, width_of(context, builder, logits, array), NUMBERS, see)
        return context.get_dummy_value()

    return types.void(logits, types.intp, types.float32, types.float32, masses), code


@emitted
def hold(_context: Any, logits: Any, row: Any, masses: Any, low: Any, high: Any, held: Any, kept: Any) -> Any:
    """(logits [n, vocab], row, masses [1, ≥ vocab], low, high, held, kept [1, ≥ vocab]) → how many: the logits of a row
    whose masses are at least low and less than high, and these masses, become the first of held and kept."""

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        array, number, of_row, least, end, out, copies = arguments
        rows = (
            (logits, array, number),
            *((kind, x, index(0)) for kind, x in ((masses, of_row), (held, out), (kept, copies))),
        )
        logit_at, mass_at, held_at, kept_at = (row_of(context, builder, *each) for each in rows)
        found = cgutils.alloca_once_value(builder, index(0))

        def see(x: Any, count: int) -> None:
            mass = load(builder, mass_at(x), types.float32, count)
            inside = builder.fcmp_ordered(">=", mass, spread(builder, least, count))
            inside = builder.and_(inside, builder.fcmp_ordered("<", mass, spread(builder, end, count)))
            bits = cgutils.alloca_once_value(builder, builder.zext(builder.bitcast(inside, ir.IntType(count)), INDEX))
            some = builder.call(declared(builder, "llvm.ctpop.i64", INDEX, [INDEX]), [builder.load(bits)])
            with cgutils.for_range(builder, some, intp=INDEX):
                left, place = builder.load(bits), builder.load(found)
                lowest = declared(builder, "llvm.cttz.i64", INDEX, [INDEX, ir.IntType(1)])
                token = builder.add(x, builder.call(lowest, [left, ir.Constant(ir.IntType(1), 1)]))
                builder.store(builder.load(logit_at(token)), held_at(place))
                builder.store(builder.load(mass_at(token)), kept_at(place))
                builder.store(builder.and_(left, builder.sub(left, index(1))), bits)
                builder.store(builder.add(place, index(1)), found)

        over_row(builder, width_of(context, builder, logits, array), NUMBERS, see)
        return builder.load(found)

    return types.intp(logits, types.intp, masses, types.float32, types.float32, held, kept), code


@compiled
def cut_point(keys: Any, masses: Any, count: int, wanted: float) -> int:
    """The largest key from which on the masses have the wanted sum. All of them must have it."""
    low, high = keys[0], keys[0]
    for i in range(count):
        low, high = min(low, keys[i]), max(high, keys[i])
    high += 1
    while high - low > 1:
        middle = low + (high - low) // 2
        if mass_from(keys, masses, count, middle) >= wanted:
            low = middle
        else:
            high = middle
    return low


@compiled
def lowest_kept(tokens: Any, count: int, cut: int, top: float, temperature: float, floor: float) -> Any:
    """(the lowest logit from the cut on with the score `floor` or more, the mass of a token at the cut, whether no
    other logit has the cut's score). tokens: (logits, masses, keys); top: the row's best logit."""
    held, masses, keys = tokens
    own, lowest, mass, alone = held[0], np.float32(np.inf), masses[0], True
    for i in range(count):
        if keys[i] == cut:
            own, mass = held[i], masses[i]
    score = (np.float64(own) - top) / temperature
    for i in range(count):
        other = (np.float64(held[i]) - top) / temperature
        if keys[i] != cut and other == score:
            alone = False
        if keys[i] >= cut and other >= floor:
            lowest = min(lowest, held[i])
    return lowest, mass, alone


@compiled
def cut_rows(logits: Any, cuts: Any, room: Any, rounding: float, lowest: Any) -> None:
    """lowest fp32 [F] becomes the lowest logit that each row of logits fp32 [F, vocab] keeps; NaN where that is not
    clear.

    cuts: (temperatures, top_ps, floors fp64, wanted [F]), as candidates.Cuts has them. room: (masses, held, kept fp32
    [1, vocab], keys int64 [vocab]). rounding: relative error of an operation in fp32.
    """
    temperatures, top_ps, floors, wanted = cuts
    masses, held, kept, keys = room
    vocab = logits.shape[1]
    for row in range(logits.shape[0]):
        lowest[row] = np.nan
        if not wanted[row]:
            continue
        inverse, p, best = np.float32(1 / temperatures[row]), top_ps[row], largest(logits, row)
        set_masses(logits, row, best, inverse, masses)
        total = mass_of(masses[0], vocab)
        if not np.isfinite(total):
            continue
        low, high = (1 - MASS_MARGIN) * (1 - p) * total / vocab, 2.0
        if floors[row] == -np.inf:  # else a token beyond the cut may be the last one that is kept
            low, high = narrowed(masses[0], low, p * total, MASS_MARGIN * total)
        count = hold(logits, row, masses, np.float32(low), np.float32(high), held, kept)
        if count == 0:
            continue
        in_order(held[0].view(np.int32), count, keys)
        above = mass_from(masses[0], masses[0], vocab, np.float32(high))
        if not above + mass_of(kept[0], count) >= p * total:
            continue
        cut = cut_point(keys, kept[0], count, p * total - above)
        without, inside = above + mass_from(keys, kept[0], count, cut + 1), above + mass_from(keys, kept[0], count, cut)
        error = share_error(p, abs(best * inverse), vocab) * rounding + vocab * ROUNDING_PER_TOKEN
        given = cut, np.float64(best), temperatures[row], floors[row]
        found, mass, alone = lowest_kept((held[0], kept[0], keys), count, *given)
        clear = without / total + error < p < inside / total - error
        if clear and alone and (1 + EDGE) * low < mass < (1 - EDGE) * high:
            lowest[row] = found
