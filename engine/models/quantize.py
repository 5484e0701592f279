"""Numbers as codes of 8 or 4 bits: x ≈ code · step, or code · step + offset. A code is an integer, or an FP8 number.

8 bits: a step for each row; for weights a row is an output channel. 4 bits, only for weights: a step and an offset for
each group of GROUP input channels of an output channel.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.blocks import block
from engine.models.compiled import compiled_module

LARGEST = 127  # −128 is not used, so that both signs have the same range
_LEAST_STEP = torch.tensor(1e-30)  # the step of a row of zeros, which must not divide by zero
SLICE_ROWS = 64  # rows of a weight that are quantised at once: temporaries stay in the cache. Int4 products need
# a multiple of 64
DEVICE_SLICE_ROWS = 4096  # on a GPU, where each slice costs launches
GROUP = 32  # input channels that share a step of 4-bit integers
INT4_RANGE = (-8, 7)
FP8 = torch.float8_e4m3fn
LARGEST_FP8 = torch.finfo(FP8).max


class Sliced(Protocol):
    """A weight [out, in] that is not a tensor."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def device(self) -> torch.device: ...
    def wide_slices(self) -> Iterator[tuple[slice, Tensor]]: ...


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A weight [out, in] as codes · steps + offsets. Groups of equally many input channels share a step."""

    codes: Tensor  # int8 or float8_e4m3fn [out, in]
    steps: Tensor  # fp32 [out, groups]
    offsets: Tensor | None = None  # fp32 [out, groups]; None: all are 0

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.codes.dtype

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.steps.nbytes + (0 if self.offsets is None else self.offsets.nbytes)

    @property
    def group(self) -> int:
        """Input channels that share a step."""
        return self.codes.shape[1] // self.steps.shape[1]

    @property
    def per_row(self) -> bool:
        """Whether each output channel is integers times one step."""
        return self.codes.dtype is torch.int8 and self.steps.shape[1] == 1 and self.offsets is None

    def wide_slices(self) -> Iterator[tuple[slice, Tensor]]:
        """See wide_slices below."""
        for part in row_slices(self.codes):
            wide = self.codes[part].float().unflatten(1, (-1, self.group)).mul_(self.steps[part, :, None])
            if self.offsets is not None:
                wide.add_(self.offsets[part, :, None])
            yield part, wide.flatten(1)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`, [out, in]."""
        weight = block(self.codes.shape, dtype)
        for part, wide in self.wide_slices():
            weight[part] = wide
        return weight

    def part(self, rows: slice) -> "CodedWeight":
        """Some of the rows. They share the memory of all."""
        return CodedWeight(self.codes[rows], self.steps[rows], None if self.offsets is None else self.offsets[rows])

    def take_rows(self, order: Tensor) -> "CodedWeight":
        """order: row numbers int64."""
        offsets = None if self.offsets is None else self.offsets[order]
        codes = self.codes.view(torch.int8)[order].view(self.codes.dtype)
        return CodedWeight(codes, self.steps[order], offsets)


def stacked(weights: Sequence[CodedWeight]) -> CodedWeight | None:
    """The weights on top of each other. None if their codes are of different kinds, or their groups differ."""
    offsets = [weight.offsets for weight in weights if weight.offsets is not None]
    kinds = {(weight.steps.shape[1], weight.codes.dtype) for weight in weights}
    if len(kinds) > 1 or len(offsets) not in (0, len(weights)):
        return None
    if len(weights) == 1:
        return weights[0]
    codes = block((sum(len(weight.codes) for weight in weights), weights[0].codes.shape[1]), weights[0].codes.dtype)
    torch.cat([weight.codes.view(torch.int8) for weight in weights], out=codes.view(torch.int8))
    steps = torch.cat([weight.steps for weight in weights])
    return CodedWeight(codes, steps, torch.cat(offsets) if offsets else None)


def scale_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, n] → (x / steps fp32 [rows, n], which is still to be rounded, steps fp32 [rows, 1]).

    The largest of a row becomes ±LARGEST. A row that is not finite gets a step that is not finite. Small models spend
    their time on the number of kernels: there are four, and a fifth for other dtypes than fp32.
    """
    wide = x.float()
    steps = _steps(wide, LARGEST)
    return wide / steps, steps


def quantise_weight(weight: Tensor | Sliced) -> CodedWeight:
    """weight [out, in] → 8-bit integers with a step per output channel. The largest of a channel becomes ±LARGEST."""
    integers = _codes(weight.shape, torch.int8, weight.device)
    steps = torch.empty(weight.shape[0], 1, device=weight.device)
    module = compiled_module("cpu_products") if weight.device.type == "cpu" else None
    for part, wide in wide_slices(weight):
        if module is not None:  # one pass in place of six
            module.round_rows(wide.detach().contiguous().numpy(), integers[part].numpy(), steps[part, 0].numpy(), 0)
            continue
        steps[part] = _steps(wide, LARGEST)
        integers[part] = (wide / steps[part]).round_()
    return CodedWeight(integers, steps)


def quantise_as_fp8(weight: Tensor | Sliced) -> CodedWeight:
    """weight [out, in] → FP8 numbers with a step per output channel. The largest of a channel becomes ±LARGEST_FP8."""
    codes = _codes(weight.shape, FP8, weight.device)
    steps = torch.empty(weight.shape[0], 1, device=weight.device)
    for part, wide in wide_slices(weight):
        steps[part] = _steps(wide, LARGEST_FP8)
        codes[part] = (wide / steps[part]).clamp_(-LARGEST_FP8, LARGEST_FP8).to(FP8)  # beyond it there is only NaN
    return CodedWeight(codes, steps)


def quantise_in_groups(weight: Tensor | Sliced) -> CodedWeight:
    """weight [out, in] → 4-bit integers; in is rounded up to whole groups of GROUP with zeros.

    The smallest and the largest number of a group become −8 and 7. Steps and offsets are bfloat16 numbers, as the
    product needs them.
    """
    rows, columns = weight.shape
    columns += -columns % GROUP
    integers = _codes((rows, columns), torch.int8, weight.device)
    steps = torch.empty(rows, columns // GROUP, device=weight.device)
    offsets = torch.empty_like(steps)
    for part, coded in coded_slices(weight):
        integers[part], steps[part] = coded.codes, coded.steps
        offsets[part] = 0.0 if coded.offsets is None else coded.offsets
    return CodedWeight(integers, steps, offsets)


def coded_slices(weight: Tensor | Sliced) -> Iterator[tuple[slice, CodedWeight]]:
    """(rows, as quantise_in_groups makes them), part by part, so that no whole weight is ever in 8-bit codes."""
    least, most = INT4_RANGE
    for part, numbers in wide_slices(weight):
        missing = -numbers.shape[1] % GROUP
        wide = (F.pad(numbers, (0, missing)) if missing else numbers).unflatten(1, (-1, GROUP))
        low, high = wide.aminmax(dim=2)
        steps = _as_bfloat16((high - low) / (most - least) + _LEAST_STEP)
        offsets = _as_bfloat16(low - least * steps)
        codes = (wide - offsets[:, :, None]).div_(steps[:, :, None]).round_().clamp_(least, most).to(torch.int8)
        yield part, CodedWeight(codes.flatten(1), steps, offsets)


def row_slices(weight: Tensor | Sliced) -> Iterator[slice]:
    """The rows of a weight in parts."""
    rows, count = SLICE_ROWS if weight.device.type == "cpu" else DEVICE_SLICE_ROWS, weight.shape[0]
    return (slice(first, min(first + rows, count)) for first in range(0, count, rows))


def wide_slices(weight: Tensor | Sliced) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their numbers in fp32 [rows, in]), part by part, so that no whole weight is ever in fp32."""
    if not isinstance(weight, Tensor):
        yield from weight.wide_slices()
        return
    for part in row_slices(weight):
        yield part, weight[part].float()


def _codes(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return block(shape, dtype) if device.type == "cpu" else torch.empty(tuple(shape), dtype=dtype, device=device)


def _as_bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _steps(wide: Tensor, largest: float) -> Tensor:
    return torch.add(_LEAST_STEP, wide.abs().amax(-1, keepdim=True), alpha=1 / largest)


def is_bfloat16(x: Tensor) -> bool:
    """Whether every number is one that bfloat16 has."""
    return torch.equal(_as_bfloat16(x), x)
