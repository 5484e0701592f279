"""The state of a thread while it computes rounds."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def computing(device: torch.device) -> Iterator[None]:
    """Computes without autograd. On CUDA `device` is the thread's current one meanwhile: Triton launches kernels there,
    whichever GPU their tensors lie on, and a new thread begins with the first GPU."""
    with torch.inference_mode(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield
