"""A layer's work between its products: the kernels against their definitions, and those against fp64."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from engine.kernels import row_work
from tests.engine.kernels.faults import with_fault

DTYPES = [torch.bfloat16, torch.float16]
EPS = 0.5  # large, so that a norm without it is seen


@pytest.fixture
def kernels(device: torch.device) -> ModuleType:
    from engine.kernels import row_kernel

    return row_kernel


def drawn(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype)


def exact_norm(x: Tensor, weight: Tensor, offset: float) -> Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * (offset + weight.double())


def error(found: Tensor, exact: Tensor) -> float:
    """The greatest difference over what rounding to 16 bits allows."""
    eps = torch.finfo(found.dtype).eps
    return float(((found.cpu().double() - exact).abs() / (eps * (exact.abs() + 1e-3))).nan_to_num(torch.inf).max())


Forms = list[tuple[Tensor, Tensor]]  # (what was computed, fp64's result)


def norms(of: ModuleType, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Forms:
    """Norms of rows alone and of sums, with an offset and without, over sizes that are no powers of two."""
    found = list[tuple[Tensor, Tensor]]()
    for size, offset in ((48, 0.0), (896, 1.0)):
        x, y, weight = drawn(3, size, dtype=dtype), drawn(3, size + 1, dtype=dtype)[:, :-1], drawn(size, dtype=dtype)
        y = y.contiguous()
        alone = of.normalise(x.to(device), weight.to(device), EPS, offset)
        found.append((alone, exact_norm(x, weight, offset)))
        total = x.to(device, copy=True)
        normed = of.normalise(total, weight.to(device), EPS, offset, y.to(device))
        found.append((total, x.double() + y.double()))
        found.append((normed, exact_norm(total.cpu(), weight, offset)))
        parts = drawn(3, 3, size, dtype=torch.float32)
        total, alone = x.to(device, copy=True), x.to(device, copy=True)
        normed = of.normalise(total, weight.to(device), EPS, offset, parts.to(device))
        of.add_parts_(alone, parts.to(device))
        found += [(each, x.double() + parts.double().sum(0)) for each in (total, alone)]
        found.append((normed, exact_norm(total.cpu(), weight, offset)))
    return found


def heads(of: ModuleType, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Forms:
    """Norms of some heads of wider rows, in place, with one weight and with one for each head."""
    found = list[tuple[Tensor, Tensor]]()
    for shape in ((8,), (4, 8)):
        whole, weight = drawn(5, 7, 8, dtype=dtype), drawn(*shape, dtype=dtype)
        placed = whole.to(device, copy=True)
        of.normalise_heads_(placed[:, 1:5], weight.to(device), EPS, 0.0)
        exact = whole.double()
        exact[:, 1:5] = exact_norm(whole[:, 1:5], weight, 0.0)
        found.append((placed, exact))
    return found


def rotations(of: ModuleType, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Forms:
    """Parts of a product's rows, which are stored in another order. More pairs than a program takes, or few."""
    found = list[tuple[Tensor, Tensor]]()
    for heads, kv_heads, size in ((3, 1, 16), (12, 2, 128)):
        width = (heads + 2 * kv_heads) * size
        x, angles = drawn(3, width, dtype=dtype), drawn(3, width // 2, dtype=torch.float32)
        factors, rows = torch.polar(torch.ones_like(angles), angles), torch.tensor([4, 0, 2])
        queries, kv = x.to(device, copy=True).view(3, -1, size).split((heads, 2 * kv_heads), 1)
        stored = torch.full((5, 2 * kv_heads, size), 7.0, dtype=dtype, device=device)
        of.rotate_and_store(queries, kv, factors.to(device), stored, rows.to(device))
        turned = torch.view_as_real(torch.view_as_complex(x.double().view(3, -1, 2)) * factors.to(torch.complex128))
        exact_queries, exact_kv = turned.view(3, -1, size).split((heads, 2 * kv_heads), 1)
        exact = torch.full(stored.shape, 7.0, dtype=torch.float64)
        exact[rows] = exact_kv
        found += [(queries, exact_queries), (stored, exact)]
    return found


def gates(of: ModuleType, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Forms:
    found = list[tuple[Tensor, Tensor]]()
    for size in (24, 1025):
        both = drawn(2, 2 * size, dtype=dtype)
        gate, up = both.double().chunk(2, 1)
        found.append((of.silu_gate(both.to(device)), gate / (1 + (-gate).exp()) * up))
    return found


WORK = [norms, heads, rotations, gates]
Work = Callable[..., Forms]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("work", WORK)
def test_the_kernels_compute_what_they_say(
    work: Work, dtype: torch.dtype, kernels: ModuleType, device: torch.device
) -> None:
    assert [error(found, exact) for found, exact in work(kernels, device, dtype) if error(found, exact) >= 1] == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("work", WORK)
def test_the_operations_compute_what_they_say(work: Work, dtype: torch.dtype) -> None:
    results = work(row_work, torch.device("cpu"), dtype)
    assert [error(found, exact) for found, exact in results if error(found, exact) >= 1] == []


def test_a_row_has_the_bits_that_it_has_alone(kernels: ModuleType, device: torch.device) -> None:
    x, weight = drawn(40, 896).to(device), drawn(896).to(device)
    company, alone = (kernels.normalise(part, weight, EPS, 0.0) for part in (x, x[7:8].clone()))
    assert torch.equal(company[7], alone[0])


def test_no_rows(kernels: ModuleType, device: torch.device) -> None:
    none = torch.empty(0, 16, dtype=torch.bfloat16, device=device)
    assert kernels.normalise(none, none.new_ones(16), EPS, 0.0).shape == (0, 16)
    assert kernels.silu_gate(none).shape == (0, 8)
    rows = torch.empty(0, dtype=torch.int64, device=device)
    factors, heads = torch.empty(0, 8, dtype=torch.complex64, device=device), none.view(0, 4, 4)
    kernels.rotate_and_store(heads[:, :2], heads[:, 2:], factors, heads.new_zeros(3, 2, 4), rows)


@pytest.mark.parametrize(
    ("work", "before", "after"),
    [
        (norms, "/ SIZE + eps", "/ WIDTH + eps"),
        (norms, "/ SIZE + eps", "/ SIZE"),
        (norms, "offset + tl.load", "tl.load"),
        (norms, "tl.store(own, value, mask=inside)", "pass"),
        (norms, "part * tl.num_programs(0) + place", "place"),
        (norms, "range(parts)", "range(1)"),
        (heads, "head * weight_stride", "0 * weight_stride"),
        (heads, "head * head_stride", "(head + 1) * head_stride"),
        (rotations, "a * cosine - b * sine", "a * cosine + b * sine"),
        (rotations, "2 * (row * pairs + pair)", "2 * (row * pairs + pair % PAIRS)"),
        (rotations, "tl.load(rows + row)", "row"),
        (rotations, "pair < own", "pair <= own"),
        (gates, "tl.load(first + size", "tl.load(first"),
        (gates, "tl.exp(-value)", "tl.exp(value)"),
    ],
)  # fmt: skip
def test_a_kernel_with_a_fault_is_seen(
    work: Work, before: str, after: str, kernels: ModuleType, device: torch.device, tmp_path: Path
) -> None:
    with with_fault(kernels, before, after, tmp_path) as faulty:
        assert any(error(found, exact) > 1 for found, exact in work(faulty, device))
