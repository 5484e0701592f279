"""Root-mean-square normalisation (Zhang & Sennrich 2019, arXiv 1910.07467)."""

import math

import torch
from torch import Tensor


class RMSNorm:
    """y = w · x / sqrt(mean(x²) + eps) for x [rows, size].

    A decoder of small layers is a row of small kernels, and torch's own rms_norm is six of them; this is four. With
    n = |x|, sqrt(mean(x²) + eps) = hypot(n, sqrt(size · eps)) / sqrt(size), and sqrt(size) goes into the weight.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[0]
        self.shape, self.eps = (size,), eps
        # A norm rounded to bf16 would be too coarse; there torch's kernel, which works in fp32, is used.
        self.coarse = weight.dtype is torch.bfloat16
        self.weight = weight if self.coarse else weight * math.sqrt(size)
        self.floor = weight.new_tensor(math.sqrt(size * eps))

    def __call__(self, x: Tensor) -> Tensor:
        if self.coarse:
            return torch.rms_norm(x, self.shape, self.weight, self.eps)
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self.floor)
        return torch.mul(x, self.weight).div_(scale)
