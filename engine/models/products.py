"""Makes a decoder's products in the forms that the settings ask for."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import ConfigError, ProductForms, WeightForm
from engine.models.int8_linear import Int8Linear, check_int8_products
from engine.models.linear import Linear, Product, usable_forms
from engine.models.product_choice import choose_forms
from engine.models.product_times import cache_folder
from engine.models.quantize import integer_weight, quantise_weight


@dataclass(frozen=True, slots=True)
class Weights:
    """The form of a model's weights. Embedding, norms and routers are never quantised."""

    form: WeightForm = "as_is"
    head: bool = True  # whether the form is also that of the product that gives the logits
    products: ProductForms = "auto"  # of weights that are not quantised
    copies_bytes: int | None = None  # that second forms of weights may take; None: no limit


AS_IS = Weights()


class ProductMaker:
    """Makes a decoder's products from weights [out, in] and biases [out]."""

    def __init__(self, weights: Weights, dtype: torch.dtype, device: torch.device, *, integers: bool = False) -> None:
        """integers: weights may be int8 times a step per channel already. Raises ConfigError for a form that this
        device does not have."""
        if weights.products == "packed" and "packed" not in usable_forms(torch.empty(1, 1, dtype=dtype, device=device)):
            raise ConfigError(
                f"products packed needs a torch with oneDNN, device cpu, and dtype float32 or bfloat16, not {dtype} on "
                f"{device}: choose auto"
            )
        if weights.form != "as_is" and device.type != "cpu":
            raise ConfigError(f"{weights.form} weights need device cpu, not {device}: choose as_is")
        if weights.form == "int8":
            check_int8_products()
        self._form, self._dtype = weights.form, dtype
        self._head_form: WeightForm = weights.form if weights.head else "as_is"
        self.keeps_integers = integers and device.type == "cpu" and _has_int8_products()
        self._products, self._copies_bytes = weights.products, weights.copies_bytes
        self._undecided: list[Linear] = []

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        return self._make(weight, bias, self._form)

    def head(self, weight: Tensor) -> Product:
        return self._make(weight, None, self._head_form)

    def router(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        """The product that chooses experts, which is never quantised."""
        return self._make_linear(weight, bias)

    def choose_forms(self) -> None:
        """Choose the forms of all products made so far by measurement, if the settings leave them open."""
        choose_forms(self._undecided, copies_bytes=self._copies_bytes, cache=cache_folder())
        self._undecided.clear()

    def describe(self, integers: bool) -> str:
        """What becomes of a quantised checkpoint's weights, for the log."""
        if self.keeps_integers:
            return "int8 products use them as they are, with activations quantised by their rows"
        if self._form == "int8":
            return "they are dequantised and then made int8, with a step per channel"
        dtype = str(self._dtype).removeprefix("torch.")
        why = "this machine has no int8 products" if integers else "this format has no product here"
        return f"they are dequantised to {dtype}: {why}"

    def _make(self, weight: Tensor, bias: Tensor | None, form: WeightForm) -> Product:
        if self.keeps_integers and (exact := integer_weight(weight)):
            return Int8Linear(*exact, bias)
        if form == "int8":
            return Int8Linear(*quantise_weight(weight), bias)
        return self._make_linear(weight.to(self._dtype), bias)

    def _make_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
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
