"""Rejection on draft trees as Triton kernels (engine/sampling/tree_acceptance.py has the mathematics).

The vocabulary is divided among programs of PART tokens. One launch for each rank of siblings makes what is left of the
target's law after every node of that rank, with its mass; one lets the coins decide; one writes the emitted token's
log-weights. What is left after a node is not normalised: whoever reads it subtracts the log of its mass.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from engine.kernels.decide_kernel import expm1, gap_of, half_to_even, uniform
from engine.sampling import acceptance, tree_acceptance

PART = 4096  # tokens of a program
TILE = 512  # tokens that a program looks at together
WARPS = 4
OVERLAP_SCALE = tl.constexpr(acceptance.OVERLAP_SCALE)
NONE = tl.constexpr(tree_acceptance.NONE)
NOWHERE = tl.constexpr(-2)  # no node's parent


def decide(
    logp: Tensor,
    logq: Tensor,
    drafts: Tensor,
    parents: Tensor,
    lenience: Tensor,
    keys: Tensor,
    positions: Tensor,
    width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As engine.kernels.decide_trees.decide_trees()."""
    logp, logq, drafts, parents = logp.contiguous(), logq.contiguous(), drafts.contiguous(), parents.contiguous()
    (count, size, vocab), device, dtype = logq.shape, logq.device, logp.dtype
    last, accepted, sources = torch.empty(3, count, dtype=torch.int64, device=device).unbind(0)
    weights, overlaps = torch.empty(count, vocab, dtype=dtype, device=device), torch.empty_like(drafts)
    if not count:
        return last, accepted, weights, overlaps
    parts = triton.cdiv(vocab, PART)
    left = torch.empty(count, size, vocab, dtype=dtype, device=device)
    tops, masses = torch.empty(2, count, size, parts, dtype=dtype, device=device).unbind(0)
    shared = torch.empty(count, size, parts, dtype=torch.float64, device=device)
    totals, scales = torch.empty(count, dtype=dtype, device=device), -lenience.to(dtype).log()
    room = (triton.next_power_of_2(size), triton.next_power_of_2(parts))
    for rank in range(width):
        sibling_kernel[(count, size, parts)](
            logp, logq, parents, scales, left, tops, masses, shared, rank, vocab, *room, PART, TILE,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    walk_kernel[(count,)](
        logp, logq, drafts, parents, scales, keys.contiguous(), positions.contiguous(), left, tops, masses, shared,
        last, accepted, sources, totals, overlaps, size, width, vocab, parts, *room,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    weight_kernel[(count, parts)](
        logp, left, last, sources, totals, weights, size, vocab, PART, TILE, num_warps=WARPS
    )  # fmt: skip
    return last, accepted, weights, overlaps


@triton.jit(do_not_specialize=["rank"], do_not_specialize_on_alignment=["parents", "masses"])
def sibling_kernel(
    logp: tl.tensor,
    logq: tl.tensor,
    parents: tl.tensor,
    scales: tl.tensor,
    left: tl.tensor,
    tops: tl.tensor,
    masses: tl.tensor,
    shared_out: tl.tensor,
    rank: tl.tensor,
    vocab: tl.tensor,
    NODES: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """A part of the log-weights that are left after one node, if it is of this rank; their greatest and their mass
    relative to it; and the part's sum of min(p, q)."""
    n, node, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    size, parts = tl.num_programs(1), tl.num_programs(2)
    nodes = tl.arange(0, NODES)
    family = tl.load(parents + n * size + nodes, mask=nodes < size, other=NOWHERE)
    parent = tl.load(parents + n * size + node)
    older = tl.sum(((family == parent) & (nodes < node)).to(tl.int32))
    if (parent == NONE) | (older != rank):
        return
    source, total = law_before(tops, masses, family, n, parent, node, rank, size, parts, NODES, PARTS)
    law = logp + (n * (size + 1) + parent) * vocab
    dtype: tl.constexpr = logp.dtype.element_ty
    scale = tl.load(scales + n)
    shared = tl.zeros([TILE], dtype)
    top, mass = tl.full([TILE], float("-inf"), dtype), tl.zeros([TILE], dtype)
    for start in range(part * PART, tl.minimum(vocab, (part + 1) * PART), TILE):
        ids = start + tl.arange(0, TILE)
        q = tl.load(logq + (n * size + node) * vocab + ids, mask=ids < vocab, other=float("-inf"))
        scaled = load_law(law, left, n * size + source, total, source, ids, vocab) + scale
        lower = tl.where((scaled < q) | (scaled != scaled), scaled, q)  # a NaN of either stays
        shared += tl.exp(lower)
        weight = scaled + tl.log(-expm1(gap_of(scaled, q)))
        tl.store(left + (n * size + node) * vocab + ids, weight, mask=ids < vocab)
        new_top = tl.where(weight > top, weight, top)
        level = tl.where(new_top == float("-inf"), 0.0, new_top).to(dtype)  # −inf minus −inf would be NaN
        mass = mass * tl.exp(top - level) + tl.exp(weight - level)
        top = new_top
    best = tl.max(top)
    level = tl.where(best == float("-inf"), 0.0, best).to(dtype)
    place = (n * size + node) * parts + part
    tl.store(tops + place, best)
    tl.store(masses + place, tl.sum(mass * tl.exp(top - level)))
    tl.store(shared_out + place, tl.sum(shared.to(tl.float64)))


@triton.jit(
    do_not_specialize=["size", "width"],
    do_not_specialize_on_alignment=["parents", "keys", "positions", "masses", "accepted_out"],
)
def walk_kernel(
    logp: tl.tensor,
    logq: tl.tensor,
    drafts: tl.tensor,
    parents: tl.tensor,
    scales: tl.tensor,
    keys: tl.tensor,
    positions: tl.tensor,
    left: tl.tensor,
    tops: tl.tensor,
    masses: tl.tensor,
    shared_in: tl.tensor,
    last_out: tl.tensor,
    accepted_out: tl.tensor,
    sources: tl.tensor,
    totals: tl.tensor,
    overlaps: tl.tensor,
    size: tl.tensor,
    width: tl.tensor,
    vocab: tl.tensor,
    parts: tl.tensor,
    NODES: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """The last row that one sequence's round visits, its depth, the overlaps of all nodes, and where the weights of the
    emitted token lie: the node after which they are left, or NONE for the row's own law, and the log of their mass."""
    n, nodes, place = tl.program_id(0).to(tl.int64), tl.arange(0, NODES), tl.arange(0, PARTS)
    family = tl.load(parents + n * size + nodes, mask=nodes < size, other=NOWHERE)
    scale = tl.load(scales + n)
    last, accepted = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for node in range(size):
        at = n * size + node
        parent = tl.load(parents + at)
        real = parent != NONE
        shared = tl.sum(tl.load(shared_in + at * parts + place, mask=(place < parts) & real, other=0.0))
        shared = tl.where(shared != shared, 0.0, tl.minimum(tl.maximum(shared, 0.0), 1.0))
        tl.store(overlaps + at, tl.where(real, half_to_even(shared * OVERLAP_SCALE), NONE))
        source, total = law_before(tops, masses, family, n, parent, node, width, size, parts, NODES, PARTS)
        token = tl.minimum(tl.maximum(tl.load(drafts + at), 0), vocab - 1)
        row = tl.maximum(parent, 0)
        p = load_law(logp + (n * (size + 1) + row) * vocab, left, n * size + source, total, source, token, vocab)
        q = tl.load(logq + at * vocab + token)
        ratio = tl.where(q == float("-inf"), float("-inf"), p - q).to(p.dtype)
        chance = tl.exp((ratio + scale).to(tl.float64))
        goes = (parent == last) & (uniform(tl.load(keys + at), tl.load(positions + at)) < chance)
        accepted += goes.to(tl.int64)
        last = tl.where(goes, node + 1, last)
    source, total = law_before(tops, masses, family, n, last, size, width, size, parts, NODES, PARTS)
    tl.store(last_out + n, last)
    tl.store(accepted_out + n, accepted)
    tl.store(sources + n, source)
    tl.store(totals + n, total)


@triton.jit(do_not_specialize=["size"])
def weight_kernel(
    logp: tl.tensor,
    left: tl.tensor,
    last: tl.tensor,
    sources: tl.tensor,
    totals: tl.tensor,
    weights: tl.tensor,
    size: tl.tensor,
    vocab: tl.tensor,
    PART: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """A part of one sequence's log-weights."""
    n, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source, total = tl.load(sources + n), tl.load(totals + n)
    law = logp + (n * (size + 1) + tl.load(last + n)) * vocab
    for start in range(part * PART, tl.minimum(vocab, (part + 1) * PART), TILE):
        ids = start + tl.arange(0, TILE)
        weight = load_law(law, left, n * size + source, total, source, ids, vocab)
        tl.store(weights + n * vocab + ids, weight, mask=ids < vocab)


@triton.jit
def law_before(
    tops: tl.tensor,
    masses: tl.tensor,
    family: tl.tensor,
    n: tl.tensor,
    parent: tl.tensor,
    node: tl.tensor,
    siblings: tl.tensor,
    size: tl.tensor,
    parts: tl.tensor,
    NODES: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """(the last sibling before `node` that left any mass, the log of that mass); (NONE, 0) if there is none: then the
    law is p itself. A node without mass left differs from q by rounding only, and is passed over."""
    nodes, place = tl.arange(0, NODES), tl.arange(0, PARTS)
    found = tl.max(tl.where((family == parent) & (nodes < node), nodes, NONE)).to(tl.int64)
    total = tl.zeros([], tops.dtype.element_ty)
    searching = (found >= 0) & (parent != NONE)  # nothing was computed for what is no node
    for _ in range(siblings):
        at = (n * size + tl.maximum(found, 0)) * parts + place
        inside = (place < parts) & searching
        top = tl.load(tops + at, mask=inside, other=float("-inf"))
        mass = tl.load(masses + at, mask=inside, other=0.0)
        best = tl.max(top)
        level = tl.where(best == float("-inf"), 0.0, best).to(top.dtype)
        whole = tl.sum(mass.to(tl.float64) * tl.exp((top - level).to(tl.float64)))
        has_mass = whole != 0  # NaN is mass too
        total = tl.where(searching & has_mass, tl.log(whole) + level, total).to(total.dtype)
        searching = searching & (whole == 0)
        older = tl.max(tl.where((family == parent) & (nodes < found), nodes, NONE)).to(tl.int64)
        found = tl.where(searching, older, found)
        searching = searching & (found >= 0)
    return found, total


@triton.jit
def load_law(
    law: tl.tensor,
    left: tl.tensor,
    at: tl.tensor,
    total: tl.tensor,
    source: tl.tensor,
    ids: tl.tensor,
    vocab: tl.tensor,
) -> tl.tensor:
    """The log-law at these ids: `law` if the source is NONE, else what is left after the source, at row `at`."""
    own = tl.load(law + ids, mask=(ids < vocab) & (source < 0), other=float("-inf"))
    rest = tl.load(left + at * vocab + ids, mask=(ids < vocab) & (source >= 0), other=float("-inf"))
    return tl.where(source < 0, own, rest - total)
