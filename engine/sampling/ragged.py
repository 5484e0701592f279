"""The numbers of drafts of a ragged batch, with what the device has to know of them."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from cache.transfer import index_tensor
from engine.device.staging import RoundNumbers, Staged


class Ragged(tuple[int, ...]):
    """The k of each of N sequences, on their way to the device. Where plain numbers are given in its place, they are
    sent when they are needed."""

    staged: Staged
    padding: Staged | None  # see padded(); None: all k are equal

    @classmethod
    def put(cls, ks: Seq[int], numbers: RoundNumbers) -> Seq[int]:
        """The ks on their way; on the CPU the ks as they are."""
        if not numbers.staging.deferred:
            return ks
        ragged = cls(ks)
        ragged.staged = numbers.index(ks)
        equal = min(ks) == max(ks)
        ragged.padding = None if equal else numbers.ints(("padding", ragged), lambda: _padding(ks))
        return ragged


Lengths = Seq[int] | Tensor  # the ks of N sequences; as a tensor they are on the device already


def lengths(ks: Lengths, device: torch.device) -> Tensor:
    """The ks on the device, int64 [N]."""
    if isinstance(ks, Tensor):
        return ks
    return ks.staged.tensor if isinstance(ks, Ragged) else index_tensor(ks, device)


def padded(values: Tensor, ks: Seq[int]) -> Tensor:
    """[R, …] with k + 1 rows per sequence → [N, K + 1, …], filled up with the sequence's last row."""
    depth = max(ks)
    if min(ks) == depth:
        return values.view(len(ks), depth + 1, *values.shape[1:])
    staged = ks.padding if isinstance(ks, Ragged) else None
    index = index_tensor(_padding(ks), values.device) if staged is None else staged.tensor
    return values[index.view(len(ks), depth + 1)]


def _padding(ks: Seq[int]) -> list[int]:
    depth, first, index = max(ks), 0, list[int]()
    for k in ks:
        index += [first + min(j, k) for j in range(depth + 1)]
        first += k + 1
    return index
