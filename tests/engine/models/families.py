"""Tiny random checkpoints of every family, made by transformers, and transformers' own logits in fp64 throughout."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine.pairs import EOS, LLAMA3, VOCAB, save_tokenizer

DEFAULT = {"rope_type": "default", "rope_theta": 500.0}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
YARN_FULL = {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False, "mscale": 1.4, "mscale_all_dim": 0.7}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 5.0, 9.0],
}
WINDOW = 9


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint: what its config says beside the common sizes."""

    kind: str
    config: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 3
    tied: bool = False
    shard_size: str = "1GB"


def _granite(**more: Any) -> dict[str, Any]:
    multipliers = {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.5}
    return {**multipliers, "logits_scaling": 3.0, **more}


def _alternating(layers: int = 3) -> list[str]:
    return ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)]


GEMMA2 = {
    "head_dim": 16,
    "query_pre_attn_scalar": 40,
    "sliding_window": WINDOW,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 4.0,
}
GEMMA3 = {
    "head_dim": 16,
    "query_pre_attn_scalar": 6,
    "sliding_window": WINDOW,
    "layer_types": _alternating(),
    "rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 20.0}},
}
PHI3 = {"head_dim": 8, "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.75}}
LONG_PHI3 = {
    "original_max_position_embeddings": 32,
    "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
}
CASES: dict[str, Case] = {
    "llama": Case("llama", {"rope_parameters": LLAMA3}),
    "llama with biases, yarn": Case("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN}),
    "llama, dynamic within its context": Case("llama", {"rope_parameters": DYNAMIC}),
    "llama, dynamic beyond its context": Case("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 32}),
    "mistral": Case("mistral", {"sliding_window": WINDOW, "head_dim": 16}, shard_size="30KB"),
    "qwen2": Case("qwen2", {"rope_parameters": YARN_FULL}, tied=True),
    "qwen2 with a window in its last layers": Case(
        "qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
    ),
    "qwen3": Case("qwen3", {"head_dim": 16}, tied=True, shard_size="30KB"),
    "qwen3 with biases and windows": Case(
        "qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": _alternating(),
        },
    ),
    "gemma2": Case("gemma2", GEMMA2, tied=True),
    "gemma2 untied, no attention cap": Case("gemma2", {**GEMMA2, "attn_logit_softcapping": None}),
    "gemma3": Case("gemma3_text", GEMMA3, tied=True),
    "phi3": Case("phi3", {**PHI3, "sliding_window": WINDOW}),
    "phi3, short factors": Case("phi3", {**LONG_PHI3, "original_max_position_embeddings": 64}),
    "phi3, long factors": Case("phi3", LONG_PHI3, tied=True),
    "olmo2": Case("olmo2", {"rope_parameters": LINEAR}),
    "olmo2 with biases": Case("olmo2", {"attention_bias": True}),
    "smollm3": Case("smollm3", {"no_rope_layers": [1, 0, 1]}, tied=True),
    "smollm3 with windows": Case(
        "smollm3", {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": WINDOW}
    ),
    "granite": Case("granite", _granite(), tied=True),
    "granite with biases": Case("granite", _granite(attention_bias=True, mlp_bias=True)),
    "mixtral": Case("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "qwen3_moe": Case(
        "qwen3_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
            "head_dim": 16,
        },
    ),
    "qwen3_moe, normalised": Case(
        "qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    ),
    "gpt_oss": Case(
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "swiglu_limit": 0.8,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
}


def random_checkpoint(
    case: Case, directory: Path, seed: int = 7, like: str | None = None, noise: float = 0.1, hidden: int = 32
) -> str:
    """Write a checkpoint with its tokenizer; every weight is random, norms and biases included.

    With `like`, the weights of that checkpoint, disturbed by `noise`. hidden: a multiple of 16.
    """
    common = {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": hidden + 8,
        "num_hidden_layers": case.layers,
        "num_attention_heads": hidden // 8,
        "num_key_value_heads": hidden // 16,
        "max_position_embeddings": 128,
        "rope_parameters": DEFAULT,
        "rms_norm_eps": 1e-3,
        "bos_token_id": 0,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "tie_word_embeddings": case.tied,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(case.kind, **{**common, **case.config}))
    if like is not None:
        model.load_state_dict(type(model).from_pretrained(like, dtype=torch.float32).state_dict())
    generator = torch.Generator().manual_seed(seed)
    offset = 1.0 if case.kind.startswith("gemma") else 0.0  # which a norm adds to its weight
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            if like is not None:
                weight.add_(noise * weight.std() * drawn)
            elif "norm" in name:
                weight.copy_(1 - offset + 0.3 * drawn)
            else:
                weight.copy_(drawn * (0.2 if weight.dim() == 1 or name.endswith("bias") else 0.25))
        if like is None:
            _spread_logits(model, offset)
    model.save_pretrained(directory, max_shard_size=case.shard_size)
    save_tokenizer(directory)
    return str(directory)


def _spread_logits(model: Any, offset: float) -> None:
    """Give the logits a standard deviation of about 3 before any cap.

    With a tied head the embedding is small, the final norm large, and half of its signs are turned: else a token would
    mostly predict itself.
    """
    head, norm = model.get_output_embeddings().weight, model.model.norm.weight
    spread = 3 * getattr(model.config, "logits_scaling", 1.0)
    if model.config.tie_word_embeddings:
        gains = torch.where(torch.arange(len(norm)) % 2 == 0, 4.0, -4.0)
        norm.copy_(gains * (offset + norm) - offset)
        spread /= 4
    head.mul_(spread / (head.std() * head.shape[1] ** 0.5))


class InFP64(TorchFunctionMode):
    """Leaves fp64 numbers what they are, where transformers' modules turn them into fp32 for a norm, a softmax or a
    router. Positions and frequencies of rotary embeddings are no fp64 numbers, so their fp32 arithmetic stays."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        exact = bool(args) and isinstance(args[0], Tensor) and args[0].dtype is torch.float64
        if exact and func is Tensor.float:
            return args[0]
        if exact and func is Tensor.to and torch.float32 in (*args[1:], kwargs.get("dtype")):
            return args[0]
        if exact and func in (F.softmax, torch.softmax, Tensor.softmax) and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@contextmanager
def reference(checkpoint: str, *, exact: bool = True) -> Iterator[Callable[[list[list[int]]], Tensor]]:
    """transformers' logits [texts, length, vocab] in fp64, by its eager attention."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64, **eager)
    for module in model.modules():
        if hasattr(module, "limit"):  # of gpt_oss's gates: transformers 5.17 takes 7, whatever the configuration says
            module.limit = model.config.swiglu_limit

    def logits(texts: list[list[int]]) -> Tensor:
        result: Tensor = model(torch.tensor(texts)).logits
        return result

    with torch.inference_mode():
        if exact:
            with InFP64():
                yield logits
        else:
            yield logits
