"""Log-laws as Triton kernels, which divide each row among programs of PART tokens."""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from engine.kernels import laws as operations
from engine.kernels.penalise_kernel import divided

PART = 4096  # tokens of a program
TILE = 1024  # tokens that a program looks at together
WARPS = 4
NO_LAW = tl.constexpr(operations.NO_LAW)
LEAST_32, LEAST_64 = (tl.constexpr(torch.finfo(dtype).tiny) for dtype in (torch.float32, torch.float64))


def log_law(scores: Tensor, temperatures: Tensor) -> Tensor:
    """As engine.kernels.laws.log_law()."""
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    (rows, vocab), device = scores.shape, scores.device
    dtype = torch.float64 if scores.dtype is torch.float64 else torch.float32
    out = torch.empty(rows, vocab, dtype=dtype, device=device)
    if not rows:
        return out
    parts = triton.cdiv(vocab, PART)
    tops, masses = (torch.empty(rows, parts, dtype=dtype, device=device) for _ in range(2))
    shape = (vocab, scores.stride(0), PART, TILE)
    mass_kernel[(rows, parts)](scores, temperatures, tops, masses, *shape, num_warps=WARPS, enable_fp_fusion=False)
    width = triton.next_power_of_2(parts)
    law_kernel[(rows, parts)](
        scores, temperatures, tops, masses, out, *shape, width, num_warps=WARPS, enable_fp_fusion=False
    )  # fmt: skip
    return out


def draft_laws(laws: Tensor | None, sources: Tensor | None, drafts: Tensor, logp: Tensor) -> Tensor:
    """As engine.kernels.laws.draft_laws()."""
    (count, depth), vocab = drafts.shape, logp.shape[-1]
    out = torch.empty(count, depth, vocab, dtype=logp.dtype, device=logp.device)
    if not out.numel():
        return out
    known = min(vocab, 0 if laws is None else laws.shape[-1])
    table = out if laws is None else laws if laws.stride(2) == 1 else laws.contiguous()  # unread without laws
    draft_kernel[(count, depth, triton.cdiv(vocab, PART))](
        table, drafts if sources is None else sources, drafts, out, known, vocab, *table.stride()[:2],
        *drafts.stride(), sources is not None, PART, TILE, num_warps=WARPS,
    )  # fmt: skip
    return out


def mark_non_finite(drawn: Tensor, logits: Tensor, mark: int) -> Tensor:
    """As engine.kernels.laws.mark_non_finite()."""
    out = torch.empty(drawn.shape, dtype=drawn.dtype, device=drawn.device)
    if out.numel():
        mark_kernel[drawn.shape](drawn, logits, out, mark, *drawn.stride(), *logits.stride(), num_warps=1)
    return out


@triton.jit(do_not_specialize_on_alignment=["temperatures"])
def mass_kernel(
    scores: tl.tensor,
    temperatures: tl.tensor,
    tops: tl.tensor,
    masses: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    PART: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """The best score of a part that is a number, and the part's mass relative to it: NaN if a score is."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype: tl.constexpr = tops.dtype.element_ty
    temperature = load_temperature(temperatures + row, dtype)
    best = tl.full([TILE], float("-inf"), dtype)
    for start in range(part * PART, tl.minimum(vocab, (part + 1) * PART), TILE):
        x = load_tile(scores + row * stride, start, vocab, dtype, TILE)
        best = tl.where(x > best, x, best)
    top = tl.max(best)
    level = tl.where(top == float("-inf"), 0.0, top).to(dtype)  # −inf minus −inf would be NaN
    mass = tl.zeros([TILE], dtype)
    for start in range(part * PART, tl.minimum(vocab, (part + 1) * PART), TILE):
        x = load_tile(scores + row * stride, start, vocab, dtype, TILE)
        mass += tl.exp(divided(x - level, temperature))
    place = row * tl.num_programs(1) + part
    tl.store(tops + place, top)
    tl.store(masses + place, tl.sum(mass))


@triton.jit(do_not_specialize_on_alignment=["temperatures"])
def law_kernel(
    scores: tl.tensor,
    temperatures: tl.tensor,
    tops: tl.tensor,
    masses: tl.tensor,
    out: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """The log-law of a part, from the best scores and masses of all parts. Where the best score is infinite or a mass
    is NaN, the total is NaN."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype: tl.constexpr = tops.dtype.element_ty
    temperature = load_temperature(temperatures + row, dtype)
    place, parts = tl.arange(0, WIDTH), tl.num_programs(1)
    top = tl.load(tops + row * parts + place, mask=place < parts, other=float("-inf"))
    mass = tl.load(masses + row * parts + place, mask=place < parts, other=0.0).to(tl.float64)
    best = tl.max(top)
    shares = mass * tl.exp(divided(top - best, temperature).to(tl.float64))
    total = tl.log(tl.sum(shares)).to(dtype)
    for start in range(part * PART, tl.minimum(vocab, (part + 1) * PART), TILE):
        x = load_tile(scores + row * stride, start, vocab, dtype, TILE)
        ids = start + tl.arange(0, TILE)
        tl.store(out + row * vocab + ids, divided(x - best, temperature) - total, mask=ids < vocab)


@triton.jit
def load_temperature(place: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """The number to divide scores by, in the laws' type: never 0."""
    least: tl.constexpr = LEAST_32 if dtype == tl.float32 else LEAST_64
    return tl.maximum(tl.load(place).to(dtype), tl.full([], least, dtype))


@triton.jit(
    do_not_specialize=["row_stride", "draft_stride", "column_stride"],
    do_not_specialize_on_alignment=["sources", "drafts"],
)
def draft_kernel(
    laws: tl.tensor,
    sources: tl.tensor,
    drafts: tl.tensor,
    out: tl.tensor,
    known: tl.tensor,
    vocab: tl.tensor,
    row_stride: tl.tensor,
    depth_stride: tl.tensor,
    draft_stride: tl.tensor,
    column_stride: tl.tensor,
    HAS_SOURCES: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """A part of the law of one draft. `known` ids have a place in `laws`."""
    n, j, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    source = tl.load(sources + n) if HAS_SOURCES else n
    draft = tl.load(drafts + n * draft_stride + j * column_stride)
    law, has_law = laws + source * row_stride + j * depth_stride, source != NO_LAW
    of_draft = tl.load(law + draft, mask=has_law & (draft >= 0) & (draft < known), other=float("-inf"))
    usable = (tl.abs(of_draft) < float("inf")).to(tl.int32) > 0  # Triton's interpreter cannot spread float comparisons
    for start in range(part * PART, tl.minimum(vocab, (part + 1) * PART), TILE):
        ids = start + tl.arange(0, TILE)
        x = tl.load(law + ids, mask=(ids < known) & usable, other=float("-inf"))
        one_hot = tl.where(ids == draft, 0.0, float("-inf")).to(x.dtype)
        row = out + (n * tl.num_programs(1) + j) * vocab
        tl.store(row + ids, tl.where(usable, x, one_hot), mask=ids < vocab)


@triton.jit(do_not_specialize=["row_stride", "rank_stride"], do_not_specialize_on_alignment=["drawn"])
def mark_kernel(
    drawn: tl.tensor,
    logits: tl.tensor,
    out: tl.tensor,
    mark: tl.tensor,
    row_stride: tl.tensor,
    rank_stride: tl.tensor,
    logit_stride: tl.tensor,
    token_stride: tl.tensor,
) -> None:
    """One drawn id."""
    row, rank = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(drawn + row * row_stride + rank * rank_stride)
    logit = tl.load(logits + row * logit_stride + token * token_stride).to(tl.float64)
    kept = tl.where(tl.abs(logit) < float("inf"), token, mark)
    tl.store(out + row * tl.num_programs(1) + rank, kept)


@triton.jit
def load_tile(
    values: tl.tensor, start: tl.tensor, vocab: tl.tensor, dtype: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """TILE values of a row from `start` on; −inf beyond its end."""
    ids = start + tl.arange(0, TILE)
    return tl.load(values + ids, mask=ids < vocab, other=float("-inf")).to(dtype)
