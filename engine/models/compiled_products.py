"""Products by code that is compiled for this CPU (engine/kernels/cpu_products.py). With few rows they are the fastest.

A row's result is the same bits in any company.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.models.compiled import as_stored, compiled_module, in_parts, type_of_sums


def has_compiled_products() -> bool:
    return compiled_module("cpu_products") is not None


def compiled_product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """y = x Wᵀ + b for a plain weight [out, in]. Sums are fp32 or fp64, and rounded once."""
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
