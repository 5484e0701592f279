"""The matrix product of the decoder, in the fastest form the machine has for few rows.

On CPU in fp32 and bf16 the weight is reordered once, at load, into oneDNN's blocked layout. Two properties matter here
(measured, docs/log.md): a product of two to eight rows costs about what one row costs, which is what makes verification
cheap, and a row's result does not depend, bit for bit, on how many others share the call. Everywhere else it is
torch's own linear.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

SINGLE_ROW_LIMIT = 450_000  # weights; below it the packed product's fixed cost (about 8 µs) exceeds what it saves


class Linear:
    """y = x Wᵀ + b for x [rows, in] → [rows, out].

    A small packed weight is kept a second time, [in, out], for single rows: there a plain matrix-vector product wins.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bias = bias
        self.weight = weight
        self.packed: Tensor | None = None
        self.single: Tensor | None = None
        if _can_pack(weight):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
            self.weight = self.packed
            if weight.numel() <= SINGLE_ROW_LIMIT:
                self.single = weight.t().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        if self.single is not None and x.shape[0] == 1:
            return torch.mm(x, self.single) if self.bias is None else torch.addmm(self.bias, x, self.single)
        return _linear_pointwise(x, self.packed, self.bias, "none", [], "")


_linear_pointwise = torch.ops.mkldnn._linear_pointwise.default


def _can_pack(weight: Tensor) -> bool:
    # The operators back torch.compile's CPU freezing, so they are present wherever oneDNN is; fp64 has no such kernel.
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
    )
