"""The rows of accepted paths as a Triton kernel: one program per tree."""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from engine.kernels import path_rows as operations

NO_ROW = tl.constexpr(operations.NO_ROW)


def path_rows(last_rows: Tensor, owners: Tensor, parents: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
    """As engine.kernels.path_rows.path_rows()."""
    count, size = parents.shape
    out = torch.empty(count, size, dtype=torch.int64, device=parents.device)
    if out.numel():
        tables = (parents.contiguous(), rows.contiguous(), targets.contiguous())
        path_kernel[(count,)](
            last_rows, owners, *tables, out, last_rows.stride(0), size, triton.next_power_of_2(size), num_warps=1
        )
    return out


@triton.jit(
    do_not_specialize=["stride", "size"],
    do_not_specialize_on_alignment=["last_rows", "owners", "parents", "rows", "targets"],
)
def path_kernel(
    last_rows: tl.tensor,
    owners: tl.tensor,
    parents: tl.tensor,
    rows: tl.tensor,
    targets: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    NODES: tl.constexpr,
) -> None:
    """The rows of one tree."""
    tree, nodes = tl.program_id(0).to(tl.int64), tl.arange(0, NODES)
    row, on_path = tl.load(last_rows + tl.load(owners + tree) * stride), tl.zeros([NODES], tl.int32)
    for i in range(size):
        node = size - 1 - i
        hit = row == node + 1
        on_path = tl.where((nodes == node) & hit, 1, on_path)
        row = tl.where(hit, tl.load(parents + tree * size + node), row)
    places = tl.cumsum(on_path, 0) - 1
    own = tl.load(rows + tree * size + nodes, mask=nodes < size, other=NO_ROW)
    target = tl.load(targets + tree * size + nodes, mask=nodes < size, other=NO_ROW)
    goes = (places[:, None] == nodes[None, :]) & (on_path == 1)[:, None]
    source = tl.max(tl.where(goes, own[:, None], NO_ROW), 0)
    tl.store(out + tree * size + nodes, tl.where(source == NO_ROW, target, source), mask=nodes < size)
