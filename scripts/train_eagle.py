"""Train an EAGLE-3 head for a causal language model of transformers, on text that the model continues itself.

    python -m scripts.train_eagle --target models/demo/target --out DIR --minutes 70
    python -m scripts.train_eagle --target models/demo/target --out DIR --minutes 10 --resume --lr 1e-3
    python -m scripts.train_eagle --target CHECKPOINT --out DIR --minutes 600 --text FILE --draft-vocab 32000
    python -m scripts.eval_eagle --target models/demo/target --head DIR --draft models/demo/draft

First DIR/work gets the data: rows of text continued by the target, rows of plain text, and the target's hidden states
on both (2 bytes × 4 × hidden size per token). They are kept; a later call makes only what is missing. Then the head is
trained on the CPU in fp32, unrolled over --steps draft steps with its own output fed back (Li et al. 2025, "EAGLE-3",
arXiv 2503.01840). DIR gets config.json and model.safetensors in SafeAILab's format in bf16, anew at every checkpoint.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from scripts.eagle_head import EagleModule, HeadShape
from scripts.eval_eagle import main as evaluate
from scripts.heads_data import FrozenTarget, TrainingBatch, TrainingRows, load_target, prepare
from scripts.heads_loss import distil
from scripts.pair_data import STDLIB
from scripts.train_demo_pair import TrainingBudget, learning_rate_scale, step_once

DECAY = 0.8  # weight of a draft step relative to the one before
MEMORY = 0.95  # of the running mean of each step's acceptance, which decides λ
LOG_SECONDS = 20
CHECKPOINT_SECONDS = 180


def default_layers(n: int) -> tuple[int, int, int]:
    """The layers whose inputs the head reads, as SafeAILab's code takes them. Raises ValueError below 7 layers."""
    if n < 7:
        raise ValueError(
            f"a target of {n} layers has no default for --layers: give three different numbers from 0 to {n - 1}"
        )
    return 2, n // 2, n - 3


def chosen_layers(target: FrozenTarget, given: Sequence[int] | None) -> tuple[int, ...]:
    """Return the given layers, or the default ones. Raises ValueError for layers that the target lacks."""
    n = target.config.num_hidden_layers
    if given is None:
        return default_layers(n)
    if not all(0 <= layer < n for layer in given) or len(set(given)) < len(given):
        raise ValueError(f"--layers {' '.join(map(str, given))}: give different numbers from 0 to {n - 1}")
    return tuple(given)


def shape_of(target: FrozenTarget, n_features: int, draft_vocab: int | None, kv_heads: int | None) -> HeadShape:
    """Return the shape of a head like one layer of the target. Raises ValueError for a draft vocabulary too large."""
    config = target.config
    vocab = config.vocab_size
    if draft_vocab is not None and not 0 < draft_vocab < vocab:
        raise ValueError(f"--draft-vocab {draft_vocab} must lie between 1 and {vocab - 1}; leave it out for all tokens")
    heads = config.num_attention_heads
    return HeadShape(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=heads,
        kv_heads=kv_heads or getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab=vocab,
        draft_vocab=draft_vocab or vocab,
        n_features=n_features,
        eps=getattr(config, "rms_norm_eps", 1e-5),
        rope_theta=float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10_000.0)),
    )


def new_head(target: FrozenTarget, shape: HeadShape, frequencies: np.ndarray[Any, Any]) -> EagleModule:
    """Return a head with random weights. frequencies [vocab]: how often the data has each token."""
    ids = None
    if shape.draft_vocab < shape.vocab:
        most = np.argsort(-frequencies, kind="stable")[: shape.draft_vocab]
        ids = torch.from_numpy(np.sort(most))
    head = EagleModule(shape, target.embedding, target.head, ids)
    for weight in head.parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5 / 1.5)
    if head.lm_head is not None and ids is not None:
        head.lm_head.weight.data.copy_(target.head[ids])
    with torch.no_grad():
        head.norm.weight.copy_(_final_norm(target))
    return head


def _final_norm(target: FrozenTarget) -> torch.Tensor:
    """The weight of the target's final norm, with which the head's norm begins; ones if it has another name."""
    norm = getattr(target.model.base_model, "norm", None)
    return torch.ones(target.config.hidden_size) if norm is None else norm.weight


def make_optimisers(head: EagleModule, lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the head, and AdamW for the norms and the output matrix."""
    own = dict(head.named_parameters())
    matrices = [w for name, w in own.items() if w.dim() == 2 and name != "lm_head.weight"]
    others = [w for name, w in own.items() if w.dim() != 2 or name == "lm_head.weight"]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class Objective:
    """Σ DECAY^s · loss of draft step s; keeps a running mean of each step's acceptance, α, for λ = exp(-3α).

    At low acceptance cross-entropy dominates: its gradient reaches tokens to which q gives no probability. Features are
    divided by `scale`, their root mean square, so that the residual stream does not drown what the head adds to it.
    """

    def __init__(self, head: EagleModule, target: FrozenTarget, steps: int, scale: float) -> None:
        self.head, self.output, self.steps, self.scale = head, target.head, steps, scale
        self.alphas: list[float] | None = None

    @torch.no_grad()
    def laws(self, last: torch.Tensor) -> torch.Tensor:
        """The target's laws from its last hidden states [batch, T, hidden], without tokens that are no drafts."""
        p = torch.empty(*last.shape[:2], self.head.shape.draft_vocab)
        for row, states in zip(p, last, strict=True):
            law = (states @ self.output.T).softmax(-1)
            row.copy_(law if self.head.draft_ids is None else law[:, self.head.draft_ids])
        return p

    def outputs(self, tokens: torch.Tensor, features: torch.Tensor) -> list[torch.Tensor]:
        """Unroll the first half of the rows over all steps, and the others over one: its drafts count most."""
        half = (len(tokens) + 1) // 2
        outputs = self.head.unroll(tokens[:half], features[:half], self.steps)
        if half < len(tokens):
            outputs[0] = torch.cat((outputs[0], *self.head.unroll(tokens[half:], features[half:], 1)))
        return outputs

    def __call__(self, batch: TrainingBatch) -> torch.Tensor:
        tokens, states = batch
        p = self.laws(states[:, :, -1])
        known = self.alphas or [0.0] * self.steps
        total, alphas = torch.zeros(()), []
        for s, h in enumerate(self.outputs(tokens, states[:, :, :-1].flatten(2) / self.scale)):
            # Position t predicts token t + 2, and the target's law of that token is the one at position t + 1.
            loss, alpha = distil(
                self.head.norm(h).flatten(0, 1),
                self.head.output_matrix,
                p[: len(h), s + 1 :].flatten(0, 1),
                math.exp(-3 * known[s]),
            )
            total = total + DECAY**s * loss
            alphas.append(alpha.item())
        keep = MEMORY if self.alphas else 0.0
        self.alphas = [keep * old + (1 - keep) * new for old, new in zip(known, alphas, strict=True)]
        return total


def train(args: argparse.Namespace) -> None:
    """Make the data, train the head within its budget, and write it. Prints a JSON line every LOG_SECONDS."""
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    target = load_target(args.target)
    layers = chosen_layers(target, args.layers)
    shape = shape_of(target, len(layers), args.draft_vocab, args.kv_heads)
    work = args.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    prepare(target, work, args.text, {"generated": args.generated, "text": args.plain}, args.threads, layers)
    rows = TrainingRows(work, layers)
    head = new_head(target, shape, np.bincount(rows.tokens.flatten(), minlength=shape.vocab))
    first = load_state(head, work / "head.safetensors") if args.resume else 0
    objective, optimisers = Objective(head, target, args.steps, rows.scale()), make_optimisers(head, args.lr)
    budget = TrainingBudget(args.minutes, args.most_steps, time.monotonic())

    def save(step: int) -> None:
        save_state(head, step, work / "head.safetensors")
        export(head, target, layers, objective.scale, args.out)

    logged = saved = budget.start
    step = first
    for step, batch in enumerate(rows.batches(args.batch, seed=1 + first), first):
        used = budget.used(step - first)
        if used >= 1:
            break
        loss = objective(batch)
        step_once(optimisers, head, loss, args.lr * learning_rate_scale(step - first, used))
        now = time.monotonic()
        if now - logged > LOG_SECONDS:
            logged = now
            log(step + 1, batch, loss, objective, minutes_left=(1 - used) * args.minutes)
        if now - saved > CHECKPOINT_SECONDS:
            saved = now
            save(step + 1)
    save(step)
    if objective.alphas is not None:
        log(step, batch, loss, objective, minutes_left=0.0)


def log(step: int, batch: TrainingBatch, loss: torch.Tensor, objective: Objective, minutes_left: float) -> None:
    record = {
        "step": step,
        "tokens": step * batch[0].numel(),
        "loss": round(loss.item(), 4),
        "acceptance": [round(alpha, 4) for alpha in objective.alphas or ()],
        "minutes_left": round(minutes_left, 1),
    }
    print(json.dumps(record), flush=True)


def save_state(head: EagleModule, step: int, path: Path) -> None:
    """Write the fp32 weights and the number of steps they had."""
    weights = {name: weight.contiguous() for name, weight in head.state_dict().items()}
    _save(weights, path, {"step": str(step)})


def _save(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write so that a file under this name is always whole."""
    part = path.with_suffix(".part")
    save_file(tensors, part, metadata)
    part.rename(path)


def load_state(head: EagleModule, path: Path) -> int:
    """Load weights and return their number of steps. Raises ValueError if there are none, or of another shape."""
    if not path.is_file():
        raise ValueError(f"--resume: there is no {path}; train without --resume first")
    try:
        head.load_state_dict(load_file(path))
    except RuntimeError as error:
        raise ValueError(f"--resume: {path} is a head of another shape, so give the same options: {error}") from None
    with safe_open(path, "pt") as file:
        return int(file.metadata()["step"])


def export(head: EagleModule, target: FrozenTarget, layers: Sequence[int], scale: float, path: Path) -> None:
    """Write config.json and model.safetensors in SafeAILab's format: floats in bf16, d2t int64, t2d bool.

    scale: by which features were divided in training; the written fc does it itself.
    Without a smaller draft vocabulary there are no lm_head.weight, d2t and t2d: the head uses the target's own.
    """
    (path / "config.json").write_text(json.dumps(config_of(head.shape, target, layers), indent=2) + "\n")
    weights = head.state_dict()
    weights["fc.weight"] = weights["fc.weight"] / scale
    half = {n: w.to(torch.bfloat16) if w.is_floating_point() else w for n, w in weights.items()}
    _save({name: weight.contiguous() for name, weight in half.items()}, path / "model.safetensors", {"format": "pt"})


def config_of(shape: HeadShape, target: FrozenTarget, layers: Sequence[int]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "target_hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": target.config.max_position_embeddings,
        "vocab_size": shape.vocab,
        "draft_vocab_size": shape.draft_vocab,
        "bos_token_id": target.config.bos_token_id,
        "eos_token_id": target.config.eos_token_id,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True},
    }


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="the directory of a checkpoint")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, default=STDLIB, help="a file, or a directory of .py, .txt or .md files")
    parser.add_argument("--generated", type=int, default=8, help="shards of rows that the target continues")
    parser.add_argument("--plain", type=int, default=8, help="shards of rows of plain text")
    parser.add_argument("--minutes", type=float, default=10.0, help="of training, after the data is made")
    parser.add_argument("--most-steps", type=int, help="end after this many steps even if minutes are left")
    parser.add_argument("--steps", type=int, default=4, help="draft steps that are unrolled")
    parser.add_argument("--batch", type=int, default=2, help="rows per step")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--layers", type=int, nargs=3, help="whose inputs the head reads; default: 2, n // 2, n - 3")
    parser.add_argument("--kv-heads", type=int, help="key-value heads; default: the target's")
    parser.add_argument("--draft-vocab", type=int, help="number of the most frequent tokens that are drafted")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="start from the weights in DIR/work")
    parser.add_argument("--eval-prefixes", type=int, default=32, help="held-out prompts of the measurement at the end")
    parser.add_argument("--draft", type=Path, help="a draft model that is measured beside the head")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    train(args)
    if args.eval_prefixes:
        measured = ["--target", args.target, "--head", args.out, "--text", args.text, "--threads", args.threads]
        beside = ["--draft", args.draft] if args.draft else []
        evaluate([str(option) for option in (*measured, *beside, "--prefixes", args.eval_prefixes)])


if __name__ == "__main__":
    main()
