"""Truncation as one operation: the tokens that the definition removes, from the reference and the Triton kernels alike.

The definition sorts and adds up masses in ascending order, the kernels add up in another order. So the two may differ
where a sum ends within its rounding of a limit, which no row here does.
"""

from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels.truncate import truncate, truncate_reference
from engine.sampling.filters import Filters, removed
from tests.engine.kernels.faults import with_fault
from tests.examples import in_proofs, usual_and_proofs

Truncate = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Kind = Callable[[tuple[int, int], torch.Generator], Tensor]
# (temperature, top-k, top-p, min-p) of a row; top-k 0: off
SETTINGS = (
    (1.0, 5, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (0.7, 0, 1.0, 0.05),
    (1.3, 20, 0.8, 0.0),
    (0.8, 0, 0.95, 0.1),
    (1.0, 30, 0.99, 0.01),
    (2.5, 0, 0.3, 0.0),
    (1e-3, 0, 0.9, 0.0),
    (1e-40, 3, 0.5, 0.2),
)
NEUTRAL, GREEDY = (0.7, 0, 1.0, 0.0), (0.0, 3, 0.5, 0.2)


@pytest.fixture
def kernels(device: torch.device) -> ModuleType:
    from engine.kernels import truncate_kernel

    return truncate_kernel


@pytest.fixture
def kernel(kernels: ModuleType, device: torch.device) -> Truncate:
    return on_device(kernels, device)


@pytest.fixture
def small_parts(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PART", 64)
    monkeypatch.setattr(kernels, "TILE", 32)


@pytest.fixture
def whole_parts(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """One part and one tile: the interpreter's time is mostly that of its operations, whatever their size."""
    monkeypatch.setattr(kernels, "PART", 512)
    monkeypatch.setattr(kernels, "TILE", 512)


def on_device(kernels: ModuleType, device: torch.device) -> Truncate:
    """The Triton kernels, for tensors on the CPU."""

    def run(*args: Tensor) -> Tensor:
        with np.errstate(all="ignore"):
            result: Tensor = kernels.truncate(*(x.to(device) for x in args))
        return result.cpu()

    return run


def normal(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64) * 3


def flat(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64) * 0.01 - 7


def peaked(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    """As of a model that is sure: most masses vanish."""
    return torch.randn(shape, generator=g, dtype=torch.float64) * 30 + 100


def ties(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    """With zeros of both signs."""
    return normal(shape, g).round() * torch.tensor([1.0, -1.0])[torch.randint(2, shape, generator=g)]


def forbidden(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    return normal(shape, g).masked_fill(torch.rand(shape, generator=g) < 0.9, -inf)


KINDS: list[Kind] = [normal, flat, peaked, ties, forbidden]


def columns(settings: list[tuple[float, int, float, float]], vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(temperatures, top_k, top_p, min_p), [rows] each."""
    temperatures, top_k, top_p, min_p = zip(*settings, strict=True)
    ks = torch.tensor([min(k, vocab) or vocab for k in top_k])
    return (
        torch.tensor(temperatures, dtype=torch.float64),
        ks,
        torch.tensor(top_p, dtype=torch.float64),
        torch.tensor(min_p, dtype=torch.float64),
    )


def check(run: Truncate, logits: Tensor, settings: list[tuple[float, int, float, float]]) -> None:
    parameters = columns(settings, logits.shape[1])
    gone = removed(logits, Filters(*parameters, any_top_p=True))
    gone[parameters[0] == 0] = False
    expected = logits.masked_fill(gone, -inf)
    made = run(logits, *parameters)
    assert made.dtype is logits.dtype
    assert torch.equal(made.nan_to_num(1.5), expected.nan_to_num(1.5))
    assert torch.equal(made.isnan(), logits.isnan())


def rows(kinds: list[Kind], vocab: int, g: torch.Generator) -> tuple[Tensor, list[tuple[float, int, float, float]]]:
    """Rows of every kind with each of the settings."""
    settings = [*SETTINGS, NEUTRAL, GREEDY]
    return torch.cat([kind((len(settings), vocab), g) for kind in kinds]), settings * len(kinds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_reference_removes_what_the_definition_does(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    for vocab in (1, 2, 31, 500, 4097):
        logits, settings = rows(KINDS, vocab, g)
        check(truncate_reference, logits.to(dtype), settings)


@pytest.mark.usefixtures("whole_parts")
def test_the_kernels_remove_what_the_definition_does(kernel: Truncate) -> None:
    """Each of the settings with one kind of row, and each kind with one setting at least."""
    g = torch.Generator().manual_seed(2)
    logits = torch.cat([KINDS[n % len(KINDS)]((1, 500), g) for n in range(len(SETTINGS))])
    check(kernel, logits.float(), list(SETTINGS))


@pytest.mark.proofs
@pytest.mark.usefixtures("whole_parts")
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_remove_from_rows_of_a_kind_what_the_definition_does(kernel: Truncate, kind: Kind) -> None:
    logits = kind((len(SETTINGS), 500), torch.Generator().manual_seed(2))
    check(kernel, logits.float(), list(SETTINGS))


@pytest.mark.proofs
@pytest.mark.usefixtures("whole_parts")
def test_the_kernels_remove_from_fp64_what_the_definition_does(kernel: Truncate) -> None:
    g = torch.Generator().manual_seed(3)
    logits = torch.cat([kind((1, 200), g) for kind in (ties, flat)])
    check(kernel, logits, [SETTINGS[3], SETTINGS[5]])


@pytest.mark.usefixtures("whole_parts")
@pytest.mark.parametrize("vocab", [1, *in_proofs(2, 31)])
def test_the_kernels_remove_from_short_rows_what_the_definition_does(kernel: Truncate, vocab: int) -> None:
    g = torch.Generator().manual_seed(4)
    check(kernel, normal((4, vocab), g).float(), [SETTINGS[0], SETTINGS[1], SETTINGS[5], GREEDY])


@pytest.mark.usefixtures("small_parts")
def test_rows_of_several_parts_and_tiles_are_cut_alike(kernel: Truncate) -> None:
    g = torch.Generator().manual_seed(5)
    check(kernel, torch.cat([normal((1, 100), g), ties((1, 100), g)]).float(), [SETTINGS[1], SETTINGS[3]])


def test_long_rows_are_cut_alike(kernel: Truncate) -> None:
    """With the tiles and parts that a device gets."""
    g = torch.Generator().manual_seed(6)
    check(kernel, normal((1, 4500), g).float(), [SETTINGS[3]])


EXACT = {
    "the best of equals stay together": ([2, 2, 1, 1, 0], (1.0, 1, 1.0, 0.0), [1, 1, 0, 0, 0]),
    "the k-th and its equals stay": ([2, 1, 0, 1, 1], (1.0, 2, 1.0, 0.0), [1, 1, 0, 1, 1]),
    "k ends before equals": ([2, 1, 0, 1, 0], (1.0, 3, 1.0, 0.0), [1, 1, 0, 1, 0]),
    "top-p among equals keeps all": ([3, 3, 3, 3, -inf], (1.0, 0, 0.4, 0.0), [1, 1, 1, 1, 0]),
    "top-p within a pair keeps both": ([5, 0, 0, -9, -9], (1.0, 0, 0.995, 0.0), [1, 1, 1, 0, 0]),
    "top-p of nothing keeps the best": ([1, 2, 0, 2, 1], (1.0, 0, 1e-20, 0.0), [0, 1, 0, 1, 0]),
    "top-p of the k best only": ([1, 1, 0, 0, 0], (1.0, 2, 0.6, 0.0), [1, 1, 0, 0, 0]),
    "the k-th has mass for top-p": ([1, 0, -1, -1, -1], (1.0, 2, 0.8, 0.0), [1, 1, 0, 0, 0]),
    "neighbours differ": ([1, 1 - 2**-24, 0, 0, 0], (1.0, 1, 1.0, 0.0), [1, 0, 0, 0, 0]),
    "min-p of 1 keeps the best": ([1, 2, 0, 2, 1], (1.0, 0, 1.0, 1.0), [0, 1, 0, 1, 0]),
    "both zeros are one number": ([0.0, -0.0, -0.0, -1, 0.0], (1.0, 2, 1.0, 0.0), [1, 1, 1, 0, 1]),
    "zeros have one mass": ([-0.0, 0.0, 0.0, -1, -1], (1.0, 0, 0.8, 0.0), [1, 1, 1, 0, 0]),
    "more than there are allowed": ([1, -inf, -inf, 0, -inf], (1.0, 4, 1.0, 0.0), [1, 0, 0, 1, 0]),
    "a temperature of 0 changes nothing": ([2, 1, 0, 1, 0], (0.0, 1, 0.1, 1.0), [1, 1, 1, 1, 1]),
}


@pytest.mark.parametrize("run", ["reference", "kernel"])
def test_equal_logits_stay_or_go_together(run: str, request: pytest.FixtureRequest) -> None:
    truncate_of = truncate_reference if run == "reference" else request.getfixturevalue("kernel")
    logits = torch.tensor([case[0] for case in EXACT.values()], dtype=torch.float32)
    made = truncate_of(logits, *columns([case[1] for case in EXACT.values()], 5))
    for name, row, kept in zip(EXACT, made.tolist(), [case[2] for case in EXACT.values()], strict=True):
        assert [value > -inf for value in row] == [bool(x) for x in kept], name


@pytest.mark.parametrize("run", ["reference", "kernel"])
def test_rows_that_are_not_finite_stay_as_they_are(run: str, request: pytest.FixtureRequest) -> None:
    """So that the verdict sees them."""
    truncate_of = truncate_reference if run == "reference" else request.getfixturevalue("kernel")
    logits = torch.tensor([[1.0, nan, 3.0], [1.0, inf, 3.0], [-inf, -inf, -inf]])
    made = truncate_of(logits, *columns([(1.0, 1, 0.5, 0.1)] * 3, 3))
    assert torch.equal(made.nan_to_num(nan=7.0), logits.nan_to_num(nan=7.0))


@pytest.mark.parametrize("run", ["reference", "kernel"])
def test_the_logits_are_not_changed(run: str, request: pytest.FixtureRequest) -> None:
    truncate_of = truncate_reference if run == "reference" else request.getfixturevalue("kernel")
    table = normal((4, 90), torch.Generator().manual_seed(7)).float()
    before, logits = table.clone(), table[::2, 3:80]
    check(truncate_of, logits, [SETTINGS[3], NEUTRAL])
    assert torch.equal(table, before)


def test_the_operation_is_the_reference_on_the_cpu_and_has_shapes_without_values() -> None:
    logits, settings = rows([normal], 40, torch.Generator().manual_seed(8))
    parameters = columns(settings, 40)
    assert torch.equal(truncate(logits, *parameters), truncate_reference(logits, *parameters))
    torch.library.opcheck(
        torch.ops.foretoken.truncate.default, (logits, *parameters), test_utils=["test_schema", "test_faketensor"]
    )


FAULTS = {
    "one token too few is removed": ("below + found <= limit", "below + found < limit"),
    "a pivot's own token counts": ("key[None, :] < pivot", "key[None, :] <= pivot"),
    "the threshold's token goes": ("/ temperature >= threshold", "/ temperature > threshold"),
    "the k-th has no mass": ("inside & (scaled >= floor)", "inside & (scaled > floor)"),
    "top-p of all, not of the k best": ("inside & (scaled >= floor)", "inside"),
    "p in place of 1 - p": ("(1 - tl.load(top_p + row))", "tl.load(top_p + row)"),
    "the least key is left out": (
        "(key >= least) & (key <= largest) & (start",
        "(key > least) & (key <= largest) & (start",
    ),
    "greedy rows are cut": (" & (temperature > 0)", ""),
    "what lies below is forgotten": ("below += tl.sum(", "below = tl.sum("),
    "min-p is forgotten": ("tl.load(log_min_p + row)", "tl.load(log_min_p + row) - 9"),
    "every part reads the first": ("stride, part * PART, vocab, least", "stride, 0, vocab, least"),
    "the temperature is forgotten": ("tl.maximum(temperature, LEAST_TEMPERATURE)", "1.0"),
}


# search_kernel, a function that it calls, and write_kernel have one fault each.
USUAL_FAULTS = ("a pivot's own token counts", "one token too few is removed", "the threshold's token goes")


@pytest.mark.parametrize("fault", usual_and_proofs(FAULTS, USUAL_FAULTS))
def test_a_kernel_with_a_fault_is_seen(kernels: ModuleType, device: torch.device, fault: str, tmp_path: Path) -> None:
    with with_fault(kernels, *FAULTS[fault], tmp_path) as faulty, pytest.raises(AssertionError):
        compare_few(on_device(small(faulty), device))


def test_a_kernel_without_a_fault_passes_the_same_comparison(
    kernels: ModuleType, device: torch.device, tmp_path: Path
) -> None:
    with with_fault(kernels, "WARPS = 4", "WARPS = 8", tmp_path) as sound:
        compare_few(on_device(small(sound), device))


def small(kernels: ModuleType) -> ModuleType:
    kernels.PART, kernels.TILE = 64, 64  # type: ignore[attr-defined]
    return kernels


def compare_few(run: Truncate) -> None:
    """What shows each of FAULTS."""
    telling = ("the k-th and its equals", "the k-th has mass", "neighbours", "a temperature")
    cases = [case for name, case in EXACT.items() if name.startswith(telling)]
    check(run, torch.tensor([case[0] for case in cases]), [case[1] for case in cases])
    g = torch.Generator().manual_seed(10)
    logits = normal((3, 100), g).sort(1).values.float()
    check(run, logits, [(1.7, 20, 0.8, 0.0), (1.0, 0, 0.9, 0.0), (0.5, 0, 1.0, 0.3)])
