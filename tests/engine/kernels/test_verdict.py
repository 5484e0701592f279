"""The one table of a round's verdict under match: equal to the verdict itself, for ragged batches and padded ones."""

import random
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from engine.device.staging import RoundNumbers, Staging
from engine.kernels.verdict import match_verdict, verdict_reference
from engine.sampling.matching import match
from engine.sampling.tree_acceptance import TreeTable
from engine.trees import ROOT
from tests.engine.kernels.faults import with_fault

Verdict = Callable[..., Tensor]


@pytest.fixture
def kernels(device: torch.device) -> ModuleType:
    from engine.kernels import verdict_kernel

    return verdict_kernel


@pytest.fixture(params=["reference", "kernel"])
def run(request: pytest.FixtureRequest) -> Verdict:
    if request.param == "reference":
        return verdict_reference
    return on_device(request.getfixturevalue("kernels"), request.getfixturevalue("device"))


def on_device(kernels: ModuleType, device: torch.device) -> Verdict:
    """The Triton kernel, for tensors on the CPU."""

    def run(*args: Tensor) -> Tensor:
        table: Tensor = kernels.match_verdict(*(x.to(device) for x in args))
        return table.cpu()

    return run


def ragged(g: torch.Generator) -> tuple[list[int], Tensor, Tensor, Tensor]:
    """(ks, drawn, finite, drafts) of up to 6 sequences. Two ids only, so that drafts are often accepted."""
    ks = torch.randint(0, 5, (int(torch.randint(1, 7, (), generator=g)),), generator=g).tolist()
    rows = sum(ks) + len(ks)
    drawn = torch.randint(2, (rows,), generator=g)
    finite = torch.rand(rows, generator=g) < 0.9
    return ks, drawn, finite, torch.randint(2, (len(ks), max(ks)), generator=g)


def lists(drafts: Tensor, ks: list[int]) -> list[list[int]]:
    return [row[:k] for row, k in zip(drafts.tolist(), ks, strict=True)]


def check(run: Verdict, batches: int) -> set[int]:
    """Returns the numbers of accepted drafts."""
    g = torch.Generator().manual_seed(1)
    seen: set[int] = set()
    for _ in range(batches):
        ks, drawn, finite, drafts = ragged(g)
        expected = match(drawn.tolist(), finite.tolist(), lists(drafts, ks), {}, 2)
        table = run(drawn, finite, drafts, torch.tensor([*accumulate((k + 1 for k in ks), initial=0)]))
        assert table[:, 0].tolist() == expected.accepted
        assert table[:, 1].tolist() == [emitted[-1] for emitted in expected.emitted]
        assert table[:, 2].tolist() == [not wrong for wrong in expected.non_finite]
        assert torch.equal(table[:, 3:], drafts)
        seen |= set(table[:, 0].tolist())
    return seen


def test_the_table_holds_the_verdict_and_the_drafts(run: Verdict) -> None:
    assert check(run, 60) == {0, 1, 2, 3, 4}


def check_trees(run: Verdict, batches: int) -> set[int]:
    """Returns the last rows."""
    draw, g, seen = random.Random(4), torch.Generator().manual_seed(4), set[int]()
    for _ in range(batches):
        ks, drawn, finite, drafts = ragged(g)
        shapes = [tuple(draw.randrange(ROOT, node) for node in range(k)) for k in ks]
        if not max(ks):
            continue
        table = TreeTable.of(shapes, RoundNumbers(Staging(torch.device("cpu"))))
        expected = match(drawn.tolist(), finite.tolist(), lists(drafts, ks), dict(enumerate(shapes)), 2)
        starts = torch.tensor([*accumulate((k + 1 for k in ks), initial=0)])
        found = run(drawn, finite, drafts, starts, table.parent_rows)
        assert found[:, 0].tolist() == [path[-1] + 1 if path else 0 for path in expected.paths.values()]
        assert found[:, 1].tolist() == [emitted[-1] for emitted in expected.emitted]
        assert found[:, 2].tolist() == [not wrong for wrong in expected.non_finite]
        assert torch.equal(found[:, 3:], drafts)
        seen |= set(found[:, 0].tolist())
    return seen


def test_the_table_holds_the_verdict_on_trees(run: Verdict) -> None:
    assert check_trees(run, 20) == {0, 1, 2, 3, 4}


def test_a_padded_batch_gives_the_same_rows(run: Verdict) -> None:
    """More columns, more rows and more sequences than there are, as a captured graph has them."""
    g = torch.Generator().manual_seed(2)
    for _ in range(10):
        ks, drawn, finite, drafts = ragged(g)
        starts = [*accumulate((k + 1 for k in ks), initial=0)]
        table = run(drawn, finite, drafts, torch.tensor(starts))
        wide = torch.full((len(ks) + 2, 6), 1)
        wide[: len(ks), : drafts.shape[1]] = drafts
        spare = torch.ones(3, dtype=torch.int64)
        padded = run(
            torch.cat([drawn, spare]),
            torch.cat([finite, spare < 1]),
            wide,
            torch.tensor([*starts, starts[-1], starts[-1]], dtype=torch.int32),
        )
        assert torch.equal(padded[: len(ks), :3], table[:, :3])


def test_the_operation_is_the_reference_on_the_cpu_and_has_shapes_without_values() -> None:
    ks, drawn, finite, drafts = ragged(torch.Generator().manual_seed(3))
    args = drawn, finite, drafts, torch.tensor([*accumulate((k + 1 for k in ks), initial=0)])
    assert torch.equal(match_verdict(*args), verdict_reference(*args))
    torch.library.opcheck(
        torch.ops.foretoken.match_verdict.default, args, test_utils=["test_schema", "test_faketensor"]
    )


TREE_FAULTS = {
    "any parent": ("(parent == last) & (draft == draw)", "(draft == draw)"),
    "any draft": ("(parent == last) & (draft == draw)", "(parent == last)"),
    "the last row alone is finite": ("visited |= column == last", "visited = column == last"),
    "another sequence's tree": ("parents + sequence * depth + node", "parents + node"),
}


@pytest.mark.parametrize("fault", TREE_FAULTS)
def test_a_kernel_with_a_fault_in_trees_is_seen(
    kernels: ModuleType, device: torch.device, fault: str, tmp_path: Path
) -> None:
    with with_fault(kernels, *TREE_FAULTS[fault], tmp_path) as faulty, pytest.raises(AssertionError):
        check_trees(on_device(faulty, device), 20)


FAULTS = {
    "a draft behind the last is accepted": (" | (place + 1 >= end)", ""),
    "a row behind the last accepted counts": ("visited = column <= last", "visited = column <= last + 1"),
    "the last row does not count": ("visited = column <= last", "visited = column < last"),
    "the next row's token": ("token = tl.max(tl.where(column == last,", "token = tl.max(tl.where(column == last + 1,"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_with_a_fault_is_seen(kernels: ModuleType, device: torch.device, fault: str, tmp_path: Path) -> None:
    with with_fault(kernels, *FAULTS[fault], tmp_path) as faulty, pytest.raises(AssertionError):
        check(on_device(faulty, device), 60)
