"""Train Medusa heads for a target: small blocks on its last state, which share the target's own output matrix.

    python -m scripts.train_heads --target models/demo/target --out models/demo/medusa --minutes 25
    python -m scripts.train_heads --target DIR --text FILE --out DIR --heads 4 --layers 1 --minutes 60
    python -m scripts.train_heads --target DIR --text FILE --out DIR --minutes 60 --resume --lr 5e-3

The target is frozen, and any causal LM of transformers whose logits are one matrix on its last state will do. Head k
learns the target's own law of token t + 2 + k from its state at position t (Cai et al. 2024, arXiv 2401.10774): each
head minimises λ·CE(p, q) + (1 - λ)·TV(p, q) with λ = exp(-3α), where α is its acceptance so far, and head k weighs
0.8^k. --text is a text file, whose last tenth is held out, or a folder of Python files as for the demo pair. --rows
adds files of token ids [rows, tokens] (.npy), for example texts that the target wrote.

DIR gets config.json and a bf16 model.safetensors in the authors' format, without output matrices. The fp32 weights for
--resume stay in WORK, which is DIR/work if it is not given.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from scripts.pair_data import STDLIB, held_out_tokens, training_tokens
from scripts.train_demo_pair import (
    CHECKPOINT_STEPS,
    LOG_STEPS,
    TrainingBudget,
    learning_rate_scale,
    make_optimisers,
    spend,
    step_once,
)

DECAY = 0.8  # weight of a head relative to the one before
EVAL_ROWS = 32

TokenArray = NDArray[Any]  # integers: [tokens] of a text, or [rows, tokens]


class Block(nn.Module):
    """x + SiLU(Wx + b) for each layer. W and b are 0 at first, so an untrained head is the target's own."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.linears = [nn.Linear(hidden, hidden) for _ in range(layers)]
        self.layers = nn.ModuleList(self.linears)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.linears:
            x = x + F.silu(layer(x))
        return x


class Heads(nn.Module):
    """Medusa heads over a target's output matrix."""

    def __init__(self, hidden: int, heads: int, layers: int) -> None:
        super().__init__()
        self.each = [Block(hidden, layers) for _ in range(heads)]
        self.blocks = nn.ModuleList(self.each)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights by their names in the authors' files."""
        return {
            f"{h}.{n}.linear.{part}": getattr(layer, part).detach()
            for h, block in enumerate(self.each)
            for n, layer in enumerate(block.linears)
            for part in ("weight", "bias")
        }

    def load(self, tensors: dict[str, torch.Tensor], path: Path) -> None:
        """Raises ValueError unless these are the tensors of heads of this shape."""
        own = self.tensors()
        if {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in tensors.items()}:
            raise ValueError(f"{path} does not hold {len(self.each)} heads of this shape: choose its --heads, --layers")
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


class Target:
    """A frozen target in fp32."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError unless its logits are one matrix on its last state."""
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.path = path
        self._body = model.eval().requires_grad_(False).base_model
        self.matrix = model.get_output_embeddings().weight.detach()  # [vocab, hidden]
        ids = torch.arange(8)[None] % len(self.matrix)
        if not torch.allclose(self.states(ids) @ self.matrix.T, model(ids).logits, rtol=1e-3, atol=1e-3):
            raise ValueError(f"target {path} scales, caps or shifts its logits: heads on its matrix cannot follow it")

    @torch.no_grad()
    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """The states behind the final norm, [batch, tokens, hidden]."""
        states: torch.Tensor = self._body(ids, use_cache=False).last_hidden_state
        return states


def read_text(target: Path, text: Path) -> tuple[TokenArray, TokenArray]:
    """Return (training tokens, held-out tokens) of a folder of Python files or of a text file."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    if text.is_dir():
        if tokenizer.get_vocab_size() > np.iinfo(np.uint16).max + 1:
            raise ValueError(f"a folder is for the demo pair; target {target} has too many tokens: give a text file")
        return training_tokens(tokenizer, text), held_out_tokens(tokenizer, text)[0]
    ids = np.array(tokenizer.encode(text.read_text("utf-8")).ids, np.int64)
    end = len(ids) * 9 // 10
    return ids[:end], ids[end:]


def batches(sources: Sequence[TokenArray], batch: int, context: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield [batch, ≤ context] ids without end: windows of texts [tokens], beginnings of rows [rows, tokens]. A source
    is drawn as often as it has tokens."""
    for source in sources:
        if source.ndim == 1 and len(source) < context:
            raise ValueError(f"{len(source)} tokens are too few for windows of {context}: give more text")
    rng = np.random.default_rng(seed)
    shares = np.array([source.size for source in sources]) / sum(source.size for source in sources)
    while True:
        source = sources[rng.choice(len(sources), p=shares)]
        if source.ndim == 1:
            starts = rng.integers(0, len(source) - context + 1, batch)
            rows = np.stack([source[i : i + context] for i in starts])
        else:
            rows = source[rng.integers(0, len(source), batch), :context]
        yield torch.from_numpy(rows.astype(np.int64))


def laws(heads: Heads, matrix: torch.Tensor, states: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (log p, log q) [positions, vocab] of each head over all positions at which the target has a law for it.

    states [batch, tokens, hidden] are the target's. Its law behind position t + 1 + k is that of token t + 2 + k.
    """
    logp = (states @ matrix.T).log_softmax(-1)
    for k, block in enumerate(heads.each):
        logq = (block(states[:, : -1 - k]) @ matrix.T).log_softmax(-1)
        yield logp[:, 1 + k :].flatten(0, 1), logq.flatten(0, 1)


def heads_loss(heads: Heads, matrix: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
    """Return (the loss, each head's acceptance Σ min(p, q))."""
    total, accepted = torch.zeros(()), []
    for k, (logp, logq) in enumerate(laws(heads, matrix, states)):
        p, q = logp.exp(), logq.exp()
        variation = 0.5 * (p - q).abs().sum(-1).mean()
        alpha = 1 - variation.item()
        weight = math.exp(-3 * alpha)
        cross_entropy = -(p * logq).sum(-1).mean()
        total = total + DECAY**k * (weight * cross_entropy + (1 - weight) * variation)
        accepted.append(alpha)
    return total, accepted


@torch.no_grad()
def evaluate(heads: Heads, target: Target, held: TokenArray, context: int) -> dict[str, list[float]]:
    """Return each head's acceptance on held-out text, given the text's own tokens: Σ min(p, q) at temperature 1, and
    the share of equal best tokens, which is that of temperature 0."""
    source = batches([held], 1, context, seed=7)
    sums = torch.zeros(2, len(heads.each), dtype=torch.float64)
    for _ in range(EVAL_ROWS):
        for k, (logp, logq) in enumerate(laws(heads, target.matrix, target.states(next(source)))):
            sums[0, k] += torch.minimum(logp, logq).exp().sum(-1).mean()
            sums[1, k] += (logp.argmax(-1) == logq.argmax(-1)).double().mean()
    overlap, equal = (sums / EVAL_ROWS).tolist()
    return {"overlap": overlap, "equal_best": equal}


def train(args: argparse.Namespace) -> None:
    """Train within the budget. Prints a JSON line every LOG_STEPS steps, and the held-out figures at the end."""
    torch.manual_seed(0)
    target = Target(args.target)
    heads = Heads(target.matrix.shape[1], args.heads, args.layers)
    kept = (args.work or args.out / "work") / "heads.safetensors"
    kept.parent.mkdir(parents=True, exist_ok=True)
    if args.resume:
        heads.load(load_file(kept), kept)
    source, held = read_sources(args)
    optimisers = make_optimisers(heads, args.lr)

    def learn(rate: float) -> tuple[float, list[float]]:
        loss, accepted = heads_loss(heads, target.matrix, target.states(next(source)))
        step_once(optimisers, heads, loss, rate)
        return loss.item(), accepted

    spend_budget(args, learn, heads.tensors, kept)
    export(heads, args)
    print(json.dumps({"held_out": rounded(evaluate(heads, target, held, args.context))}), flush=True)


def read_sources(args: argparse.Namespace) -> tuple[Iterator[torch.Tensor], TokenArray]:
    """Return (batches of token ids without end, held-out tokens)."""
    text, held = read_text(args.target, args.text)
    rows = [np.load(path) for path in args.rows]
    sources = [*rows, *([text] if args.text_too or not rows else [])]
    return batches(sources, args.batch, args.context, args.seed), held


def spend_budget(
    args: argparse.Namespace,
    learn: Callable[[float], tuple[float, list[float]]],
    weights: Callable[[], dict[str, torch.Tensor]],
    kept: Path,
) -> None:
    """Call learn (learning rate → loss, acceptance by token) until the budget is spent, and keep the weights."""
    budget = TrainingBudget(args.minutes, args.steps, time.monotonic())
    for step, used in spend(budget):
        loss, accepted = learn(args.lr * learning_rate_scale(step, used))
        if step % LOG_STEPS == LOG_STEPS - 1:
            tell(step + 1, budget, args, loss, accepted)
        if step % CHECKPOINT_STEPS == CHECKPOINT_STEPS - 1:
            save_file(weights(), kept)
    save_file(weights(), kept)


def tell(step: int, budget: TrainingBudget, args: argparse.Namespace, loss: float, accepted: list[float]) -> None:
    seconds, used = time.monotonic() - budget.start, budget.used(step)
    record = {"step": step, "tokens": step * args.batch * args.context, "seconds": round(seconds)}
    record["seconds_left"] = round(seconds * (1 - min(used, 1)) / used)
    print(json.dumps({**record, "loss": round(loss, 4), **rounded({"accepted": accepted})}), flush=True)


def rounded(figures: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [round(value, 4) for value in values] for name, values in figures.items()}


def export(heads: Heads, args: argparse.Namespace) -> None:
    """Write a directory that the engine loads."""
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in heads.tensors().items()}
    save_file(weights, args.out / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": "medusa",
        "medusa_num_heads": args.heads,
        "medusa_num_layers": args.layers,
        "base_model_name_or_path": args.target.name,
    }
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def training_arguments(about: str | None, *, context: int, lr: float) -> argparse.ArgumentParser:
    """Return a parser of what every training of heads takes. context, lr: the defaults."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="a checkpoint of transformers")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="a folder for what --resume begins with; default: OUT/work")
    parser.add_argument("--text", type=Path, default=STDLIB, help="a text file, or a folder of Python files")
    parser.add_argument("--rows", type=Path, nargs="*", default=[], help=".npy files of token ids, instead of the text")
    parser.add_argument("--text-too", action="store_true", help="with --rows: train on the text as well")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--steps", type=int, help="end after this many steps even if minutes are left")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=context)
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--resume", action="store_true", help="start from the weights in the work folder")
    parser.add_argument("--seed", type=int, default=1, help="of the windows")
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = training_arguments(__doc__, context=512, lr=2e-2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=1)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    train(args)


if __name__ == "__main__":
    main()
