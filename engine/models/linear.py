"""The matrix product of the decoder, in the fastest form the machine has for few rows.

On CPU in fp32 and bf16 the weight is reordered once, at load, into oneDNN's blocked layout. Two properties matter here
(measured, docs/log.md): a product of two to eight rows costs about what one row costs, which is what makes verification
cheap, and a row's result does not depend, bit for bit, on how many others share the call. A small weight takes a plain
product for few rows, which has neither property but a fifth of the fixed cost. Elsewhere it is torch's own linear.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

UNPACKED_LIMIT = 450_000  # rows · weights; below it the packed product's fixed cost (about 9 µs) exceeds what it saves


class Linear:
    """y = x Wᵀ + b for x [rows, in] → [rows, out].

    A small packed weight is kept a second time, [in, out], for few rows: there a plain product wins.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bias = bias
        self.packed = _can_pack(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self.packed else weight
        self.unpacked_rows = (
            UNPACKED_LIMIT // weight.numel() if self.packed else 0
        )  # up to this many go through `plain`
        self.unpacked = weight.t().contiguous() if self.unpacked_rows else None

    @property
    def num_bytes(self) -> int:
        kept = (self.weight, self.unpacked, self.bias)
        return sum(t.numel() * t.element_size() for t in kept if t is not None)

    def __call__(self, x: Tensor) -> Tensor:
        if self.unpacked is not None and x.shape[0] <= self.unpacked_rows:
            return torch.mm(x, self.unpacked) if self.bias is None else torch.addmm(self.bias, x, self.unpacked)
        if self.packed:
            return _linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


_linear_pointwise = torch.ops.mkldnn._linear_pointwise.default


def _can_pack(weight: Tensor) -> bool:
    # The operators back torch.compile's CPU freezing, so they are present wherever oneDNN is; fp64 has no such kernel.
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
    )
