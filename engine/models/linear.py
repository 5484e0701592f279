"""The decoder's matrix products, in the fastest form for few rows.

`Linear`: on a CPU in fp32 and bf16 the weight is packed at load: reordered into oneDNN's blocked layout. A packed
product has two properties that matter here (measured, docs/log.md). Two to eight rows cost about as much as one, which
makes verification cheap. A row's result does not depend, bit for bit, on the other rows of the call. For few rows of a
small weight an unpacked product is used: it has neither property, but a fifth of the fixed cost. Elsewhere torch's own
linear is used.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

UNPACKED_LIMIT = (
    450_000  # rows · weights, below which the packed product's fixed cost (about 9 µs) is larger than its gain
)


class Product(Protocol):
    """y = x Wᵀ + b for x [rows, in] → [rows, out]."""

    weight: Tensor

    @property
    def num_bytes(self) -> int: ...
    def __call__(self, x: Tensor) -> Tensor: ...


class Linear:
    """y = x Wᵀ + b for x [rows, in] → [rows, out].

    A small packed weight is also kept unpacked, [in, out], for few rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bias = bias
        self.packed = _can_pack(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self.packed else weight
        self.unpacked_rows = (
            UNPACKED_LIMIT // weight.numel() if self.packed else 0
        )  # up to this many go through `unpacked`
        self.unpacked = weight.t().contiguous() if self.unpacked_rows else None

    @property
    def num_bytes(self) -> int:
        return num_bytes_of(self.weight, self.unpacked, self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        if self.unpacked is not None and x.shape[0] <= self.unpacked_rows:
            return torch.mm(x, self.unpacked) if self.bias is None else torch.addmm(self.bias, x, self.unpacked)
        if self.packed:
            return _linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


_linear_pointwise = torch.ops.mkldnn._linear_pointwise.default


def num_bytes_of(*kept: Tensor | None) -> int:
    """Bytes of the tensors that are kept."""
    return sum(t.numel() * t.element_size() for t in kept if t is not None)


def _can_pack(weight: Tensor) -> bool:
    # torch.compile's freezing on CPUs needs these operators, so they come with oneDNN. There is none for fp64.
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
    )
