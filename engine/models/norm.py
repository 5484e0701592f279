"""Root-mean-square normalisation (Zhang & Sennrich 2019, arXiv 1910.07467)."""

import math

import torch
from torch import Tensor

from engine.kernels.row_work import normalise, normalise_heads_


class RMSNorm:
    """y = (offset + w) · x / sqrt(mean(x²) + eps), the mean over the last `dims` dimensions.

    w [size], or [heads, size] where heads have weights of their own.
    Small layers spend their time on the number of kernels: torch's rms_norm has six on a CPU, this has four. With
    n = |x|, sqrt(mean(x²) + eps) = hypot(n, sqrt(size · eps)) / sqrt(size), and sqrt(size) is multiplied into the
    weight. 16-bit numbers go through fp32, because a rounded norm or a rounded sum of offset and weight is too coarse.
    """

    def __init__(self, weight: Tensor, eps: float, *, offset: float = 0.0, dims: int = 1) -> None:
        self.eps, self.offset, self.dims = eps, offset, tuple(range(-dims, 0))
        self.shape = weight.shape[-dims:]
        size = self.shape.numel()
        self.coarse = weight.dtype.itemsize == 2
        self.fused = self.coarse and weight.is_cuda and dims == 1
        wide = weight.float() if self.coarse else weight
        self.weight = weight if self.fused else (offset + wide) * math.sqrt(size)
        self.floor = wide.new_tensor(math.sqrt(size * eps))

    def __call__(self, x: Tensor) -> Tensor:
        if self.fused:
            return normalise(x, self.weight, self.eps, self.offset)
        if self.coarse:
            wide = x.float()
            self._normalise(wide)
            return wide.to(x.dtype)
        return torch.mul(x, self.weight).div_(self._scale(x))

    def of_sum(self, x: Tensor, added: Tensor) -> Tensor:
        """Add to x in place. Returns the normalised sum."""
        if self.fused:
            return normalise(x, self.weight, self.eps, self.offset, added)
        return self(x.add_(added))

    def apply_(self, x: Tensor) -> None:
        """Normalise x in place."""
        if self.fused:
            normalise_heads_(x, self.weight, self.eps, self.offset)
        elif self.coarse:
            x.copy_(self(x))
        else:
            self._normalise(x)

    def _normalise(self, x: Tensor) -> None:
        scale = self._scale(x)
        x.mul_(self.weight).div_(scale)

    def _scale(self, x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, 2, self.dims, True).hypot_(self.floor)
