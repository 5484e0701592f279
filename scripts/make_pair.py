"""Write a synthetic target/draft pair of any shape. One number, E (--eps), sets its acceptance.

    python scripts/make_pair.py --out DIR --eps 0.05 --layers 12 --hidden 384 --draft-layers 2

The draft is a random transformer. The target has the same layers and more after them. The writes of the additional
layers to the residual stream (o_proj, down_proj) are scaled by E. At E = 0 both models compute the same function; a
larger E makes their laws differ more. The target's cost follows from its depth. So a benchmark can measure the
engine apart from the quality of a draft. DIR/target and DIR/draft are ordinary Hugging Face checkpoints.

Greedy text of a random transformer usually runs into a loop, which would flatter every cache and n-gram table. Sharp
random attention (see ATTENTION) makes the next token depend on the whole prefix, so the text does not repeat.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

DEMO_TOKENIZER = Path(__file__).resolve().parent.parent / "models" / "demo" / "target" / "tokenizer.json"
ARCHITECTURES: dict[str, tuple[Callable[..., PreTrainedConfig], Callable[[Any], PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
}
BOS, EOS = "<|bos|>", "<|eos|>"

# Standard deviations of the random weights, times fan_in ** -0.5. With normalised inputs the outputs of every
# projection have about this size.
ATTENTION = 2.0  # q and k: scores have variance 16, so a query attends to a few positions, not to the mean of all
WRITE = 0.5  # o and down: each layer adds to the residual stream without drowning the embedding
HEAD = 4.0  # logits have standard deviation 4: with 4,096 tokens the best one has a probability of about 0.3
BIAS = 0.5  # q, k and v biases, absolute (qwen2)
_SCALES = {"q_proj": ATTENTION, "k_proj": ATTENTION, "o_proj": WRITE, "down_proj": WRITE, "lm_head": HEAD}


def make_pair(
    out: Path,
    *,
    eps: float = 0.05,
    layers: int = 12,
    draft_layers: int = 2,
    hidden: int = 384,
    heads: int = 6,
    kv_heads: int = 2,
    ffn: int = 1024,
    vocab: int = 4096,
    max_positions: int = 2048,
    seed: int = 0,
    arch: str = "llama",
    dtype: str = "float32",
) -> None:
    """Write out/target and out/draft. The tokenizer is the demo pair's, cut to `vocab` ids; ids from 4,096 on have no
    text. Raises ValueError for a shape that cannot be built."""
    if not 1 <= draft_layers <= layers:
        raise ValueError(f"draft_layers {draft_layers} must be 1..layers ({layers})")
    if hidden % heads or heads % kv_heads or (hidden // heads) % 2:
        raise ValueError(f"hidden {hidden} / heads {heads} must be an even number, and heads a multiple of kv_heads")
    make_config, make_model = ARCHITECTURES[arch]
    shape = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": False,  # with a tied head every token would predict itself
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    target = make_model(make_config(num_hidden_layers=layers, **shape))
    _randomise(target, draft_layers, eps, seed)
    draft = make_model(make_config(num_hidden_layers=draft_layers, **shape))
    weights = target.state_dict()
    draft.load_state_dict({name: weights[name] for name in draft.state_dict()})
    tokenizer = _tokenizer(vocab)
    for role, model in (("target", target), ("draft", draft)):
        model.to(getattr(torch, dtype)).save_pretrained(out / role)
        tokenizer.save_pretrained(out / role)


@torch.no_grad()
def _randomise(model: PreTrainedModel, draft_layers: int, eps: float, seed: int) -> None:
    """Draw every weight in double precision, so that pairs of different dtypes have the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            continue  # norms keep their ones
        scale = _scale(name, weight)
        if _layer(name) >= draft_layers and name.split(".")[-2] in ("o_proj", "down_proj"):
            scale *= eps
        weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * scale)


def _scale(name: str, weight: torch.Tensor) -> float:
    if name.endswith(".bias"):
        return BIAS
    if "embed_tokens" in name:
        return 1.0
    return _SCALES.get(name.split(".")[-2], 1.0) / math.sqrt(weight.shape[1])


def _layer(name: str) -> int:
    """Return the layer's index in a name such as "model.layers.3.mlp.up_proj.weight"; -1 outside the layers."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else -1


def _tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Cut the demo pair's byte-level BPE to ids below `vocab`. Merges are in the order of ids, so the cut is valid."""
    spec = json.loads(DEMO_TOKENIZER.read_text("utf-8"))
    model = spec["model"]
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < vocab}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--eps", type=float, default=0.05, help="scale of the additional layers' writes, 0: same law")
    parser.add_argument("--layers", type=int, default=12, help="of the target")
    parser.add_argument("--draft-layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--ffn", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--max-positions", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arch", choices=sorted(ARCHITECTURES), default="llama")
    parser.add_argument("--dtype", choices=["float64", "float32", "bfloat16"], default="float32")
    make_pair(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    main()
