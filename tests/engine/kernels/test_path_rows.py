"""Where accepted nodes lie in memory: by plain Python, from the reference and from the Triton kernel."""

import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels.path_rows import NO_ROW, path_rows, path_rows_reference
from engine.sampling.tree_acceptance import NONE
from engine.trees import ROOT, Parents, path
from tests.engine.kernels.faults import with_fault

SIZE, SPARE = 6, 999
Args = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def batch(seed: int) -> tuple[Args, list[list[int]]]:
    """(trees of which some nodes lie in memory, the sources that they must get). A node whose parent is not in memory
    is not either, as in a draft model's."""
    draw = random.Random(seed)
    last_rows = [draw.randint(0, SIZE) for _ in range(5)]
    owners, parents, rows, targets, expected = [], [], [], [], []
    for owner in draw.sample(range(5), 3):
        size = draw.randint(max(1, last_rows[owner]), SIZE)
        shape: Parents = tuple(draw.randrange(ROOT, node) for node in range(size))
        held = [node for node in range(size) if draw.random() < 0.8 or seed % 2]
        held = [node for node in held if set(path(shape, node)) <= set(held)]
        memory = draw.sample(range(500), len(held))
        kept = [memory[held.index(node)] for node in path(shape, last_rows[owner] - 1) if node in held]
        fill = SIZE - len(held)
        owners.append(owner)
        parents.append([*(p + 1 for p in shape), *[NONE] * (SIZE - size)])
        rows.append([memory[held.index(node)] if node in held else NO_ROW for node in range(SIZE)])
        targets.append([*memory, *[SPARE] * fill])
        expected.append([*kept, *targets[-1][len(kept) :]])
    tensors = [torch.tensor(values) for values in (last_rows, owners, parents, rows, targets)]
    return (tensors[0], tensors[1], tensors[2], tensors[3], tensors[4]), expected


def check(run: Any, batches: int = 60) -> None:
    for seed in range(batches):
        args, expected = batch(seed)
        assert run(*args).tolist() == expected


def on_device(kernels: Any, device: torch.device) -> Any:
    return lambda *args: kernels.path_rows(*(x.to(device) for x in args)).cpu()


@pytest.fixture
def kernels(device: torch.device) -> ModuleType:
    from engine.kernels import path_rows_kernel

    return path_rows_kernel


def test_accepted_nodes_move_to_the_front() -> None:
    check(path_rows)
    args, _ = batch(0)
    assert torch.equal(path_rows(*args), path_rows_reference(*args))
    torch.library.opcheck(torch.ops.foretoken.path_rows.default, args, test_utils=["test_schema", "test_faketensor"])


def test_last_rows_may_be_a_column_of_a_table() -> None:
    (last_rows, *others), expected = batch(3)
    table = torch.stack([last_rows, last_rows + 1], 1)
    assert path_rows(table[:, 0], *others).tolist() == expected


def test_the_kernel_moves_them_too(kernels: ModuleType, device: torch.device) -> None:
    check(on_device(kernels, device), 15)
    (last_rows, *others), expected = batch(3)
    table = torch.stack([last_rows, last_rows + 1], 1).to(device)
    found = kernels.path_rows(table[:, 0], *(x.to(device) for x in others))
    assert found.tolist() == expected


FAULTS = {
    "the owner is not looked up": ("tl.load(owners + tree) * stride", "tree * stride"),
    "the path is one node": ("row = tl.where(hit, tl.load(parents + tree * size + node), row)", "row = row"),
    "nodes beside the path move": ("& (on_path == 1)[:", "& (on_path >= 0)[:"),
    "a place too far": ("tl.cumsum(on_path, 0) - 1", "tl.cumsum(on_path, 0)"),
    "another tree's targets": ("tl.load(targets + tree * size", "tl.load(targets + 0 * size"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_with_a_fault_is_seen(kernels: ModuleType, device: torch.device, fault: str, tmp_path: Path) -> None:
    with with_fault(kernels, *FAULTS[fault], tmp_path) as faulty, pytest.raises(AssertionError):
        check(on_device(faulty, device), 15)
