"""Medusa heads: the forward pass against the paper's formula, both file formats, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.config import ConfigError
from engine.heads.eagle import OUTSIDE
from engine.heads.medusa import MedusaHeads, load_medusa
from engine.heads.state_heads import StateTarget
from engine.models.products import Weights
from tests.engine.heads.fitted import (
    BLOCKS,
    CPU,
    HEADS,
    HIDDEN,
    ReferenceMedusa,
    Tensors,
    load_target,
    randn,
    random_medusa,
    save_heads,
)
from tests.engine.pairs import VOCAB, Pair

KEPT = torch.tensor([5, 2, 399, 17, 40])  # a small vocabulary


@pytest.fixture(scope="module")
def target(pair: Pair) -> StateTarget:
    return load_target(pair.target)[1]


def load(directory: Path, target: StateTarget) -> MedusaHeads:
    return load_medusa(directory, target, dtype=torch.float64, device=CPU)


def expected(tensors: Tensors, states: Tensor, blocks: int = BLOCKS) -> Tensor:
    """[R, heads, vocab]"""
    heads = ReferenceMedusa(tensors, HEADS, blocks)
    return torch.stack([torch.stack([heads.path_logits(s, [0] * (h + 1)) for h in range(HEADS)]) for s in states])


def in_vllms_names(tensors: Tensors, blocks: int = BLOCKS, prefix: str = "") -> Tensors:
    found = {}
    for name, tensor in tensors.items():
        head, layer, *rest = name.split(".")
        own = f"lm_heads.{head}.weight" if int(layer) == blocks else f"blocks.{head}.layers.{layer}.{rest[-1]}"
        found[prefix + own] = tensor
    return found


def close(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and bool((found - wanted).abs().max() < 1e-6)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_authors_format(target: StateTarget, tmp_path: Path, blocks: int, rows: int) -> None:
    tensors, states = random_medusa(blocks=blocks), randn(rows, HIDDEN, seed=9)
    heads = load(save_heads(tmp_path, tensors, medusa_num_heads=2), target)
    wanted = expected(tensors, states, blocks)
    assert heads.most == HEADS  # as the tensors say; the authors' config.json may say 2
    assert close(heads.logits(states), wanted)
    assert close(heads.logits(states, 2), wanted[:, :2])


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_vllms_format(target: StateTarget, tmp_path: Path, prefix: str) -> None:
    tensors, states = random_medusa(), randn(3, HIDDEN, seed=9)
    heads = load(save_heads(tmp_path, in_vllms_names(tensors, prefix=prefix), num_heads=HEADS), target)
    assert close(heads.logits(states), expected(tensors, states))


def test_blocks_without_biases(target: StateTarget, tmp_path: Path) -> None:
    tensors, states = random_medusa(), randn(3, HIDDEN, seed=9)
    without = {name: tensor for name, tensor in tensors.items() if not name.endswith("bias")}
    zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items() if name.endswith("bias")}
    heads = load(save_heads(tmp_path, in_vllms_names(without)), target)
    assert close(heads.logits(states), expected({**tensors, **zeros}, states))


def shared(tensors: Tensors, matrix: Tensor) -> Tensors:
    """The same heads, all with one matrix."""
    return {name: matrix if name.endswith(f".{BLOCKS}.weight") else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
def test_one_matrix_for_all_heads(target: StateTarget, tmp_path: Path, name: str) -> None:
    tensors, states = random_medusa(), randn(3, HIDDEN, seed=9)
    blocks = {n: t for n, t in in_vllms_names(tensors).items() if n.startswith("blocks.")}
    matrix = randn(VOCAB, HIDDEN, seed=3)
    heads = load(save_heads(tmp_path, {**blocks, name: matrix}, original_lm_head=True), target)
    assert close(heads.logits(states), expected(shared(tensors, matrix), states))


def test_heads_without_a_matrix_use_the_targets(target: StateTarget, pair: Pair, tmp_path: Path) -> None:
    decoder, _ = load_target(pair.target)
    tensors, states = random_medusa(), randn(3, HIDDEN, seed=9)
    blocks = {name: t for name, t in tensors.items() if not name.endswith(f".{BLOCKS}.weight")}
    heads = load(save_heads(tmp_path, blocks), target)
    matrix = decoder.head(torch.eye(HIDDEN, dtype=torch.float64)).T
    assert close(heads.logits(states), expected(shared(tensors, matrix), states))
    assert heads.weight_bytes == 8 * HEADS * BLOCKS * (HIDDEN + 1) * HIDDEN


@pytest.mark.parametrize("rows", [len(KEPT), VOCAB, None], ids=["cut rows", "all rows", "the target's"])
def test_a_small_vocabulary(target: StateTarget, pair: Pair, tmp_path: Path, rows: int | None) -> None:
    """token_map names the ids of the rows. Other tokens get a logit without probability, and a finite one."""
    tensors, states = random_medusa(), randn(3, HIDDEN, seed=9)
    if rows is None:
        decoder, _ = load_target(pair.target)
        full = shared(tensors, decoder.head(torch.eye(HIDDEN, dtype=torch.float64)).T)
        files = {name: t for name, t in tensors.items() if not name.endswith(f".{BLOCKS}.weight")}
    else:
        full = tensors
        cut = {name: t[KEPT] for name, t in tensors.items() if name.endswith(f".{BLOCKS}.weight")}
        files = {**tensors, **cut} if rows == len(KEPT) else tensors
    files = in_vllms_names(files) | {"token_map": KEPT}
    config = {"vocab_size": VOCAB, "truncated_vocab_size": len(KEPT)}
    logits = load(save_heads(tmp_path, files, **config), target).logits(states)
    assert close(logits[..., KEPT], expected(full, states)[..., KEPT])
    others = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, KEPT, False)
    assert (logits[..., others] == OUTSIDE).all()


def test_logits_are_scaled(target: StateTarget, tmp_path: Path) -> None:
    tensors, states = random_medusa(), randn(3, HIDDEN, seed=9)
    heads = load(save_heads(tmp_path, in_vllms_names(tensors), logit_scale=0.25), target)
    assert close(heads.logits(states), 0.25 * expected(tensors, states))


@pytest.mark.parametrize(
    ("dtype", "weights", "tolerance"),
    [
        (torch.float32, Weights(), 1e-4),
        (torch.float32, Weights(products="packed"), 1e-4),
        (torch.bfloat16, Weights(), 0.1),
        (torch.float32, Weights("int8"), 0.1),
    ],
    ids=["fp32", "packed", "bf16", "int8"],
)
def test_forms_of_weights(pair: Pair, tmp_path: Path, dtype: torch.dtype, weights: Weights, tolerance: float) -> None:
    tensors, states = random_medusa(), randn(3, HIDDEN, seed=9)
    directory = save_heads(tmp_path, tensors)
    _, target = load_target(pair.target)
    try:
        heads = load_medusa(directory, target, dtype=dtype, device=CPU, weights=weights)
    except ConfigError as error:
        pytest.skip(str(error))
    logits = heads.logits(states.to(dtype))
    assert logits.dtype is dtype
    assert (logits.double() - expected(tensors, states)).abs().max() < tolerance


def test_a_run_steps_through_the_heads(target: StateTarget, tmp_path: Path) -> None:
    """Rows end and branch; each keeps the state that it began with."""
    tensors, states = random_medusa(), randn(3, HIDDEN, seed=9)
    run = load(save_heads(tmp_path, tensors), target).start(states, 3)
    wanted = expected(tensors, states)
    tokens = torch.zeros(3, dtype=torch.int64)
    assert close(run.step(None, tokens), wanted[:, 0])
    assert close(run.step(torch.tensor([2, 0, 2]), tokens), wanted[[2, 0, 2], 1])
    assert close(run.step(torch.tensor([1, 2]), tokens[:2]), wanted[[0, 2], 2])


# What is refused


def dropped(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


def added(name: str, tensor: Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: tensor}


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (dropped("1.0.linear.weight"), {}, r"4 Medusa heads of 2 blocks, but no 1\.0\.linear\.weight"),
        (dropped("1.1.linear.bias"), {}, None),
        (dropped("1.0.linear.bias"), {}, r"holds no tensor '1\.0\.linear\.bias'"),
        (dropped("2.2.weight"), {}, r"holds no tensor '2\.2\.weight'"),
        (added("2.1.linear.weight", randn(HIDDEN, 9)), {}, r"2\.1\.linear\.weight has shape \(64, 9\), and \(64, 64\)"),
        (added("extra", randn(3)), {}, "1 tensors that Medusa heads do not have, 'extra'"),
        (added("0.2.weight", randn(VOCAB + 1, HIDDEN)), {}, "draft 401 tokens, and target the target has 400"),
        (lambda t: t, {"vocab_size": VOCAB, "truncated_vocab_size": 9}, "no tensor token_map"),
        (added("token_map", torch.tensor([3, 3])), {}, "different ids from 0 to 399"),
        (added("token_map", torch.tensor([3, 400])), {}, "different ids from 0 to 399"),
        (added("token_map", randn(4)), {}, "must be a list of integers, not F64"),
        (lambda t: random_medusa(hidden=32), {}, "read states of 32 numbers, and those of target the target have 64"),
        (lambda t: {"lm_head.weight": randn(4, 4)}, {}, "holds no Medusa heads: tensors named 0.0.linear.weight"),
        (lambda t: t, {"logit_scale": "much"}, "logit_scale must be a positive number, not 'much'"),
        (lambda t: t, {"logit_scale": float("nan")}, "logit_scale must be a positive number, not nan"),
    ],
)
def test_files_that_do_not_fit(
    target: StateTarget,
    tmp_path: Path,
    change: Callable[[Tensors], Tensors],
    config: dict[str, object],
    message: str | None,
) -> None:
    directory = save_heads(tmp_path, change(random_medusa()), **config)
    if message is None:  # a block may lack its bias
        load(directory, target)
        return
    with pytest.raises(ConfigError, match=message):
        load(directory, target)


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "pytorch_model.bin"])
def test_a_pickle_is_refused_and_the_conversion_named(target: StateTarget, tmp_path: Path, file: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2}), "utf-8")
    torch.save(random_medusa(), tmp_path / file)
    with pytest.raises(ConfigError, match=f"{file} is a pickle, .* convert it to safetensors"):
        load(tmp_path, target)


def test_safetensors_under_the_authors_name_are_told_what_to_be_called(target: StateTarget, tmp_path: Path) -> None:
    save_file(random_medusa(), tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(ConfigError, match=r"no model\.safetensors; rename medusa_lm_head\.safetensors"):
        load(tmp_path, target)
