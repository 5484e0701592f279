"""Train the demo pair from scratch: a tokenizer, a target, a draft distilled from the target, and a second draft.

    python -m scripts.train_demo_pair tokenizer --out DIR
    python -m scripts.train_demo_pair target --out DIR --minutes 70
    python -m scripts.train_demo_pair draft --out DIR --minutes 12
    python -m scripts.train_demo_pair draft --out DIR --minutes 14 --resume --lr 2e-3
    python -m scripts.train_demo_pair draft2 --out DIR --minutes 3 --batch 4 --lr 2e-3
    python -m scripts.train_demo_pair draft2 --out DIR --minutes 3 --batch 4 --lr 1e-3 --resume --seed 3
    python -m scripts.eval_pair DIR

The second draft begins as a copy of the first and learns where that one fails (boost-tuning: SpecInfer, Miao et al.
2023, arXiv 2305.09781). To train it for the embedded pair, copy tokenizer.json, and both model.safetensors as
target.safetensors and draft.safetensors, to DIR/work.

Runs on a GPU if there is one, else on the CPU. The models in DIR become ordinary Hugging Face checkpoints (config.json,
bf16 model.safetensors, tokenizer.json). The fp32 weights for --resume stay in DIR/work.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from scripts.pair_data import (
    BOS,
    EOS,
    SPECIAL,
    STDLIB,
    VOCAB,
    PairTokens,
    held_out_tokens,
    train_tokenizer,
    training_tokens,
    windows,
)

# The target is deep and narrow: on a CPU the time of a pass grows with the layers, so depth makes it costly relative to
# the draft.
SHAPES: dict[str, dict[str, Any]] = {
    "target": {"hidden_size": 192, "num_hidden_layers": 14, "num_attention_heads": 3, "intermediate_size": 512},
    "draft": {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 352},
}
SHAPES["draft2"] = SHAPES["draft"]
BOOST = 4.0  # default of --boost
WARMUP_STEPS = 30
DECAY_FROM = 0.55  # share of the budget with a constant learning rate; then it falls linearly to 2 %
TEMPERATURE = 0.6  # at 1 the texts of so small a model lose their thread
CHECKPOINT_STEPS = 200
LOG_STEPS = 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class TrainingBudget:
    """Training ends when either the minutes or the steps are used up."""

    minutes: float
    steps: int | None
    start: float

    def used(self, step: int) -> float:
        """Return the share of the budget that was used before this step, from 0."""
        by_time = (time.monotonic() - self.start) / (60 * self.minutes)
        return max(by_time, step / self.steps if self.steps else 0.0)


def learning_rate_scale(step: int, used: float) -> float:
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return warm * min(1.0, max(0.02, (1 - used) / (1 - DECAY_FROM)))


def new_model(role: str) -> LlamaForCausalLM:
    """Return a Llama of the role's shape with random weights. Deeper models get smaller residual writes."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        bos_token_id=BOS,
        eos_token_id=EOS,
        **SHAPES[role],
    )
    model = LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if "embed_tokens" in name:
            nn.init.normal_(weight, std=0.02)
        elif "o_proj" in name or "down_proj" in name:
            nn.init.normal_(weight, std=0.5 * (2 * config.num_hidden_layers * weight.shape[1]) ** -0.5)
        elif weight.dim() == 2:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5 / 1.5)
    return _moved(model, DEVICE)


def _moved(model: nn.Module, to: str | torch.dtype) -> LlamaForCausalLM:
    return model.to(to)  # type: ignore[return-value]


def make_optimisers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers, and AdamW for the embedding and the norms."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, weight in model.named_parameters():
        (matrices if ".layers." in name and weight.dim() == 2 else others).append(weight)
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def target_loss(model: nn.Module, window: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the cross-entropy of the next token, nats. window [batch, context + 1]."""
    logits = model(window[:, :-1]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
    return loss, {}


def draft_loss(
    model: nn.Module, target: nn.Module, window: torch.Tensor, first: nn.Module | None = None, boost: float = BOOST
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return λ·CE(p, q) + (1 - λ)·TV(p, q) with λ = exp(-3α), where α = Σ min(p, q) is the acceptance.

    At low acceptance cross-entropy dominates: its gradient reaches tokens to which q gives no probability. Later total
    variation dominates, which is 1 - α. With a first draft, positions at which its best token is not the target's have
    the weight `boost` in all means, and the others 1.
    """
    with torch.no_grad():
        p = target(window[:, :-1]).logits.softmax(-1)  # [batch, context, vocab]
        best = p.argmax(-1)
        fails = torch.zeros_like(best) if first is None else first(window[:, :-1]).logits.argmax(-1) != best
        shares = 1 + (boost - 1) * fails.float()
        shares /= shares.sum()
    log_q = model(window[:, :-1]).logits.log_softmax(-1)
    q = log_q.exp()
    alpha = (shares * torch.minimum(p, q.detach()).sum(-1)).sum().item()
    weight = math.exp(-3 * alpha)
    cross_entropy = -(shares * (p * log_q).sum(-1)).sum()
    variation = 0.5 * (shares * (p - q).abs().sum(-1)).sum()
    measured = {"alpha": alpha}
    if first is not None:
        right = log_q.argmax(-1) == best
        measured |= {"rescued": right[fails].float().mean().item(), "kept": right[~fails].float().mean().item()}
    return weight * cross_entropy + (1 - weight) * variation, measured


@torch.no_grad()
def held_out_loss(model: nn.Module, tokens: PairTokens, context: int) -> float:
    """Return the mean loss over 24 fixed random windows, nats per token."""
    batches = windows(tokens, 4, context, seed=7)
    return sum(target_loss(model, next(batches).to(DEVICE))[0].item() for _ in range(6)) / 6


def step_once(optimisers: list[torch.optim.Optimizer], model: nn.Module, loss: torch.Tensor, lr: float) -> None:
    for optimiser in optimisers:
        optimiser.zero_grad(set_to_none=True)
        for group in optimiser.param_groups:
            group["lr"] = lr
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimiser in optimisers:
        optimiser.step()


def train(role: str, args: argparse.Namespace) -> None:
    """Train one model within its budget. Prints a JSON line every LOG_STEPS steps and writes the checkpoint."""
    torch.manual_seed(0)
    work = args.out / "work"
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    model, target, first = new_model(role), None, None
    if role != "target":
        target = load_weights(new_model("target"), work / "target.safetensors").eval()
    if role == "draft2":
        first = load_weights(new_model("draft"), work / "draft.safetensors").eval()
        model.load_state_dict(first.state_dict())
    if args.resume:
        load_weights(model, work / f"{role}.safetensors")
    optimisers = make_optimisers(model, args.lr)
    held = held_out_tokens(tokenizer, args.corpus)[0]
    seed = 1 + args.resume if args.seed is None else args.seed
    batches = windows(training_tokens(tokenizer, args.corpus), args.batch, args.context, seed)
    budget = TrainingBudget(args.minutes, args.steps, time.monotonic())
    step = 0
    for step, used in spend(budget):
        window = next(batches).to(DEVICE)
        loss, extra = draft_loss(model, target, window, first, args.boost) if target else target_loss(model, window)
        step_once(optimisers, model, loss, args.lr * learning_rate_scale(step, used))
        if step % LOG_STEPS == LOG_STEPS - 1:
            log(step + 1, args, loss=loss.item(), seconds=time.monotonic() - budget.start, **extra)
        if step % CHECKPOINT_STEPS == CHECKPOINT_STEPS - 1:
            log(step + 1, args, held_out=held_out_loss(model, held, args.context))
            save_weights(model, work / f"{role}.safetensors")
    log(step + 1, args, held_out=held_out_loss(model, held, args.context))
    save_weights(model, work / f"{role}.safetensors")
    export(model, tokenizer, args.out / role)


def spend(budget: TrainingBudget) -> Iterator[tuple[int, float]]:
    """Yield (step, share of the budget used) until the budget is used up. Yields at least one step."""
    step, used = 0, 0.0
    while used < 1:
        yield step, used
        step += 1
        used = budget.used(step)


def log(step: int, args: argparse.Namespace, **figures: float) -> None:
    record: dict[str, Any] = {"step": step, "tokens": step * args.batch * args.context}
    print(json.dumps(record | {name: round(value, 4) for name, value in figures.items()}), flush=True)


def save_weights(model: LlamaForCausalLM, path: Path) -> None:
    weights = {name: weight.detach().cpu().contiguous() for name, weight in model.named_parameters()}
    save_file(weights, path)


def load_weights(model: LlamaForCausalLM, path: Path) -> LlamaForCausalLM:
    # The tied head has no weights of its own; the file must hold all others.
    differences = model.load_state_dict(load_file(path), strict=False)
    if differences.unexpected_keys or set(differences.missing_keys) - {"lm_head.weight"}:
        raise ValueError(f"{path} is not a checkpoint of this shape: {differences}")
    return model


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, path: Path) -> None:
    """Write an ordinary Hugging Face checkpoint in bf16. Its generation_config.json asks for TEMPERATURE."""
    model.generation_config.update(do_sample=True, temperature=TEMPERATURE)
    _moved(model, torch.bfloat16).save_pretrained(path)
    bos, eos = SPECIAL
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos).save_pretrained(path)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["tokenizer", "target", "draft", "draft2"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, default=STDLIB, help="a folder of Python files")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--steps", type=int, help="end after this many steps even if minutes are left")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--resume", action="store_true", help="start from the weights in DIR/work")
    parser.add_argument("--boost", type=float, default=BOOST, help="draft2: weight of positions where the draft fails")
    parser.add_argument("--seed", type=int, help="of the windows; default: 1, with --resume 2")
    args = parser.parse_args(argv)
    (args.out / "work").mkdir(parents=True, exist_ok=True)
    if args.part == "tokenizer":
        train_tokenizer(args.corpus).save(str(args.out / "work" / "tokenizer.json"))
    else:
        train(args.part, args)


if __name__ == "__main__":
    main()
