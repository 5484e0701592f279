"""A lean Llama-family decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU; llama and qwen2 checkpoints.

The input is packed and ragged: N token rows of any mix of sequences, without padding. Small models spend most of their
time on the fixed cost of kernels, so three choices keep the number of kernels per layer low:
  - one product gives q, k and v, another one gate and up;
  - the rows of q and k are permuted at load so that the two numbers of a rotary pair are neighbours. One complex
    product then rotates q and k in place. Attention scores do not change when q and k are permuted alike;
  - k and v of a token are neighbours in that product and in the cache, so one copy stores both.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.attention import Attention
from engine.models.linear import Product
from engine.models.norm import RMSNorm


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


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: RMSNorm
    qkv: Product  # hidden → (heads + 2·kv_heads)·head_dim
    out: Product
    post_norm: RMSNorm
    gate_up: Product  # hidden → 2·intermediate
    down: Product


@dataclass(frozen=True, slots=True)
class Decoder:
    """Weights and forward pass, without state. The KV cache comes with each call."""

    config: DecoderConfig
    embedding: Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    norm: RMSNorm
    head: Product  # hidden → vocab
    rotations: Tensor  # complex [max_len, 1, head_dim / 2]: e^(i·position·frequency)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def weight_bytes(self) -> int:
        """Memory of the matrices and the embedding. Norms and rotations are negligible."""
        products = [p for layer in self.layers for p in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        head = 0 if self.head.weight is self.embedding else self.head.num_bytes
        return self.embedding.numel() * self.embedding.element_size() + head + sum(p.num_bytes for p in products)

    def forward(self, ids: Tensor, attention: Attention) -> Tensor:
        """Hidden states [N, hidden] (before the final norm) of N packed tokens, ids [N] int64.

        `attention` knows the position of each token and stores its k and v.
        """
        c = self.config
        rows = ids.shape[0]
        rotated = c.num_heads + c.num_kv_heads
        rotations = self.rotations[attention.plan.positions]  # [N, 1, head_dim / 2]
        x = F.embedding(ids, self.embedding)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(layer.input_norm(x)).view(rows, -1, c.head_dim)
            _rotate(qkv[:, :rotated], rotations)
            x = x + layer.out(attention(index, qkv[:, : c.num_heads], qkv[:, c.num_heads :]))
            gate, up = layer.gate_up(layer.post_norm(x)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate).mul_(up))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] → [R, vocab]."""
        return self.head(self.norm(hidden))


def _rotate(heads: Tensor, rotations: Tensor) -> None:
    """Rotate [N, heads, head_dim] in place; pairs are neighbours. 16-bit numbers have no complex type: fp32 is used."""
    pairs = heads.view(*heads.shape[:-1], -1, 2)
    if heads.dtype.itemsize < 4:
        turned = torch.view_as_complex(pairs.float()).mul_(rotations)
        pairs.copy_(torch.view_as_real(turned))
    else:
        torch.view_as_complex(pairs).mul_(rotations)
