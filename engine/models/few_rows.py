"""A decoder's layers for passes of few rows, on CUDA in 16 bits: fewer kernels, by engine/kernels/row_products.py.

A pass of one row is normalised inside of its products. Several rows are normalised by the kernel that also adds what
the product in front gave. So `inputs` of a product are the states themselves, or the normed states.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from engine.kernels.row_products import (
    add_product_,
    gated_product,
    most_rows,
    normalised_product,
    product_parts,
    project_and_store,
)
from engine.kernels.row_work import add_parts_
from engine.models.decoder import DecoderConfig, WatchedStates
from engine.models.layer import Layer, no_norm
from engine.models.linear import Linear, Product
from engine.models.mlp import GatedMLP
from engine.models.norm import RMSNorm
from engine.models.paged_attention import PagedAttention
from engine.models.pass_attention import PassAttention, Scoring
from engine.models.rope import row_rotations

InsideNorm = tuple[Tensor | None, float, float]  # gain, eps and offset as the operations take them


@dataclass(frozen=True, slots=True)
class FewRowsLayer:
    """A layer that the operations can compute."""

    attention_norm: RMSNorm
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norms: tuple[tuple[slice, RMSNorm], ...]
    rope: int | None
    scoring: Scoring
    out: Tensor
    mlp_norm: RMSNorm
    gate_up: Tensor
    down: Tensor

    @classmethod
    def of(cls, layer: Layer) -> Self | None:
        """None: the operations do not know what the layer does, or how its weights are laid out."""
        first, second, mlp = layer.before_attention, layer.before_mlp, layer.mlp
        if not (isinstance(first, RMSNorm) and isinstance(second, RMSNorm) and isinstance(mlp, GatedMLP)):
            return None
        products = (layer.qkv, layer.out, *mlp.products)
        if not (first.fused and second.fused and mlp.is_silu and all(map(_is_plain, products))):
            return None
        qkv_bias, *biases = (product.bias for product in products if isinstance(product, Linear))
        if layer.after_attention is not no_norm or layer.after_mlp is not no_norm or any(b is not None for b in biases):
            return None
        qkv, out, gate_up, down = (product.weight for product in products)
        return cls(first, qkv, qkv_bias, layer.qk_norms, layer.rope, layer.scoring, out, second, gate_up, down)


def _is_plain(product: Product) -> bool:
    """Whether its weight is kept as it is, [out, in]."""
    return isinstance(product, Linear) and tuple(product.forms) == ("plain",) and product.weight.is_contiguous()


class FewRows:
    """The layers of one decoder."""

    def __init__(self, layers: Seq[FewRowsLayer], config: DecoderConfig, rotations: Seq[Tensor]) -> None:
        """rotations: as Decoder has them."""
        self._layers, self._rotations, self._head_sizes = layers, rotations, config.head_sizes
        self._most = most_rows(layers[0].qkv.device)

    @classmethod
    def of(cls, layers: Seq[Layer], config: DecoderConfig, rotations: Seq[Tensor]) -> Self | None:
        """None: some layer cannot be computed like this."""
        known = [layer for layer in map(FewRowsLayer.of, layers) if layer is not None]
        if len(known) < len(layers) or config.traits.residual_multiplier != 1:
            return None
        return cls(known, config, rotations)

    @property
    def block_rows(self) -> int:
        """As LanguageModel.block_rows."""
        return 0

    def can_compute(self, x: Tensor, attention: PassAttention) -> bool:
        """Whether a pass over the states x [N, hidden] is one of few rows."""
        return 0 < x.shape[0] <= self._most and isinstance(attention, PagedAttention)

    def add_layers(
        self,
        x: Tensor,
        attention: PassAttention,
        watched: WatchedStates | None = None,
        inputs: Tensor | None = None,
    ) -> None:
        """As Decoder.add_layers. No head that draws from inputs of its own has such layers."""
        assert isinstance(attention, PagedAttention)
        assert inputs is None
        rotations = [row_rotations(table, attention.positions, self._head_sizes) for table in self._rotations]
        inputs = x if x.shape[0] == 1 else self._layers[0].attention_norm(x)
        following = [*(layer.attention_norm for layer in self._layers[1:]), None]
        for index, (layer, norm) in enumerate(zip(self._layers, following, strict=True)):
            if watched is not None:
                watched.keep(index, x)
            attended = _attend(index, layer, inputs, rotations, attention)
            inputs = _add(x, attended, layer.out, layer.mlp_norm)
            gated = gated_product(inputs, layer.gate_up, *_inside(layer.mlp_norm, inputs))
            inputs = _add(x, gated, layer.down, norm)


def _attend(
    index: int, layer: FewRowsLayer, inputs: Tensor, rotations: Seq[Tensor], attention: PagedAttention
) -> Tensor:
    factors, norm = None if layer.rope is None else rotations[layer.rope], _inside(layer.attention_norm, inputs)
    stored, places = attention.memory(index)
    _, stored_heads, size = stored.shape  # of keys, then of values
    width = len(layer.qkv) - stored_heads * size
    if factors is not None and not layer.qk_norms:
        queries = project_and_store(inputs, layer.qkv, layer.qkv_bias, factors, stored, places, width, *norm)
        return attention.attend(index, queries.view(len(inputs), -1, size), layer.scoring)
    heads = normalised_product(inputs, layer.qkv, layer.qkv_bias, *norm).view(len(inputs), -1, size)
    for which, qk_norm in layer.qk_norms:
        qk_norm.apply_(heads[:, which])
    queries, kv = heads.split_with_sizes((heads.shape[1] - stored_heads, stored_heads), 1)
    return attention(index, queries, kv, layer.scoring, factors)


def _inside(norm: RMSNorm, inputs: Tensor) -> InsideNorm:
    """The norm that a product of these inputs applies itself."""
    return (norm.weight if inputs.shape[0] == 1 else None), norm.eps, norm.offset


def _add(x: Tensor, inputs: Tensor, weight: Tensor, following: RMSNorm | None) -> Tensor:
    """x += inputs Wᵀ. Returns the inputs of the next product, in front of which stands the norm `following`."""
    if x.shape[0] == 1:
        add_product_(x, inputs, weight)
        return x
    parts = product_parts(inputs, weight)
    if following is None:
        add_parts_(x, parts)
        return x
    return following.of_sum(x, parts)
