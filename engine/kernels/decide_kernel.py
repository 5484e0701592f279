"""Rejection and block verification of chains as Triton kernels (engine/sampling/acceptance.py has the mathematics).

The vocabulary is divided among programs of PART tokens. One launch sums each position's masses, one lets the coins
decide, one writes the emitted token's log-weights, and one puts p in the place of a residual without mass.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from engine.kernels.race_kernel import GOLDEN, mix
from engine.sampling import acceptance

PART = 4096  # tokens of a program
TILE = 512  # tokens that a program looks at together
WARPS = 4
OVERLAP_SCALE = tl.constexpr(acceptance.OVERLAP_SCALE)


def decide(
    logp: Tensor,
    logq: Tensor,
    drafts: Tensor,
    lengths: Tensor,
    lenience: Tensor | None,
    keys: Tensor,
    ends: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """As engine.kernels.decide.decide_chains()."""
    logp, logq, drafts = logp.contiguous(), logq.contiguous(), drafts.contiguous()
    (count, depth, vocab), device, dtype = logq.shape, logq.device, logp.dtype
    accepted, overlaps = torch.empty_like(lengths), torch.empty_like(drafts)
    weights = torch.empty(count, vocab, dtype=dtype, device=device)
    if not count:
        return accepted, weights, overlaps
    parts, is_block = triton.cdiv(vocab, PART), lenience is None
    width = triton.next_power_of_2(parts)
    sums = torch.empty(2, count, depth, parts, dtype=torch.float64, device=device)
    scales = torch.empty(count, dtype=dtype, device=device)
    found = torch.empty(count, parts, dtype=torch.int32, device=device)
    fixed = scales if lenience is None else -lenience.to(dtype).log()  # block verification makes its own
    laws = logp, logq, drafts, lengths
    mass_kernel[(count, depth, parts)](
        logp, logq, drafts, fixed, sums, vocab, is_block, PART, TILE, num_warps=WARPS, enable_fp_fusion=False
    )
    coin_kernel[(count,)](
        *laws, fixed, keys, ends, sums, accepted, overlaps, scales, vocab, depth, parts, is_block, width,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    weight_kernel[(count, parts)](
        logp, logq, lengths, accepted, scales, weights, found, vocab, depth, PART, TILE,
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    fallback_kernel[(count, parts)](logp, accepted, weights, found, vocab, depth, PART, TILE, width, num_warps=WARPS)
    return accepted, weights, overlaps


@triton.jit
def mass_kernel(
    logp: tl.tensor,
    logq: tl.tensor,
    drafts: tl.tensor,
    fixed: tl.tensor,
    sums: tl.tensor,
    vocab: tl.tensor,
    IS_BLOCK: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """A part's sums at one position of one sequence: of min(p, q) and, for block verification, of max(scale·p − q, 0)
    with the scale after the drafts before the position."""
    n, j, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    depth = tl.num_programs(1)
    dtype: tl.constexpr = logp.dtype.element_ty
    scale = tl.zeros([], dtype)
    if IS_BLOCK:
        for i in range(j):
            scale = next_scale(scale, log_ratio(logp, logq, drafts, n, i, depth, vocab))
    else:
        scale = tl.load(fixed + n)
    shared, rest = tl.zeros([TILE], dtype), tl.zeros([TILE], dtype)
    for start in range(part * PART, tl.minimum(vocab, (part + 1) * PART), TILE):
        ids = start + tl.arange(0, TILE)
        p = tl.load(logp + (n * (depth + 1) + j) * vocab + ids, mask=ids < vocab, other=float("-inf"))
        q = tl.load(logq + (n * depth + j) * vocab + ids, mask=ids < vocab, other=float("-inf"))
        scaled = p + scale
        level = p if IS_BLOCK else scaled
        lower = tl.where((level < q) | (level != level), level, q)  # a NaN of either stays
        shared += tl.exp(lower)
        if IS_BLOCK:
            rest -= tl.exp(scaled) * expm1(gap_of(scaled, q))
    place = (n * depth + j) * tl.num_programs(2) + part
    tl.store(sums + place, tl.sum(shared.to(tl.float64)))
    tl.store(sums + tl.num_programs(0) * depth * tl.num_programs(2) + place, tl.sum(rest.to(tl.float64)))


@triton.jit(do_not_specialize=["depth"], do_not_specialize_on_alignment=["lengths", "keys", "ends"])
def coin_kernel(
    logp: tl.tensor,
    logq: tl.tensor,
    drafts: tl.tensor,
    lengths: tl.tensor,
    fixed: tl.tensor,
    keys: tl.tensor,
    ends: tl.tensor,
    sums: tl.tensor,
    accepted_out: tl.tensor,
    overlaps: tl.tensor,
    scales_out: tl.tensor,
    vocab: tl.tensor,
    depth: tl.tensor,
    parts: tl.tensor,
    IS_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """How many drafts of one sequence the coins accept, its overlaps, and the log-scale of the emitted token's p."""
    n, place = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    length, rest = tl.load(lengths + n), sums + tl.num_programs(0) * depth * parts
    key, end = tl.load(keys + n), tl.load(ends + n)
    scale = tl.zeros([], logp.dtype.element_ty)
    if not IS_BLOCK:
        scale = tl.load(fixed + n)
    accepted, at_accepted = tl.zeros([], tl.int64), scale
    for j in range(depth):
        row = (n * depth + j) * parts
        shared = tl.sum(tl.load(sums + row + place, mask=place < parts, other=0.0))
        shared = tl.where(shared != shared, 0.0, tl.minimum(tl.maximum(shared, 0.0), 1.0))
        tl.store(overlaps + n * depth + j, half_to_even(shared * OVERLAP_SCALE))
        ratio = log_ratio(logp, logq, drafts, n, j, depth, vocab)
        coin = uniform(key, end + j)
        if IS_BLOCK:
            scale = next_scale(scale, ratio)
            chance = tl.exp(scale.to(tl.float64))
            if j + 1 < tl.minimum(length, depth):
                mass = tl.sum(tl.load(rest + row + parts + place, mask=place < parts, other=0.0))
                room = mass - expm1(scale.to(tl.float64))
                chance = tl.where(room > 0, mass / room, 1.0)
                chance = tl.where(scale == float("-inf"), 0.0, chance)
            passes = (coin < chance) & (j < length)
            accepted = tl.where(passes, j + 1, accepted)
            at_accepted = tl.where(passes, scale, at_accepted)
        else:
            chance = tl.exp((ratio + scale).to(tl.float64))
            accepted += ((coin < chance) & (j < length) & (accepted == j)).to(tl.int64)
    tl.store(accepted_out + n, accepted)
    tl.store(scales_out + n, at_accepted)


@triton.jit(do_not_specialize=["depth"], do_not_specialize_on_alignment=["lengths"])
def weight_kernel(
    logp: tl.tensor,
    logq: tl.tensor,
    lengths: tl.tensor,
    accepted: tl.tensor,
    scales: tl.tensor,
    weights: tl.tensor,
    found: tl.tensor,
    vocab: tl.tensor,
    depth: tl.tensor,
    PART: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """A part of one sequence's log-weights, and whether any of them has mass."""
    n, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(accepted + n)
    complete = row == tl.load(lengths + n)
    scale = tl.load(scales + n)
    scale = tl.where(complete, 0.0, scale).to(scale.dtype)
    any_mass = tl.zeros([TILE], tl.int32)
    for start in range(part * PART, tl.minimum(vocab, (part + 1) * PART), TILE):
        ids = start + tl.arange(0, TILE)
        p = tl.load(logp + (n * (depth + 1) + row) * vocab + ids, mask=ids < vocab, other=float("-inf"))
        q = tl.load(logq + (n * depth + row) * vocab + ids, mask=(ids < vocab) & (not complete), other=float("-inf"))
        scaled = p + scale
        weight = scaled + tl.log(-expm1(gap_of(scaled, q)))
        any_mass = tl.where(weight != float("-inf"), 1, any_mass)
        tl.store(weights + n * vocab + ids, weight, mask=ids < vocab)
    tl.store(found + n * tl.num_programs(1) + part, tl.max(any_mass))


@triton.jit(do_not_specialize=["depth"])
def fallback_kernel(
    logp: tl.tensor,
    accepted: tl.tensor,
    weights: tl.tensor,
    found: tl.tensor,
    vocab: tl.tensor,
    depth: tl.tensor,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Write p in the place of log-weights without any mass."""
    n, part, place = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)
    parts = tl.num_programs(1)
    if tl.max(tl.load(found + n * parts + place, mask=place < parts, other=0)) == 0:
        row = (n * (depth + 1) + tl.load(accepted + n)) * vocab
        for start in range(part * PART, tl.minimum(vocab, (part + 1) * PART), TILE):
            ids = start + tl.arange(0, TILE)
            p = tl.load(logp + row + ids, mask=ids < vocab, other=float("-inf"))
            tl.store(weights + n * vocab + ids, p, mask=ids < vocab)


@triton.jit
def log_ratio(
    logp: tl.tensor,
    logq: tl.tensor,
    drafts: tl.tensor,
    n: tl.tensor,
    j: tl.tensor,
    depth: tl.tensor,
    vocab: tl.tensor,
) -> tl.tensor:
    """log p/q at a draft; −inf where q gives it no probability."""
    token = tl.load(drafts + n * depth + j)
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)
    p = tl.load(logp + (n * (depth + 1) + j) * vocab + token)
    q = tl.load(logq + (n * depth + j) * vocab + token)
    return tl.where(q == float("-inf"), float("-inf"), p - q).to(p.dtype)


@triton.jit
def next_scale(scale: tl.tensor, ratio: tl.tensor) -> tl.tensor:
    """The log of min(p₁…pᵢ / q₁…qᵢ, 1) after one more draft; it stays at −inf."""
    moved = scale + ratio
    moved = tl.where(moved > 0, 0.0, moved).to(scale.dtype)  # a NaN stays
    return tl.where(scale == float("-inf"), scale, moved)


@triton.jit
def gap_of(scaled: tl.tensor, q: tl.tensor) -> tl.tensor:
    """The log of q / (scale·p), at most 0: no mass is left where it is 0."""
    gap = tl.where(scaled == float("-inf"), 0.0, q - scaled)
    return tl.where(gap > 0, 0.0, gap).to(q.dtype)  # a NaN stays


@triton.jit
def expm1(x: tl.tensor) -> tl.tensor:
    """e^x − 1 for x ≤ 0, precise in fp64 near 0 too: by its series there."""
    small = tl.where(x > -0.5, x, 0.0).to(x.dtype)
    series = tl.full(x.shape, 1.0, x.dtype)
    for n in tl.static_range(16, 1, -1):
        series = 1.0 + small * series / n
    return tl.where(x > -0.5, small * series, tl.exp(x) - 1.0)


@triton.jit
def uniform(key: tl.tensor, position: tl.tensor) -> tl.tensor:
    """A number in [0, 1), bit for bit as engine.sampling.noise.uniforms() makes it."""
    bits = mix(key.to(tl.uint64) + (position + 1).to(tl.uint64) * GOLDEN)
    return (bits >> 11).to(tl.float64) * 2.0**-53


@triton.jit
def half_to_even(x: tl.tensor) -> tl.tensor:
    """A number of at least 0, rounded to an integer as torch.round() does."""
    whole = x.to(tl.int64)
    rest = x - whole.to(x.dtype)
    up = (rest > 0.5) | ((rest == 0.5) & (whole % 2 == 1))
    return whole + up.to(tl.int64)
