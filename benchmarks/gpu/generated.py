"""Pairs of any size whose acceptance is set, made in the device's memory.

The checkpoint files are sparse: their weights are holes, so 16 GB take no disk and no time to write, and the engine
loads them as any others. Then the weights are drawn in place. A token's embedding is a random code of ±1, and the
head's row of token f(t) is the code of t, for a permutation f. So the best token after t is f(t) by a wide margin,
whatever stood before. The layers cost what they cost in a trained model, but write too little to change that. A draft
model has its own codes, and its permutation is f for a set share of the tokens and another one for the rest.
"""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.engineered import DEMO_TOKENIZER, LOGITS, WRITES, Cycle, textual
from engine.models.decoder import Decoder

STORED_AS = {torch.bfloat16: "BF16", torch.float32: "F32"}
POSITIONS = 4096


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a model. The embedding and the head are not tied, so that the head can be f; a pass reads as much of
    either."""

    kind: str  # llama, or qwen2, which has biases
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def config(self) -> dict[str, Any]:
        """config.json."""
        return {
            "model_type": self.kind,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": POSITIONS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name."""
        hidden, queries, keys = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "mlp.gate_proj.weight": (self.intermediate, hidden),
            "mlp.up_proj.weight": (self.intermediate, hidden),
            "mlp.down_proj.weight": (hidden, self.intermediate),
        }
        if self.kind == "qwen2":
            layer |= {f"self_attn.{n}_proj.bias": (queries if n == "q" else keys,) for n in "qkv"}
        named = {f"model.layers.{i}.{name}": shape for i in range(self.layers) for name, shape in layer.items()}
        ends: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, hidden)}
        return {**ends, **named, "model.norm.weight": (hidden,), "lm_head.weight": (self.vocab, hidden)}

    def num_bytes(self, dtype: torch.dtype) -> int:
        return dtype.itemsize * sum(math.prod(shape) for shape in self.tensors().values())


def write_sparse(directory: Path, shape: ModelShape, dtype: torch.dtype) -> str:
    """Write a checkpoint whose norms are 1. All other weights are holes in the file and read as 0."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(shape.config()), "utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_TOKENIZER.with_name(name), directory)
    header: dict[str, Any] = {}
    end = 0
    for name, sizes in shape.tensors().items():
        begin, end = end, end + dtype.itemsize * math.prod(sizes)
        header[name] = {"dtype": STORED_AS[dtype], "shape": sizes, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for name, entry in header.items():
            if name.endswith("norm.weight"):
                file.seek(8 + len(text) + entry["data_offsets"][0])
                file.write(bytes(torch.ones(entry["shape"], dtype=dtype).view(torch.uint8).tolist()))
    return str(directory)


@dataclass(frozen=True, slots=True)
class Texts:
    """The permutations of a pair, over the tokens that have a text."""

    tokens: Tensor  # [n] token ids
    target: Tensor  # [n] f of each
    draft: Tensor  # [n] the draft's permutation, which is f for the set share

    @classmethod
    def draw(cls, vocab: int, acceptance: float, seed: int = 0) -> "Texts":
        """vocab: of the smaller model. acceptance: the share of tokens after which the draft is right."""
        generator = torch.Generator().manual_seed(seed)
        tokenizer = Tokenizer.from_file(str(DEMO_TOKENIZER))
        known = min(vocab, tokenizer.get_vocab_size())
        tokens = textual(tokenizer, known)
        cycle = Cycle(tokens, known, generator)
        target = cycle.followers(generator)[tokens, 0]
        wrong = (cycle.ranks(generator)[tokens] >= acceptance).nonzero()[:, 0]
        draft = target.clone()
        draft[wrong] = target[wrong.roll(1)]
        return cls(tokens, target, draft)

    def after(self, first: int, count: int) -> list[int]:
        """The text of the target from a token on: `count` tokens."""
        follower = dict(zip(self.tokens.tolist(), self.target.tolist(), strict=True))
        text = [first]
        while len(text) < count:
            text.append(follower[text[-1]])
        return text


def fill(decoder: Decoder, tokens: Tensor, followers: Tensor, seed: int) -> None:
    """Draw all weights of a decoder in place, so that the best token after tokens[i] is followers[i]."""
    generator = torch.Generator(decoder.embedding.device).manual_seed(seed)
    writes = WRITES / math.sqrt(2 * len(decoder.layers))
    with torch.no_grad():
        for layer in decoder.layers:
            gate_up, down = layer.mlp.products
            for product, scale in ((layer.qkv, 1.0), (layer.out, writes), (gate_up, 1.0), (down, writes)):
                weight = product.weight
                weight.normal_(0, scale / math.sqrt(weight.shape[1]), generator=generator)
        for table in (decoder.embedding, decoder.head.weight):
            table.random_(0, 2, generator=generator).mul_(2).sub_(1)
        device = decoder.embedding.device
        decoder.head.weight[followers.to(device)] = decoder.embedding[tokens.to(device)]
        decoder.head.weight.mul_(LOGITS[0].item() / decoder.config.hidden_size)
