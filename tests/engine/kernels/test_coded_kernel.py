"""The Triton kernels of products by coded weights against the numbers that the codes stand for, and the bits of a row
alone and in company."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from engine.kernels.coded_product import coded_product, pack_int4, reference, unpack_int4
from engine.models.quantize import quantise_as_fp8, quantise_in_groups, quantise_weight
from tests.engine.kernels.faults import with_fault
from tests.examples import in_proofs, usual_and_proofs

pytestmark = pytest.mark.slow

KINDS = ("int8", "int4", "fp8")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Case(NamedTuple):
    x: Tensor
    codes: Tensor
    steps: Tensor
    offsets: Tensor | None
    bias: Tensor | None


@pytest.fixture
def kernels(device: torch.device) -> ModuleType:
    from engine.kernels import coded_kernel

    return coded_kernel


def numbers_of(case: Case) -> Tensor:
    """The weight in fp64 [out, in], number by number as the format says."""
    codes = case.codes.double() if case.codes.dtype is not torch.uint8 else pairs(case.codes)
    group = codes.shape[1] // len(case.steps)
    weight = torch.empty_like(codes)
    for column in range(codes.shape[1]):
        weight[:, column] = codes[:, column] * case.steps[column // group].double()
        if case.offsets is not None:
            weight[:, column] += case.offsets[column // group].double()
    return weight[:, : case.x.shape[1]]


def pairs(packed: Tensor) -> Tensor:
    """Bytes of 16 that hold 32 columns: the first 16 in their lower bits."""
    codes = torch.empty(packed.shape[0], 2 * packed.shape[1], dtype=torch.float64)
    for column in range(codes.shape[1]):
        byte = packed[:, column // 32 * 16 + column % 16].double()
        codes[:, column] = (byte % 16 if column % 32 < 16 else byte // 16) - 8
    return codes


def draw(
    kind: str,
    rows: int,
    out: int,
    inner: int,
    groups: int = 1,
    *,
    offsets: bool = False,
    bias: bool = True,
    missing: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """missing: input channels that the weight has and x has not."""
    g = torch.Generator().manual_seed(rows + out + inner)
    if kind == "fp8":
        bits = torch.randint(0, 256, (out, inner), generator=g, dtype=torch.uint8)
        codes = torch.where(bits & 0x7F == 0x7F, 0, bits).view(torch.float8_e4m3fn)  # every number that is finite
    else:
        most = 128 if kind == "int8" else 8
        codes = torch.randint(-most, most, (out, inner), generator=g, dtype=torch.int8)
        codes = codes if kind == "int8" else pack_int4(codes)
    x = torch.randn(rows, inner - missing, generator=g) * torch.logspace(-3, 0, rows)[:, None]
    steps = torch.rand(groups, out, generator=g) / 100 + 1e-3  # so that float16 has the products
    shift = torch.randn(groups, out, generator=g) if offsets else None
    return Case(x.to(dtype), codes, steps, shift, torch.randn(out, generator=g).to(dtype) if bias else None)


def multiply(kernels: ModuleType, case: Case) -> Tensor:
    """What the kernel gives, on the device that runs it."""
    device = "cpu" if kernels._INTERPRETED.value else "cuda"
    y: Tensor = kernels.coded_product(*(None if t is None else t.to(device) for t in case)).cpu()
    return y


def error(kernels: ModuleType, case: Case) -> float:
    """The greatest difference from the product in fp64, over what the rounding of fp32's sums and of y allows."""
    y = multiply(kernels, case)
    assert y.dtype == case.x.dtype
    x, weight = case.x.double(), numbers_of(case)
    exact, size = x @ weight.t(), x.abs() @ weight.abs().t()
    if case.bias is not None:
        exact, size = exact + case.bias.double(), size + case.bias.double().abs()
    eps = torch.finfo(y.dtype).eps if y.dtype.itemsize == 2 else 0.0  # the interpreter cuts off where a GPU rounds
    # A code and its offset may cancel, so that the sizes of both count.
    if case.offsets is not None:
        plain = case._replace(offsets=None)
        size = size + x.abs() @ (numbers_of(plain) - weight).abs().t() + x.abs() @ numbers_of(plain).abs().t()
    least = torch.finfo(y.dtype).tiny * torch.finfo(y.dtype).eps  # the distance of numbers near 0
    allowed = eps * exact.abs() + 2.0**-22 * size + least
    assert y.shape == exact.shape
    return float(((y.double() - exact).abs() / allowed).nan_to_num(torch.inf).max())


@pytest.mark.parametrize("dtype", usual_and_proofs(DTYPES, (torch.bfloat16,)))
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_rows(kernels: ModuleType, kind: str, dtype: torch.dtype) -> None:
    for rows in (1, 16, 17) if dtype is torch.float32 else (1, 16, 17, 65):  # fp32 has one tile for all
        assert error(kernels, draw(kind, rows, 20, 160, dtype=dtype)) < 1, rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("group", [96, *in_proofs(32, 128)])  # other tests have groups of these sizes
def test_groups(kernels: ModuleType, kind: str, offsets: bool, group: int) -> None:
    for rows in (3, 65) if group == 96 else (3,):
        assert error(kernels, draw(kind, rows, 33, 2 * group, 2, offsets=offsets, dtype=torch.bfloat16)) < 1


@pytest.mark.parametrize("kind", ["int8", *in_proofs("fp8")])
@pytest.mark.parametrize(("out", "inner", "groups"), [(1, 1, 1), (3, 5, 1), (17, 130, 1), (40, 80, 2)])
def test_odd_shapes(kernels: ModuleType, kind: str, out: int, inner: int, groups: int) -> None:
    for rows in (1, 66):
        assert error(kernels, draw(kind, rows, out, inner, groups)) < 1


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_joined(kernels: ModuleType, kind: str) -> None:
    tile = kernels.choose_tile(5, 40, 0, torch.float16)
    assert kernels.count_parts(5, 20, 1536, tile) == 3
    assert error(kernels, draw(kind, 5, 20, 1536, bias=False, dtype=torch.float16)) < 1
    assert error(kernels, draw(kind, 5, 20, 1152, 9, offsets=True, dtype=torch.float16)) < 1


@pytest.mark.parametrize("kind", KINDS)
def test_columns_that_only_the_weight_has_are_not_used(kernels: ModuleType, kind: str) -> None:
    for groups in (1, 5):
        assert error(kernels, draw(kind, 3, 20, 160, groups, offsets=groups > 1, missing=27)) < 1


def test_steps_of_short_types(kernels: ModuleType) -> None:
    case = draw("int4", 3, 40, 128, 4, offsets=True)
    for dtype in (torch.float16, torch.bfloat16):
        assert case.offsets is not None
        assert error(kernels, case._replace(steps=case.steps.to(dtype), offsets=case.offsets.to(dtype))) < 1


def test_no_rows(kernels: ModuleType) -> None:
    case = draw("int8", 1, 40, 128)
    assert multiply(kernels, case._replace(x=case.x[:0])).shape == (0, 40)


def company(kernels: ModuleType, case: Case) -> int:
    """Rows that have not the bits that they have alone, in passes of several sizes."""
    alone = {row: multiply(kernels, case._replace(x=case.x[row : row + 1]))[0] for row in (0, 4, 31)}
    found = 0
    for rows in (5, 17, 64):
        y = multiply(kernels, case._replace(x=case.x[:rows]))
        found += sum(not torch.equal(y[row], alone[row]) for row in alone if row < rows)
    return found


@pytest.mark.parametrize(("kind", "groups"), [("int4", 6), pytest.param("int8", 1, marks=pytest.mark.proofs)])
def test_a_row_has_the_bits_that_it_has_alone(
    kernels: ModuleType, kind: str, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a verification are rows of decoding. The sums of 128 columns are exact here, because the interpreter's
    own products depend on the number of rows; the sums of these sums are not. The second half takes the first one back,
    so what is left is what they were rounded by."""
    half = draw(kind, 64, 16, 768, groups, offsets=groups > 1)
    exponents = torch.randint(-12, 13, (6,), generator=torch.Generator().manual_seed(1))
    x = torch.ldexp((half.x * 10).round().clamp(-2, 2), exponents.repeat_interleave(128)).half()
    steps = half.steps if groups == 1 else torch.cat([half.steps] * 2)
    offsets = None if half.offsets is None else torch.cat([half.offsets] * 2)
    case = Case(torch.cat([x, -x], 1), torch.cat([half.codes] * 2, 1), steps, offsets, None)
    assert company(kernels, case) == 0
    # The negative control: more parts where there are fewer rows.
    count = kernels.count_parts
    monkeypatch.setattr(kernels, "count_parts", lambda rows, *more: 1 if rows > 16 else count(rows, *more))
    assert company(kernels, case) > 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_not_finite_touch_no_other(kernels: ModuleType, kind: str) -> None:
    case = draw(kind, 6, 40, 160)
    clean = multiply(kernels, case)
    case.x[1, 3], case.x[4, 9], case.x[5] = torch.nan, torch.inf, 0.0
    y = multiply(kernels, case)
    assert not y[[1, 4]].isfinite().any()
    assert case.bias is not None
    assert torch.equal(y[5], case.bias)
    assert torch.equal(y[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_channels_of_a_weight_that_is_not_finite_give_no_numbers(kernels: ModuleType) -> None:
    """The kernel reads the code of NaN as a number, but the step is not finite either."""
    weight = torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    weight[3, 5], weight[7, 1] = torch.nan, torch.inf
    coded = quantise_as_fp8(weight)
    case = Case(torch.ones(2, 64), coded.codes, coded.steps.t().contiguous(), None, None)
    finite = multiply(kernels, case).isfinite()
    assert (~finite).nonzero()[:, 1].tolist() == [3, 7] * 2


def test_x_whose_address_is_odd(kernels: ModuleType) -> None:
    case = draw("int8", 5, 40, 33)
    assert error(kernels, case._replace(x=case.x[1:])) < 1
    assert error(kernels, case._replace(x=case.x.t().contiguous().t())) < 1


FAULTS = {
    "codes of 4 bits are unsigned": ("(pairs & 15).to(tl.int8) - _ZERO", "(pairs & 15).to(tl.int8)"),
    "upper and lower bits are exchanged": ("low, high = (pairs & 15).to", "high, low = (pairs & 15).to"),
    "upper bits belong to the next column": ("column + _PAIRED, end", "column + 1, end"),
    "FP8 loses its sign": ("(bits & 0x80) << 8", "(bits & 0x80) << 7"),
    "FP8 has another unit": ("tl.constexpr(256.0)", "tl.constexpr(128.0)"),
    "steps of the next group": ("at = group.to(tl.int64)", "at = (group ^ 1).to(tl.int64)"),
    "groups end too late": ("(group + 1) * GROUP", "(group + 2) * GROUP"),
    "columns that x has not are used": ("column < tl.minimum(end, width)", "column < end"),
    "a part is left out": ("for part in range(parts)", "for part in range(parts - 1)"),
    "the bias is added by each part": ("bias if parts == 1 else None", "bias"),
    "steps are left out": ("sums *= _step(", "sums += 0 * _step("),
    "offsets are left out": ("sums = tl.fma(tl.broadcast_to(total", "_ = tl.fma(tl.broadcast_to(total"),
    "rows are shifted": ("row.to(tl.int64) * width", "row.to(tl.int64) * (width - 1)"),
    "the last tile is left out": ("tl.minimum(begin + share, tiles)", "tl.minimum(begin + share, tiles - 1)"),
}


def errors(kernels: ModuleType) -> Iterator[float]:
    for kind in KINDS:
        yield error(kernels, draw(kind, 3, 20, 192, 2, offsets=True, missing=7, dtype=torch.float16))
    yield error(kernels, draw("int8", 3, 20, 1024))


# None, two faults of multiply_kernel and one of join_kernel.
USUAL_FAULTS = (None, "upper and lower bits are exchanged", "steps of the next group", "a part is left out")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("fault", usual_and_proofs([None, *FAULTS], USUAL_FAULTS))
def test_a_fault_in_one_place_is_seen(kernels: ModuleType, fault: str | None, tmp_path: Path) -> None:
    with nullcontext(kernels) if fault is None else with_fault(kernels, *FAULTS[fault], tmp_path) as made:
        assert any(found > 1 for found in errors(made)) == (fault is not None)


# The operation and its reference


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_product_of_the_numbers(kind: str) -> None:
    case = draw(kind, 5, 40, 160, 5, offsets=True, missing=7)._replace(bias=None)
    wide = case._replace(x=case.x.double())
    assert torch.allclose(reference(*wide), wide.x @ numbers_of(case).t(), rtol=1e-12, atol=1e-9)
    assert torch.equal(coded_product(*wide), reference(*wide))
    assert coded_product(wide.x.to("meta"), case.codes.to("meta"), case.steps.to("meta"), None, None).shape == (5, 40)


def test_pairs_hold_all_codes() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(4).view(1, 64)
    assert torch.equal(unpack_int4(pack_int4(codes)), codes)
    assert torch.equal(pairs(pack_int4(codes)), codes.double())


@pytest.mark.parametrize("quantise", [quantise_weight, quantise_in_groups, quantise_as_fp8])
def test_what_is_quantised_is_near(quantise: object) -> None:
    weight = torch.randn(70, 96, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    assert callable(quantise)
    coded = quantise(weight.bfloat16())
    error = (coded.numbers(torch.float32) - weight).abs() / weight.abs().amax(1, keepdim=True).clamp(min=1e-9)
    assert 1e-3 < error[:3].max() < {quantise_weight: 0.01, quantise_in_groups: 0.07, quantise_as_fp8: 0.04}[quantise]
    assert not error[3].any()
