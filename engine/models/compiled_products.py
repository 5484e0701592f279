"""Products by code that is compiled for this CPU (engine/kernels/cpu_products.py). With few rows they are the fastest.

A row's result is the same bits in any company.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.compiled import as_stored, compiled_module, in_parts, type_of_sums

LEAST_CHANNELS = 4  # of a weight: its rows are read in groups of so many


def has_compiled_products() -> bool:
    return compiled_module("cpu_products") is not None


def compiled_product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """y = x Wᵀ + b for a plain weight [out ≥ LEAST_CHANNELS, in]. Sums are fp32 or fp64, and rounded once."""
    module = compiled_module("cpu_products")
    assert module is not None, "usable_forms() asks first"
    multiply, stored = module.multiply, as_stored(weight.contiguous())
    dtype, sums, channels, num_bytes = weight.dtype, type_of_sums(weight.dtype), weight.shape[0], weight.nbytes
    wide_bias, same = None if bias is None else bias.to(sums), dtype == sums

    def product(x: Tensor) -> Tensor:
        wide = x.contiguous() if same else x.to(sums, memory_format=torch.contiguous_format)
        out = torch.empty(x.shape[0], channels, dtype=sums)
        in_parts(multiply, num_bytes, wide.numpy(), stored, out.numpy())
        if wide_bias is not None:
            out += wide_bias
        return out if same else out.to(dtype)

    return product


CodedWeightArrays = tuple[tuple[Any, Any, Any], Any]  # ((codes, steps, what OFFSET adds), bias), as the kernel's


def coded_weight(codes: Tensor, steps: Tensor, bias: Tensor | None) -> CodedWeightArrays:
    """W = codes int8 [out, in] · steps fp32 [out] as the kernel reads it, with further channels of zeros if there are
    too few."""
    module = compiled_module("cpu_products")
    assert module is not None, "int8_forms() asks first"
    channels, _ = codes.shape
    added = (0, max(0, LEAST_CHANNELS - channels))
    stored = F.pad(codes, (0, 0, *added)).numpy() if added[1] else codes.contiguous().numpy()
    offsets = F.pad(codes.sum(1, dtype=torch.int32), added).mul_(module.OFFSET).numpy()
    given = torch.zeros(channels) if bias is None else bias.float()
    wide_bias, wide_steps = (F.pad(numbers, added).contiguous().numpy() for numbers in (given, steps))
    return (stored, wide_steps, offsets), wide_bias


def compiled_int8_product(codes: Tensor, steps: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """y = x Wᵀ + b for W = codes int8 [out, in] · steps fp32 [out], and x of any floating dtype, which is rounded to
    integers by rows. Sums are exact."""
    module = compiled_module("cpu_products")
    weight, wide_bias = coded_weight(codes, steps, bias)
    channels, (given, inner), num_bytes = codes.shape[0], weight[0].shape, codes.nbytes
    assert module is not None, "coded_weight() asked"

    def product(x: Tensor) -> Tensor:
        wide, rows = x.float().contiguous(), x.shape[0]
        rounded, row_steps = np.empty((rows, inner), module.ACTIVATION), np.empty(rows, np.float32)
        module.round_rows(wide.numpy(), rounded, row_steps)
        sums, out = np.empty((rows, given), np.int32), torch.empty(rows, given)
        in_parts(module.multiply_codes, num_bytes, (rounded, row_steps), weight, wide_bias, sums, out.numpy())
        return (out if given == channels else out[:, :channels]).to(x.dtype)

    return product
