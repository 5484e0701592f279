"""Products by weights that are kept as codes of 8 or 4 bits, as one operation: foretoken::coded_product.

A weight is code · step, or code · step + offset. Each output channel has a step for each group of its input channels,
often one for all of them. Only the weights are codes: the activations keep their type. So the rows of a prompt, of a
verification and of plain decoding are computed from the same numbers, and no row is rounded more than another one.

`reference` computes in fp32, or in fp64 for fp64 inputs, and runs on every device. On CUDA the Triton kernels of
coded_kernel.py run instead. They read the codes once, and no other form of the weight is ever in memory.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.triton_modules import triton_module

# What codes are, by the type of the tensor that holds them.
INT8, INT4_PAIRS, FP8 = torch.int8, torch.uint8, torch.float8_e4m3fn
PAIRED = 16  # byte i of a block of this many bytes holds the codes of columns i and PAIRED + i of its 2·PAIRED columns
INT4_ZERO = 8  # the unsigned 4 bits that stand for code 0

_library = torch.library.Library("foretoken", "FRAGMENT")
_library.define(
    "coded_product(Tensor x, Tensor codes, Tensor steps, Tensor? offsets, Tensor? bias) -> Tensor",
)


def coded_product(x: Tensor, codes: Tensor, steps: Tensor, offsets: Tensor | None, bias: Tensor | None) -> Tensor:
    """y = x Wᵀ + bias for x [rows, in] → [rows, out], of x's type.

    codes: int8 or float8_e4m3fn [out, inner], or uint8 [out, inner / 2] as `pack_int4` makes them; inner ≥ in, and the
    columns behind `in` are not used. steps and offsets [groups, out] of any floating type: groups of inner / groups
    columns, a multiple of 32 for pairs. bias [out].
    """
    return torch.ops.foretoken.coded_product(x, codes, steps, offsets, bias)


def reference(x: Tensor, codes: Tensor, steps: Tensor, offsets: Tensor | None, bias: Tensor | None) -> Tensor:
    """As `coded_product`, from torch's operations. It makes all of W."""
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    numbers = unpack_int4(codes) if codes.dtype is INT4_PAIRS else codes
    weight = numbers.to(wide).unflatten(1, (steps.shape[0], -1)) * steps.t().to(wide)[..., None]
    if offsets is not None:
        weight = weight + offsets.t().to(wide)[..., None]
    y = F.linear(x.to(wide), weight.flatten(1)[:, : x.shape[1]], None if bias is None else bias.to(wide))
    return y.to(x.dtype)


def pack_int4(codes: Tensor) -> Tensor:
    """int8 [out, inner] of −8 … 7 → uint8 [out, inner / 2]: inner is a multiple of 2·PAIRED. The lower four bits are
    those of the earlier column."""
    low, high = (codes + INT4_ZERO).to(torch.uint8).unflatten(1, (-1, 2, PAIRED)).unbind(2)
    return (low | high << 4).flatten(1)


def unpack_int4(pairs: Tensor) -> Tensor:
    """uint8 [out, inner / 2] → int8 [out, inner]."""
    blocks = pairs.unflatten(1, (-1, PAIRED))
    return torch.stack([blocks & 15, blocks >> 4], 2).flatten(1).to(torch.int8) - INT4_ZERO


def _anywhere(x: Tensor, codes: Tensor, steps: Tensor, offsets: Tensor | None, bias: Tensor | None) -> Tensor:
    """The operation on every device."""
    kernels = triton_module("engine.kernels.coded_kernel") if x.is_cuda else None
    run = reference if kernels is None or not kernels.supports(x) else kernels.coded_product
    return run(x, codes, steps, offsets, bias)


def _shape_only(x: Tensor, codes: Tensor, steps: Tensor, offsets: Tensor | None, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[0])


_library.impl("coded_product", _anywhere, "CPU")
_library.impl("coded_product", _anywhere, "CUDA")
torch.library.register_fake("foretoken::coded_product", _shape_only, lib=_library)
