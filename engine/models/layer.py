"""A decoder's layer: its weights, norms and products."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from engine.models.linear import Product
from engine.models.mlp import Experts, GatedMLP
from engine.models.norm import RMSNorm
from engine.models.pass_attention import Scoring

Norm = Callable[[Tensor], Tensor]


def no_norm(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True)
class Layer:
    before_attention: Norm
    qkv: Product  # hidden → (heads + 2·kv_heads)·head_dim
    qk_norms: tuple[tuple[slice, RMSNorm], ...]  # the heads of q and k that each one normalises
    rope: int | None  # index into the decoder's rotations; None: positions are not rotated
    scoring: Scoring
    out: Product
    after_attention: Norm
    before_mlp: Norm
    mlp: GatedMLP | Experts
    after_mlp: Norm
