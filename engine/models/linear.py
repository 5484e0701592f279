"""The decoder's matrix products, in the fastest form for few rows.

`Linear`: on a CPU in fp32 and bf16 the weight is packed at load: reordered into oneDNN's blocked layout. A packed
product has two properties that matter here (measured, docs/log.md). Two to eight rows cost about as much as one, which
makes verification cheap. A row's result does not depend, bit for bit, on the other rows of the call. For few rows of a
small weight an unpacked product is used: it has neither property, but a fifth of the fixed cost. Elsewhere torch's own
linear is used.

`Int8Linear`: weights and activations are 8-bit integers, so a CPU reads a quarter of the bytes of fp32.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import ConfigError
from engine.models.quantize import LARGEST, OFFSET, quantise_activations

UNPACKED_LIMIT = (
    450_000  # rows · weights, below which the packed product's fixed cost (about 9 µs) is larger than its gain
)


class Product(Protocol):
    """y = x Wᵀ + b for x [rows, in] → [rows, out]."""

    weight: Tensor

    @property
    def num_bytes(self) -> int: ...
    def __call__(self, x: Tensor) -> Tensor: ...


class Linear:
    """y = x Wᵀ + b for x [rows, in] → [rows, out].

    A small packed weight is also kept unpacked, [in, out], for few rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bias = bias
        self.packed = _can_pack(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self.packed else weight
        self.unpacked_rows = (
            UNPACKED_LIMIT // weight.numel() if self.packed else 0
        )  # up to this many go through `unpacked`
        self.unpacked = weight.t().contiguous() if self.unpacked_rows else None

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self.weight, self.unpacked, self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        if self.unpacked is not None and x.shape[0] <= self.unpacked_rows:
            return torch.mm(x, self.unpacked) if self.bias is None else torch.addmm(self.bias, x, self.unpacked)
        if self.packed:
            return _linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


class Int8Linear:
    """y = x Wᵀ + b in 8-bit integers: W has a step per output channel, each row of x gets its step when it comes.

    The sums are exact integers, so a row's result does not depend, bit for bit, on the other rows of the call.
    """

    def __init__(self, integers: Tensor, steps: Tensor, bias: Tensor | None = None) -> None:
        """W ≈ integers int8 [out, in] · steps fp32 [out]. Only on a CPU for which `check_int8_products` is silent."""
        self.weight = torch.ops.onednn.qlinear_prepack(integers, None)
        self.steps = steps
        self.bias = None if bias is None else bias.float()

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self.weight, self.steps, self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        integers, row_steps = quantise_activations(x)
        sums = _int8_product(integers, self.weight, self.steps)
        y = sums.mul_(row_steps) if self.bias is None else torch.addcmul(self.bias, sums, row_steps)
        return y.to(x.dtype)


def check_int8_products() -> None:
    """Raise ConfigError if this processor's int8 products are missing or inexact.

    A processor without VNNI adds pairs of products in 16 bits, and oneDNN lets them saturate there.
    """
    channels = torch.full((16, 64), LARGEST, dtype=torch.int8)
    largest = torch.full((16, 64), OFFSET + LARGEST, dtype=torch.uint8)
    try:
        weight = torch.ops.onednn.qlinear_prepack(channels, None)
        sums = torch.cat([_int8_product(largest[:rows], weight, torch.ones(16)) for rows in (1, 16)])
    except (AttributeError, RuntimeError) as error:
        raise ConfigError(f"torch has no int8 products on this machine, so weights cannot be int8: {error}") from error
    if not bool((sums == 64 * LARGEST * LARGEST).all()):
        raise ConfigError(
            "int8 products saturate on this processor, which has no VNNI instructions, so weights cannot be int8: "
            "choose as_is"
        )


def _int8_product(integers: Tensor, packed: Tensor, steps: Tensor) -> Tensor:
    """integers + OFFSET uint8 [rows, in] times a packed weight → fp32 [rows, out]: each sum · its channel's step.

    oneDNN also takes int8 activations, but it computes small products of them by its reference code, a thousand times
    slower, and on processors without AMX all products.
    """
    product = torch.ops.onednn.qlinear_pointwise.default
    return product(integers, 1.0, OFFSET, packed, steps, _NO_OFFSET, None, 1.0, 0, torch.float32, "none", [], "")


_NO_OFFSET = torch.zeros(1, dtype=torch.int64)
_linear_pointwise = torch.ops.mkldnn._linear_pointwise.default


def _num_bytes(*kept: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in kept if t is not None)


def _can_pack(weight: Tensor) -> bool:
    # torch.compile's freezing on CPUs needs these operators, so they come with oneDNN. There is none for fp64.
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
    )
