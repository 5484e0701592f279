"""Measures what torch takes between the products of a layer. Compiled layers do without most of it.

A product that is a little slower in compiled code is chosen nevertheless if that saves more around it.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor

from engine.models.compiled import one_part, parts_of
from engine.models.compiled_layers import CompiledLayers, products_of
from engine.models.compiled_products import compiled_product
from engine.models.decoder import Decoder
from engine.models.layer import Layer
from engine.models.linear import BUCKETS, LayerGain
from engine.models.mlp import GatedMLP
from engine.models.pass_attention import PLAIN, Scoring
from engine.profiling.quartile import lower_quartile

RUNS = 20
SAMPLE = (16384, 1024)  # of a weight: 64 MiB, beside which it takes no time to wake threads
PRODUCTS = 4  # of a layer


@dataclass(frozen=True, slots=True)
class _NoAttention:
    """Attention that takes no time."""

    positions: Tensor
    attended: Tensor
    rotates: bool = False

    def __call__(
        self, layer: int, queries: Tensor, kv: Tensor, scoring: Scoring = PLAIN, factors: Tensor | None = None
    ) -> Tensor:
        return self.attended


@dataclass(frozen=True, slots=True)
class _NoProduct:
    """A product that takes no time."""

    weight: Tensor  # what it gives
    num_bytes: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight


def tell_gains(decoder: Decoder) -> None:
    """Tell the products of compiled layers what these gain."""
    if not isinstance(decoder.few_rows, CompiledLayers):
        return
    with torch.inference_mode():
        saved = tuple(_seconds_between(decoder, rows) / PRODUCTS for rows in BUCKETS)
    gain = LayerGain(saved, _gain_of_threads(decoder.few_rows.layer_bytes))
    for layer in decoder.layers:
        for product in products_of(layer):
            product.layer_gain = gain


def _gain_of_threads(layer_bytes: int) -> float:
    """How many times as fast the threads that share a layer read weights as one does, once they are awake."""
    if parts_of(layer_bytes) == 1:
        return 1.0
    product, x = compiled_product(torch.ones(SAMPLE), None), torch.ones(1, SAMPLE[1])
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(RUNS):
        for spent, alone in zip(seconds, (False, True), strict=True):
            began = perf_counter()
            with one_part() if alone else nullcontext():
                product(x)
            spent.append(perf_counter() - began)
    together, by_itself = map(lower_quartile, seconds)
    return max(1.0, by_itself / together)


def _seconds_between(decoder: Decoder, rows: int) -> float:
    """Seconds of a layer whose products and attention take no time."""
    first, dtype = decoder.layers[0], decoder.dtype
    layer = _without_products(first, rows, dtype)
    alone = replace(decoder, layers=(layer,), few_rows=None)
    attended = torch.ones(rows, decoder.config.num_heads * decoder.config.head_dim, dtype=dtype)
    attention = _NoAttention(torch.zeros(rows, dtype=torch.int64), attended)
    x, rotations = torch.ones(rows, decoder.config.hidden_size, dtype=dtype), alone.row_rotations(attention)
    inputs = layer.before_attention(x)
    seconds: list[float] = []
    for run in range(1 + RUNS):
        began = perf_counter()
        alone.add_layers(x, rotations, attention, inputs=inputs)
        if run:
            seconds.append(perf_counter() - began)
    return lower_quartile(seconds)


def _without_products(layer: Layer, rows: int, dtype: torch.dtype) -> Layer:
    qkv, out, gate_up, down = (
        _NoProduct(torch.ones(rows, product.shape[0], dtype=dtype)) for product in products_of(layer)
    )
    assert isinstance(layer.mlp, GatedMLP)
    return replace(layer, qkv=qkv, out=out, mlp=layer.mlp.with_products(gate_up, down))
