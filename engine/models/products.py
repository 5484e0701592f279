"""Which form of product a weight gets."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import ConfigError, WeightForm
from engine.models.linear import Int8Linear, Linear, Product, check_int8_products
from engine.models.quantize import quantise_weight

MakeProduct = Callable[[Tensor, Tensor | None], Product]  # (weight [out, in], bias [out]) → the product


@dataclass(frozen=True, slots=True)
class Weights:
    """The form of a model's weights. Embedding and norms are never quantised."""

    form: WeightForm = "as_is"
    head: bool = True  # whether the form is also that of the product that gives the logits

    def maker(self, device: torch.device) -> MakeProduct:
        """What makes the layers' products. Raises ConfigError for a form that this device does not have."""
        if self.form == "as_is":
            return Linear
        if device.type != "cpu":
            raise ConfigError(f"int8 weights need device cpu, not {device}: choose as_is")
        check_int8_products()
        return _int8_product

    def head_maker(self, device: torch.device) -> MakeProduct:
        return self.maker(device) if self.head else Linear


AS_IS = Weights()


def _int8_product(weight: Tensor, bias: Tensor | None) -> Product:
    return Int8Linear(*quantise_weight(weight), bias)
