"""Tells out-of-memory errors from other errors."""

import torch


def out_of_memory(error: BaseException) -> bool:
    """Whether the error means that memory ran out. torch has an error class for that on a GPU, but not on a CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "you tried to allocate" in str(error)
