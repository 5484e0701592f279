"""The decoder's matrix products in 8-bit integers: a CPU reads a quarter of the bytes of fp32."""

import torch
from torch import Tensor

from engine.config import ConfigError
from engine.models.linear import num_bytes_of
from engine.models.quantize import LARGEST, OFFSET, CodedWeight, quantise_activations


class Int8Linear:
    """y = x Wᵀ + b in 8-bit integers: W has a step per output channel, each row of x gets its step when it comes.

    The sums are exact integers, so a row's result does not depend, bit for bit, on the other rows of the call.
    """

    def __init__(self, weight: CodedWeight, bias: Tensor | None = None) -> None:
        """weight: with one step per output channel. Only on a CPU for which `check_int8_products` is silent."""
        self.weight = torch.ops.onednn.qlinear_prepack(weight.codes, None)
        self.steps = weight.steps.flatten()
        self.bias = None if bias is None else bias.float()

    @property
    def num_bytes(self) -> int:
        return num_bytes_of(self.weight, self.steps, self.bias)

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
            "choose int4 or as_is"
        )


def _int8_product(integers: Tensor, packed: Tensor, steps: Tensor) -> Tensor:
    """integers + OFFSET uint8 [rows, in] times a packed weight → fp32 [rows, out]: each sum · its channel's step.

    oneDNN also takes int8 activations, but it computes small products of them by its reference code, a thousand times
    slower, and on processors without AMX all products.
    """
    product = torch.ops.onednn.qlinear_pointwise.default
    return product(integers, 1.0, OFFSET, packed, steps, _NO_OFFSET, None, 1.0, 0, torch.float32, "none", [], "")


_NO_OFFSET = torch.zeros(1, dtype=torch.int64)
