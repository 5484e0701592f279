"""Rows of 8-bit integers, each with a step of its own: x ≈ values · step. For weights a row is an output channel."""

import torch
from torch import Tensor

LARGEST = 127  # −128 is not used, so that a row and its negative are rounded alike
_LEAST_STEP = torch.tensor(1e-30)  # the step of a row of zeros, which must not divide by zero
SLICE_ROWS = 1024  # of a weight that are quantised at once: temporaries stay small


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, n] → (values int8 [rows, n], steps fp32 [rows, 1]). The largest number of a row becomes ±127.

    A row that is not finite gets a step that is not finite. Small models spend their time on the number of kernels:
    there are six, and a seventh for other dtypes than fp32.
    """
    wide = x.float()
    steps = torch.add(_LEAST_STEP, wide.abs().amax(-1, keepdim=True), alpha=1 / LARGEST)
    return (wide / steps).round_().to(torch.int8), steps


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] → (values int8 [out, in], steps fp32 [out])."""
    values, steps = zip(*(quantise_rows(rows) for rows in weight.split(SLICE_ROWS)), strict=True)
    return torch.cat(values), torch.cat(steps).squeeze(1)
