"""Measure a pair on held-out Python source with transformers alone: python -m scripts.eval_pair models/demo

Prints three figures, first as a table and then as one line of JSON: the held-out bits per byte of both models, the
acceptance of each verifier on the target's own samples, and the share of repeated greedy text. The seed is fixed, so
the figures repeat on the same machine.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from scripts.pair_data import STDLIB, PairTokens, held_out_tokens

CONTEXT = 512  # tokens, as in the training of the demo pair
TEMPERATURES = (0.0, 0.7, 1.0)


def coupling(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the probability that two exponential races with shared noise, by p and by q, have the same winner: [...].

    This is the acceptance of the `match` verifier: Σ_x 1 / Σ_y max(p_y / p_x, q_y / q_x). p and q are laws over the
    last axis, [..., vocab]. Sorted by r = q / p, the inner sum splits at x, because the maximum is p_y / p_x exactly
    where r_y ≤ r_x. Two running sums therefore replace vocab² terms.
    Example: p = (.5, .5), q = (1, 0): 1 / (1 + .5 / .5) = .5.
    """
    tiny = torch.finfo(torch.float64).tiny
    p, q = p.double().clamp_min(tiny), q.double().clamp_min(tiny)
    order = (q / p).argsort(-1)
    p, q = p.gather(-1, order), q.gather(-1, order)
    below = p.cumsum(-1)  # Σ p_y over r_y ≤ r_x
    above = q.flip(-1).cumsum(-1).flip(-1) - q  # Σ q_y over r_y > r_x; ties may fall on either side
    return (1 / (below / p + above.clamp_min(0) / q)).sum(-1)


def overlap(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return Σ min(p, q) over the last axis: the acceptance of the `rejection` verifier, the highest possible one."""
    return torch.minimum(p, q).sum(-1)


def repeated_share(rows: Sequence[Sequence[int]], n: int = 8) -> float:
    """Return the share of n-grams that occur earlier in their own row."""
    total = distinct = 0
    for row in rows:
        grams = [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]
        total += len(grams)
        distinct += len(set(grams))
    return 1 - distinct / total


@torch.no_grad()
def bits_per_byte(model: Any, tokens: PairTokens, n_bytes: int) -> float:
    """Predict every token once, from at most CONTEXT tokens before it in its window. Returns bits per byte of text."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    nats = 0.0
    for start in range(0, len(ids) - 1, CONTEXT):
        window = ids[start : start + CONTEXT + 1]
        logits = model(window[None, :-1]).logits[0]
        nats += F.cross_entropy(logits, window[1:], reduction="sum").item()
    return nats / math.log(2) / n_bytes


@torch.no_grad()
def continue_text(model: Any, prefix: torch.Tensor, n: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw n more tokens for each row of prefix [rows, length]. Returns ids [rows, n] and logits [rows, n, vocab].

    Goes on after the end of a text. transformers' generate stops or masks there, which would change the law.
    """
    generator = torch.Generator().manual_seed(0)
    step, cache = prefix, None
    ids, logits = [], []
    for _ in range(n):
        output = model(step, past_key_values=cache, use_cache=True)
        cache, row = output.past_key_values, output.logits[:, -1]
        law = (row / temperature).softmax(-1) if temperature else None
        step = row.argmax(-1, keepdim=True) if law is None else torch.multinomial(law, 1, generator=generator)
        ids.append(step)
        logits.append(row)
    return torch.cat(ids, 1), torch.stack(logits, 1)


@torch.no_grad()
def acceptance(draft: Any, prefix: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor, t: float) -> dict[str, float]:
    """Return the mean acceptance of one draft token over all positions of the target's own text, by verifier."""
    scored = draft(torch.cat((prefix, ids[:, :-1]), 1)).logits[:, prefix.shape[1] - 1 :]  # [rows, n, vocab]
    if not t:
        same = (scored.argmax(-1) == logits.argmax(-1)).double().mean().item()
        return {"match": same, "rejection": same}
    p, q = (logits / t).softmax(-1), (scored / t).softmax(-1)
    return {"match": coupling(p, q).mean().item(), "rejection": overlap(p, q).mean().item()}


def measure(pair: Path, corpus: Path, prefixes: int, prefix_tokens: int, new_tokens: int) -> dict[str, Any]:
    """Return all figures of a pair."""
    target = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32).eval()
    draft = AutoModelForCausalLM.from_pretrained(pair / "draft", dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(pair / "target" / "tokenizer.json"))
    tokens, n_bytes = held_out_tokens(tokenizer, corpus)
    starts = np.linspace(0, len(tokens) - prefix_tokens, prefixes).astype(int)
    prefix = torch.from_numpy(np.stack([tokens[i : i + prefix_tokens] for i in starts]).astype(np.int64))
    figures: dict[str, Any] = {
        "held_out_bytes": n_bytes,
        "held_out_tokens": len(tokens),
        "bits_per_byte": {
            "target": bits_per_byte(target, tokens, n_bytes),
            "draft": bits_per_byte(draft, tokens, n_bytes),
        },
        "acceptance": {},
    }
    for temperature in TEMPERATURES:
        ids, logits = continue_text(target, prefix, new_tokens, temperature)
        figures["acceptance"][str(temperature)] = acceptance(draft, prefix, ids, logits, temperature)
        if not temperature:
            figures["repeated_8_grams"] = repeated_share(ids.tolist())
            figures["sample"] = tokenizer.decode(ids[0].tolist())
    return figures


def report(figures: dict[str, Any]) -> str:
    """Return the figures as text with a table."""
    lines = [f"held-out text: {figures['held_out_bytes']} bytes, {figures['held_out_tokens']} tokens"]
    lines += [f"bits per byte, {role}: {bits:.3f}" for role, bits in figures["bits_per_byte"].items()]
    lines += ["| T | match | rejection |", "|---|---|---|"]
    lines += [f"| {t} | {a['match']:.3f} | {a['rejection']:.3f} |" for t, a in figures["acceptance"].items()]
    lines += [
        f"repeated 8-grams in greedy text: {figures['repeated_8_grams']:.3f}",
        "greedy sample:",
        figures["sample"],
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", type=Path, help="a folder with target and draft")
    parser.add_argument("--corpus", type=Path, default=STDLIB)
    parser.add_argument("--prefixes", type=int, default=32)
    parser.add_argument("--prefix-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    args = parser.parse_args(argv)
    figures = measure(args.pair, args.corpus, args.prefixes, args.prefix_tokens, args.new_tokens)
    print(report(figures))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
