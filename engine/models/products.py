"""Which form of product a weight gets."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import ConfigError, ProductForms, WeightForm
from engine.kept_files import cache_folder
from engine.models.int4_linear import Int4Linear, check_int4_products, fits_int4
from engine.models.int8_linear import Int8Linear, check_int8_products
from engine.models.linear import Linear, Product, usable_forms
from engine.models.mlp import Gating
from engine.models.product_choice import choose_forms
from engine.models.quantize import IntegerWeight, quantise_in_groups, quantise_weight
from engine.models.steady_linear import SteadyLinear, steady_gating


@dataclass(frozen=True, slots=True)
class Weights:
    """The form of a model's weights. Embedding, norms and routers are never quantised."""

    form: WeightForm = "as_is"
    head: bool = True  # whether the form is also that of the product that gives the logits
    products: ProductForms = "auto"  # of weights that are not quantised
    deterministic: bool = False  # a row's result does not depend on the other rows of a pass
    copies_bytes: int | None = None  # that second forms of weights may take; None: no limit


AS_IS = Weights()


class ProductMaker:
    """Makes a decoder's products from weights [out, in] and biases [out]."""

    def __init__(self, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ConfigError for a form that this device does not have."""
        if weights.products == "packed" and "packed" not in usable_forms(torch.empty(1, 1, dtype=dtype, device=device)):
            raise ConfigError(
                f"products packed needs a torch with oneDNN, device cpu, and dtype float32, or bfloat16 on a CPU with "
                f"AVX-512, not {dtype} on {device}: choose auto"
            )
        if weights.form != "as_is" and device.type != "cpu":
            raise ConfigError(f"{weights.form} weights need device cpu, not {device}: choose as_is")
        if weights.form == "int8":
            check_int8_products()
        if weights.form == "int4":
            check_int4_products()
        self._form, self._dtype, self._device = weights.form, dtype, device
        self._head_form: WeightForm = weights.form if weights.head else "as_is"
        self._has_int8 = device.type == "cpu" and _has_int8_products()
        self._deterministic = weights.deterministic
        self._products, self._copies_bytes = weights.products, weights.copies_bytes
        self._undecided: list[Linear] = []

    def __call__(self, weight: Tensor | IntegerWeight, bias: Tensor | None = None) -> Product:
        return self._make(weight, bias, self._form)

    def head(self, weight: Tensor | IntegerWeight) -> Product:
        return self._make(weight, None, self._head_form)

    def router(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        """The product that chooses experts, which is never quantised."""
        return self._make_linear(weight, bias)

    def gating(self, gating: Gating) -> Gating:
        """How the products' gate and up become one."""
        return steady_gating(gating) if self._deterministic else gating

    def choose_forms(self) -> None:
        """Choose the forms of all products made so far by measurement, if the settings leave them open."""
        choose_forms(self._undecided, copies_bytes=self._copies_bytes, cache=cache_folder())
        self._undecided.clear()

    def describe(self, integers: int | None) -> str:
        """What becomes of a quantised checkpoint's weights, for the log. integers: their bits, if a product can use
        them as they are."""
        if integers == 8 and self._form != "int4" and self._has_int8:
            return "int8 products use them as they are, with activations quantised by their rows"
        if integers == 4 and self._form == "int4":
            return "int4 products use them as they are where bfloat16 has their scales; elsewhere they are made anew"
        if self._form == "int8":
            return "they are dequantised and then made int8, with a step per channel"
        if self._form == "int4":
            return "they are dequantised and then made int4, with a step per group of channels"
        dtype = str(self._dtype).removeprefix("torch.")
        why = "this machine has no int8 products" if integers == 8 else "this format has no product here"
        return f"they are dequantised to {dtype}: {why}"

    def _make(self, weight: Tensor | IntegerWeight, bias: Tensor | None, form: WeightForm) -> Product:
        if isinstance(weight, IntegerWeight):
            if weight.per_row and form != "int4" and self._has_int8:
                return Int8Linear(weight, bias)
            if form == "int4" and fits_int4(weight):
                return Int4Linear(weight, bias)
            weight = weight.numbers(self._dtype if form == "as_is" else torch.float32).to(self._device)
        if form == "int8":
            return Int8Linear(quantise_weight(weight), bias)
        if form == "int4":
            return Int4Linear(quantise_in_groups(weight), bias)
        return self._make_linear(weight.to(self._dtype), bias)

    def _make_linear(self, weight: Tensor, bias: Tensor | None) -> Product:
        if self._deterministic:
            return SteadyLinear(weight, bias)
        linear = Linear(weight, bias, None if self._products == "packed" else ["plain"])
        if self._products == "auto":
            self._undecided.append(linear)
        return linear


def _has_int8_products() -> bool:
    try:
        check_int8_products()
    except ConfigError:
        return False
    return True
