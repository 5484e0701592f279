"""What one decoder does differently from another, as data. The defaults are llama's. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Activation = Literal["silu", "gelu_tanh"]
QKNorm = Literal["head", "projection"]  # each head alone; all heads of q, and all heads of k, together
Routing = Literal["softmax_first", "choice_first"]  # weights of all experts, then the best; or the other way round
RopeParameters = Mapping[str, Any]  # config.json's rope_parameters


@dataclass(frozen=True, slots=True)
class NormNames:
    """Where a layer's norms stand: the tensors' names before and behind attention and MLP; None: no norm there."""

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None


PRE_NORM = NormNames(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
POST_NORM = NormNames(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
SANDWICH_NORM = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


@dataclass(frozen=True, slots=True)
class ExpertTraits:
    """A mixture of experts in place of an MLP."""

    count: int
    per_token: int
    intermediate_size: int
    layers: tuple[bool, ...]  # whether the layer has experts, or an MLP
    names: "ExpertNames"
    routing: Routing = "softmax_first"
    normalised: bool = True  # the weights of a token's experts add up to 1
    clamped_at: float | None = None  # gpt_oss: (up + 1) · gate · σ(slope · gate), both clamped
    slope: float = 1.0


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of the tensors below model.layers.N. `{}` is the expert's number; without it a tensor holds all experts."""

    router: str
    gate: str
    up: str
    down: str
    router_bias: bool = False


@dataclass(frozen=True, slots=True)
class Traits:
    """What the forward pass and the names of the tensors depend on, beside the sizes.

    A tuple per layer that is empty means its default for every layer.
    """

    norms: NormNames = PRE_NORM
    norm_offset: float = 0.0  # a norm multiplies by offset + weight
    qk_norm: QKNorm | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    fused: bool = False  # the checkpoint has qkv_proj and gate_up_proj
    activation: Activation = "silu"
    attention_scale: float | None = None  # of the scores; None: 1 / √head_dim
    attention_softcap: float | None = None  # a score s becomes cap · tanh(s / cap)
    logit_softcap: float | None = None
    sinks: bool = False  # each head has one more score, whose value is zero
    windows: tuple[int | None, ...] = ()  # per layer: tokens that a token sees, itself included; None: all before it
    ropes: tuple[RopeParameters, ...] = ()
    rotary_dim: int | None = None  # how many numbers of each head are rotated, from the first; None: all
    rope_of_layer: tuple[int | None, ...] = ()  # index into `ropes`; None: not rotated
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # multiplies what attention and MLP add
    logit_divisor: float = 1.0
    experts: ExpertTraits | None = None

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    @property
    def widest_window(self) -> int | None:
        """Positions that a token sees in every layer, at most; None: all before it in some layer."""
        return (
            max((window for window in self.windows if window is not None), default=None) if all(self.windows) else None
        )

    def rope(self, layer: int) -> int | None:
        return self.rope_of_layer[layer] if self.rope_of_layer else 0

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]
