"""Write a target and draft models of any shape whose acceptance is a number that you choose.

    python -m benchmarks.engineered DIR --layers 24 --hidden 896 --acceptance .6,.9

DIR/target and one DIR/draft-A per acceptance A are Hugging Face checkpoints (llama). A token's embedding alone decides
the law of the next token: three followers with logits 16, 15 and 14, at which the embedding is aimed through the head.
The layers have their full size and cost. Their writes to the residual stream are too small to change the best token. A
draft model has the same followers for a share A of the tokens, and others for the rest. So a draft is accepted with a
chance of A, independently of its position, at any temperature. The first followers form one cycle through all tokens
that have text: greedy text has no repetition. The weights depend on the seed and the shape alone.
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.common import positive

DEMO_TOKENIZER = Path(__file__).resolve().parent.parent / "models" / "demo" / "target" / "tokenizer.json"
BOS, EOS = "<|bos|>", "<|eos|>"
LOGITS = torch.tensor([16.0, 15.0, 14.0])  # of the followers; all others have a standard deviation of 26 / sqrt(hidden)
WRITES = 0.02  # size of all layers' writes together, over the embedding's
HEAD_DIM = 64
SMALLEST_HIDDEN = 128  # in a narrower model other tokens come near the followers' logits
CHUNK = 8192  # tokens whose embeddings are solved for at once
STRETCH = 100  # tokens on the cycle, among which the share of changed followers is exact


@dataclass(frozen=True)
class PairShape:
    layers: int
    hidden: int
    intermediate: int
    kv_heads: int
    vocab: int
    positions: int

    def config(self, dtype: str) -> LlamaConfig:
        """Raises ValueError for a shape that cannot be built."""
        heads, rest = divmod(self.hidden, HEAD_DIM)
        if rest or heads % self.kv_heads or self.hidden < SMALLEST_HIDDEN:
            raise ValueError(
                f"hidden is {self.hidden}, KV heads are {self.kv_heads}; hidden must be a multiple of "
                f"{HEAD_DIM} × KV heads and at least {SMALLEST_HIDDEN}"
            )
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.positions,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=1,
            dtype=dtype,
            architectures=["LlamaForCausalLM"],
        )


def make_tokenizer(vocab: int) -> Tokenizer:
    """The demo pair's byte-level BPE, cut to `vocab` ids or filled up to them with pairs of its tokens."""
    spec = json.loads(DEMO_TOKENIZER.read_text("utf-8"))
    model = spec["model"]
    ids: dict[str, int] = {token: i for token, i in model["vocab"].items() if i < vocab}
    merges = [pair for pair in model["merges"] if "".join(pair) in ids]  # in the order of ids: the cut is valid
    taken = len({*ids.values(), *(entry["id"] for entry in spec["added_tokens"])})
    words = [token for token in ids if token.isalpha() and token.isascii()]
    for left in words:
        for right in words:
            if taken >= vocab:
                break
            if left + right not in ids:
                ids[left + right] = taken
                merges.append([left, right])
                taken += 1
    model["vocab"], model["merges"] = ids, merges
    return Tokenizer.from_str(json.dumps(spec))


def textual(tokenizer: Tokenizer, vocab: int) -> torch.Tensor:
    """Ids whose text is complete on its own: not special, and no part of a character: [ids]."""
    texts = [tokenizer.decode([i]) for i in range(vocab)]
    return torch.tensor([i for i, text in enumerate(texts) if text and "\N{REPLACEMENT CHARACTER}" not in text])


class Cycle:
    """A random order of ids, in which every token has a place: [vocab]."""

    def __init__(self, ids: torch.Tensor, vocab: int, generator: torch.Generator) -> None:
        self._ids = ids[torch.randperm(len(ids), generator=generator)]
        self._place = torch.randint(len(ids), (vocab,), generator=generator)  # by chance for ids without text
        self._place[self._ids] = torch.arange(len(ids))

    def followers(self, generator: torch.Generator) -> torch.Tensor:
        """Three different ids for each token: the next one, and two anywhere: [vocab, 3]."""
        vocab, count = len(self._place), len(self._ids)
        half = (count - 2) // 2
        anywhere = torch.randint(half, (vocab, 2), generator=generator)
        steps = torch.cat([torch.ones(vocab, 1, dtype=torch.long), anywhere + torch.tensor([2, 2 + half])], 1)
        return self._ids[(self._place[:, None] + steps) % count]

    def ranks(self, generator: torch.Generator) -> torch.Tensor:
        """A number in [0, 1) for each token, by chance. Within a stretch of the cycle they are evenly spaced:
        [vocab]."""
        stretches = -(-len(self._ids) // STRETCH)
        order = torch.rand(stretches, STRETCH, generator=generator).argsort(1)
        return (order / STRETCH).flatten()[self._place]


def aim(followers: torch.Tensor, hidden: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(embedding, head), [vocab, hidden] each, by which every token gives its followers LOGITS.

    The head does not read coordinate 0. The embedding gets there what it lacks to the one length that all have, so that
    the last norm scales all logits alike.
    """
    head = torch.randn(len(followers), hidden, generator=generator) / math.sqrt(hidden)
    head[:, 0] = 0.0
    embedding = torch.cat([_shortest(head[chunk]) for chunk in followers.split(CHUNK)])
    lengths = embedding.norm(dim=1)
    longest = 1.02 * lengths.max()
    embedding[:, 0] = (longest**2 - lengths**2).sqrt()
    scale = math.sqrt(hidden) / longest  # the embedding's numbers have a root mean square of 1
    return embedding * scale, head / scale


def _shortest(rows: torch.Tensor) -> torch.Tensor:
    """The shortest vectors with products LOGITS with rows [tokens, followers, hidden]: [tokens, hidden]."""
    gram = rows @ rows.mT
    weights = torch.linalg.solve(gram, LOGITS.expand(len(rows), -1))
    return (weights[:, None] @ rows)[:, 0]


def make_weights(config: LlamaConfig, followers: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """fp32 weights by name. Inputs and outputs of every product have numbers of about the size of 1."""
    generator = torch.Generator().manual_seed(seed)
    embedding, head = aim(followers, config.hidden_size, generator)
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in LlamaForCausalLM(config).named_parameters()}
    write = WRITES / math.sqrt(2 * config.num_hidden_layers)
    weights = {}
    for name, shape in shapes.items():
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(shape)
        elif name.startswith("model.layers"):
            scale = write if name.split(".")[-2] in ("o_proj", "down_proj") else 1.0
            weights[name] = torch.randn(shape, generator=generator) * (scale / math.sqrt(shape[1]))
    return weights | {"model.embed_tokens.weight": embedding, "lm_head.weight": head}


def write_model(directory: Path, config: LlamaConfig, weights: dict[str, torch.Tensor], tokenizer: Tokenizer) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(directory)
    dtype = getattr(torch, str(config.dtype).removeprefix("torch."))
    stored = {name: weight.to(dtype).contiguous() for name, weight in weights.items()}
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS).save_pretrained(directory)


def make_pair(
    out: Path, target: PairShape, draft: PairShape, acceptances: list[float], *, seed: int = 0, dtype: str = "float32"
) -> None:
    """Write out/target and one out/draft-A per acceptance A. Raises ValueError for a shape that cannot be built."""
    target_config, draft_config = target.config(dtype), draft.config(dtype)
    tokenizer = make_tokenizer(target.vocab)
    ids = textual(tokenizer, target.vocab)
    generator = torch.Generator().manual_seed(seed)
    cycle, other_cycle = (Cycle(ids, target.vocab, generator) for _ in range(2))
    followers, others = (c.followers(generator) for c in (cycle, other_cycle))
    ranks = cycle.ranks(generator)
    write_model(out / "target", target_config, make_weights(target_config, followers, seed + 1), tokenizer)
    for acceptance in acceptances:
        drafted = torch.where(ranks[:, None] < acceptance, followers, others)
        write_model(
            out / f"draft-{acceptance:g}", draft_config, make_weights(draft_config, drafted, seed + 2), tokenizer
        )


def acceptance_list(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 <= value <= 1 for value in values):
        raise argparse.ArgumentTypeError(f"acceptances must be from 0 to 1, not {text}")
    return values


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", type=Path, metavar="DIR")
    p.add_argument("--acceptance", type=acceptance_list, default=[0.9], help="shares such as .6,.9 (default .9)")
    p.add_argument("--vocab", type=positive, default=4096)
    p.add_argument("--max-positions", type=positive, default=8192)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the files")
    for prefix, (layers, hidden, intermediate) in {"": (24, 896, 2240), "draft-": (2, 384, 1024)}.items():
        p.add_argument(f"--{prefix}layers", type=positive, default=layers)
        p.add_argument(f"--{prefix}hidden", type=positive, default=hidden, help=f"a multiple of {HEAD_DIM}")
        p.add_argument(f"--{prefix}intermediate", type=positive, default=intermediate)
        p.add_argument(f"--{prefix}kv-heads", type=positive, default=2)
    a = p.parse_args(argv)
    target = PairShape(a.layers, a.hidden, a.intermediate, a.kv_heads, a.vocab, a.max_positions)
    draft = PairShape(a.draft_layers, a.draft_hidden, a.draft_intermediate, a.draft_kv_heads, a.vocab, a.max_positions)
    try:
        make_pair(a.out, target, draft, a.acceptance, seed=a.seed, dtype=a.dtype)
    except ValueError as error:
        p.error(str(error))


if __name__ == "__main__":
    main()
