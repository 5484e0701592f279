"""The synthetic pair: ordinary checkpoints; only E sets how often they agree."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.make_pair import ARCHITECTURES, main, make_pair

TINY: dict[str, Any] = {
    "layers": 4,
    "draft_layers": 1,
    "hidden": 32,
    "heads": 2,
    "kv_heads": 1,
    "ffn": 64,
    "vocab": 300,
}


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path).eval()


@torch.no_grad()
def logits(path: Path, rows: int = 8, length: int = 64) -> torch.Tensor:
    """[rows, length, vocab] on the same random ids for every model."""
    ids = torch.randint(2, TINY["vocab"], (rows, length), generator=torch.Generator().manual_seed(5))
    return load(path)(ids).logits


def agreement(pair: Path) -> float:
    """Share of positions where target and draft have the same best token."""
    same = logits(pair / "target").argmax(-1) == logits(pair / "draft").argmax(-1)
    return same.double().mean().item()


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_at_zero_the_target_computes_what_the_draft_computes(tmp_path: Path, arch: str) -> None:
    make_pair(tmp_path, eps=0.0, arch=arch, **TINY)
    target, draft = load(tmp_path / "target"), load(tmp_path / "draft")
    assert target.config.model_type == draft.config.model_type == arch
    assert (target.config.num_hidden_layers, draft.config.num_hidden_layers) == (4, 1)
    assert torch.equal(logits(tmp_path / "target"), logits(tmp_path / "draft"))


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_a_larger_e_lowers_the_agreement(tmp_path: Path, arch: str) -> None:
    shares = []
    for eps in (0.02, 0.2, 2.0):
        make_pair(tmp_path / str(eps), eps=eps, arch=arch, **TINY)
        shares.append(agreement(tmp_path / str(eps)))
    assert 1.0 > shares[0] > shares[1] > shares[2] > 0.0


def test_the_seed_alone_decides_the_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_pair(tmp_path / name, seed=seed, **TINY)
    a, b, c = (logits(tmp_path / name / "target") for name in "abc")
    assert torch.equal(a, b)
    assert not torch.allclose(a, c)


def test_qwen2_biases_are_not_zero(tmp_path: Path) -> None:
    """A reader that drops the pair's biases must fail."""
    make_pair(tmp_path, arch="qwen2", **TINY)
    biases = [p for name, p in load(tmp_path / "draft").named_parameters() if name.endswith(".bias")]
    assert len(biases) == 3
    assert all(b.abs().min() > 0 for b in biases)


@torch.no_grad()
def test_greedy_text_does_not_loop(tmp_path: Path) -> None:
    make_pair(tmp_path, **(TINY | {"hidden": 64, "vocab": 4096}))
    prompt = torch.tensor([[0, 17, 300, 42, 9]])
    target = load(tmp_path / "target")
    out = target.generate(prompt, max_new_tokens=96, do_sample=False, eos_token_id=None, pad_token_id=1)
    text = out[0, prompt.shape[1] :].tolist()
    grams = [tuple(text[i : i + 8]) for i in range(len(text) - 7)]
    assert len(grams) == 89
    assert len(set(grams)) > 0.9 * len(grams)


@pytest.mark.parametrize("vocab", [300, 4096, 5000])
def test_text_survives_the_tokenizer_at_every_size(tmp_path: Path, vocab: int) -> None:
    make_pair(tmp_path, **(TINY | {"vocab": vocab}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    text = "def f(x):\n    return {'é': x}  # ∑\n"
    ids = tokenizer(text).input_ids
    assert max(ids) < vocab
    assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)


def test_the_command_line_writes_the_dtype_asked_for(tmp_path: Path) -> None:
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    main([f"--out={tmp_path}", "--dtype=bfloat16", "--arch=qwen2", *sizes])
    assert load(tmp_path / "draft").dtype == torch.bfloat16
    assert load(tmp_path / "target").config.hidden_size == TINY["hidden"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"draft_layers": 5}, r"draft_layers 5 must be 1\.\.layers \(4\)"), ({"heads": 3}, "hidden 32 / heads 3")],
)
def test_a_shape_that_cannot_be_built_is_refused(tmp_path: Path, wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_pair(tmp_path, **(TINY | wrong))
    assert list(tmp_path.iterdir()) == []
