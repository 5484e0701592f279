"""Small random checkpoints of several families, made by transformers, with the embedded pair's tokenizer."""

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.engineered import DEMO_TOKENIZER

VOCAB = 4096  # the tokenizer's
SPREAD = 3.0  # standard deviation of the logits
SLIDING_WINDOW = 16
HEAD_DIM = 64
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ALTERNATING = ["sliding_attention", "full_attention"]


@dataclass(frozen=True, slots=True)
class SmallModel:
    kind: str  # model_type
    config: Mapping[str, Any] = field(default_factory=dict)  # beside the common sizes
    tied: bool = False
    experts: bool = False  # in 16 bits a rounding may choose another expert, so logits cannot be compared there


FAMILIES: dict[str, SmallModel] = {
    "llama": SmallModel("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen3": SmallModel("qwen3", {}, tied=True),
    "gemma3": SmallModel(
        "gemma3_text",
        {
            "query_pre_attn_scalar": HEAD_DIM,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ALTERNATING,
            "rope_parameters": {"full_attention": DEFAULT_ROPE, "sliding_attention": DEFAULT_ROPE},
        },
        tied=True,
    ),
    "gemma2": SmallModel(
        "gemma2",
        {"query_pre_attn_scalar": HEAD_DIM, "sliding_window": SLIDING_WINDOW, "attn_logit_softcapping": 5.0},
        tied=True,
    ),
    "qwen2": SmallModel("qwen2"),
    "mistral": SmallModel("mistral", {"sliding_window": SLIDING_WINDOW}),
    "olmo2": SmallModel("olmo2"),
    "gpt_oss": SmallModel(
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ALTERNATING,
        },
        experts=True,
    ),
}
DRY_FAMILIES = ("llama", "qwen3", "gemma3")


def make_checkpoint(family: SmallModel, directory: Path, *, seed: int = 7, like: Path | None = None) -> Path:
    """Write a checkpoint whose numbers bfloat16 can hold, so that it is the same model in every dtype. `like`: its
    weights, disturbed, so that the two often agree about the next token."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 4 * HEAD_DIM,
        "intermediate_size": 320,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 2048,
        "rope_parameters": DEFAULT_ROPE,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "tie_word_embeddings": family.tied,
    }
    config = AutoConfig.for_model(family.kind, **{**sizes, **family.config})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        if like is None:
            _draw_weights(model, family, generator)
        else:
            model.load_state_dict(type(model).from_pretrained(like, dtype=torch.float32).state_dict())
            for weight in model.parameters():
                weight.add_(0.1 * weight.std() * torch.randn(weight.shape, generator=generator))
    model.to(torch.bfloat16).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_TOKENIZER.with_name(name), directory)
    return directory


def _draw_weights(model: Any, family: SmallModel, generator: torch.Generator) -> None:
    offset = 1.0 if family.kind.startswith("gemma") else 0.0  # which its norms add to their weights
    for name, weight in model.named_parameters():
        drawn = torch.randn(weight.shape, generator=generator)
        if "norm" in name:
            weight.copy_(1 - offset + 0.2 * drawn)
        else:
            weight.copy_(0.2 * drawn if weight.dim() == 1 else drawn / math.sqrt(weight.shape[-1]))
    head, norm = model.get_output_embeddings().weight, model.model.norm.weight
    if family.tied:  # half of the signs are turned: else a token would mostly predict itself
        norm.mul_(0).add_(torch.where(torch.arange(len(norm)) % 2 == 0, SPREAD, -SPREAD) - offset)
    else:
        head.mul_(SPREAD)
