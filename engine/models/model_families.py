"""The families of checkpoints that can be served: a table, and how a config.json becomes a DecoderConfig by it."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal

from engine.config import ConfigError
from engine.models.decoder import DecoderConfig
from engine.models.rope import FIELDS as ROPE_FIELDS
from engine.models.traits import (
    POST_NORM,
    PRE_NORM,
    SANDWICH_NORM,
    Activation,
    ExpertNames,
    ExpertTraits,
    NormNames,
    QKNorm,
    RopeParameters,
    Routing,
    Traits,
)

MIXTRAL_EXPERTS = ExpertNames(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{}.w1.weight",
    up="block_sparse_moe.experts.{}.w3.weight",
    down="block_sparse_moe.experts.{}.w2.weight",
)
QWEN_EXPERTS = ExpertNames(
    router="mlp.gate",
    gate="mlp.experts.{}.gate_proj.weight",
    up="mlp.experts.{}.up_proj.weight",
    down="mlp.experts.{}.down_proj.weight",
)
GPT_OSS_EXPERTS = ExpertNames(
    router="mlp.router",
    gate="mlp.experts.gate_up_proj",
    up="mlp.experts.gate_up_proj",
    down="mlp.experts.down_proj",
    router_bias=True,
)


@dataclass(frozen=True, slots=True)
class ExpertFamily:
    """How a family's experts are described; names of fields of config.json, or the value itself."""

    names: ExpertNames
    intermediate_size: str = "intermediate_size"
    normalised: bool | None = True  # None: norm_topk_prob says
    sparse_layers: bool = False  # decoder_sparse_step and mlp_only_layers say which layers have experts
    routing: Routing = "softmax_first"
    clamped: tuple[float, float] | None = None  # (limit, slope) of clamped gates, where the fields do not give them


@dataclass(frozen=True, slots=True)
class Family:
    """What all checkpoints of a family share, and which fields of config.json say the rest. Defaults: llama's."""

    norms: NormNames = PRE_NORM
    norm_offset: float = 0.0
    qk_norm: QKNorm | None = None
    qkv_bias: bool | None = None  # None: attention_bias says
    out_bias: bool | None = None  # None: attention_bias says
    mlp_bias: bool = False  # whether mlp_bias says
    fused: bool = False
    activation: str = "hidden_act"  # the field
    attention_scale: Literal["head_dim", "query_pre_attn_scalar", "attention_multiplier"] = "head_dim"
    softcaps: bool = False  # attn_logit_softcapping and final_logit_softcapping
    sinks: bool = False
    sliding: Literal["never", "layer_types", "all"] = "never"  # which layers sliding_window holds for
    rope_by_layer_type: bool = False
    no_rope_layers: bool = False
    partial_rotary: bool = False
    scaled_embedding: bool = False  # by √hidden_size
    multipliers: bool = False  # embedding_multiplier, residual_multiplier and logits_scaling
    experts: ExpertFamily | None = None

    @property
    def fields(self) -> frozenset[str]:
        """The fields of TRAIT_FIELDS that this family reads."""
        return frozenset(name for names, read in self._readers() if read for name in names.split())

    def _readers(self) -> Seq[tuple[str, bool]]:
        return (
            ("attention_bias", self.qkv_bias is None or self.out_bias is None),
            ("mlp_bias", self.mlp_bias),
            (self.attention_scale, True),
            ("attn_logit_softcapping final_logit_softcapping", self.softcaps),
            ("sliding_window", self.sliding != "never"),
            ("layer_types", self.sliding == "layer_types"),
            ("rope_local_base_freq", self.rope_by_layer_type),
            ("no_rope_layers no_rope_layer_interval", self.no_rope_layers),
            ("partial_rotary_factor", self.partial_rotary),
            ("embedding_multiplier residual_multiplier logits_scaling", self.multipliers),
            ("num_experts num_local_experts", self.experts is not None),
        )


GEMMA2 = Family(
    norms=SANDWICH_NORM,
    norm_offset=1.0,
    activation="hidden_activation",
    attention_scale="query_pre_attn_scalar",
    softcaps=True,
    sliding="layer_types",
    scaled_embedding=True,
)
GEMMA3 = Family(
    norms=SANDWICH_NORM,
    norm_offset=1.0,
    qk_norm="head",
    activation="hidden_activation",
    attention_scale="query_pre_attn_scalar",
    softcaps=True,
    sliding="layer_types",
    rope_by_layer_type=True,
    scaled_embedding=True,
)
FAMILIES: dict[str, Family] = {  # by config.json's model_type
    "llama": Family(mlp_bias=True),
    "mistral": Family(qkv_bias=False, out_bias=False, sliding="all"),
    "qwen2": Family(qkv_bias=True, out_bias=False, sliding="layer_types"),
    "qwen3": Family(qk_norm="head", sliding="layer_types"),
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gemma3": GEMMA3,
    "phi3": Family(qkv_bias=False, out_bias=False, fused=True, sliding="all", partial_rotary=True),
    "olmo2": Family(norms=POST_NORM, qk_norm="projection"),
    "smollm3": Family(mlp_bias=True, sliding="layer_types", no_rope_layers=True),
    "granite": Family(mlp_bias=True, attention_scale="attention_multiplier", multipliers=True),
    "mixtral": Family(qkv_bias=False, out_bias=False, sliding="all", experts=ExpertFamily(MIXTRAL_EXPERTS)),
    "qwen3_moe": Family(
        qk_norm="head",
        sliding="all",
        experts=ExpertFamily(
            QWEN_EXPERTS, intermediate_size="moe_intermediate_size", normalised=None, sparse_layers=True
        ),
    ),
    "gpt_oss": Family(
        sinks=True,
        sliding="layer_types",
        experts=ExpertFamily(GPT_OSS_EXPERTS, routing="choice_first", clamped=(7.0, 1.702)),
    ),
}
LARGEST_COUNT = 2**31 - 1  # of layers, rows, positions …
LARGEST_NUMBER = 1e30
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Fields that change what a model computes, with the values that change nothing. A checkpoint of a family that does not
# read such a field must not have another value there.
TRAIT_FIELDS: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "use_qk_norm", "qk_layernorm"), (False,)),
    **dict.fromkeys(("use_bidirectional_attention", "alibi", "parallel_attn", "use_parallel_residual"), (False,)),
    **dict.fromkeys(("sliding_window", "layer_types", "attention_chunk_size", "clip_qkv", "no_rope_layers"), ()),
    **dict.fromkeys(("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"), ()),
    **dict.fromkeys(("attention_multiplier", "embedding_multiplier", "residual_multiplier"), (1,)),
    **dict.fromkeys(("logits_scaling", "logit_scale", "scale_emb", "partial_rotary_factor"), (1,)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (0,)),
    **dict.fromkeys(("rope_local_base_freq", "scale_depth", "attn_temperature_tuning"), (False,)),
}


def read_config(name: str, raw: dict[str, Any]) -> DecoderConfig:
    """config.json of the family `name`, with transformers' defaults filled in → what the decoder depends on.

    Raises ConfigError, naming the field, for a value that is malformed or that this family has no use for.
    """
    family, fields = FAMILIES[name], Fields(raw)
    _refuse_foreign_traits(name, family, fields)
    heads = fields.count("num_attention_heads")
    hidden = fields.count("hidden_size")
    kv_heads = fields.count("num_key_value_heads", heads)
    head_dim = fields.count("head_dim", hidden // heads)
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise ConfigError(f"head_dim {head_dim} is odd; rotary positions need pairs")
    return DecoderConfig(
        architecture=name,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        num_layers=fields.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.count("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        max_position_embeddings=fields.count("max_position_embeddings"),
        tied=fields.flag("tie_word_embeddings"),
        traits=_read_traits(family, fields, head_dim),
    )


class Fields:
    """The fields of a config.json. Every method raises ConfigError, naming the field, for a value of another kind."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw

    def count(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST_COUNT:
            raise ConfigError(f"{name} must be an integer of at least 1 and at most {LARGEST_COUNT:,}, not {value!r}")
        return value

    def number(self, name: str) -> float:
        value = self.raw.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= LARGEST_NUMBER:
            raise ConfigError(f"{name} must be a number above 0 and at most {LARGEST_NUMBER:g}, not {value!r}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.raw.get(name) is None else self.number(name)

    def flag(self, name: str) -> bool:
        value = self.raw.get(name)
        if not isinstance(value, bool | None):
            raise ConfigError(f"{name} must be true or false, not {value!r}")
        return bool(value)

    def per_layer(self, name: str, layers: int) -> list[Any]:
        value = self.raw.get(name)
        if not isinstance(value, list) or len(value) != layers:
            raise ConfigError(f"{name} must be a list with an entry for each of {layers} layers, not {value!r}")
        return value


def _refuse_foreign_traits(name: str, family: Family, fields: Fields) -> None:
    slides = fields.raw.get("use_sliding_window") is not False
    for field, neutral in TRAIT_FIELDS.items():
        value = fields.raw.get(field)
        if value is None or value in neutral or field in family.fields:
            continue
        if field == "sliding_window" and not slides:
            continue
        if field == "layer_types" and set(value) == {"full_attention"}:
            continue
        raise ConfigError(f"{field} {value!r} is not supported for {name!r} models")


def _read_traits(family: Family, fields: Fields, head_dim: int) -> Traits:
    layers, hidden = fields.count("num_hidden_layers"), fields.count("hidden_size")
    attention_bias = fields.flag("attention_bias")
    activation = fields.raw.get(family.activation)
    if activation not in ACTIVATIONS:
        raise ConfigError(f"{family.activation} {activation!r} is not supported; {', '.join(ACTIVATIONS)} are")
    ropes, rope_of_layer = _read_ropes(family, fields, layers)
    multiplier = sqrt(hidden) if family.scaled_embedding else 1.0
    return Traits(
        norms=family.norms,
        norm_offset=family.norm_offset,
        qk_norm=family.qk_norm,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=attention_bias if family.out_bias is None else family.out_bias,
        mlp_bias=family.mlp_bias and fields.flag("mlp_bias"),
        fused=family.fused,
        activation=ACTIVATIONS[activation],
        attention_scale=_attention_scale(family, fields),
        attention_softcap=fields.optional_number("attn_logit_softcapping") if family.softcaps else None,
        logit_softcap=fields.optional_number("final_logit_softcapping") if family.softcaps else None,
        sinks=family.sinks,
        windows=_read_windows(family, fields, layers),
        ropes=ropes,
        rotary_dim=_rotary_dim(family, ropes, head_dim),
        rope_of_layer=rope_of_layer,
        embedding_multiplier=fields.number("embedding_multiplier") if family.multipliers else multiplier,
        residual_multiplier=fields.number("residual_multiplier") if family.multipliers else 1.0,
        logit_divisor=fields.number("logits_scaling") if family.multipliers else 1.0,
        experts=None if family.experts is None else _read_experts(family.experts, fields, layers),
    )


def _attention_scale(family: Family, fields: Fields) -> float | None:
    if family.attention_scale == "query_pre_attn_scalar":
        return fields.number("query_pre_attn_scalar") ** -0.5
    if family.attention_scale == "attention_multiplier":
        return fields.number("attention_multiplier")
    return None


def _read_windows(family: Family, fields: Fields, layers: int) -> tuple[int | None, ...]:
    if family.sliding == "never":
        return ()
    if family.sliding == "all":
        kinds = ["sliding_attention" if fields.raw.get("sliding_window") else "full_attention"] * layers
    else:
        kinds = fields.per_layer("layer_types", layers)
    if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
        raise ConfigError(f"layer_types {', '.join(sorted(map(str, unknown)))} are not supported")
    if "sliding_attention" not in kinds:
        return ()
    window = fields.count("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _read_ropes(
    family: Family, fields: Fields, layers: int
) -> tuple[tuple[RopeParameters, ...], tuple[int | None, ...]]:
    """(the parameters of each table of rotations, the table of each layer)."""
    given = fields.raw.get("rope_parameters")
    if not isinstance(given, dict):
        raise ConfigError(f"rope_parameters must be an object, not {given!r}")
    if not family.rope_by_layer_type:
        rotated = fields.per_layer("no_rope_layers", layers) if family.no_rope_layers else [1] * layers
        return (_checked_rope(given),), tuple(0 if flag else None for flag in rotated)
    kinds = fields.per_layer("layer_types", layers)
    names = sorted(set(kinds))
    if missing := [name for name in names if not isinstance(given.get(name), dict)]:
        raise ConfigError(f"rope_parameters lack {', '.join(missing)}")
    return tuple(_checked_rope(given[name]) for name in names), tuple(names.index(kind) for kind in kinds)


def _checked_rope(rope: RopeParameters) -> RopeParameters:
    if unknown := set(rope) - ROPE_FIELDS:
        raise ConfigError(f"rope_parameters {', '.join(sorted(unknown))} are not supported")
    return rope


def _rotary_dim(family: Family, ropes: tuple[RopeParameters, ...], head_dim: int) -> int:
    factors = {Fields(dict(rope)).optional_number("partial_rotary_factor") or 1 for rope in ropes}
    if factors != {1} and not family.partial_rotary:
        raise ConfigError(f"partial_rotary_factor {', '.join(map(str, factors))} is not supported for this family")
    dim = int(head_dim * factors.pop())
    if dim % 2 or not 2 <= dim <= head_dim:
        raise ConfigError(
            f"partial_rotary_factor rotates {dim} of a head's {head_dim} numbers; it must be an even number"
        )
    return dim


def _read_experts(family: ExpertFamily, fields: Fields, layers: int) -> ExpertTraits:
    count = fields.count("num_local_experts" if fields.raw.get("num_experts") is None else "num_experts")
    per_token = fields.count("num_experts_per_tok")
    if per_token > count:
        raise ConfigError(f"num_experts_per_tok {per_token} is more than the {count} experts")
    sparse = [True] * layers
    if family.sparse_layers:
        step, dense = fields.count("decoder_sparse_step"), fields.raw.get("mlp_only_layers") or []
        sparse = [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]
    return ExpertTraits(
        count=count,
        per_token=per_token,
        intermediate_size=fields.count(family.intermediate_size),
        layers=tuple(sparse),
        names=family.names,
        routing=family.routing,
        normalised=fields.flag("norm_topk_prob") if family.normalised is None else family.normalised,
        **_clamps(family, fields),
    )


def _clamps(family: ExpertFamily, fields: Fields) -> dict[str, float]:
    """Configurations by transformers 5.17 name neither the limit nor the slope of clamped gates."""
    if family.clamped is None:
        return {}
    names = {"swiglu_limit": "clamped_at", "swiglu_alpha": "slope"}
    usual = dict(zip(names, family.clamped, strict=True))
    return {names[f]: usual[f] if fields.raw.get(f) is None else fields.number(f) for f in names}
