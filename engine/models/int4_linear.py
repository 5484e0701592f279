"""The decoder's matrix products with 4-bit weights: the smallest memory, at about 5 bits per weight with its steps.

torch's kernel dequantises the weights as it multiplies. It has the price of one row for every row, so it is the fastest
form for one row, and slower than int8 for the rows of a verification or of a prompt (docs/log.md).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import ConfigError
from engine.models.blocks import block
from engine.models.linear import num_bytes_of
from engine.models.quantize import INT4_RANGE, CodedWeight, is_bfloat16

KERNEL_ROWS = 16  # the kernel's output channels come in multiples of so many
KERNEL_GROUPS = (256, 128, 64, 32)  # input channels that may share a step
PACKED_ROWS = 128  # channels that are packed at once, a multiple of the kernel's blocks
INSTRUCTIONS = ("AVX2", "AVX512")  # elsewhere the kernel is scalar code


class Int4Linear:
    """y = x Wᵀ + b, with W in 4-bit integers and x in bfloat16. Sums are fp32; y has bfloat16's precision.

    A row's result does not depend, bit for bit, on the other rows of the call.
    """

    def __init__(self, weight: CodedWeight, bias: Tensor | None = None) -> None:
        """weight: for which `fits_int4` holds. Only on a CPU for which `check_int4_products` is silent."""
        self.out_features = weight.codes.shape[0]
        self.in_features = weight.codes.shape[1]
        group = _kernel_group(weight.group)
        repeats = weight.group // group
        offsets = torch.zeros_like(weight.steps) if weight.offsets is None else weight.offsets
        steps = torch.stack([weight.steps, offsets], 2).bfloat16().repeat_interleave(repeats, 1)
        self._group = group
        self.steps = F.pad(steps, (0, 0, 0, 0, 0, self._missing_rows)).transpose(0, 1).contiguous()  # [groups, out, 2]
        # uint8 in the kernel's layout, [out rounded up to KERNEL_ROWS, in / 2]
        self.weight = block((self.out_features + self._missing_rows, self.in_features // 2), torch.uint8)
        for place, part in zip(self.weight.split(PACKED_ROWS), weight.codes.split(PACKED_ROWS), strict=True):
            place.copy_(_packed(part))
        self.bias = bias

    @property
    def _missing_rows(self) -> int:
        return -self.out_features % KERNEL_ROWS

    @property
    def num_bytes(self) -> int:
        return num_bytes_of(self.weight, self.steps, self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        padded = (
            F.pad(x.bfloat16(), (0, self.in_features - x.shape[1])) if x.shape[1] < self.in_features else x.bfloat16()
        )
        y = torch.ops.aten._weight_int4pack_mm_for_cpu.default(padded, self.weight, self._group, self.steps)
        y = y[:, : self.out_features].to(x.dtype)
        return y if self.bias is None else y.add_(self.bias)


def fits_int4(weight: CodedWeight) -> bool:
    """Whether an Int4Linear keeps the weight exactly."""
    least, most = INT4_RANGE
    if weight.codes.dtype is not torch.int8:
        return False
    low, high = weight.codes.aminmax()
    tables = (weight.steps, weight.offsets)
    return (
        least <= int(low)
        and int(high) <= most
        and weight.group % KERNEL_GROUPS[-1] == 0
        and all(is_bfloat16(table) for table in tables if table is not None)
    )


def check_int4_products() -> None:
    """Raise ConfigError if this machine has no fast kernel."""
    found = torch.backends.cpu.get_cpu_capability()
    if not found.startswith(INSTRUCTIONS):
        raise ConfigError(
            f"int4 weights need a CPU with {' or '.join(INSTRUCTIONS)} instructions, and torch finds {found}: choose "
            "as_is or int8"
        )
    if not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        raise ConfigError("this version of torch has no int4 products on CPUs: choose as_is or int8")


def _kernel_group(group: int) -> int:
    return next(size for size in KERNEL_GROUPS if group % size == 0)


def _packed(integers: Tensor) -> Tensor:
    """int8 [out, in] → the kernel's layout, uint8 [out rounded up to KERNEL_ROWS, in / 2]."""
    numbers = F.pad(integers, (0, 0, 0, -integers.shape[0] % KERNEL_ROWS)).int() - INT4_RANGE[0]
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
    return packed
