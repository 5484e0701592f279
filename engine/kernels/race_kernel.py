"""The Gumbel race as Triton kernels: one reads the scores once, in parts of a row; one joins the parts of each row.

The hashes equal those of engine/sampling/hashing.py bit for bit. All arithmetic is in fp64 and in the order of the
race on the CPU, without fused multiply-adds, so that draws differ only where logarithms differ in their last bit and
two scores are that close.

Noise in blocks (engine/sampling/noise.py) is mostly not made. Per block of 32 tokens the two earliest clocks are made.
The token with the first clock competes. No other token of the block exceeds the block's best score plus the noise of
the second clock, so the noise of the others is made only where this bound reaches the best score so far.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from engine.sampling import hashing
from engine.sampling import race as cpu_race

PART = 16_384  # tokens that one program races
SHORT_PART = 1024  # … where there are few rows: one row of 152k tokens took 52 µs in ten programs of an H100
FEW_ROWS = 16
TILE = 1024  # tokens that a program looks at together
WARPS = 8

BLOCK = tl.constexpr(hashing.BLOCK)
(SHIFT_1, FACTOR_1), (SHIFT_2, FACTOR_2), (SHIFT_3, _) = (map(tl.constexpr, step) for step in hashing.STEPS)
GOLDEN = tl.constexpr(hashing.GOLDEN)
FIRST_CLOCK_SALT = tl.constexpr(hashing.FIRST_CLOCK_SALT)
SECOND_CLOCK_SALT = tl.constexpr(hashing.SECOND_CLOCK_SALT)
SECOND_TOKEN_SALT = tl.constexpr(hashing.SECOND_TOKEN_SALT)
SLACK = tl.constexpr(cpu_race.SLACK)
NO_ID = tl.constexpr(2**31 - 1)


def race(scores: Tensor, keys: Tensor, positions: Tensor, temperatures: Tensor, blocks: bool) -> tuple[Tensor, Tensor]:
    """As engine.kernels.race.race()."""
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    rows, vocab = scores.shape
    part = SHORT_PART if rows <= FEW_ROWS else PART
    parts = triton.cdiv(vocab, part)
    tokens, finite = torch.empty_like(keys), torch.empty_like(keys, dtype=torch.bool)
    if not rows:
        return tokens, finite
    best = torch.empty(rows, parts, dtype=torch.float64, device=scores.device)
    ids = torch.empty(rows, parts, 2, dtype=torch.int32, device=scores.device)
    part_kernel[(rows, parts)](
        scores, keys, positions, temperatures, best, ids, vocab, scores.stride(0), part, blocks, TILE,
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    width = triton.next_power_of_2(parts)
    join_kernel[(rows,)](scores, best, ids, tokens, finite, scores.stride(0), parts, width, num_warps=1)
    return tokens, finite


@triton.jit(do_not_specialize_on_alignment=["keys", "positions", "temperatures"])
def part_kernel(
    scores: tl.tensor,
    keys: tl.tensor,
    positions: tl.tensor,
    temperatures: tl.tensor,
    best_out: tl.tensor,
    ids_out: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    PART: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Race the tokens of one part of one row: its best noisy score, that token, and the first NaN's token or NO_ID."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + row) + 1
    row_key = mix(tl.load(keys + row).to(tl.uint64) + position.to(tl.uint64) * GOLDEN)
    temperature = tl.load(temperatures + row)
    best, winner = tl.full([], float("-inf"), tl.float64), tl.full([], 0, tl.int32)
    offsets = tl.arange(0, TILE // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    nan_ids = tl.full([TILE // BLOCK, BLOCK], NO_ID, tl.int32)
    tops, top_ids = tl.full([TILE // BLOCK, BLOCK], float("-inf"), tl.float64), tl.zeros_like(nan_ids)
    for start in range(part * PART, tl.minimum(vocab, (part + 1) * PART), TILE):
        ids = start + offsets
        x = tl.load(scores + row * stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float64)
        nan_ids = tl.minimum(nan_ids, tl.where(x != x, ids, NO_ID))
        x = tl.where(x != x, float("-inf"), x)
        if temperature == 0:  # each place of the tile has a best score of its own, until the end
            top_ids = tl.where(x > tops, ids, top_ids)
            tops = tl.maximum(x, tops)
        elif tl.max(x) > float("-inf"):
            if BLOCKS:
                best, winner = race_blocks(best, winner, x, ids, row_key, temperature)
            else:
                noise = -tl.log(token_clocks(row_key, ids))
                best, winner = better(best, winner, x + temperature * noise, ids)
    best, winner = better(best, winner, tops, top_ids)
    place = row * tl.num_programs(1) + part
    tl.store(best_out + place, best)
    tl.store(ids_out + 2 * place, winner)
    tl.store(ids_out + 2 * place + 1, tl.min(nan_ids))


@triton.jit
def join_kernel(
    scores: tl.tensor,
    best: tl.tensor,
    ids: tl.tensor,
    tokens: tl.tensor,
    finite: tl.tensor,
    stride: tl.tensor,
    parts: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """The winner of a row among those of its parts, and whether its score is finite."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    place, inside = row * parts + part, part < parts
    value = tl.load(best + place, mask=inside, other=float("-inf"))
    winner = tl.load(ids + 2 * place, mask=inside, other=NO_ID)
    first_nan = tl.min(tl.load(ids + 2 * place + 1, mask=inside, other=NO_ID))
    winner = tl.min(tl.where(value == tl.max(value), winner, NO_ID))
    token = tl.where(first_nan < NO_ID, first_nan, winner).to(tl.int64)
    score = tl.load(scores + row * stride + token).to(tl.float64)
    tl.store(tokens + row, token)
    tl.store(finite + row, tl.abs(score) < float("inf"))


@triton.jit
def race_blocks(
    best: tl.tensor, winner: tl.tensor, x: tl.tensor, ids: tl.tensor, row_key: tl.tensor, temperature: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Race the tokens of a tile [blocks, BLOCK] whose noise is made in blocks."""
    offset = ids % BLOCK
    block = tl.min(ids, 1) // BLOCK
    bits = mix(mix(row_key ^ FIRST_CLOCK_SALT) + (block + 1).to(tl.uint64) * GOLDEN)
    first = clocks(bits) / BLOCK
    second = first + clocks(mix(bits + SECOND_CLOCK_SALT)) / (BLOCK - 1)
    first_offset = (bits % BLOCK).to(tl.int32)
    distance = (mix(bits + SECOND_TOKEN_SALT) % (BLOCK - 1)).to(tl.int32) + 1
    second_offset = (first_offset + distance) % BLOCK

    leader = tl.max(tl.where(offset == first_offset[:, None], x, float("-inf")), 1)
    best, winner = better(best, winner, leader + temperature * -tl.log(first), block * BLOCK + first_offset)
    bound = temperature * -tl.log(second)
    bound = tl.max(x, 1) + (bound + SLACK * (1 + tl.abs(bound)))
    if tl.max(bound) >= best:  # the leaders get too little noise here, but they have competed
        times = token_clocks(row_key, ids) + second[:, None]
        times = tl.where(offset == second_offset[:, None], second[:, None], times)
        best, winner = better(best, winner, x + temperature * -tl.log(times), ids)
    return best, winner


@triton.jit
def better(best: tl.tensor, winner: tl.tensor, values: tl.tensor, ids: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """(best, winner), or the best of these values and its token where it is larger, or as large and of a lower id."""
    top = tl.max(values)
    leader = tl.min(tl.where(values == top, ids, NO_ID))
    ahead = (top > best) | ((top == best) & (leader < winner))
    return tl.where(ahead, top, best), tl.where(ahead, leader, winner)


@triton.jit
def token_clocks(row_key: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """The clocks of tokens that have hashes of their own."""
    return clocks(mix(row_key + (ids + 1).to(tl.uint64) * GOLDEN))


@triton.jit
def clocks(bits: tl.tensor) -> tl.tensor:
    """Standard exponentials from the upper 52 bits."""
    return -tl.log(((bits >> 12).to(tl.float64) + 0.5) * 2.0**-52)


@triton.jit
def mix(z: tl.tensor) -> tl.tensor:
    """splitmix64's finaliser, on uint64."""
    z = (z ^ (z >> SHIFT_1)) * FACTOR_1
    z = (z ^ (z >> SHIFT_2)) * FACTOR_2
    return z ^ (z >> SHIFT_3)
