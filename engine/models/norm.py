"""Root-mean-square normalisation (Zhang & Sennrich 2019, arXiv 1910.07467)."""

import math

import torch
from torch import Tensor


class RMSNorm:
    """y = w · x / sqrt(mean(x²) + eps) for x [rows, size].

    Small layers spend their time on the number of kernels: torch's rms_norm has six, this has four. With n = |x|,
    sqrt(mean(x²) + eps) = hypot(n, sqrt(size · eps)) / sqrt(size), and sqrt(size) is multiplied into the weight.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[0]
        self.shape, self.eps = (size,), eps
        # In bf16 and fp16 a rounded norm would be too coarse, so torch's kernel is used, which computes in fp32.
        self.coarse = weight.dtype.itemsize < 4
        self.weight = weight if self.coarse else weight * math.sqrt(size)
        self.floor = weight.new_tensor(math.sqrt(size * eps))

    def __call__(self, x: Tensor) -> Tensor:
        if self.coarse:
            return torch.rms_norm(x, self.shape, self.weight, self.eps)
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self.floor)
        return torch.mul(x, self.weight).div_(scale)
