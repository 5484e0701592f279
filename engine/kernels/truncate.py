"""Top-k, top-p and min-p as one operation on the device, for all rows of a round.

On CUDA it is the Triton kernel of truncate_kernel.py, which searches thresholds. Elsewhere, and without Triton, it is
truncate_reference(), which sorts: torch operations of fixed shapes that never wait for the device.
"""

import torch
from torch import Tensor

from engine.kernels.operations import operation
from engine.sampling.filters import Filters, removed


def _truncate_shapes(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@operation("truncate_kernel.truncate", shapes=_truncate_shapes)
def truncate(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """A copy of logits [F, vocab], fp32 or fp64, with −inf for the tokens that the filters of their row remove.

    engine.sampling.filters.removed() defines these tokens. Per row [F]: temperatures fp64; top_k int64, at least 1, and
    from the vocabulary's size on it keeps everything; top_p fp64, 1 keeps everything; min_p fp64, 0 keeps everything.
    A row of temperature 0 is not changed, because its best token stays whatever the filters are.
    """
    return truncate_reference(logits, temperatures, top_k, top_p, min_p)


def truncate_reference(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The definition of truncate(), by sorting each row."""
    # Whether any row has a top-p is not known on the host.
    gone = removed(logits, Filters(temperatures, top_k, top_p, min_p, any_top_p=True))
    return logits.masked_fill(gone & (temperatures > 0)[:, None], -torch.inf)
