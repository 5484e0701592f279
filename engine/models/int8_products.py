"""Matrix products in 8-bit integers on a CPU, which reads a quarter of the bytes of fp32.

A weight has a step per output channel. Each row of activations gets its step when it comes. The sums are exact
integers. So a row's result does not depend, bit for bit, on the other rows of the call or on the form of the weight.

No form is the fastest for every number of rows (docs/log.md). With few rows it is compiled code, with many a library's.
So product_choice.py measures all at load.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor

from engine.config import ConfigError
from engine.models.compiled_products import coded_panels, compiled_int8_product, has_compiled_products
from engine.models.quantize import LARGEST, CodedWeight, scale_activations

Int8Form = Literal["onednn_int8", "fbgemm_int8", "compiled_int8"]
Sums = Callable[
    [Tensor], Tensor
]  # numbers [rows, in], which it rounds → fp32 [rows, out]: sums · their channels' steps

LIBRARIES: tuple[Int8Form, ...] = ("onednn_int8", "fbgemm_int8")
OFFSET = 128  # of the integers of activations, which are unsigned
# fp32 has no fractions beyond 2²³, so adding it rounds, half to even. The lowest byte is then the integer + OFFSET.
ROUNDING = 1.5 * 2**23 + OFFSET


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight [out, in] in the layout of a library, or in panels."""

    packed: Any  # oneDNN's tensor, FBGEMM's object, or Panels of the codes
    steps: Tensor  # fp32 [out]
    num_bytes: int


def int8_forms() -> tuple[Int8Form, ...]:
    """The forms whose sums are exact on this processor."""
    libraries = tuple(form for form in LIBRARIES if _is_exact_here(form))
    return (*libraries, "compiled_int8") if has_compiled_products() else libraries


def pack_int8(weight: CodedWeight, form: Int8Form) -> Int8Weight:
    """weight: with one step per output channel."""
    steps = weight.steps.flatten()
    if form == "compiled_int8":
        panels = coded_panels(weight.codes)
        return Int8Weight(panels, steps, panels.num_bytes + steps.nbytes)
    prepack = torch.ops.onednn.qlinear_prepack
    packed = prepack(weight.codes, None) if form == "onednn_int8" else _fbgemm_pack(weight)
    return Int8Weight(packed, steps, weight.codes.nbytes + steps.nbytes)


def int8_product(weight: Int8Weight, form: Int8Form, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """y = x Wᵀ + b for x [rows, in] of any floating dtype → [rows, out] of the same dtype."""
    if form == "compiled_int8":
        return compiled_int8_product(weight.packed, weight.steps, bias)
    sums_of = _onednn_sums(weight) if form == "onednn_int8" else _fbgemm_sums(weight)
    wide_bias = None if bias is None else bias.float()

    def product(x: Tensor) -> Tensor:
        numbers, row_steps = scale_activations(x)
        sums = sums_of(numbers)
        y = sums.mul_(row_steps) if wide_bias is None else torch.addcmul(wide_bias, sums, row_steps)
        return y.to(x.dtype)

    return product


def check_int8_products() -> None:
    """Raise ConfigError if no int8 products are exact on this processor.

    Call it before threads make products: libraries are tried once, and threads that set the filters of warnings
    together leave them changed.

    A processor without VNNI adds pairs of products in 16 bits, and libraries let them saturate there.
    """
    if not int8_forms():
        raise ConfigError(
            "weights cannot be int8: torch's products are missing or saturate on this processor, which has no VNNI "
            "instructions, and Numba cannot compile others: install numba, or choose int4 or as_is"
        )


@cache
def _is_exact_here(form: Int8Form) -> bool:
    """A torch may lack a library."""
    try:
        with catch_warnings():  # torch says once that its quantised tensors will go; then FBGEMM has no products
            simplefilter("ignore", UserWarning)
            return _is_exact(form)
    except (AttributeError, RuntimeError):
        return False


def _is_exact(form: Int8Form) -> bool:
    """Whether sums of the largest numbers are right."""
    weight = pack_int8(CodedWeight(torch.full((16, 64), LARGEST, dtype=torch.int8), torch.ones(16, 1)), form)
    product = int8_product(weight, form, None)
    sums = torch.cat([product(torch.full((rows, 64), float(LARGEST))) for rows in (1, 16)])
    return bool((sums == 64 * LARGEST * LARGEST).all())


def _onednn_sums(weight: Int8Weight) -> Sums:
    """oneDNN also takes int8 activations, but it computes small products of them by its reference code, a thousand
    times slower, and on processors without AMX all products."""
    product = torch.ops.onednn.qlinear_pointwise.default
    packed, steps, no_offset = weight.packed, weight.steps, torch.zeros(1, dtype=torch.int64)

    def sums(numbers: Tensor) -> Tensor:
        integers = numbers.add_(ROUNDING).view(torch.int32).to(torch.uint8)
        return product(integers, 1.0, OFFSET, packed, steps, no_offset, None, 1.0, 0, torch.float32, "none", [], "")

    return sums


def _fbgemm_sums(weight: Int8Weight) -> Sums:
    """FBGEMM adds the offset and converts to uint8 itself, but other kernels of it round halves in other ways."""
    product, packed = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default, weight.packed
    return lambda numbers: product(numbers.round_(), 1.0, OFFSET, packed)


def _fbgemm_pack(weight: CodedWeight) -> Any:
    steps = weight.steps.flatten().double()
    quantised = torch._make_per_channel_quantized_tensor(
        weight.codes, steps, torch.zeros(len(steps), dtype=torch.int64), 0
    )
    return torch.ops.quantized.linear_prepack(quantised, None)
