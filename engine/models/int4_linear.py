"""The decoder's matrix products with 4-bit weights: the smallest memory, at about 5 bits per weight with its steps.

torch's kernel dequantises the weights as it multiplies. It has the price of one row for every row, so it is the fastest
form for one row, and slower than int8 for the rows of a verification or of a prompt (docs/log.md).
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import ConfigError
from engine.models.blocks import block
from engine.models.linear import num_bytes_of
from engine.models.quantize import GROUP, INT4_RANGE, CodedWeight, Sliced, coded_slices, is_bfloat16, row_slices

KERNEL_ROWS = 16  # the kernel's output channels come in multiples of so many
KERNEL_GROUPS = (256, 128, 64, 32)  # input channels that may share a step
INSTRUCTIONS = ("AVX2", "AVX512")  # elsewhere the kernel is scalar code


class Int4Linear:
    """y = x Wᵀ + b, with W in 4-bit integers and x in bfloat16. Sums are fp32; y has bfloat16's precision.

    A row's result does not depend, bit for bit, on the other rows of the call.
    """

    def __init__(self, weight: Tensor | Sliced, bias: Tensor | None = None) -> None:
        """Codes for which `fits_int4` holds are kept, and other numbers are rounded. Only on a CPU for which
        `check_int4_products` is silent."""
        group, parts = _parts(weight)
        self.out_features, inner = weight.shape
        self.in_features = inner + -inner % group
        self._group = _kernel_group(group)
        rows = self.out_features + -self.out_features % KERNEL_ROWS
        # uint8 in the kernel's layout, [out rounded up to KERNEL_ROWS, in / 2]
        self.weight = block((rows, self.in_features // 2), torch.uint8)
        self.steps = torch.zeros(self.in_features // self._group, rows, 2, dtype=torch.bfloat16)
        for part, coded in parts:
            packed = _packed(coded.codes)
            self.weight[part.start : part.start + len(packed)] = packed
            offsets = torch.zeros_like(coded.steps) if coded.offsets is None else coded.offsets
            steps = torch.stack([coded.steps, offsets], 2).repeat_interleave(group // self._group, 1)
            self.steps[:, part] = steps.transpose(0, 1)
        self.bias = bias

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


def _parts(weight: Tensor | Sliced) -> tuple[int, Iterator[tuple[slice, CodedWeight]]]:
    """(input channels that share a step, some rows and their codes at a time). All parts but the last have a multiple
    of the channels that the kernel's layout holds side by side: 32 or 64."""
    if isinstance(weight, CodedWeight) and fits_int4(weight):
        return weight.group, ((part, weight.part(part)) for part in row_slices(weight))
    return GROUP, coded_slices(weight)


def _kernel_group(group: int) -> int:
    return next(size for size in KERNEL_GROUPS if group % size == 0)


def _packed(integers: Tensor) -> Tensor:
    """int8 [out, in] → the kernel's layout, uint8 [out rounded up to KERNEL_ROWS, in / 2]."""
    numbers = F.pad(integers, (0, 0, 0, -integers.shape[0] % KERNEL_ROWS)).int().sub_(INT4_RANGE[0])
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
    return packed
