"""Products of few rows: the kernels and their definitions against fp64."""

from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels import row_products, row_work
from tests.engine.kernels.faults import with_fault
from tests.examples import in_proofs

EPS = 0.5  # large, so that a norm without it is seen
OFFSET = 1.0
# (rows, input channels): tiles that are whole and not, one part of the input and several, every height of a tile
SIZES = [(1, 80), (1, 1056), (2, 1536), (3, 1040), (8, 768), (13, 96), (20, 160), (33, 800)]


@pytest.fixture
def kernels(device: torch.device) -> ModuleType:
    from engine.kernels import row_product_kernel

    return row_product_kernel


def drawn(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype)


def exact(x: Tensor, weight: Tensor, gain: Tensor | None) -> Tensor:
    wide = x.double()
    if gain is not None:
        wide = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * (OFFSET + gain.double())
    return wide @ weight.double().t()


def error(found: Tensor, expected: Tensor) -> float:
    """Relative, over what rounding to 16 bits allows: the definitions round before the last step, too. The interpreter
    cuts bits off in place of rounding."""
    distance = (found.cpu().double() - expected).norm() / expected.norm()
    return float(distance.nan_to_num(torch.inf)) / (2 * torch.finfo(torch.bfloat16).eps)


Forms = Iterator[tuple[Tensor, Tensor]]  # (what was computed, fp64's result)


class Case:
    """Operands of a product, and what it is given of a norm."""

    def __init__(self, rows: int, inner: int, channels: int, dtype: torch.dtype) -> None:
        self.x = drawn(rows, inner, dtype=dtype)
        self.weight = (drawn(channels, inner) / inner**0.5).to(dtype)
        self.bias = drawn(channels, dtype=dtype)
        self.gain = drawn(inner, dtype=dtype) if rows == 1 else None

    def product(self) -> Tensor:
        return exact(self.x, self.weight, self.gain)

    def norm(self, device: torch.device) -> tuple[Any, ...]:
        return None if self.gain is None else self.gain.to(device), EPS, OFFSET


def cases(channels: int, dtype: torch.dtype) -> list[Case]:
    return [Case(rows, inner, channels, dtype) for rows, inner in SIZES]


def products(of: ModuleType, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Forms:
    for case in cases(70, dtype):
        args = case.x.to(device), case.weight.to(device)
        yield of.normalised_product(*args, None, *case.norm(device)), case.product()
        biased = of.normalised_product(*args, case.bias.to(device), *case.norm(device))
        yield biased, case.product() + case.bias.double()


def gates(of: ModuleType, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Forms:
    for case in cases(70, dtype):
        gate, up = case.product().chunk(2, 1)
        gated = of.gated_product(case.x.to(device), case.weight.to(device), *case.norm(device))
        yield gated, gate / (1 + (-gate).exp()) * up


def sums(of: ModuleType, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Forms:
    """What is added to the states, at once for one row and in parts for several."""
    for case in cases(70, dtype):
        states, product = drawn(len(case.x), 70, dtype=dtype), exact(case.x, case.weight, None)
        x, args = states.to(device, copy=True), (case.x.to(device), case.weight.to(device))
        if len(case.x) == 1:
            of.add_product_(x, *args)
        else:
            row_work.add_parts_(x, of.product_parts(*args))
        yield x, states.double() + product


def projections(of: ModuleType, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Forms:
    """Queries, and keys and values, which are stored in another order."""
    heads, kv_heads, size = 3, 1, 14
    width, channels = heads * size, (heads + 2 * kv_heads) * size
    for case in cases(channels, dtype):
        rows = len(case.x)
        angles, places = drawn(rows, channels // 2, dtype=torch.float32), torch.randperm(rows + 2)[:rows]
        factors = torch.polar(torch.ones_like(angles), angles)
        stored = torch.full((rows + 2, 2 * kv_heads, size), 7.0, dtype=dtype, device=device)
        queries = of.project_and_store(
            case.x.to(device), case.weight.to(device), case.bias.to(device), factors.to(device), stored,
            places.to(device), width, *case.norm(device),
        )  # fmt: skip
        pairs = torch.view_as_complex((case.product() + case.bias.double()).view(rows, -1, 2))
        turned = torch.view_as_real(pairs * factors.to(torch.complex128)).flatten(1)
        kept = torch.full(stored.shape, 7.0, dtype=torch.float64)
        kept[places] = turned[:, width:].view(rows, 2 * kv_heads, size)
        yield queries, turned[:, :width]
        yield stored, kept


WORK = [products, gates, sums, projections]
Work = Callable[..., Forms]


def errors(work: Work, of: ModuleType, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Iterator[float]:
    return (error(found, expected) for found, expected in work(of, device, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, *in_proofs(torch.float16)])
@pytest.mark.parametrize("work", WORK)
def test_the_kernels_compute_what_they_say(
    work: Work, dtype: torch.dtype, kernels: ModuleType, device: torch.device
) -> None:
    assert max(errors(work, kernels, device, dtype)) < 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, *in_proofs(torch.float16)])
@pytest.mark.parametrize("work", WORK)
def test_the_operations_compute_what_they_say(work: Work, dtype: torch.dtype) -> None:
    assert max(errors(work, row_products, torch.device("cpu"), dtype)) < 1


def test_a_row_has_the_bits_that_it_has_beside_others(kernels: ModuleType, device: torch.device) -> None:
    x, weight = drawn(8, 1536).to(device), drawn(70, 1536).to(device)
    company, pair = kernels.product_parts(x, weight), kernels.product_parts(x[2:4].clone(), weight)
    assert torch.equal(company[:, 2:4], pair)


def test_many_parts_only_where_there_are_few_programs(kernels: ModuleType) -> None:
    tile = kernels.choose_dot_tile(8, 4864, False)
    assert kernels.count_parts(896, 4864, tile) == 8
    assert kernels.count_parts(152_000, 4864, tile) == 1
    assert kernels.count_parts(896, 896, tile) == 2  # a part has three tiles at least


def test_no_rows(kernels: ModuleType, device: torch.device) -> None:
    none, weight = torch.empty(0, 64, dtype=torch.bfloat16, device=device), drawn(32, 64).to(device)
    assert kernels.normalised_product(none, weight, None, None, 0.0, 0.0).shape == (0, 32)
    assert kernels.product_parts(none, weight).shape[1:] == (0, 32)


@pytest.mark.parametrize(
    "fault",
    [
        (products, "y += tl.load(bias", "y -= tl.load(bias"),
        (gates, "y * scale, up * scale", "y * scale, up"),
        (sums, "y += tl.load(to", "y -= tl.load(to"),
        (projections, "tl.load(places + row", "0 * tl.load(places + row"),
        *in_proofs(
            (products, "tl.sum(squares) / inner + eps", "tl.sum(squares) / inner"),
            (products, "row *= offset + ", "row *= "),
            (products, "first + DEPTH, inner, DEPTH)\n        sums", "first, inner, DEPTH)\n        sums"),
            (products, "tl.cdiv(inner, DEPTH)", "inner // DEPTH"),
            (gates, "tl.exp(-y)) * up", "tl.exp(-y)) * y"),
            (gates, "tl.dot(_tile(other", "tl.dot(_tile(own"),
            (gates, "_weights(other, real, 0", "_weights(own, real, 0"),
            (sums, "begin = tl.program_id(1) * share", "begin = 0"),
            (sums, "tl.minimum(begin + share, tiles)", "tiles"),
            (projections, "a * sine + b * cosine", "a * sine - b * cosine"),
            (projections, "factors + row[:, None] * channels", "factors"),
        ),
    ],
    ids=itemgetter(1),
)  # fmt: skip
def test_a_kernel_with_a_fault_is_seen(
    fault: tuple[Work, str, str], kernels: ModuleType, device: torch.device, tmp_path: Path
) -> None:
    work, before, after = fault
    with with_fault(kernels, before, after, tmp_path) as faulty:
        assert any(found > 1 for found in errors(work, faulty, device))
