"""Finds the tokens that may win a Gumbel race (engine/sampling/token_race.py), compiled by Numba for the CPU at hand.

The noise is computed in fp32 here, for all tokens of a row in vectors. Tokens whose sums come near the largest one are
found. The caller computes their noise in fp64 and decides.
"""

import math
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from engine.kernels.cpu_code import (
    INDEX,
    VECTOR_BYTES,
    emitted,
    index,
    load,
    multiply_add,
    picked,
    row_of,
    spread,
    store,
    totals_of,
    width_of,
)
from engine.kernels.cpu_compile import compiled_exactly
from engine.kernels.cpu_exponentials import logarithm
from engine.kernels.cpu_reductions import keep_largest, larger, largest_of
from engine.sampling.hashing import GOLDEN, MASK, STEPS

FLOAT, INTEGER = ir.FloatType(), ir.IntType(32)
NUMBERS = VECTOR_BYTES // 4  # of a vector
UNIFORM_BITS = 52  # as noise.py takes them of a hash
NOISE_ERROR = 1e-3  # bound on the error of a token's noise, with much to spare: 5e-7 was found in 262,144 tokens
ROUNDING = 1e-6  # bound on the error of a sum, relative to its largest part
MOST_NOISE = 40.0  # more than the size of any noise
MOST_LOST = 4.0  # more than the noise of any token takes from its score: −log(53 · log 2), and the errors above
LEAST_TEMPERATURE = 1e-30  # below it products in fp32 lose digits
LARGEST_SCORE = 1e6  # over the temperature: beyond it rounding may hide the noise


def hashes(builder: Any, key: Any, first: Any, count: int) -> Any:
    """The hashes of the tokens `first`, first + 1, … in a row with this key, as hashing.py has them."""
    kind = ir.VectorType(INDEX, count)

    def every(number: int) -> Any:
        return ir.Constant(kind, [number] * count)

    base = builder.add(key, builder.mul(first, index(GOLDEN)))
    bits = builder.add(spread(builder, base, count), ir.Constant(kind, [(n + 1) * GOLDEN & MASK for n in range(count)]))
    for shift, factor in STEPS:
        bits = builder.xor(bits, builder.lshr(bits, every(shift)))
        bits = bits if factor == 1 else builder.mul(bits, every(factor))
    return bits


def clock(builder: Any, bits: Any) -> Any:
    """−log u for the uniform number u of each hash. u and 1 − u are both rounded to fp32, so that small ones of either
    kind are exact enough."""
    count, kind = bits.type.count, ir.VectorType(FLOAT, bits.type.count)

    def every(number: float) -> Any:
        return ir.Constant(kind, [number] * count)

    def share(whole: Any) -> Any:
        return builder.fmul(builder.fadd(builder.sitofp(whole, kind), every(0.5)), every(2.0**-UNIFORM_BITS))

    upper = builder.lshr(bits, ir.Constant(bits.type, [64 - UNIFORM_BITS] * count))
    u, v = share(upper), share(builder.sub(ir.Constant(bits.type, [(1 << UNIFORM_BITS) - 1] * count), upper))
    gap, late = builder.fsub(every(1), u), builder.fneg(logarithm(builder, u))
    # log(1 − v) = log u · v / (1 − u), where u is rounded and 1 − u is not (Goldberg 1991, theorem 4).
    early = builder.fmul(late, builder.fdiv(v, gap))
    early = builder.select(builder.fcmp_ordered(">", gap, every(0)), early, v)
    return builder.select(builder.fcmp_ordered(">", u, every(0.5)), early, late)


def most_noise(builder: Any, bits: Any) -> Any:
    """A bound on the noise of each hash: −log of a number that is at most 1 − u, which is at most the clock −log u."""
    count, kind = bits.type.count, ir.VectorType(FLOAT, bits.type.count)
    inverse = builder.xor(bits, ir.Constant(bits.type, [(1 << 64) - 1] * count))
    upper = builder.lshr(inverse, ir.Constant(bits.type, [1] * count))  # of 63 bits, as signed numbers are converted
    wide = ir.VectorType(INTEGER, count)
    exponent = builder.lshr(builder.bitcast(builder.sitofp(upper, kind), wide), ir.Constant(wide, [23] * count))
    octaves = builder.sub(ir.Constant(wide, [127 + 63 + 1] * count), exponent)  # one for rounding up
    return builder.fmul(builder.sitofp(octaves, kind), ir.Constant(kind, [math.log(2)] * count))


@emitted
def run(_context: Any, scores: Any, row: Any, key: Any, temperature: Any, above: Any, sums: Any, vectors: Any) -> Any:
    """(scores fp32 [n, width], row, key, temperature, above, sums fp32 [1, width], vectors int64 [1, width]) → (the
    largest sum, the largest score, how many vectors were computed): vectors[0, ..] become the first tokens of the
    vectors of NUMBERS tokens in which some may win, or of one behind the last whole vector. sums[0, token] becomes
    about score + temperature · noise for these, and −inf for a score that is not above `above`."""
    returned = types.Tuple([types.float32, types.float32, types.intp])

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        array, number, of_row, heat, limit, out, computed = arguments
        rows = ((scores, array, number), (sums, out, index(0)), (vectors, computed, index(0)))
        score_at, sum_at, place = (row_of(context, builder, *row) for row in rows)
        width, done = width_of(context, builder, scores, array), cgutils.alloca_once_value(builder, index(0))

        def see(x: Any, count: int, top: Any) -> None:
            keep_largest(builder, top, load(builder, score_at(x), types.float32, count))

        best = largest_of(builder, width, FLOAT, NUMBERS, see)
        floor, inexact = _lowest_end(builder, best, heat)
        lowest = builder.fsub(spread(builder, floor, NUMBERS), spread(builder, inexact, NUMBERS))
        to_beat = cgutils.alloca_once_value(builder, lowest)  # the same number NUMBERS times

        def race(x: Any, count: int, top: Any) -> None:
            score, bits = load(builder, score_at(x), types.float32, count), hashes(builder, of_row, x, count)
            warmth, nothing = spread(builder, heat, count), ir.Constant(score.type, [-math.inf] * count)
            runs = builder.fcmp_ordered(">", score, spread(builder, limit, count))
            bound = picked(builder, builder.load(to_beat), range(count))
            near = builder.fcmp_ordered(">=", multiply_add(builder, warmth, most_noise(builder, bits), score), bound)
            some = builder.bitcast(builder.and_(runs, near), ir.IntType(count))
            with builder.if_then(builder.icmp_unsigned("!=", some, ir.Constant(some.type, 0)), likely=False):
                vector = builder.load(done)
                builder.store(x, place(vector))
                builder.store(builder.add(vector, index(1)), done)
                noise = builder.fneg(logarithm(builder, clock(builder, bits)))
                value = builder.select(runs, multiply_add(builder, warmth, noise, score), nothing)
                store(builder, value, sum_at(x), 4)
                keep_largest(builder, top, value)
                ahead = totals_of(builder, [builder.load(top)], partial(larger, builder))
                ahead = builder.fsub(picked(builder, ahead, [0] * NUMBERS), spread(builder, inexact, NUMBERS))
                builder.store(larger(builder, ahead, lowest), to_beat)

        largest = largest_of(builder, width, FLOAT, NUMBERS, race)
        return context.make_tuple(builder, returned, [largest, best, builder.load(done)])

    return returned(scores, types.intp, types.uint64, types.float32, types.float32, sums, vectors), code


def _lowest_end(builder: Any, best: Any, heat: Any) -> tuple[Any, Any]:
    """(what the token with the best score ends with at least, bound on the error of sums)."""

    def times(number: Any, factor: float) -> Any:
        return builder.fmul(number, ir.Constant(FLOAT, factor))

    size = builder.select(builder.fcmp_ordered(">=", best, ir.Constant(FLOAT, 0)), best, builder.fneg(best))
    inexact = builder.fadd(times(size, 4 * ROUNDING), times(heat, 4 * (NOISE_ERROR + MOST_NOISE * ROUNDING)))
    return builder.fsub(best, times(heat, MOST_LOST)), inexact


@compiled_exactly
def contenders(
    scores: Any, keys: Any, temperatures: Any, above: Any, sums: Any, vectors: Any, rows: Any, tokens: Any
) -> int:
    """Write the (row, token) of all that may win the races of scores fp32 [n, width] to rows and tokens, in ascending
    order. Returns how many there are; −1: there is no room, a score is too large or not a number, or a
    temperature too low.

    keys uint64 [n]: of the rows' hashes; temperatures fp64, above fp32 [n]: only higher scores run; sums fp32 and
    vectors int64 [1, ≥ width]: room.
    """
    found, whole = 0, scores.shape[1] // NUMBERS * NUMBERS
    for row in range(scores.shape[0]):
        temperature = temperatures[row]
        top, best, count = run(scores, row, keys[row], np.float32(temperature), above[row], sums, vectors)
        if not abs(best) <= LARGEST_SCORE * temperature or temperature < LEAST_TEMPERATURE:
            return -1
        if top == -np.inf:
            continue
        error = temperature * NOISE_ERROR + (abs(best) + abs(top) + temperature * MOST_NOISE) * ROUNDING
        limit = np.float32(top - 2 * error)
        for first in vectors[0, :count]:
            for token in range(first, first + (NUMBERS if first < whole else 1)):
                if sums[0, token] >= limit:
                    if found == len(rows):
                        return -1
                    rows[found], tokens[found] = row, token
                    found += 1
    return found
