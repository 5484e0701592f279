"""Log-laws of rows, and rejection and block verification of chains, compiled by Numba for the CPU at hand.

The definitions are laws.py, decide.py and engine/sampling/acceptance.py. Here only rows that a decision needs are read.
All numbers are fp32, and arrays have two dimensions.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from engine.kernels.cpu_code import (
    VECTOR_BYTES,
    emitted,
    load,
    row_of,
    spread,
    store,
    width_of,
)
from engine.kernels.cpu_compile import compiled_exactly
from engine.kernels.cpu_exponentials import exponential, exponential_less_one, logarithm
from engine.kernels.cpu_reductions import keep_largest, largest, largest_of, sum_of

FLOAT, SIZE = ir.FloatType(), 4  # bytes of a number
NUMBERS = VECTOR_BYTES // SIZE  # of a vector
LEAST_TEMPERATURE = np.float32(np.finfo(np.float32).tiny)
NONE = np.float32(-np.inf)  # the log of no mass
MILLION = np.float32(1e6)  # acceptance.OVERLAP_SCALE


def _every(value: Any, number: float) -> Any:
    """A vector like `value` of one number."""
    return ir.Constant(value.type, [number] * value.type.count)


@emitted
def mass(_context: Any, logs: Any, row: Any) -> Any:
    """(logs [n, width], row) → Σ exp of a row."""

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        array, number = arguments
        at, width = row_of(context, builder, logs, array, number), width_of(context, builder, logs, array)

        def share(x: Any, count: int) -> Any:
            return exponential(builder, load(builder, at(x), logs.dtype, count))

        return sum_of(builder, width, FLOAT, NUMBERS, share)

    return types.float32(logs, types.intp), code


def _of_pair(term: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """What `emitted` takes to sum term(builder, log_scale + logp, logq) over two rows."""

    def make(_context: Any, logp: Any, row: Any, logq: Any, other: Any, log_scale: Any) -> Any:
        def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            p, number, q, of_draft, scale = arguments
            p_at, q_at = row_of(context, builder, logp, p, number), row_of(context, builder, logq, q, of_draft)

            def summand(x: Any, count: int) -> Any:
                scaled = builder.fadd(load(builder, p_at(x), logp.dtype, count), spread(builder, scale, count))
                return term(builder, scaled, load(builder, q_at(x), logq.dtype, count))

            return sum_of(builder, width_of(context, builder, logp, p), FLOAT, NUMBERS, summand)

        return types.float32(logp, types.intp, logq, types.intp, types.float32), code

    return make


def _smaller(builder: Any, scaled: Any, q: Any) -> Any:
    """exp of the smaller number. NaN stays."""
    least = builder.select(builder.fcmp_ordered("<", q, scaled), q, scaled)
    return exponential(builder, builder.select(builder.fcmp_unordered("uno", q, q), q, least))


def _share_left(builder: Any, scaled: Any, q: Any) -> Any:
    """1 − q / (scale · p), at least 0; NaN stays where p has mass. Precise where p and q are close."""
    zero = _every(scaled, 0.0)
    gap = builder.fsub(q, scaled)
    gap = builder.select(builder.fcmp_ordered(">", gap, zero), zero, gap)
    left = builder.fsub(zero, exponential_less_one(builder, gap))
    return builder.select(builder.fcmp_ordered("==", scaled, _every(scaled, float("-inf"))), zero, left)


def _mass_left(builder: Any, scaled: Any, q: Any) -> Any:
    return builder.fmul(exponential(builder, scaled), _share_left(builder, scaled, q))


shared_mass: Any = emitted(_of_pair(_smaller))  # Σ min(scale · p, q)
residual_mass: Any = emitted(_of_pair(_mass_left))  # Σ max(scale · p − q, 0)


@emitted
def residual(
    _context: Any, logp: Any, row: Any, logq: Any, other: Any, log_scale: Any, weights: Any, target: Any
) -> Any:
    """(logp, row, logq, other, log_scale, weights, target) → the largest weight. weights[target] becomes the log of
    max(scale · p − q, 0)."""

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        p, number, q, of_draft, scale, out, place = arguments
        p_at, q_at, at = (
            row_of(context, builder, *of) for of in ((logp, p, number), (logq, q, of_draft), (weights, out, place))
        )

        def weigh(x: Any, count: int, top: Any) -> None:
            scaled = builder.fadd(load(builder, p_at(x), logp.dtype, count), spread(builder, scale, count))
            left = _share_left(builder, scaled, load(builder, q_at(x), logq.dtype, count))
            weight = builder.fadd(scaled, logarithm(builder, left))
            weight = builder.select(builder.fcmp_unordered("uno", left, left), left, weight)
            nothing = builder.fcmp_ordered("==", left, _every(left, 0.0))
            weight = builder.select(nothing, _every(weight, float("-inf")), weight)
            store(builder, weight, at(x), SIZE)
            keep_largest(builder, top, weight)

        return largest_of(builder, width_of(context, builder, logp, p), FLOAT, NUMBERS, weigh)

    given = logp, types.intp, logq, types.intp, types.float32, weights, types.intp
    return types.float32(*given), code


@compiled_exactly
def log_laws(scores: Any, temperatures: Any, laws: Any) -> None:
    """laws [R, vocab] become log softmax(scores [R, vocab] / temperatures fp64 [R]); NaN where the best score of a row
    is not finite."""
    for row in range(scores.shape[0]):
        best, temperature = largest(scores, row), max(np.float32(temperatures[row]), LEAST_TEMPERATURE)
        for i in range(scores.shape[1]):
            laws[row, i] = (scores[row, i] - best) / temperature
        log_mass = np.log(mass(laws, row))
        for i in range(scores.shape[1]):
            laws[row, i] -= log_mass


@compiled_exactly
def draft_laws(laws: Any, depth: int, sources: Any, drafts: Any, logq: Any) -> None:
    """logq [N · K, vocab] become the log-laws of drafts int64 [N, K]: row sources[n] · depth + j of laws [n · depth,
    vocab'], or one-hot, as acceptance.fill_one_hot() has it. sources int64 [N]; below 0: no law."""
    count, length = drafts.shape
    vocab = logq.shape[1]
    known = min(vocab, laws.shape[1])
    for n in range(count):
        for j in range(length):
            target, token = n * length + j, drafts[n, j]
            seen = known if sources[n] >= 0 else 0
            for i in range(seen):
                logq[target, i] = laws[sources[n] * depth + j, i]
            logq[target, seen:] = NONE
            if token < 0 or token >= vocab:
                logq[target] = NONE
            elif not np.isfinite(logq[target, token]):
                logq[target] = NONE
                logq[target, token] = np.float32(0)


@compiled_exactly
def log_ratio(p: Any, q: Any) -> Any:
    """log p/q; −inf where q has no mass."""
    return NONE if q == NONE else p - q


@compiled_exactly
def at_most_one(log_chance: Any) -> Any:
    """The smaller of this and 0. NaN stays."""
    return np.float32(0) if log_chance > 0 else log_chance


@compiled_exactly
def first_failure(ratios: Any, log_scale: Any, coins: Any) -> int:
    """Drafts that rejection accepts, by log p/q [k] of a sequence."""
    for j in range(len(ratios)):
        if not coins[j] < np.exp(at_most_one(ratios[j] + log_scale)):
            return j
    return len(ratios)


@compiled_exactly
def last_success(logp: Any, row: int, logq: Any, draft: int, log_scales: Any, coins: Any) -> int:
    """Drafts that block verification accepts. log_scales [k + 1]: as AcceptanceLaw has them. row, draft: of the first
    draft."""
    for j in range(len(log_scales) - 1, 0, -1):
        scale = log_scales[j]
        chance = np.exp(scale)
        if j < len(log_scales) - 1:
            left = residual_mass(logp, row + j, logq, draft + j, scale)
            room = left - np.expm1(scale)
            chance = np.float32(0) if scale == NONE else left / room if room > 0 else np.float32(1)
        if coins[j - 1] < chance:
            return j
    return 0


@compiled_exactly
def decide(logp: Any, logq: Any, drafts: Any, lengths: Any, log_scales: Any, coins: Any, block: bool, out: Any) -> None:
    """As decide.decide_chains, for logp [N · (K + 1), vocab] and logq [N · K, vocab]. log_scales [N]: −log of the
    lenience; coins fp64 [N, K]. out: (accepted int64 [N], weights [N, vocab], overlaps int64 [N, K]); the overlaps of
    drafts that were not tried become 0."""
    accepted, weights, overlaps = out
    depth, vocab = drafts.shape[1], logp.shape[1]
    ratios, scales = np.empty(depth, np.float32), np.empty(depth + 1, np.float32)
    for n in range(drafts.shape[0]):
        k, row, draft, log_scale = lengths[n], n * (depth + 1), n * depth, log_scales[n]
        scales[0] = 0
        for j in range(k):
            token = min(max(drafts[n, j], 0), vocab - 1)
            ratios[j] = log_ratio(logp[row + j, token], logq[draft + j, token])
            scales[j + 1] = NONE if scales[j] == NONE else at_most_one(scales[j] + ratios[j])
        if block:
            kept = last_success(logp, row, logq, draft, scales[: k + 1], coins[n])
            scale = scales[kept]
        else:
            kept, scale = first_failure(ratios[:k], log_scale, coins[n]), log_scale
        accepted[n] = kept
        for j in range(depth):
            overlaps[n, j] = 0
            if j <= kept and j < k:
                shared = shared_mass(logp, row + j, logq, draft + j, log_scale)
                if shared > 0:  # and a number
                    overlaps[n, j] = np.int64(np.rint(min(shared, np.float32(1)) * MILLION))
        if kept == k or residual(logp, row + kept, logq, draft + kept, scale, weights, n) == NONE:
            for i in range(vocab):  # an assignment of the row would compile a message about its shape, for 2 s
                weights[n, i] = logp[row + kept, i]
