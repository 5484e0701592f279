"""Train look-ahead embeddings for a target, which let the target itself draft: PaSS (Monea et al. 2023).

    python -m scripts.train_pass --target models/demo/target --out models/demo/pass --minutes 15
    python -m scripts.train_pass --target DIR --text FILE --out DIR --tokens 4 --minutes 60
    python -m scripts.train_pass --target DIR --text FILE --out DIR --minutes 60 --resume --lr 3e-3

arXiv 2311.13581. The target is frozen, and any causal LM of transformers whose logits are one matrix on its last state
will do. Look-ahead token i (from 1) stands i positions behind a text's last token. It sees the text and the look-ahead
tokens before it, and learns the target's own law of the token after its position. It minimises λ·CE(p, q) + (1 -
λ)·TV(p, q) with λ = exp(-3α), where α is its acceptance so far, and token i weighs 0.8^(i - 1). --text is a text file,
whose last tenth is held out, or a folder of Python files as for the demo pair. --rows adds files of token ids [rows,
tokens] (.npy), for example texts that the target wrote.

DIR gets config.json and a model.safetensors that holds `embeddings` fp32 [tokens, hidden]. --resume begins with those
of the work folder WORK, which is DIR/work if it is not given. The last line has the acceptance on held-out text.
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from scripts.train_heads import (
    DECAY,
    EVAL_ROWS,
    TokenArray,
    batches,
    read_sources,
    rounded,
    spend_budget,
    training_arguments,
)

NAME = "embeddings"


class AnchoredTarget:
    """A frozen target in fp32, which reads texts and look-ahead tokens behind them."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError unless its embeddings enter the first layer as they are, and its logits are one matrix on
        its last state."""
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._body = model.eval().requires_grad_(False).base_model
        self.layers = model.config.get_text_config().num_hidden_layers
        self.embedding = model.get_input_embeddings().weight.detach()  # [vocab, hidden]
        self.matrix = model.get_output_embeddings().weight.detach()  # [vocab, hidden]
        ids = torch.arange(8)[None] % len(self.matrix)
        output = model(ids, output_hidden_states=True)
        states = output.hidden_states
        if not torch.allclose(states[0], self.embedding[ids]) or not torch.allclose(
            states[-1] @ self.matrix.T, output.logits, rtol=1e-3, atol=1e-3
        ):
            raise ValueError(
                f"target {path} scales its embeddings or logits: look-ahead tokens cannot be trained for it"
            )

    @torch.no_grad()
    def read(self, ids: Tensor) -> tuple[Tensor, DynamicCache]:
        """(log-laws [batch, tokens, vocab] of the next tokens, keys and values) of texts, ids [batch, tokens]."""
        cache = DynamicCache()
        states = self._body(ids, past_key_values=cache, use_cache=True).last_hidden_state
        return (states @ self.matrix.T).log_softmax(-1), cache

    def look_ahead(self, cache: DynamicCache, batch: int, tokens: Tensor, anchors: Tensor) -> Tensor:
        """Log-laws [batch, anchors, L, vocab] of look-ahead tokens behind places of the `batch` texts that are read.

        tokens [L, hidden]: their embeddings. anchors [A]: the positions of the last token that they see, of all texts.
        Changes the cache.
        """
        (length, width), past = tokens.shape, cache.get_seq_length()
        positions = anchors[:, None] + 1 + torch.arange(length)  # [A, L]
        states = self._body(
            inputs_embeds=tokens.repeat(len(anchors), 1).expand(batch, -1, width),
            position_ids=positions.flatten().expand(batch, -1),
            attention_mask=_mask(anchors, length, past).expand(batch, 1, -1, -1),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        laws: Tensor = (states @ self.matrix.T).log_softmax(-1)
        return laws.unflatten(1, (len(anchors), length))


def _mask(anchors: Tensor, length: int, past: int) -> Tensor:
    """[A·L, past + A·L]: 0 where a look-ahead token sees a key, else −inf: the text up to its anchor, then the
    look-ahead tokens of its own anchor up to itself."""
    text = torch.arange(past) <= anchors.repeat_interleave(length)[:, None]
    own = torch.block_diag(*[torch.ones(length, length).tril()] * len(anchors)).bool()
    return torch.zeros(len(own), past + len(own)).masked_fill_(~torch.cat((text, own), 1), -torch.inf)


def laws(target: AnchoredTarget, tokens: Tensor, ids: Tensor, anchors: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (log p, log q) [batch · anchors, vocab] of each look-ahead token. ids [batch, n]: anchors + L < n.

    The target's law behind position anchor + i is what look-ahead token i gives.
    """
    logp, cache = target.read(ids)
    logq = target.look_ahead(cache, len(ids), tokens, anchors)
    for i in range(len(tokens)):
        yield logp[:, anchors + 1 + i].flatten(0, 1), logq[:, :, i].flatten(0, 1)


def loss_of(pairs: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[float]]:
    """Return (the loss, each look-ahead token's acceptance Σ min(p, q))."""
    total, accepted = torch.zeros(()), []
    for i, (logp, logq) in enumerate(pairs):
        p, q = logp.exp(), logq.exp()
        variation = 0.5 * (p - q).abs().sum(-1).mean()
        alpha = 1 - variation.item()
        weight = math.exp(-3 * alpha)
        cross_entropy = -(p * logq).sum(-1).mean()
        total = total + DECAY**i * (weight * cross_entropy + (1 - weight) * variation)
        accepted.append(alpha)
    return total, accepted


def draw_anchors(rng: np.random.Generator, count: int, context: int, length: int) -> Tensor:
    """Places in texts of `context` tokens with `length` tokens behind them, without the first few."""
    places = np.arange(min(8, context - length - 1), context - length)
    return torch.from_numpy(np.sort(rng.choice(places, min(count, len(places)), replace=False)))


@torch.no_grad()
def evaluate(
    target: AnchoredTarget, tokens: Tensor, held: TokenArray, args: argparse.Namespace
) -> dict[str, list[float]]:
    """Return each look-ahead token's acceptance on held-out text, given the text's own tokens: Σ min(p, q) at
    temperature 1, and the share of equal best tokens, which is that of temperature 0."""
    source, rng = batches([held], 1, args.context, seed=7), np.random.default_rng(7)
    sums = torch.zeros(2, len(tokens), dtype=torch.float64)
    for _ in range(EVAL_ROWS):
        anchors = draw_anchors(rng, args.anchors, args.context, len(tokens))
        for i, (logp, logq) in enumerate(laws(target, tokens, next(source), anchors)):
            sums[0, i] += torch.minimum(logp, logq).exp().sum(-1).mean()
            sums[1, i] += (logp.argmax(-1) == logq.argmax(-1)).double().mean()
    overlap, equal = (sums / EVAL_ROWS).tolist()
    return {"overlap": overlap, "equal_best": equal}


def begin(target: AnchoredTarget, args: argparse.Namespace, kept: Path) -> Tensor:
    """The embeddings to begin with: those of the work folder, or near the mean of the target's own.

    Raises ValueError if the work folder has those of another shape.
    """
    shape = (args.tokens, target.embedding.shape[1])
    if args.resume:
        found = load_file(kept)[NAME]
        if found.shape != shape:
            raise ValueError(f"{kept} has embeddings of shape {tuple(found.shape)}, not {shape}: choose its --tokens")
        return found
    mean, spread = target.embedding.mean(0), target.embedding.std(0)
    return mean + 0.1 * spread * torch.randn(shape, generator=torch.Generator().manual_seed(0))


def train(args: argparse.Namespace) -> None:
    """Train within the budget. Prints a JSON line every LOG_STEPS steps, and the held-out figures at the end."""
    target = AnchoredTarget(args.target)
    kept = (args.work or args.out / "work") / "embeddings.safetensors"
    kept.parent.mkdir(parents=True, exist_ok=True)
    tokens = nn.Parameter(begin(target, args, kept))
    source, held = read_sources(args)
    rng = np.random.default_rng(args.seed)
    optimiser = torch.optim.AdamW([tokens], betas=(0.9, 0.99), weight_decay=0.0)

    def learn(rate: float) -> tuple[float, list[float]]:
        anchors = draw_anchors(rng, args.anchors, args.context, args.tokens)
        loss, accepted = loss_of(laws(target, tokens, next(source), anchors))
        optimiser.zero_grad(set_to_none=True)
        optimiser.param_groups[0]["lr"] = rate
        loss.backward()
        nn.utils.clip_grad_norm_([tokens], 1.0)
        optimiser.step()
        return loss.item(), accepted

    spend_budget(args, learn, lambda: {NAME: tokens.detach()}, kept)
    export(tokens.detach(), target, args)
    print(json.dumps({"held_out": rounded(evaluate(target, tokens.detach(), held, args))}), flush=True)


def export(tokens: Tensor, target: AnchoredTarget, args: argparse.Namespace) -> None:
    """Write a directory that the engine loads."""
    save_file({NAME: tokens.contiguous()}, args.out / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": "pass",
        "num_lookahead_tokens": tokens.shape[0],
        "hidden_size": tokens.shape[1],
        "num_target_layers": target.layers,
        "vocab_size": len(target.embedding),
        "base_model_name_or_path": args.target.name,
    }
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = training_arguments(__doc__, context=256, lr=1e-2)
    parser.add_argument("--tokens", type=int, default=4, help="look-ahead tokens")
    parser.add_argument("--anchors", type=int, default=48, help="places of each text that are looked ahead from")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    train(args)


if __name__ == "__main__":
    main()
