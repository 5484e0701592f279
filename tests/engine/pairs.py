"""Tiny random Hugging Face checkpoints, made on the spot: a target, and a draft that agrees with it now and then."""

import json
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCAB = 400  # rows of the models' tables; the tokenizer uses fewer
EOS = 1
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CORPUS = [
    "def main(argv=None):\n    return 0\n",
    "the cat sat on the mat, the dog did not",
    "naïve café, 12 €, λ → 日本語 🙂",
]


@dataclass(frozen=True, slots=True)
class Pair:
    target: str
    draft: str


@dataclass(frozen=True, slots=True)
class Shape:
    """What varies between the checkpoints; hidden 64, 4 heads and 2 kv heads are common to all."""

    kind: str = "llama"
    layers: int = 2
    tied: bool = False
    rope: dict[str, Any] | None = None
    vocab: int = VOCAB
    max_positions: int = 128
    spread: float = 3.0  # standard deviation of the logits


def save_tokenizer(directory: Path, merges: int = 60, specials: tuple[str, ...] = ("<|bos|>", "<|eos|>")) -> None:
    """Byte-level BPE: the specials, all 256 bytes, then at most `merges` merges."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(specials) + merges,
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=specials[0], eos_token=specials[1])
    fast.save_pretrained(directory)


def random_model(shape: Shape, seed: int) -> PreTrainedModel:
    """Random weights in fp32, biases included, whose logits differ enough to make varied text."""
    common: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": 0,
        "eos_token_id": EOS,
        "rope_parameters": shape.rope or {"rope_type": "default", "rope_theta": 10000.0},
    }
    llama = shape.kind == "llama"
    model = LlamaForCausalLM(LlamaConfig(**common)) if llama else Qwen2ForCausalLM(Qwen2Config(**common))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.1 * noise if "norm" in name else noise * (0.3 if weight.dim() == 1 else 0.15))
        # The final norm makes rows of length √hidden, so this is the logits' standard deviation.
        head = model.get_output_embeddings().weight
        head.mul_(shape.spread / (head.std() * head.shape[1] ** 0.5))
    return model


def save_checkpoint(
    directory: Path, shape: Shape, seed: int = 0, *, like: Path | None = None, noise: float = 0.0
) -> str:
    """Write a checkpoint and its tokenizer; with `like`, that checkpoint's weights disturbed by `noise`."""
    model = random_model(shape, seed)
    if like is not None:
        generator = torch.Generator().manual_seed(seed)
        model.load_state_dict(type(model).from_pretrained(like).state_dict())
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(noise * weight.std() * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return str(directory)


def save_pair(directory: Path, shape: Shape = Shape(), noise: float = 0.12) -> Pair:
    target = save_checkpoint(directory / "target", shape, seed=1)
    return Pair(target, save_checkpoint(directory / "draft", shape, seed=2, like=directory / "target", noise=noise))


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**content, **changes}), "utf-8")


def copy_of(checkpoint: str, directory: Path) -> Path:
    shutil.copytree(checkpoint, directory)
    return directory


def reference_model(checkpoint: str, *, exact: bool = True) -> Any:
    """transformers' own module in fp64. Its norms compute in fp32 whatever the dtype: `exact` lifts them to fp64."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64, attn_implementation="sdpa")
    norms: list[Any] = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")] if exact else []
    for norm in norms:
        norm.forward = partial(
            F.rms_norm, normalized_shape=norm.weight.shape, weight=norm.weight, eps=norm.variance_epsilon
        )
    return model
