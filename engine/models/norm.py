"""Root-mean-square normalisation (Zhang & Sennrich 2019, arXiv 1910.07467)."""

import math

import torch
from torch import Tensor


class RMSNorm:
    """y = (offset + w) · x / sqrt(mean(x²) + eps), the mean over the last `dims` dimensions.

    w [size], or [heads, size] where heads have weights of their own.
    Small layers spend their time on the number of kernels: torch's rms_norm has six on a CPU, this has four. With
    n = |x|, sqrt(mean(x²) + eps) = hypot(n, sqrt(size · eps)) / sqrt(size), and sqrt(size) is multiplied into the
    weight. 16-bit numbers go through fp32, because a rounded norm or a rounded sum of offset and weight is too coarse.
    """

    def __init__(self, weight: Tensor, eps: float, *, offset: float = 0.0, dims: int = 1) -> None:
        self.eps, self.dims = eps, tuple(range(-dims, 0))
        self.shape = weight.shape[-dims:]
        size = self.shape.numel()
        self.coarse = weight.dtype.itemsize == 2
        # CUDA has one kernel for it, which takes neither an offset nor weights per head.
        self.fused = self.coarse and weight.is_cuda and offset == 0 and weight.shape == self.shape
        wide = weight.float() if self.coarse else weight
        self.weight = weight if self.fused else (offset + wide) * math.sqrt(size)
        self.floor = wide.new_tensor(math.sqrt(size * eps))

    def __call__(self, x: Tensor) -> Tensor:
        if self.fused:
            return torch.rms_norm(x, self.shape, self.weight, self.eps)
        if self.coarse:
            wide = x.float()
            self._normalise(wide)
            return wide.to(x.dtype)
        return torch.mul(x, self.weight).div_(self._scale(x))

    def apply_(self, x: Tensor) -> None:
        """Normalise x in place."""
        if self.coarse:
            x.copy_(self(x))
        else:
            self._normalise(x)

    def _normalise(self, x: Tensor) -> None:
        scale = self._scale(x)
        x.mul_(self.weight).div_(scale)

    def _scale(self, x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, 2, self.dims, True).hypot_(self.floor)
