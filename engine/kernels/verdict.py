"""The verdict of `match`, with all that the host needs of it, as one operation on the device."""

import torch
from torch import Tensor

from engine.kernels.operations import operation


def _match_verdict_shapes(
    drawn: Tensor, finite: Tensor, drafts: Tensor, first_rows: Tensor, parents: Tensor | None = None
) -> Tensor:
    return drafts.new_empty(drafts.shape[0], 3 + drafts.shape[1])


@operation("verdict_kernel.match_verdict", shapes=_match_verdict_shapes)
def match_verdict(
    drawn: Tensor, finite: Tensor, drafts: Tensor, first_rows: Tensor, parents: Tensor | None = None
) -> Tensor:
    """Accept drafts while they equal the target's own draws, as engine.sampling.matching.match().

    drawn [R] int64: the target's draws, sequence-major, k + 1 per sequence. finite [R] bool: whether the score of each
    draw is finite. drafts [N, K] int64: row i holds k[i] ≤ K ids, then anything. first_rows [N + 1] int64 or int32: the
    first row of each sequence, then the end of the last one's; R may exceed it. Ignore the entries of a sequence
    without rows: it fills up a batch. parents [N, K] int64: the drafts are trees, and each node's parent has this row
    of its sequence, at most the node's own number; −1: no node. None: chains.

    Returns [N, 3 + K] int64: the row of the sequence that gives the recovered or bonus token, which is the number of
    accepted drafts of a chain; this token; 1 if every row that was visited is finite, else 0; the drafts.
    """
    return verdict_reference(drawn, finite, drafts, first_rows, parents)


def verdict_reference(
    drawn: Tensor, finite: Tensor, drafts: Tensor, first_rows: Tensor, parents: Tensor | None = None
) -> Tensor:
    """The definition of match_verdict(), in torch operations of fixed shapes."""
    depth = drafts.shape[1]
    first, end = first_rows[:-1, None], first_rows[1:, None]
    rows = first + torch.arange(depth + 1, device=drawn.device)
    places = torch.minimum(rows, end - 1).clamp_(0, len(drawn) - 1)
    draws, row_finite = drawn[places], finite[places]
    if parents is None:
        agrees = (drafts == draws[:, :-1]) & (rows[:, 1:] < end)
        last = agrees.cumprod(1).sum(1, keepdim=True)
        all_finite = row_finite.cumprod(1).gather(1, last)
    else:
        last, all_finite = torch.zeros_like(drafts[:, :1]), row_finite[:, :1]
        for node, parent in enumerate(parents.split(1, 1)):  # a node comes behind its parent and its earlier siblings
            goes = (parent == last) & (drafts[:, node : node + 1] == draws.gather(1, last))
            last = torch.where(goes, node + 1, last)
            all_finite = all_finite & (row_finite[:, node + 1 : node + 2] | ~goes)
    return torch.cat([last, draws.gather(1, last), all_finite, drafts], 1)
