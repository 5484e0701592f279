"""Hugging Face checkpoints → Decoder. Only safetensors, only local files, no code from the checkpoint."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from engine.config import ConfigError
from engine.models.decoder import Decoder, DecoderConfig, Layer
from engine.models.linear import Linear
from engine.models.norm import RMSNorm
from engine.models.rope import rotation_table
from engine.models.shards import Read, tensor_reader

ARCHITECTURES = ("llama", "qwen2")  # by config.json's model_type


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint directory with a config.json that can be served."""

    path: Path
    shape: DecoderConfig
    raw: dict[str, Any]  # config.json as transformers reads it, with older spellings converted


def open_checkpoint(directory: str) -> Checkpoint:
    """Read and check config.json. Raises ConfigError if it is malformed or needs what the decoder does not have."""
    path = Path(directory)
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} holds no config.json: give the directory of a Hugging Face checkpoint")
    kind = json.loads((path / "config.json").read_text("utf-8")).get("model_type")
    if kind not in ARCHITECTURES:
        raise ConfigError(f"{path} is a {kind!r} model; supported are {', '.join(ARCHITECTURES)}")
    try:
        raw = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False).to_dict()
    except Exception as error:  # transformers raises errors of many classes here, KeyError among others
        raise ConfigError(f"{path}: config.json is malformed: {error}") from error
    _refuse_unsupported(path, raw)
    heads = raw["num_attention_heads"]
    shape = DecoderConfig(
        architecture=kind,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        intermediate_size=raw["intermediate_size"],
        rms_norm_eps=raw["rms_norm_eps"],
        max_position_embeddings=raw["max_position_embeddings"],
        tied=bool(raw.get("tie_word_embeddings")),
    )
    return Checkpoint(path, shape, raw)


def _refuse_unsupported(path: Path, raw: dict[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{path} uses hidden_act {raw['hidden_act']!r}; only silu is supported")
    if raw.get("use_sliding_window") and raw.get("sliding_window"):
        raise ConfigError(f"{path} uses sliding-window attention, which is not supported")
    if raw.get("mlp_bias"):
        raise ConfigError(f"{path} has biases in its MLP, which are not supported")
    if raw.get("quantization_config"):
        raise ConfigError(f"{path} is quantised, which is not supported")


def load_decoder(checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device, max_len: int) -> Decoder:
    """Read a checkpoint's weights into the decoder's fused layout, one tensor at a time.

    Raises ConfigError, naming the file or tensor, if one is missing or has another shape than config.json says.
    """
    config, raw = checkpoint.shape, checkpoint.raw
    try:
        rotations = rotation_table(raw, config.head_dim, max_len, dtype, device)
    except ConfigError as error:
        raise ConfigError(f"{checkpoint.path}: {error}") from None
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{checkpoint.path}: the rope configuration is malformed: {error!r}") from error
    read = tensor_reader(checkpoint.path, dtype, device)
    embedding = read("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
    # Packed first: beside all layers a second copy of the head would be the peak of the load.
    head = Linear(embedding if config.tied else read("lm_head.weight", (config.vocab_size, config.hidden_size)))
    return Decoder(
        config=config,
        embedding=embedding,
        layers=tuple(_load_layer(config, read, i, raw) for i in range(config.num_layers)),
        norm=RMSNorm(read("model.norm.weight", (config.hidden_size,)), config.rms_norm_eps),
        head=head,
        rotations=rotations,
    )


def _load_layer(c: DecoderConfig, read: Read, index: int, raw: dict[str, Any]) -> Layer:
    prefix = f"model.layers.{index}."
    q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    attention_bias = c.architecture == "qwen2" or bool(raw.get("attention_bias"))

    def attention_part(name: str, rows: int, rotary: bool) -> tuple[Tensor, Tensor | None]:
        weight = read(f"{prefix}self_attn.{name}_proj.weight", (rows, c.hidden_size))
        bias = read(f"{prefix}self_attn.{name}_proj.bias", (rows,)) if attention_bias else None
        if rotary:
            weight = _pair_neighbours(weight, c.head_dim)
            bias = None if bias is None else _pair_neighbours(bias, c.head_dim)
        return weight, bias

    def norm(name: str) -> RMSNorm:
        return RMSNorm(read(f"{prefix}{name}.weight", (c.hidden_size,)), c.rms_norm_eps)

    parts = [attention_part("q", q_rows, True), attention_part("k", kv_rows, True), attention_part("v", kv_rows, False)]
    biases = [b for _, b in parts if b is not None]
    # llama's attention_bias includes the output product; qwen2 has no bias there.
    out_bias = read(f"{prefix}self_attn.o_proj.bias", (c.hidden_size,)) if raw.get("attention_bias") else None
    gate_up = [read(f"{prefix}mlp.{n}_proj.weight", (c.intermediate_size, c.hidden_size)) for n in ("gate", "up")]
    return Layer(
        input_norm=norm("input_layernorm"),
        qkv=Linear(torch.cat([w for w, _ in parts]), torch.cat(biases) if biases else None),
        out=Linear(read(f"{prefix}self_attn.o_proj.weight", (c.hidden_size, q_rows)), out_bias),
        post_norm=norm("post_attention_layernorm"),
        gate_up=Linear(torch.cat(gate_up)),
        down=Linear(read(f"{prefix}mlp.down_proj.weight", (c.hidden_size, c.intermediate_size))),
    )


def _pair_neighbours(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder each head's rows from (x₀ … x_{d/2−1}, y₀ … y_{d/2−1}) to (x₀, y₀, x₁, y₁, …)."""
    halves = rows.unflatten(0, (-1, 2, head_dim // 2))  # [heads, 2, head_dim / 2, …]
    return halves.transpose(1, 2).reshape(rows.shape)
