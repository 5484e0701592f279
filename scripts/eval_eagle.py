"""Measure an EAGLE-3 head on text that its target wrote after held-out prompts, beside a draft model.

    python -m scripts.eval_eagle --target models/demo/target --head models/demo/eagle --draft models/demo/draft
    python -m scripts.eval_eagle ... --text DIR --all

Per temperature and verifier it prints the acceptance of each draft of a chain, given that all before it were accepted,
and the tokens per round. Both are exact for the drawn text: draft j of a round that began at position r is accepted
with the probability that the verifier gives to the event, given the tokens of the text. The last line is JSON.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from scripts.eagle_head import EagleModule, HeadShape
from scripts.eval_pair import continue_text
from scripts.heads_data import FrozenTarget, load_target, read_tokens
from scripts.pair_data import STDLIB

TEMPERATURES = (0.0, 0.8)
K = 4  # drafts per round
ROWS_AT_ONCE = 4


def load_head(path: Path, target: FrozenTarget) -> tuple[EagleModule, list[int]]:
    """Return a head of SafeAILab's format in fp32, and the layers whose inputs it reads."""
    config = json.loads((path / "config.json").read_text())
    layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    shape = HeadShape(
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocab=config["vocab_size"],
        draft_vocab=config["draft_vocab_size"],
        n_features=len(layers),
        eps=config["rms_norm_eps"],
        rope_theta=config["rope_theta"],
    )
    weights = load_file(path / "model.safetensors")
    ids = weights["d2t"] + torch.arange(shape.draft_vocab) if "d2t" in weights else None
    head = EagleModule(shape, target.embedding, target.head, ids)
    head.load_state_dict({n: w.float() if w.is_floating_point() else w for n, w in weights.items()})
    return head.eval().requires_grad_(False), layers


def rejection_factor(p: torch.Tensor, q: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """P(the draft is accepted | the text goes on with `token`) for `rejection`: min(1, q / p) at the token."""
    at = token[..., None]
    return (q.gather(-1, at) / p.gather(-1, at)).clamp_max(1).squeeze(-1)


def match_factor(p: torch.Tensor, q: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """The same for `match`: two exponential races with one noise. 1 / Σ_y max(p_y, p_x · q_y / q_x) at token x."""
    at = token[..., None]
    ratio = p.gather(-1, at) / q.gather(-1, at).clamp_min(1e-30)
    return 1 / torch.maximum(p, ratio * q).sum(-1)


FACTORS = {"match": match_factor, "rejection": rejection_factor}


@torch.no_grad()
def head_logits(head: EagleModule, tokens: torch.Tensor, features: torch.Tensor) -> list[torch.Tensor]:
    """Return for each draft step the logits over the target's vocabulary, [rows, T - 1 - step, vocab]."""
    outputs = [head.logits(h) for h in head.unroll(tokens, features, K)]
    if head.draft_ids is None:
        return outputs
    wide = [torch.full((*x.shape[:2], head.shape.vocab), -torch.inf) for x in outputs]
    for x, w in zip(outputs, wide, strict=True):
        w[:, :, head.draft_ids] = x
    return wide


@torch.no_grad()
def features(target: FrozenTarget, tokens: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
    """[rows, T, len(layers) × hidden]"""
    states = target.model.base_model(tokens, output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[i] for i in layers], -1)


def accepted(p_logits: torch.Tensor, q_logits: torch.Tensor, token: torch.Tensor, t: float) -> dict[str, torch.Tensor]:
    """P(a draft by q is accepted | the text goes on with token) by verifier. At T = 0: whether the best token is it."""
    if not t:
        same = (q_logits.argmax(-1) == token).double()
        return dict.fromkeys(FACTORS, same)
    p, q = (p_logits / t).double().softmax(-1), (q_logits / t).double().softmax(-1)
    return {name: factor(p, q, token) for name, factor in FACTORS.items()}


def tokens_per_round(factors: torch.Tensor) -> float:
    """Return tokens per target pass when rounds of K drafts follow each other through the text.

    factors [K, rows, n]: P(draft j of the round that began at r is accepted | all before it were, and the text).
    From the end: f(r) = Σ_a P(exactly a accepted) · (gain + f(r + a + 1)), where the gain is 1 for f = the number of
    rounds, and a + 1 for f = the number of tokens.
    """
    k, rows, n = factors.shape
    left = torch.zeros(2, rows, n + k + 1, dtype=torch.float64)  # rounds, tokens
    gains = torch.stack((torch.ones(k + 1), torch.arange(k + 1) + 1.0))[:, None]
    for r in reversed(range(n)):
        reach = torch.cat((torch.ones(1, rows), factors[:, :, r].cumprod(0), torch.zeros(1, rows)))
        exactly = (reach[:-1] - reach[1:]).T
        left[:, :, r] = (exactly * (gains + left[:, :, r + 1 : r + k + 2])).sum(-1)
    rounds, tokens = left[:, :, 0].sum(-1).tolist()
    return tokens / rounds


def per_depth(factors: torch.Tensor) -> list[float]:
    """Return for each depth the share of rounds that accept it, among those that accepted all before it: [K]."""
    reach = torch.cat((torch.ones(1), factors.cumprod(0).flatten(1).mean(1)))
    return (reach[1:] / reach[:-1]).tolist()


def chain_factors(
    steps: list[torch.Tensor], logits: torch.Tensor, ids: torch.Tensor, t: float
) -> dict[str, torch.Tensor]:
    """Return by verifier [K, rows, n - K + 1].

    steps[j] [rows, n - j, vocab]: logits of draft j of the rounds that begin before tokens 0 … n - j - 1, for tokens
    j … n - 1. logits [rows, n, vocab] and ids [rows, n]: the target's.
    """
    n = ids.shape[1] - K + 1
    parts = [accepted(logits[:, j : j + n], q[:, :n], ids[:, j : j + n], t) for j, q in enumerate(steps)]
    return {name: torch.stack([part[name] for part in parts]) for name in FACTORS}


def measure(
    target: FrozenTarget, head: tuple[EagleModule, Sequence[int]] | None, draft: Any, prefix: torch.Tensor, n: int
) -> dict[str, Any]:
    """Return {drafter: {temperature: {verifier: {"acceptance": [K], "tokens_per_round": x}}}}.

    The target continues each row of prefix [rows, length] by n tokens at each temperature.
    """
    figures: dict[str, Any] = {}
    for t in TEMPERATURES:
        ids, logits = continue_text(target.model, prefix, n, t)
        drafters = {"head": head and _head_factors(target, head, prefix, ids, logits, t)}
        drafters["draft"] = draft and _draft_factors(draft, prefix, ids, logits, t)
        for name, by_verifier in drafters.items():
            for verifier, factors in (by_verifier or {}).items():
                figures.setdefault(name, {}).setdefault(str(t), {})[verifier] = {
                    "acceptance": per_depth(factors),
                    "tokens_per_round": tokens_per_round(factors),
                }
    return figures


@torch.no_grad()
def _head_factors(
    target: FrozenTarget,
    head: tuple[EagleModule, Sequence[int]],
    prefix: torch.Tensor,
    ids: torch.Tensor,
    logits: torch.Tensor,
    t: float,
) -> dict[str, torch.Tensor]:
    module, layers = head
    parts = []
    for rows in torch.arange(len(ids)).split(ROWS_AT_ONCE):
        text = torch.cat((prefix[rows], ids[rows]), 1)
        steps = head_logits(module, text, features(target, text, layers))
        # Row r of a step began at position r and its first draft is token r + 2.
        steps = [x[:, prefix.shape[1] - 2 :] for x in steps]
        parts.append(chain_factors(steps, logits[rows], ids[rows], t))
    return {name: torch.cat([part[name] for part in parts], 1) for name in FACTORS}


@torch.no_grad()
def _draft_factors(
    draft: Any, prefix: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor, t: float
) -> dict[str, torch.Tensor]:
    parts = []
    for rows in torch.arange(len(ids)).split(ROWS_AT_ONCE):
        text = torch.cat((prefix[rows], ids[rows, :-1]), 1)
        scored = draft(text).logits[:, prefix.shape[1] - 1 :]
        parts.append(chain_factors([scored[:, j:] for j in range(K)], logits[rows], ids[rows], t))
    return {name: torch.cat([part[name] for part in parts], 1) for name in FACTORS}


def report(figures: dict[str, Any]) -> str:
    """Return the figures as a table."""
    lines = [
        "| drafter | T | verifier | draft 1 | 2 after 1 | 3 after 2 | 4 after 3 | tokens per round |",
        "|" + "---|" * 8,
    ]
    for name, by_temperature in figures.items():
        for t, by_verifier in by_temperature.items():
            for verifier, found in by_verifier.items():
                shares = " | ".join(f"{share:.3f}" for share in found["acceptance"])
                lines.append(f"| {name} | {t} | {verifier} | {shares} | {found['tokens_per_round']:.2f} |")
    return "\n".join(lines)


def prompts(target: FrozenTarget, path: Path, held: bool, rows: int, length: int) -> torch.Tensor:
    """Return prefixes spread evenly over the held-out files of a corpus, or over its others, [rows, length]."""
    tokens = read_tokens(target, path, held)
    starts = np.linspace(0, len(tokens) - length, rows).astype(int)
    return torch.from_numpy(np.stack([tokens[i : i + length] for i in starts]).astype(np.int64))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--head", type=Path, help="a directory that scripts.train_eagle wrote")
    parser.add_argument("--draft", type=Path, help="a draft model to compare with")
    parser.add_argument("--text", type=Path, default=STDLIB, help="a file, or a directory of .py, .txt or .md files")
    parser.add_argument(
        "--all", action="store_true", help="the text was never trained on: use more than its held-out part"
    )
    parser.add_argument("--prefixes", type=int, default=32)
    parser.add_argument("--prefix-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    target = load_target(args.target)
    head = args.head and load_head(args.head, target)
    draft = args.draft and AutoModelForCausalLM.from_pretrained(args.draft, dtype=torch.float32).eval()
    prefix = prompts(target, args.text, not args.all, args.prefixes, args.prefix_tokens)
    figures = measure(target, head, draft, prefix, args.new_tokens)
    print(report(figures))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
