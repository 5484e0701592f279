"""Numbers as integers of 8 or 4 bits: x ≈ integer · step, or integer · step + offset.

8 bits: a step for each row; for weights a row is an output channel. 4 bits, only for weights: a step and an offset for
each group of GROUP input channels of an output channel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 127  # −128 is not used, so that both signs have the same range
OFFSET = 128  # of activations, which are unsigned
_LEAST_STEP = torch.tensor(1e-30)  # the step of a row of zeros, which must not divide by zero
SLICE_ROWS = 64  # of a weight that are quantised at once: temporaries stay in the cache
GROUP = 32  # input channels that share a step of 4-bit integers
INT4_RANGE = (-8, 7)


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """A weight [out, in] as integers · steps + offsets. Groups of equally many input channels share a step."""

    integers: Tensor  # int8 [out, in]
    steps: Tensor  # fp32 [out, groups]
    offsets: Tensor | None = None  # fp32 [out, groups]; None: all are 0

    @property
    def group(self) -> int:
        """Input channels that share a step."""
        return self.integers.shape[1] // self.steps.shape[1]

    @property
    def per_row(self) -> bool:
        """Whether each output channel is integers times one step."""
        return self.steps.shape[1] == 1 and self.offsets is None

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`, [out, in]."""
        weight = torch.empty(self.integers.shape, dtype=dtype)
        for first in range(0, len(weight), SLICE_ROWS):
            part = slice(first, first + SLICE_ROWS)
            wide = self.integers[part].float().unflatten(1, (-1, self.group)).mul_(self.steps[part, :, None])
            if self.offsets is not None:
                wide.add_(self.offsets[part, :, None])
            weight[part] = wide.flatten(1)
        return weight

    def take_rows(self, order: Tensor) -> "IntegerWeight":
        """order: row numbers int64."""
        offsets = None if self.offsets is None else self.offsets[order]
        return IntegerWeight(self.integers[order], self.steps[order], offsets)


def stacked(weights: Sequence[IntegerWeight]) -> IntegerWeight | None:
    """The weights on top of each other. None if their groups differ."""
    offsets = [weight.offsets for weight in weights if weight.offsets is not None]
    if len({weight.steps.shape[1] for weight in weights}) > 1 or len(offsets) not in (0, len(weights)):
        return None
    integers, steps = (torch.cat([getattr(weight, name) for weight in weights]) for name in ("integers", "steps"))
    return IntegerWeight(integers, steps, torch.cat(offsets) if offsets else None)


def quantise_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, n] → (integers + OFFSET uint8 [rows, n], steps fp32 [rows, 1]). The largest of a row becomes ±LARGEST.

    The conversion to uint8 cuts the fraction off, so the additional half rounds. A row that is not finite gets a step
    that is not finite. Small models spend their time on the number of kernels: there are six, and a seventh for other
    dtypes than fp32.
    """
    wide = x.float()
    steps = _steps(wide)
    return (wide / steps).add_(OFFSET + 0.5).to(torch.uint8), steps


def quantise_weight(weight: Tensor) -> IntegerWeight:
    """weight [out, in] → 8-bit integers with a step per output channel. The largest of a channel becomes ±LARGEST."""
    integers = torch.empty(weight.shape, dtype=torch.int8)
    steps = torch.empty(weight.shape[0], 1)
    for first in range(0, weight.shape[0], SLICE_ROWS):
        part = slice(first, first + SLICE_ROWS)
        wide = weight[part].float()
        steps[part] = _steps(wide)
        integers[part] = (wide / steps[part]).round_()
    return IntegerWeight(integers, steps)


def quantise_in_groups(weight: Tensor) -> IntegerWeight:
    """weight [out, in] → 4-bit integers; in is rounded up to whole groups of GROUP with zeros.

    The smallest and the largest number of a group become −8 and 7. Steps and offsets are bfloat16 numbers, as the
    product needs them.
    """
    weight = F.pad(weight, (0, -weight.shape[1] % GROUP))
    integers = torch.empty(weight.shape, dtype=torch.int8)
    steps = torch.empty(weight.shape[0], weight.shape[1] // GROUP)
    offsets = torch.empty_like(steps)
    least, most = INT4_RANGE
    for first in range(0, weight.shape[0], SLICE_ROWS):
        part = slice(first, first + SLICE_ROWS)
        wide = weight[part].float().unflatten(1, (-1, GROUP))
        low, high = wide.aminmax(dim=2)
        steps[part] = _as_bfloat16((high - low) / (most - least) + _LEAST_STEP)
        offsets[part] = _as_bfloat16(low - least * steps[part])
        rounded = ((wide - offsets[part, :, None]) / steps[part, :, None]).round_().clamp_(least, most)
        integers[part] = rounded.flatten(1)
    return IntegerWeight(integers, steps, offsets)


def _as_bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _steps(wide: Tensor) -> Tensor:
    return torch.add(_LEAST_STEP, wide.abs().amax(-1, keepdim=True), alpha=1 / LARGEST)


def is_bfloat16(x: Tensor) -> bool:
    """Whether every number is one that bfloat16 has."""
    return torch.equal(_as_bfloat16(x), x)
