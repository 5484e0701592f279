"""Sets a thread up for rounds: no autograd, and its engine's GPU as the current one."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


def computing(device: torch.device) -> AbstractContextManager[object]:
    """Computes without autograd. On CUDA `device` is the thread's current one meanwhile: Triton launches kernels there,
    whichever GPU their tensors lie on, and a new thread begins with the first GPU."""
    return _computing_on(device) if device.type == "cuda" else torch.inference_mode()


@contextmanager
def _computing_on(device: torch.device) -> Iterator[None]:
    with torch.inference_mode(), torch.cuda.device(device):
        yield
