"""A lean decoder: RMSNorm, rotary positions, grouped-query attention, gated MLPs; see traits.py for what varies.

The input is packed and ragged: N token rows of any mix of sequences, without padding. Small models spend most of their
time on the fixed cost of kernels, so three choices keep the number of kernels per layer low:
  - one product gives q, k and v, another one gate and up;
  - the rows of q and k are permuted at load so that the two numbers of a rotary pair are neighbours. One complex
    product over whole rows then rotates q and k in place; v and what else is not rotated is multiplied by 1, which is
    cheaper than a view without it. Attention scores do not change when q and k are permuted alike;
  - k and v of a token are neighbours in that product and in the cache, so one copy stores both.
Fresh memory costs as much as a small kernel, so sums are written into the states.
"""

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.layer import Layer, Norm, no_norm
from engine.models.linear import Product
from engine.models.norm import RMSNorm
from engine.models.pass_attention import PassAttention
from engine.models.rope import row_rotations
from engine.models.traits import Traits

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What the forward pass depends on in a checkpoint's config.json."""

    architecture: str
    vocab_size: int  # rows of the embedding table, which may be padded beyond the tokenizer's ids
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tied: bool  # whether the head uses the embedding's weights
    traits: Traits = field(default_factory=Traits)

    @property
    def head_sizes(self) -> tuple[int, int, int]:
        """(heads, kv_heads, head_dim)."""
        return self.num_heads, self.num_kv_heads, self.head_dim

    @property
    def layer_numbers(self) -> int:
        """Numbers in the matrices of all layers."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        rows = [attention + 3 * self.intermediate_size] * self.num_layers
        if experts := self.traits.experts:
            mixture = attention + experts.count * (3 * experts.intermediate_size + 1)
            rows = [mixture if sparse else row for row, sparse in zip(rows, experts.layers, strict=True)]
        return self.hidden_size * sum(rows)


class LanguageModel(Protocol):
    """What a Runner runs: a native Decoder, or a model of transformers (adapter.py)."""

    @property
    def config(self) -> DecoderConfig: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def can_capture(self) -> bool:
        """Whether passes do nothing but work of the device, apart from experts, which are chosen on the host."""
        ...

    @property
    def block_rows(self) -> int:
        """Up to so many rows a pass wants all its attention to read blocks, on a CPU."""
        ...

    def forward(self, ids: Tensor, attention: PassAttention, watched: "WatchedStates | None" = None) -> Tensor:
        """States [N, hidden] of N packed tokens, ids [N] int64. `watched` keeps copies of those of its layers."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """States [R, hidden] → [R, vocab]."""
        ...


class LayersOfFewRows(Protocol):
    """A decoder's layers in a form for passes of few rows, or of as many as it is fastest for."""

    @property
    def block_rows(self) -> int:
        """As LanguageModel.block_rows."""
        ...

    def can_compute(self, x: Tensor, attention: PassAttention) -> bool:
        """Whether these layers compute a pass over the states x [N, hidden]."""
        ...

    def add_layers(
        self, x: Tensor, attention: PassAttention, watched: "WatchedStates | None", inputs: Tensor | None
    ) -> None:
        """As Decoder.add_layers."""
        ...


class WatchedStates:
    """Copies of the states that enter chosen layers of a pass, for heads that draft from them.

    Layer l stands for what enters layer l, counted from 0, and the number of layers for the states behind the final
    norm. transformers numbers `hidden_states` in the same way.
    """

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.table: Tensor | None = None  # [N, len(layers) · hidden], in the order of layers
        self.layers = layers  # none after a failure
        self._columns: tuple[Tensor, ...] = ()  # of the table, by place in `layers`

    def keep(self, layer: int, states: Tensor) -> None:
        """Copy states [N, hidden] of a chosen layer, which the pass may overwrite. A failure is logged and costs all
        copies of the pass, not the pass (R9)."""
        try:
            if layer in self.layers:
                self._copy(layer, states)
        except Exception:
            log.exception("the states of a pass could not be kept; heads draft nothing from it")
            self.table, self.layers, self._columns = None, (), ()

    def take(self, table: Tensor) -> None:
        """Take the copies of a whole pass, [N, len(layers) · hidden]. Those behind the final norm come by keep()."""
        self.table, self._columns = table, ()

    def _copy(self, layer: int, states: Tensor) -> None:
        rows, width = states.shape
        if self.table is None:
            self.table = states.new_empty(rows, len(self.layers) * width)
        self._columns = self._columns or self.table.split_with_sizes((width,) * len(self.layers), 1)
        self._columns[self.layers.index(layer)].copy_(states)


@dataclass(frozen=True, slots=True)
class Decoder:
    """Weights and forward pass, without state. The KV cache comes with each call."""

    config: DecoderConfig
    embedding: Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    norm: Norm
    head: Product  # hidden → vocab
    rotations: tuple[Tensor, ...]  # complex [max_len, 1, rotary_dim / 2]: e^(i·position·frequency)
    few_rows: LayersOfFewRows | None = None  # the layers in another form, for the passes that it can compute

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def can_capture(self) -> bool:
        return True

    @property
    def block_rows(self) -> int:
        return 0 if self.few_rows is None else self.few_rows.block_rows

    @property
    def weight_bytes(self) -> int:
        """Memory of the matrices and the embedding. Norms and rotations are negligible."""
        products = [p for layer in self.layers for p in (layer.qkv, layer.out, *layer.mlp.products)]
        embedding = 0 if self.head.weight is self.embedding else self.embedding.nbytes
        return embedding + self.head.num_bytes + sum(p.num_bytes for p in products)

    def forward(self, ids: Tensor, attention: PassAttention, watched: WatchedStates | None = None) -> Tensor:
        """Hidden states [N, hidden] (before the final norm) of N packed tokens, ids [N] int64.

        `attention` knows the position of each token and stores its k and v.
        """
        return self.forward_embedded(self.embed(ids), attention, watched)

    def forward_embedded(self, x: Tensor, attention: PassAttention, watched: WatchedStates | None = None) -> Tensor:
        """As forward(), of the states x [N, hidden] that enter the first layer. Writes into x."""
        self.add_layers(x, attention, watched)
        if watched is not None and len(self.layers) in watched.layers:
            watched.keep(len(self.layers), self.norm(x))
        return x

    def add_layers(
        self,
        x: Tensor,
        attention: PassAttention,
        watched: WatchedStates | None = None,
        inputs: Tensor | None = None,
    ) -> None:
        """Add to the states x [N, hidden] what the layers write. inputs [N, width]: of the first product, in place of
        the normed states."""
        if self.few_rows is not None and self.few_rows.can_compute(x, attention):
            self.few_rows.add_layers(x, attention, watched, inputs)
            return
        rotations = [row_rotations(table, attention.positions, self.config.head_sizes) for table in self.rotations]
        norms = [layer.before_attention for layer in self.layers]
        inputs = norms[0](x) if inputs is None else inputs
        for index, following in enumerate([*norms[1:], no_norm]):
            if watched is not None:
                watched.keep(index, x)
            inputs = self.add_layer(index, x, inputs, rotations, attention, following)

    def add_layer(
        self,
        index: int,
        x: Tensor,
        inputs: Tensor,
        rotations: Seq[Tensor],
        attention: PassAttention,
        following: Norm,
    ) -> Tensor:
        """Add to the states x [N, hidden] what a layer writes. inputs [N, width] of its product qkv. Returns
        following(x)."""
        c, layer, residual = self.config, self.layers[index], self.config.traits.residual_multiplier
        rows, parts = x.shape[0], (c.num_heads, 2 * c.num_kv_heads)
        qkv = layer.qkv(inputs)
        for heads, norm in layer.qk_norms:
            norm.apply_(qkv.view(rows, -1, c.head_dim)[:, heads])
        factors = None if layer.rope is None else rotations[layer.rope]
        if factors is not None and not attention.rotates:
            qkv, factors = _rotate(qkv, factors), None
        queries, kv = qkv.view(rows, -1, c.head_dim).split_with_sizes(parts, 1)
        attended = attention(index, queries, kv, layer.scoring, factors)
        inner = _add(x, layer.out(attended), layer.after_attention, residual, layer.before_mlp)
        return _add(x, layer.mlp(inner), layer.after_mlp, residual, following)

    def embed(self, ids: Tensor) -> Tensor:
        """The states [N, hidden] that enter the first layer, in memory of their own."""
        x = F.embedding(ids, self.embedding)
        multiplier = self.config.traits.embedding_multiplier
        # The multiplier is rounded to the weights' type, as gemma was trained.
        return x if multiplier == 1 else x.mul_(rounded(multiplier, x.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] → [R, vocab]."""
        logits, traits = self.head(self.norm(hidden)), self.config.traits
        if traits.logit_divisor != 1:
            logits = logits / traits.logit_divisor
        if traits.logit_softcap is not None:
            logits = logits.div_(traits.logit_softcap).tanh_().mul_(traits.logit_softcap)
        return logits


@cache
def rounded(number: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(number, dtype=dtype))


def _add(x: Tensor, y: Tensor, norm: Norm, factor: float, following: Norm) -> Tensor:
    """x += norm(y) · factor. Returns following(x). May write into y. In 16 bits add_'s alpha rounds a number by its
    place in the tensor."""
    y = norm(y) if factor == 1 else norm(y).mul_(factor)
    if isinstance(following, RMSNorm):
        return following.of_sum(x, y)
    return following(x.add_(y))


def _rotate(qkv: Tensor, factors: Tensor) -> Tensor:
    """qkv [N, n], whose rotary pairs are neighbours, times factors [N, n / 2]. May write into qkv.

    16-bit numbers go through fp32: torch has no complex type for them.
    """
    turned = qkv.float() if qkv.dtype.itemsize == 2 else qkv
    turned.view(factors.dtype).mul_(factors)
    return turned.to(qkv.dtype)
