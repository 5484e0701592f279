"""Root-mean-square normalisation (Zhang & Sennrich 2019, arXiv 1910.07467)."""

import math

import torch
from torch import Tensor


class RMSNorm:
    """y = (offset + w) · x / sqrt(mean(x²) + eps), the mean over the last `dims` dimensions.

    w [size], or [heads, size] where heads have weights of their own.
    Small layers spend their time on the number of kernels: torch's rms_norm has six, this has four. With n = |x|,
    sqrt(mean(x²) + eps) = hypot(n, sqrt(size · eps)) / sqrt(size), and sqrt(size) is multiplied into the weight.
    """

    def __init__(self, weight: Tensor, eps: float, *, offset: float = 0.0, dims: int = 1) -> None:
        self.eps, self.dims = eps, tuple(range(-dims, 0))
        self.shape = weight.shape[-dims:]
        size = self.shape.numel()
        # In 16 bits a rounded norm would be too coarse, so torch's kernel is used, which computes in fp32. It takes
        # neither an offset, which would round the weight, nor weights per head.
        self.coarse = weight.dtype.itemsize == 2
        self.fused = self.coarse and offset == 0 and weight.shape == self.shape
        if self.coarse:
            self.weight = weight if self.fused else offset + weight.float()
        else:
            self.weight = (offset + weight) * math.sqrt(size)
        self.floor = weight.new_tensor(math.sqrt(size * eps))

    def __call__(self, x: Tensor) -> Tensor:
        if self.coarse:
            return self._in_fp32(x)
        return torch.mul(x, self.weight).div_(self._scale(x))

    def apply_(self, x: Tensor) -> None:
        """Normalise x in place."""
        if self.coarse:
            x.copy_(self._in_fp32(x))
        else:
            scale = self._scale(x)
            x.mul_(self.weight).div_(scale)

    def _scale(self, x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, 2, self.dims, True).hypot_(self.floor)

    def _in_fp32(self, x: Tensor) -> Tensor:
        if self.fused:
            return torch.rms_norm(x, self.shape, self.weight, self.eps)
        return torch.rms_norm(x.float(), self.shape, None, self.eps).mul_(self.weight).to(x.dtype)
