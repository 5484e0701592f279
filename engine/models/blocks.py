"""CPU memory for weights."""

import mmap
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

MAPPED_BYTES = 2**21  # a huge page


def block(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor in CPU memory, not filled. A large one goes back to the system as soon as it is freed.

    Otherwise the holes that the tensors leave in the heap when they are freed add a tenth to the memory of the process.
    """
    size = prod(shape) * dtype.itemsize
    if size < MAPPED_BYTES:
        return torch.empty(tuple(shape), dtype=dtype)
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux: a fault per 2 MiB
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8).view(dtype).view(tuple(shape))
