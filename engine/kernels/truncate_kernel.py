"""Top-k, top-p and min-p as Triton kernels that search each row's threshold and never sort.

A number is searched by its key: an unsigned integer in the order of the numbers. Each pass over a row divides the range
of the threshold's key by 16: it adds up, in fp64, what lies below each of 15 keys of the range. So 8 passes find a
threshold among fp32 logits, and 16 among fp64 logits. First the k-th largest logit is found by counts, then the least
likely token that top-p keeps by masses. With one pass for the maxima and one for the result, fp32 logits are read at
most 18 times. A row without top-k or without top-p skips the passes for it, and a part without a logit in the range
is only read.

A row is divided among programs of PART logits. A pass is one launch: each program repeats the step from the last pass's
sums to the new range, because programs cannot wait for each other.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

PART = 4096  # logits of a program
TILE = 256  # logits that a program looks at together
WARPS = 4
BITS = tl.constexpr(4)  # of the range that a pass finds
STEPS = tl.constexpr(16)  # 2 ** BITS
LEAST_TEMPERATURE = tl.constexpr(torch.finfo(torch.float64).tiny)
ALL_KEYS = tl.constexpr(2**64 - 1)
LEAST_INT32, LARGEST_INT32 = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
LARGEST_INT64, SIGN = tl.constexpr(2**63 - 1), tl.constexpr(2**63)


def truncate(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """As engine.kernels.truncate.truncate()."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    (rows, vocab), device = logits.shape, logits.device
    out = torch.empty(rows, vocab, dtype=logits.dtype, device=device)
    if not rows:
        return out
    parts = triton.cdiv(vocab, PART)
    grid, width, passes = (rows, parts), triton.next_power_of_2(parts), logits.dtype.itemsize * 8 // BITS.value
    tops = torch.empty(rows, parts, dtype=torch.float64, device=device)
    # Passes alternate between two buffers: programs of a pass read the last one's while others write.
    ranges = torch.empty(2, rows, 4, dtype=torch.int64, device=device)
    masses = torch.empty(2, rows, 2, dtype=torch.float64, device=device)
    sums = torch.empty(2, rows, parts, STEPS.value, dtype=torch.float64, device=device)
    shape = (vocab, logits.stride(0), parts, PART, TILE, width)
    top_kernel[grid](logits, tops, vocab, logits.stride(0), PART, TILE, num_warps=WARPS)
    for n in range(2 * passes):
        old, new = (n + 1) % 2, n % 2
        search_kernel[grid](
            logits, temperatures, top_k, top_p, tops,
            ranges[old], masses[old], sums[old], ranges[new], masses[new], sums[new],
            *shape, n >= passes, n % passes == 0, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    write_kernel[grid](
        logits, temperatures, top_k, top_p, min_p.log(), tops, ranges[1], masses[1], sums[1], out,
        *shape, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def top_kernel(
    logits: tl.tensor, tops: tl.tensor, vocab: tl.tensor, stride: tl.tensor, PART: tl.constexpr, TILE: tl.constexpr
) -> None:
    """The largest logit of a part; NaN if one is NaN."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top = tl.full([TILE], float("-inf"), tl.float64)
    broken = tl.zeros([TILE], tl.int32)
    for start in range(part * PART, tl.minimum(vocab, (part + 1) * PART), TILE):
        x = load_tile(logits + row * stride, start, vocab, TILE).to(tl.float64)
        broken = tl.where(x != x, 1, broken)
        top = tl.where(x > top, x, top)
    result = tl.where(tl.max(broken) > 0, float("nan"), tl.max(top))
    tl.store(tops + row * tl.num_programs(1) + part, result)


@triton.jit
def first_range(best: tl.tensor, kth: tl.tensor, wanted: tl.tensor) -> tl.tensor:
    """(least, largest key) that a threshold may have before its search; kth for both if none is wanted."""
    lowest = keys_of(tl.full([], float("-inf"), best.dtype))
    return tl.where(wanted, lowest, kth), tl.where(wanted, keys_of(best), kth)


@triton.jit
def store_range(
    ranges: tl.tensor,
    masses: tl.tensor,
    row: tl.tensor,
    least: tl.tensor,
    largest: tl.tensor,
    kth: tl.tensor,
    below: tl.tensor,
    total: tl.tensor,
) -> None:
    tl.store(ranges + 4 * row, least.to(tl.int64, bitcast=True))
    tl.store(ranges + 4 * row + 1, largest.to(tl.int64, bitcast=True))
    tl.store(ranges + 4 * row + 2, kth.to(tl.int64, bitcast=True))
    tl.store(masses + 2 * row, below)
    tl.store(masses + 2 * row + 1, total)


@triton.jit(do_not_specialize_on_alignment=["temperatures", "top_k", "top_p"])
def search_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    tops: tl.tensor,
    old_ranges: tl.tensor,
    old_masses: tl.tensor,
    old_sums: tl.tensor,
    ranges: tl.tensor,
    masses: tl.tensor,
    sums: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    parts: tl.tensor,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    MASS: tl.constexpr,
    FIRST: tl.constexpr,
) -> None:
    """One pass over one part of a row. MASS: for top-p, else for top-k. FIRST: the first pass of its search.

    ranges [F, 4]: least and largest key that the threshold may have; key of the k-th largest logit. masses [F, 2]: what
    lies below the least key; what the row has in all, 0 before it is known. sums [F, parts, STEPS]: what each part has
    below the keys of pivots().
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best, temperature, usable = row_scale(tops, temperatures, row, parts, WIDTH)
    if FIRST:
        below, total = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
        kth = keys_of(tl.full([], float("-inf"), logits.dtype.element_ty))
        wanted = usable & (tl.load(top_p + row) < 1 if MASS else tl.load(top_k + row) < vocab)
        if MASS:
            kth, _, _, _, _ = narrowed(old_ranges, old_masses, old_sums, top_k, top_p, row, vocab, parts, WIDTH, False)
        least, largest = first_range(best.to(logits.dtype.element_ty), kth, wanted)
    else:
        least, largest, kth, below, total = narrowed(
            old_ranges, old_masses, old_sums, top_k, top_p, row, vocab, parts, WIDTH, MASS
        )
    if part == 0:
        store_range(ranges, masses, row, least, largest, kth, below, total)

    if least < largest:
        found = tl.zeros([STEPS, TILE], tl.float64 if MASS else tl.int32)
        step = tl.arange(0, STEPS)
        if any_within(logits + row * stride, part * PART, vocab, least, largest, PART):
            pivot = tl.where(step == 0, ALL_KEYS, pivots(least, largest))[:, None]
            floor = (value_of(kth, logits.dtype.element_ty).to(tl.float64) - best) / temperature
            for start in range(part * PART, tl.minimum(vocab, (part + 1) * PART), TILE):
                x = load_tile(logits + row * stride, start, vocab, TILE)
                key = keys_of(x)
                inside = (key >= least) & (key <= largest) & (start + tl.arange(0, TILE) < vocab)
                if MASS:
                    scaled = (x.to(tl.float64) - best) / temperature
                    weight = tl.where(inside & (scaled >= floor), tl.exp(scaled), 0.0)
                else:
                    weight = inside.to(tl.int32)
                found += tl.where(key[None, :] < pivot, weight[None, :], 0)
        tl.store(sums + (row * parts + part) * STEPS + step, tl.sum(found, 1).to(tl.float64))


@triton.jit(do_not_specialize_on_alignment=["temperatures", "top_k", "top_p"])
def write_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    log_min_p: tl.tensor,
    tops: tl.tensor,
    ranges: tl.tensor,
    masses: tl.tensor,
    sums: tl.tensor,
    out: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    parts: tl.tensor,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Write one part of a row, with −inf below the threshold."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best, temperature, usable = row_scale(tops, temperatures, row, parts, WIDTH)
    key, _, _, _, _ = narrowed(ranges, masses, sums, top_k, top_p, row, vocab, parts, WIDTH, True)
    threshold = (value_of(key, logits.dtype.element_ty).to(tl.float64) - best) / temperature
    threshold = tl.maximum(threshold, tl.load(log_min_p + row))
    for start in range(part * PART, tl.minimum(vocab, (part + 1) * PART), TILE):
        ids = start + tl.arange(0, TILE)
        x = load_tile(logits + row * stride, start, vocab, TILE)
        kept = ((x.to(tl.float64) - best) / temperature >= threshold) | (usable == 0)
        tl.store(out + row * vocab + ids, tl.where(kept, x, float("-inf")), mask=ids < vocab)


@triton.jit
def narrowed(
    ranges: tl.tensor,
    masses: tl.tensor,
    sums: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    row: tl.tensor,
    vocab: tl.tensor,
    parts: tl.tensor,
    WIDTH: tl.constexpr,
    MASS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(least and largest key, the k-th logit's key, what lies below the least key, the row's mass) after a pass.

    The threshold is the largest key below which no more lies than may be removed.
    """
    least = tl.load(ranges + 4 * row).to(tl.uint64, bitcast=True)
    largest = tl.load(ranges + 4 * row + 1).to(tl.uint64, bitcast=True)
    kth = tl.load(ranges + 4 * row + 2).to(tl.uint64, bitcast=True)
    below, total = tl.load(masses + 2 * row), tl.load(masses + 2 * row + 1)
    if least < largest:
        part, step = tl.arange(0, WIDTH)[:, None], tl.arange(0, STEPS)
        found = tl.load(sums + (row * parts + part) * STEPS + step[None, :], mask=part < parts, other=0.0)
        found = tl.sum(found, 0)
        if MASS:
            total = tl.where(total == 0, tl.sum(tl.where(step == 0, found, 0.0)), total)
            limit = (1 - tl.load(top_p + row)) * total
        else:
            limit = (vocab - tl.minimum(tl.load(top_k + row), vocab)).to(tl.float64)
        removable = (below + found <= limit) & (pivots(least, largest) <= largest) & (step > 0)
        chosen = tl.max(tl.where(removable, step, 0))
        below += tl.sum(tl.where((step == chosen) & (step > 0), found, 0.0))
        width = (largest - least) >> BITS
        least += chosen.to(tl.uint64) * (width + 1)
        largest = tl.minimum(largest, least + width)
    return least, largest, kth, below, total


@triton.jit
def pivots(least: tl.tensor, largest: tl.tensor) -> tl.tensor:
    """STEPS keys that divide a range."""
    return least + tl.arange(0, STEPS).to(tl.uint64) * (((largest - least) >> BITS) + 1)


@triton.jit
def row_scale(
    tops: tl.tensor, temperatures: tl.tensor, row: tl.tensor, parts: tl.tensor, WIDTH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(largest logit, temperature, whether the row can be truncated). Rows that are not finite or greedy stay whole."""
    part = tl.arange(0, WIDTH)
    top = tl.load(tops + row * parts + part, mask=part < parts, other=float("-inf"))
    broken = tl.max((top != top).to(tl.int32))
    best = tl.max(tl.where(top != top, float("-inf"), top))
    temperature = tl.load(temperatures + row)
    usable = (broken == 0) & (tl.abs(best) < float("inf")) & (temperature > 0)
    return best, tl.maximum(temperature, LEAST_TEMPERATURE), usable


@triton.jit
def any_within(
    logits: tl.tensor, start: tl.tensor, vocab: tl.tensor, least: tl.tensor, largest: tl.tensor, PART: tl.constexpr
) -> tl.tensor:
    """Whether a part has a logit in the range of keys."""
    key = keys_of(load_tile(logits, start, vocab, PART))
    return tl.max(((key >= least) & (key <= largest)).to(tl.int32)) > 0


@triton.jit
def load_tile(logits: tl.tensor, start: tl.tensor, vocab: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    ids = start + tl.arange(0, TILE)
    return tl.load(logits + ids, mask=ids < vocab, other=float("-inf"))


@triton.jit
def keys_of(x: tl.tensor) -> tl.tensor:
    """uint64 keys in the order of fp32 or fp64 numbers; both zeros have one key."""
    x = tl.where(x == 0, 0.0, x)
    if x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        key = ((bits ^ ((bits >> 31) & LARGEST_INT32)).to(tl.int64) - LEAST_INT32).to(tl.uint64, bitcast=True)
    else:
        bits = x.to(tl.int64, bitcast=True)
        key = (bits ^ ((bits >> 63) & LARGEST_INT64)).to(tl.uint64, bitcast=True) ^ SIGN
    return key


@triton.jit
def value_of(key: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """The number that has this key."""
    if dtype == tl.float32:
        bits = (key.to(tl.int64, bitcast=True) + LEAST_INT32).to(tl.int32)
        number = (bits ^ ((bits >> 31) & LARGEST_INT32)).to(tl.float32, bitcast=True)
    else:
        bits = (key ^ SIGN).to(tl.int64, bitcast=True)
        number = (bits ^ ((bits >> 63) & LARGEST_INT64)).to(tl.float64, bitcast=True)
    return number
