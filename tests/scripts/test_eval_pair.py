"""The acceptance figures: closed form against its definition and against a simulation."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.eval_pair import coupling, overlap, repeated_share

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


def laws(vocab: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, rows, vocab, generator=generator, dtype=torch.float64) * 2
    p, q = logits.softmax(-1)
    return p, q


def by_definition(p: list[float], q: list[float]) -> float:
    tokens = range(len(p))
    return sum(1 / sum(max(p[y] / p[x], q[y] / q[x]) for y in tokens) for x in tokens)


def test_the_coupling_is_its_definition() -> None:
    p, q = laws(vocab=17, rows=5)
    expected = [by_definition(*rows) for rows in zip(p.tolist(), q.tolist(), strict=True)]
    assert coupling(p, q).tolist() == pytest.approx(expected, rel=1e-12)


def test_the_coupling_is_how_often_two_races_with_one_noise_agree() -> None:
    """200,000 races; five standard errors (at most 0.0056), a false alarm in 2 million runs."""
    p, q = (law[0] for law in laws(vocab=6, rows=1))
    noise = torch.empty(200_000, 6, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(4))
    same = ((noise / p).argmin(-1) == (noise / q).argmin(-1)).double().mean().item()
    assert same == pytest.approx(coupling(p, q).item(), abs=0.0056)


def test_the_coupling_lies_between_its_bounds() -> None:
    """min / (2 - min) ≤ coupling ≤ min, with min = Σ min(p, q); one where the laws are equal, none where disjoint."""
    p, q = laws(vocab=50, rows=20)
    least, most = overlap(p, q) / (2 - overlap(p, q)), overlap(p, q)
    assert (least <= coupling(p, q) + 1e-12).all()
    assert (coupling(p, q) <= most + 1e-12).all()
    assert coupling(p, p).tolist() == pytest.approx([1.0] * 20)
    apart = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]], dtype=torch.float64)
    assert coupling(apart[0], apart[1]).item() == pytest.approx(0.0, abs=1e-12)


def test_repeats_are_counted_within_a_row() -> None:
    assert repeated_share([[1, 2, 3, 4], [1, 2, 3, 4]], n=2) == 0.0
    assert repeated_share([[1, 2, 1, 2, 1]], n=2) == 0.5


def test_the_demo_pair_writes_python() -> None:
    """The shipped target knows that `for i in` goes on with a loop over something and that its body is indented."""
    model = AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    ids = tokenizer("def main(argv=None):\n    for i in range(", return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=1)
    text = str(tokenizer.decode(out[0, ids.shape[1] :]))
    first, rest = text.split("\n", 1)
    assert first.endswith("):")
    assert rest.startswith("        ")
