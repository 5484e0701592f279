"""The verdict of `match` as a Triton kernel: one program per sequence."""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor


def match_verdict(
    drawn: Tensor, finite: Tensor, drafts: Tensor, first_rows: Tensor, parents: Tensor | None = None
) -> Tensor:
    """As engine.kernels.verdict.match_verdict()."""
    count, depth = drafts.shape
    table = torch.empty(count, 3 + depth, dtype=torch.int64, device=drafts.device)
    if count:
        width = triton.next_power_of_2(depth + 1)
        verdict_kernel[(count,)](
            drawn, finite, drafts, first_rows, None if parents is None else parents.contiguous(), table,
            len(drawn), depth, *drafts.stride(), width, num_warps=1,
        )  # fmt: skip
    return table


@triton.jit(
    do_not_specialize=["rows", "depth", "row_stride", "column_stride"],
    do_not_specialize_on_alignment=["first_rows", "parents"],
)
def verdict_kernel(
    drawn: tl.tensor,
    finite: tl.tensor,
    drafts: tl.tensor,
    first_rows: tl.tensor,
    parents: tl.tensor,
    table: tl.tensor,
    rows: tl.tensor,
    depth: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """One line of the table."""
    sequence, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    first, end = tl.load(first_rows + sequence), tl.load(first_rows + sequence + 1)
    place = first + column
    live = (place < end) & (place < rows)
    draws = tl.load(drawn + place, mask=live, other=-1)
    row_finite = tl.load(finite + place, mask=live, other=0) != 0
    ids = tl.load(drafts + sequence * row_stride + column * column_stride, mask=column < depth, other=-1)
    if parents is None:
        rejected = (draws != ids) | (column >= depth) | (place + 1 >= end)
        last = tl.min(tl.where(rejected, column, WIDTH)).to(tl.int64)
        visited = column <= last
    else:
        last = tl.zeros([], tl.int64)
        visited = column == 0
        for node in range(depth):
            parent = tl.load(parents + sequence * depth + node)
            draw = tl.max(tl.where(column == last, draws, -1))
            draft = tl.max(tl.where(column == node, ids, -2))
            last = tl.where((parent == last) & (draft == draw), node + 1, last)
            visited |= column == last
    token = tl.max(tl.where(column == last, draws, -1))
    broken = tl.max((visited & (row_finite == 0)).to(tl.int32))
    line = table + sequence * (3 + depth)
    tl.store(line, last)
    tl.store(line + 1, token)
    tl.store(line + 2, (1 - broken).to(tl.int64))
    tl.store(line + 3 + column, ids, mask=column < depth)
