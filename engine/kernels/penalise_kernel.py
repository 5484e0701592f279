"""Penalties as a Triton kernel, and the update of the texts that they read."""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from engine.kernels import penalise as operations

TILE = 1024  # tokens that a program looks at together
WARPS = 4
NO_COLUMN, SEEN, OUTPUT = (tl.constexpr(x) for x in (operations.NO_COLUMN, operations.SEEN, operations.OUTPUT))


def record(uses: Tensor, tokens: Tensor) -> None:
    """As engine.kernels.penalise.record_texts()."""
    count = len(tokens) // 3
    if count:
        record_kernel[(triton.cdiv(count, TILE),)](uses, tokens, count, uses.shape[1], TILE, num_warps=WARPS)


def penalise(logits: Tensor, uses: Tensor, index: Tensor, strengths: Tensor, drafts: Tensor | None) -> Tensor:
    """As engine.kernels.penalise.penalise()."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    (rows, vocab), columns = logits.shape, index.shape[1] - 2
    out = torch.empty(rows, vocab, dtype=logits.dtype, device=logits.device)
    if not rows:
        return out
    table = index if drafts is None else drafts  # without drafts no column is read
    penalise_kernel[(rows, triton.cdiv(vocab, TILE))](
        logits, uses, index, strengths, table, out, vocab, uses.shape[1], logits.stride(0), *table.stride(),
        0 if drafts is None else columns, index.stride(0), TILE, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["tokens"])
def record_kernel(uses: tl.tensor, tokens: tl.tensor, count: tl.tensor, vocab: tl.tensor, TILE: tl.constexpr) -> None:
    """Add tokens to their entries. The same entry may come several times."""
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = place < count
    row = tl.load(tokens + place, mask=inside, other=0)
    token = tl.load(tokens + count + place, mask=inside, other=0)
    output = tl.load(tokens + 2 * count + place, mask=inside, other=0) > 0
    entry = uses + row * vocab + token
    tl.atomic_or(entry, SEEN, mask=inside)
    tl.atomic_add(entry, OUTPUT, mask=inside & output)


@triton.jit(
    do_not_specialize=["draft_stride", "column_stride", "columns", "index_stride"],
    do_not_specialize_on_alignment=["index", "strengths", "drafts"],
)
def penalise_kernel(
    logits: tl.tensor,
    uses: tl.tensor,
    index: tl.tensor,
    strengths: tl.tensor,
    drafts: tl.tensor,
    out: tl.tensor,
    vocab: tl.tensor,
    all_tokens: tl.tensor,
    stride: tl.tensor,
    draft_stride: tl.tensor,
    column_stride: tl.tensor,
    columns: tl.tensor,
    index_stride: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Penalise a tile of one row. uses has rows of all_tokens entries."""
    row, ids = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside, rows = ids < vocab, tl.num_programs(0)
    old = tl.load(logits + row * stride + ids, mask=inside, other=0.0)
    text, owner = tl.load(index + row * index_stride), tl.load(index + row * index_stride + 1)
    known = tl.load(uses + text * all_tokens + ids, mask=inside & (text >= 0), other=0)
    seen, count = (known & SEEN) > 0, known // OUTPUT
    for n in range(columns):
        column = tl.load(index + row * index_stride + 2 + n)
        used = column != NO_COLUMN
        token = tl.load(drafts + owner * draft_stride + column * column_stride, mask=used, other=0)
        token = tl.minimum(tl.maximum(token, 0), all_tokens - 1)
        hit = (ids == token) & used
        seen, count = seen | hit, count + hit.to(tl.int32)
    repetition = tl.load(strengths + row).to(old.dtype)
    frequency = tl.load(strengths + rows + row).to(old.dtype)
    presence = tl.load(strengths + 2 * rows + row).to(old.dtype)
    new = tl.where(old > 0, divided(old, repetition), old * repetition)
    new = new - (frequency * count.to(old.dtype) + presence * (count > 0).to(old.dtype))
    tl.store(out + row * vocab + ids, tl.where(seen, new, old), mask=inside)


@triton.jit
def divided(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """x / y, rounded to nearest. In fp32 the operator rounds less precisely."""
    return tl.div_rn(x, tl.broadcast_to(y, x.shape)) if x.dtype == tl.float32 else x / y
