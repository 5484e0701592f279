"""The decoder's matrix products on CUDA with weights of 8 or 4 bits, so that a pass reads fewer bytes."""

import torch
from torch import Tensor

from engine.kernels.coded_product import PAIRED, coded_product, pack_int4
from engine.kernels.triton_modules import triton_reason
from engine.models.linear import num_bytes_of
from engine.models.quantize import INT4_RANGE, CodedWeight

LEAST_CAPABILITY = (8, 0)
WARM_ROWS = (1, 17, 65, 129)  # a number of rows for each tile of coded_kernel.py


class CodedLinear:
    """y = x Wᵀ + b, with W in 8-bit integers, 4-bit integers or FP8 numbers, and x as it comes. Sums are fp32.

    In a pass of at most 64 rows a row's result does not depend, bit for bit, on the other rows.
    """

    def __init__(self, weight: CodedWeight, bias: Tensor | None, device: torch.device) -> None:
        """FP8 codes are finite, or their step is not: the kernel cannot tell a NaN from a number."""
        codes = weight.codes
        self.weight = (pack_int4(codes) if _fits_pairs(weight) else codes).to(device)  # [out, in], or [out, in / 2]
        self.steps = _smallest(weight.steps).t().contiguous().to(device)  # [groups, out]
        self.offsets = None if weight.offsets is None else _smallest(weight.offsets).t().contiguous().to(device)
        self.bias = bias

    @property
    def num_bytes(self) -> int:
        return num_bytes_of(self.weight, self.steps, self.offsets, self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return coded_product(x, self.weight, self.steps, self.offsets, self.bias)

    def warm_up(self, in_features: int, dtype: torch.dtype) -> None:
        """Compile what the product needs, which takes Triton seconds: not in the middle of serving."""
        for rows in WARM_ROWS:
            self(torch.zeros(rows, in_features, dtype=dtype, device=self.weight.device))


def coded_products_reason(device: torch.device) -> str | None:
    """Why a CUDA device has no such products. None: it has them."""
    found = torch.cuda.get_device_capability(device)
    if found < LEAST_CAPABILITY:
        needed = ".".join(map(str, LEAST_CAPABILITY))
        return f"{device} has compute capability {'.'.join(map(str, found))}, and they need {needed}"
    return triton_reason()


def _fits_pairs(weight: CodedWeight) -> bool:
    """Whether two codes fit in a byte."""
    if weight.codes.dtype is not torch.int8 or weight.group % (2 * PAIRED):
        return False
    low, high = weight.codes.aminmax()
    return INT4_RANGE[0] <= int(low) and int(high) <= INT4_RANGE[1]


def _smallest(table: Tensor) -> Tensor:
    """The table in the first type that has all of its numbers."""
    for dtype in (torch.bfloat16, torch.float16):
        short = table.to(dtype)
        if torch.equal(short.float(), table):
            return short
    return table
