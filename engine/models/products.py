"""Makes a decoder's matrix products: plain, packed, int8, int4 or by codes, as settings and checkpoint ask."""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import ConfigError, ProductForms, WeightForm
from engine.device.computing import computing
from engine.memory.host import give_back_freed_memory
from engine.models.coded_linear import CodedLinear, coded_products_reason
from engine.models.int4_linear import Int4Linear, check_int4_products
from engine.models.int8_products import check_int8_products
from engine.models.linear import Given, Linear, Product, usable_forms
from engine.models.mlp import Gating
from engine.models.product_choice import choose_forms
from engine.models.quantize import (
    CodedWeight,
    quantise_as_fp8,
    quantise_in_groups,
    quantise_weight,
)
from engine.models.quantized_checkpoints import Quantisation
from engine.models.shards import StoredWeight, UnroundedWeight
from engine.models.steady_linear import SteadyLinear, steady_gating
from engine.profiling.kept_files import cache_folder

Weight = Tensor | CodedWeight | StoredWeight

QUANTISE = {"int8": quantise_weight, "int4": quantise_in_groups, "fp8": quantise_as_fp8}


@dataclass(frozen=True, slots=True)
class Weights:
    """The form of a model's weights. Embedding, norms and routers are never quantised."""

    form: WeightForm = "as_is"
    head: bool = True  # whether the form is also that of the product that gives the logits
    products: ProductForms = "auto"  # on a CPU, but for int4
    deterministic: bool = False  # a row's result does not depend on the other rows of a pass
    copies_bytes: int | None = None  # that second forms of weights may take; None: no limit


AS_IS = Weights()


class ProductMaker:
    """Makes a decoder's products from weights [out, in] and biases [out]."""

    def __init__(
        self, weights: Weights, dtype: torch.dtype, device: torch.device, stored: Quantisation | None = None
    ) -> None:
        """stored: how the checkpoint's weights are quantised.

        Raises ConfigError for a form that this device does not have.
        """
        if weights.products == "packed" and "packed" not in usable_forms(torch.empty(1, 1, dtype=dtype, device=device)):
            raise ConfigError(
                f"products packed needs a torch with oneDNN, device cpu, and dtype float32, or bfloat16 on a CPU with "
                f"AVX-512, not {dtype} on {device}: choose auto"
            )
        self._no_codes = None if device.type == "cpu" else coded_products_reason(device)
        if weights.form != "as_is":
            self._check_form(weights.form, device)
        self._form, self._dtype, self._device = weights.form, dtype, device
        self._has_codes = device.type != "cpu" and self._no_codes is None
        self._coded: dict[tuple[object, ...], tuple[CodedLinear, int]] = {}  # by what is compiled: one, its columns
        self._head_form: WeightForm = weights.form if weights.head else "as_is"
        self._kept: frozenset[WeightForm] = frozenset()  # of products that use the checkpoint's codes as they are
        if stored is not None:
            forms = (weights.form, self._head_form)
            self._kept = frozenset(form for form in forms if keeps_codes(stored, form, device))
        self._deterministic = weights.deterministic
        self._products, self._copies_bytes = weights.products, weights.copies_bytes
        self._undecided: defaultdict[torch.dtype, list[Linear]] = defaultdict(list)  # by the weights' dtype

    def __call__(self, weight: Weight, bias: Tensor | None = None) -> Product:
        return self._make(weight, bias, self._form)

    def head(self, weight: Weight) -> Product:
        return self._make(weight, None, self._head_form)

    def router(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        """The product that chooses experts, which is never quantised."""
        return self._make_linear(weight, bias)

    def gating(self, gating: Gating) -> Gating:
        """How the products' gate and up become one."""
        return steady_gating(gating) if self._deterministic else gating

    def choose_forms(self) -> None:
        """Choose the forms of all products made so far by measurement, if the settings leave them open. Compile what
        the kernels of coded products need."""
        with computing(self._device):
            for product, columns in self._coded.values():
                product.warm_up(columns, self._dtype)
        self._coded.clear()
        room = self._copies_bytes
        for alike in self._undecided.values():
            copied = choose_forms(alike, copies_bytes=room, cache=cache_folder())
            room = None if room is None else room - copied
        self._undecided.clear()
        give_back_freed_memory()

    def describe(self, stored: Quantisation) -> str:
        """What becomes of a quantised checkpoint's weights, for the log."""
        kind, form, on_cpu = stored.kind, self._form, self._device.type == "cpu"
        dtype = str(self._dtype).removeprefix("torch.")
        if form in self._kept and not on_cpu:
            return f"{kind} products use them as they are, with activations in {dtype}"
        if form in self._kept:
            return "int8 products use them as they are, with activations quantised by their rows"
        if kind == "int4" and form == "int4":
            return "int4 products use them as they are where bfloat16 has their scales; elsewhere they are made anew"
        if form == "int8":
            return "they are dequantised and then made int8, with a step per channel"
        if form == "int4":
            return "they are dequantised and then made int4, with a step per group of channels"
        if form == "fp8":
            return "they are dequantised and then made FP8, with a step per channel"
        why = self._no_codes or "this format has no product here"
        if on_cpu and kind == "int8" and stored.per_row:
            why = "this machine has no int8 products"
            if not stored.rounds_activations:
                why = "config.json does not ask for rounded activations, as int8 products have them"
        return f"they are dequantised to {dtype}: {why}"

    def _make(self, weight: Weight, bias: Tensor | None, form: WeightForm) -> Product:
        if isinstance(weight, CodedWeight):
            if form in self._kept and self._device.type != "cpu":
                return self._make_coded(weight, bias, weight.codes.shape[1])
            if form in self._kept and weight.per_row:
                return self._make_linear(weight, bias)
            if form == "as_is":
                weight = weight.numbers(self._dtype).to(self._device)
            elif self._device.type != "cpu":
                weight = weight.numbers(torch.float32).to(self._device)
        if form == "as_is":
            return self._make_linear(weight.to(self._dtype) if isinstance(weight, Tensor) else weight, bias)
        if form == "int8" and self._device.type == "cpu" and isinstance(weight, StoredWeight):
            return self._make_linear(UnroundedWeight(weight), bias)
        if isinstance(weight, StoredWeight) and self._device.type != "cpu":
            weight = weight.passing()
        if self._has_codes:
            return self._make_coded(QUANTISE[form](weight), bias, weight.shape[1])
        if form == "int8":
            return self._make_linear(quantise_weight(weight), bias)
        return Int4Linear(weight, bias)

    def _make_coded(self, weight: CodedWeight, bias: Tensor | None, columns: int) -> CodedLinear:
        product = CodedLinear(weight, bias, self._device)
        offsets = None if product.offsets is None else (product.offsets.dtype, len(product.offsets))
        tables = product.steps.dtype, product.steps.shape[0], offsets, bias is None
        self._coded[product.weight.dtype, product.weight.shape, *tables] = product, columns
        return product

    def _check_form(self, form: WeightForm, device: torch.device) -> None:
        if self._no_codes is not None:
            raise ConfigError(f"{form} weights have no products on this device, since {self._no_codes}: choose as_is")
        if device.type == "cpu" and form == "fp8":
            raise ConfigError(f"fp8 weights need device cuda, not {device}: choose int8 or as_is")
        if device.type == "cpu" and form == "int8":
            check_int8_products()
        if device.type == "cpu" and form == "int4":
            check_int4_products()

    def _make_linear(self, weight: Given, bias: Tensor | None) -> Product:
        """weight: of the products' dtype, or of 8-bit codes, whose products give a row the same bits in any company."""
        coded = isinstance(weight, CodedWeight | UnroundedWeight)
        if self._deterministic and not isinstance(weight, CodedWeight | UnroundedWeight):
            return SteadyLinear(weight, bias)
        if self._products == "auto" and len(usable_forms(weight)) > 1:
            product = Linear(weight, bias, ())
            self._undecided[weight.dtype].append(product)
            return product
        one_form = self._products == "packed" or coded
        return Linear(weight, bias, None if one_form else ["plain"])


def keeps_codes(stored: Quantisation, form: WeightForm, device: torch.device) -> bool:
    """Whether products in this form use the codes of a checkpoint as they are.

    On a CPU int8 products round activations too: the checkpoint or the operator must ask for it.
    """
    if device.type != "cpu":
        return stored.kind is not None and form in ("as_is", stored.kind) and coded_products_reason(device) is None
    asked = form == "int8" or (form == "as_is" and stored.rounds_activations)
    return asked and stored.per_row and _has_int8_products()


def _has_int8_products() -> bool:
    try:
        check_int8_products()
    except ConfigError:
        return False
    return True
