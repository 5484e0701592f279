"""What the engine needs to know of an architecture that is not native, and which of them cannot work.

A model is examined without weights, by one pass on torch's meta device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from engine.config import ConfigError
from engine.models.adapter import NAME, AdaptedModel, AttentionCall, no_mask
from engine.models.decoder import DecoderConfig
from engine.models.traits import Traits

CHANGING_ROPES = ("dynamic", "longrope")  # their frequencies depend on the longest text of a pass
STATELESS_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "attention", "mlp", "moe")
RECURRENT_FIELDS = ("mamba_", "ssm_", "conv_L", "lru_", "linear_conv", "state_size")  # how they begin


def read_adapted_config(path: Path, config: PreTrainedConfig) -> DecoderConfig:
    """What the engine needs to know of an architecture that is not native. Raises ConfigError, naming what does not
    work, for a model that cannot run over our KV memory."""
    kind = f"{path} is a {config.model_type!r} model"
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ConfigError(f"{kind} with an encoder: only decoders are supported")
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"{kind} with quantised weights: they are supported for native architectures only")
    if changing := sorted(_rope_types(config.to_dict()) & set(CHANGING_ROPES)):
        raise ConfigError(
            f"{kind} with {changing[0]} rotary positions, which transformers computes anew from the longest text of a "
            "pass: a token would depend on the texts beside it. They are supported for native architectures only"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        _refuse_parts(kind, config)
        raise ConfigError(f"{kind}, which is no causal language model in transformers: only those are supported")
    try:
        with torch.device("meta"), _recorded_windows() as windows:
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation=NAME, trust_remote_code=False
            )
            calls = AdaptedModel(model, None).examine()  # type: ignore[arg-type]  # its sizes are what is asked for
    except Exception as error:  # of any module
        _refuse_parts(kind, config)
        raise ConfigError(f"{kind}{_why_not(config, error)}") from error
    _check_calls(kind, calls, windows, _count(kind, config, "num_hidden_layers"))
    call = calls[0]
    return DecoderConfig(
        architecture=str(config.model_type),
        vocab_size=_count(kind, config, "vocab_size"),
        hidden_size=_count(kind, config, "hidden_size"),
        num_layers=len(calls),
        num_heads=call.heads,
        num_kv_heads=call.kv_heads,
        head_dim=call.key_dim,
        intermediate_size=0,
        rms_norm_eps=0.0,
        max_position_embeddings=_count(kind, config, "max_position_embeddings"),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        traits=Traits(windows=tuple(c.window for c in calls)),
    )


def _refuse_parts(kind: str, config: PreTrainedConfig) -> None:
    """Raise ConfigError for a model that has other parts than a text model."""
    if parts := [name for name in ("vision", "audio") if getattr(config, f"{name}_config", None) is not None]:
        raise ConfigError(f"{kind} with a part for {' and '.join(parts)}: only models of text alone are supported")
    if getattr(config, "text_config", None) is not None:
        raise ConfigError(f"{kind} with parts beside its text model: only models of text alone are supported")


def _why_not(config: PreTrainedConfig, error: Exception) -> str:
    """Why a model's modules do not run over our KV memory."""
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(STATELESS_LAYERS))
    if others or any(name.startswith(RECURRENT_FIELDS) for name in config.to_dict()):
        layers = f" ({', '.join(others)} layers)" if others else ""
        return f" with a recurrent state{layers}: only attention is supported"
    if isinstance(error, KeyError) and error.args == (NAME,):
        return ", whose attention is its own and not that of transformers' attention interface: that is not supported"
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return f", which does not run through transformers' attention interface: {first}"


def _rope_types(value: Any) -> set[str]:
    if not isinstance(value, dict):
        return set()
    found = {str(value["rope_type"])} if "rope_type" in value else set()
    return found.union(*map(_rope_types, value.values()))


def _count(kind: str, config: PreTrainedConfig, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{kind}, and its config.json says {name} {value!r}; an integer of at least 1 is needed")
    return value


@contextmanager
def _recorded_windows() -> Iterator[set[int]]:
    """The window sizes that masks are asked for. A model may tell them to its masks and not to its attention."""
    windows: set[int] = set()

    def record(*, local_size: int | None = None, **_: Any) -> None:
        if local_size:  # 0: a model with windows that are switched off
            windows.add(local_size)

    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, record)
    try:
        yield windows
    finally:
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, no_mask)


def _check_calls(kind: str, calls: list[AttentionCall], mask_windows: set[int], layers: int) -> None:
    """Raise ConfigError unless every layer attends once, causally, in a way that our attention has."""
    if [call.layer for call in calls] != list(range(layers)):
        raise ConfigError(
            f"{kind}: {len(calls)} of its {layers} layers attend through transformers' attention interface, and all "
            "must, once each; a recurrent state or an attention of its own is not supported"
        )
    first = calls[0]
    for call in calls:
        if call.unknown:
            raise ConfigError(f"{kind}, whose attention needs {', '.join(call.unknown)}: that is not supported")
        if not call.causal:
            raise ConfigError(f"{kind}, whose attention is not causal: only causal attention is supported")
        if call.key_dim != call.value_dim:
            raise ConfigError(
                f"{kind}: keys of {call.key_dim} and values of {call.value_dim} numbers are not supported"
            )
        if (call.heads, call.kv_heads, call.key_dim) != (first.heads, first.kv_heads, first.key_dim):
            raise ConfigError(f"{kind}: layers whose heads differ in number or size are not supported")
    if hidden := mask_windows - {call.window for call in calls}:
        raise ConfigError(f"{kind}, whose masks have windows of {sorted(hidden)} that its attention is not told")
