"""Finds where the accepted nodes of draft trees lie in memory, as one operation on the device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.operations import operation

NO_ROW = -1  # of a node that is not in memory


def _path_rows_shapes(last_rows: Tensor, owners: Tensor, parents: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
    return torch.empty_like(targets, memory_format=torch.contiguous_format)


@operation("path_rows_kernel.path_rows", shapes=_path_rows_shapes)
def path_rows(last_rows: Tensor, owners: Tensor, parents: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
    """The rows of memory [M, K] whose numbers belong into the rows `targets` [M, K], once M trees are decided.

    last_rows [N] int64: see DeviceVerdict. owners [M] int64: the entry of last_rows of each tree. parents [M, K] int64:
    the row of each node's parent, at most the node's own number; −1: no node. rows [M, K] int64: the row of memory that
    holds each node, or NO_ROW. The i-th node of the accepted path belongs into the i-th target; a target behind the
    path, or whose node is not in memory, keeps its own numbers.
    """
    return path_rows_reference(last_rows, owners, parents, rows, targets)


def path_rows_reference(last_rows: Tensor, owners: Tensor, parents: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
    """The definition of path_rows(), in torch operations of fixed shapes."""
    size, row = parents.shape[1], last_rows[owners]
    on_path = torch.zeros_like(parents, dtype=torch.bool)
    for node in range(size - 1, -1, -1):  # a node comes behind its parent
        on_path[:, node] = row == node + 1
        row = torch.where(on_path[:, node], parents[:, node], row)
    places = torch.where(on_path & (rows != NO_ROW), on_path.cumsum(1) - 1, size)  # one more column takes all others
    return F.pad(targets, (0, 1)).scatter(1, places, rows)[:, :size].contiguous()
