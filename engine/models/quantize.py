"""Numbers as 8-bit integers, with a step for each row: x ≈ integer · step. For weights a row is an output channel."""

import torch
from torch import Tensor

LARGEST = 127  # −128 is not used, so that both signs have the same range
OFFSET = 128  # of activations, which are unsigned
_LEAST_STEP = torch.tensor(1e-30)  # the step of a row of zeros, which must not divide by zero
SLICE_ROWS = 1024  # of a weight that are quantised at once: temporaries stay small
FIRST_CHANNELS = 8  # are examined before the others
SAMPLE = 64  # numbers of a channel that tell most wrong steps
TOLERANCE = 1e-4  # of an integer up to 128 that came by two roundings to fp32


def quantise_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, n] → (integers + OFFSET uint8 [rows, n], steps fp32 [rows, 1]). The largest of a row becomes ±LARGEST.

    The conversion to uint8 cuts the fraction off, so the additional half rounds. A row that is not finite gets a step
    that is not finite. Small models spend their time on the number of kernels: there are six, and a seventh for other
    dtypes than fp32.
    """
    wide = x.float()
    steps = _steps(wide)
    return (wide / steps).add_(OFFSET + 0.5).to(torch.uint8), steps


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] → (integers int8 [out, in], steps fp32 [out]). The largest of a channel becomes ±LARGEST."""
    integers = torch.empty(weight.shape, dtype=torch.int8)
    steps = torch.empty(weight.shape[0])
    for first in range(0, weight.shape[0], SLICE_ROWS):
        part = slice(first, first + SLICE_ROWS)
        wide = weight[part].float()
        steps[part] = _steps(wide).squeeze(1)
        integers[part] = (wide / steps[part, None]).round_()
    return integers, steps


def _steps(wide: Tensor) -> Tensor:
    return torch.add(_LEAST_STEP, wide.abs().amax(-1, keepdim=True), alpha=1 / LARGEST)


def integer_weight(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """(integers int8 [out, in], steps fp32 [out]) that give weight [out, in] exactly, up to fp32's rounding.

    None if a channel is no int8 numbers times one step. The largest number of a channel is 1 to 128 steps, and all are
    tried. A multiple of a channel's own integers is as exact, so whatever fits is right.
    """
    if weight.shape[0] > FIRST_CHANNELS and integer_weight(weight[:FIRST_CHANNELS]) is None:
        return None
    largest = weight.abs().amax(1, keepdim=True).float()
    counts = torch.zeros_like(largest)  # steps of the largest number of each channel
    left = torch.arange(weight.shape[0])
    for count in range(LARGEST + 1, 0, -1):
        if not left.numel():
            break
        fits = _are_integers(weight[left, :SAMPLE].float() / (largest[left] / count + _LEAST_STEP))
        counts[left[fits]] = count
        left = left[~fits]
    if left.numel():
        return None
    steps = largest / counts + _LEAST_STEP
    ratios = weight.float() / steps
    if not bool(_are_integers(ratios).all()):
        return None
    return ratios.round_().to(torch.int8), steps.squeeze(1)


def _are_integers(ratios: Tensor) -> Tensor:
    """Whether each row [out] holds integers of −128 … 127 only."""
    nearest = ratios.round()
    inside = (nearest >= -LARGEST - 1) & (nearest <= LARGEST)
    return (((ratios - nearest).abs() < TOLERANCE) & inside).all(1)
