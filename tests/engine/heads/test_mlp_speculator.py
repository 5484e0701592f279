"""The MLP speculator: the forward pass against its formula, tied weights, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config import ConfigError
from engine.heads.mlp_speculator import MLPSpeculator, load_mlp_speculator
from engine.heads.state_heads import StateTarget
from tests.engine.heads.fitted import (
    CPU,
    HIDDEN,
    INNER,
    ReferenceMLP,
    Tensors,
    load_target,
    mlp_config,
    randn,
    random_mlp,
    save_heads,
)
from tests.engine.pairs import VOCAB, Pair

COUNT = 3
TOKENS = [[7, 300, 12], [5, 5, 5], [399, 0, 31]]  # by row, the first one committed


@pytest.fixture(scope="module")
def target(pair: Pair) -> StateTarget:
    return load_target(pair.target)[1]


def load(directory: Path, target: StateTarget) -> MLPSpeculator:
    return load_mlp_speculator(directory, target, dtype=torch.float64, device=CPU)


def check(heads: MLPSpeculator, reference: ReferenceMLP) -> None:
    """Each step's logits of three rows that go on with tokens of their own."""
    states = randn(3, HIDDEN, seed=9)
    run = heads.start(states, COUNT)
    for step in range(COUNT):
        logits = run.step(None, torch.tensor([row[step] for row in TOKENS]))
        for row in range(3):
            wanted = reference.path_logits(states[row], TOKENS[row][: step + 1])
            assert (logits[row] - wanted).abs().max() < 1e-6


@pytest.mark.parametrize("scale_input", [False, True])
def test_the_formula(target: StateTarget, tmp_path: Path, scale_input: bool) -> None:
    tensors = random_mlp()
    heads = load(save_heads(tmp_path, tensors, **mlp_config(scale_input=scale_input)), target)
    assert heads.most == COUNT
    assert heads.weight_bytes == sum(t.nbytes for name, t in tensors.items() if ".ln." not in name)
    check(heads, ReferenceMLP(tensors, COUNT, scale_input=scale_input))


def tied(*, copies: bool) -> tuple[Tensors, Tensors]:
    """(the tensors of a file, the same weights written out for each step)."""
    tensors = random_mlp()
    written = {}
    for name in tensors:
        _, part, step, kind = name.split(".")
        source = min(int(step), 1) if part == "proj" else 0
        written[name] = tensors[f"speculator.{part}.{source}.{kind}"]
    own = {n: t for n, t in written.items() if n.split(".")[2] == "0" or n == "speculator.proj.1.weight"}
    return ({n: t.clone() for n, t in written.items()} if copies else own), written


@pytest.mark.parametrize("copies", [False, True])
def test_tied_weights(target: StateTarget, tmp_path: Path, copies: bool) -> None:
    """One embedding, norm and head; of projections the first and one for all later steps. A file may repeat them."""
    stored, written = tied(copies=copies)
    heads = load(save_heads(tmp_path, stored, **mlp_config(tie_weights=True)), target)
    check(heads, ReferenceMLP(written, COUNT))
    assert heads.stages[0].embedding is heads.stages[2].embedding


def test_an_inner_size_that_is_the_targets(target: StateTarget, tmp_path: Path) -> None:
    """inner_dim 0 says so."""
    tensors = random_mlp(inner=HIDDEN)
    check(load(save_heads(tmp_path, tensors, **mlp_config(inner=0)), target), ReferenceMLP(tensors, COUNT))


def test_rows_end_and_branch(target: StateTarget, tmp_path: Path) -> None:
    tensors, states = random_mlp(), randn(2, HIDDEN, seed=9)
    reference = ReferenceMLP(tensors, COUNT)
    run = load(save_heads(tmp_path, tensors, **mlp_config()), target).start(states, COUNT)
    run.step(None, torch.tensor([7, 8]))
    run.step(torch.tensor([1, 0, 1]), torch.tensor([20, 21, 22]))
    logits = run.step(torch.tensor([2, 1]), torch.tensor([30, 31]))
    assert (logits[0] - reference.path_logits(states[1], [8, 22, 30])).abs().max() < 1e-6
    assert (logits[1] - reference.path_logits(states[0], [7, 21, 31])).abs().max() < 1e-6


def test_a_token_that_it_does_not_know_is_read_as_its_last_one(target: StateTarget, tmp_path: Path) -> None:
    """Its vocabulary may be smaller than the target's: a wrong embedding costs drafts, a fault would cost a round."""
    heads = load(save_heads(tmp_path, random_mlp(vocab=300), **mlp_config(vocab_size=300)), target)
    states = randn(1, HIDDEN, seed=9)
    found = [heads.start(states, 1).step(None, torch.tensor([token])) for token in (399, 299)]
    assert found[0].shape == (1, 300)
    assert torch.equal(*found)


def dropped(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


def unchanged(tensors: Tensors) -> Tensors:
    return tensors


def wide(tensors: Tensors) -> Tensors:
    proj: Tensor = randn(INNER, 32)
    return {**tensors, "speculator.proj.0.weight": proj}


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (dropped("speculator.proj.2.weight"), {}, r"holds no tensor 'speculator\.proj\.2\.weight'"),
        (dropped("speculator.ln.1.bias"), {}, r"holds no tensor 'speculator\.ln\.1\.bias'"),
        (wide, {}, r"speculator\.proj\.0\.weight has shape \(48, 32\), and \(48, 64\) is needed"),
        (unchanged, {"n_predict": 2}, "tensors that MLP speculators do not have, 'speculator.emb.2.weight'"),
        (unchanged, {"n_predict": None}, "n_predict must be a whole number above 0, not None"),
        (unchanged, {"n_predict": 0.5}, "n_predict must be a whole number above 0, not 0.5"),
        (unchanged, {"vocab_size": float("inf")}, "vocab_size must be a whole number above 0, not inf"),
        (unchanged, {"emb_dim": 32}, "read states of 32 numbers, and those of target the target have 64"),
        (unchanged, {"vocab_size": VOCAB + 8}, "draft 408 tokens, and target the target has 400"),
        (unchanged, {"vocab_size": 8}, r"emb\.0\.weight has shape \(400, 48\), and \(8, 48\) is needed"),
    ],
)
def test_files_that_do_not_fit(
    target: StateTarget, tmp_path: Path, change: Callable[[Tensors], Tensors], config: dict[str, Any], message: str
) -> None:
    directory = save_heads(tmp_path, change(random_mlp()), **{**mlp_config(), **config})
    with pytest.raises(ConfigError, match=message):
        load(directory, target)
