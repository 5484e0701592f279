"""Products with 4-bit weights: the numbers that they stand for, their rounding, rows independent of their company."""

import pytest
import torch
from torch import Tensor

from engine.config import ConfigError
from engine.models.int4_linear import Int4Linear, check_int4_products, fits_int4
from engine.models.quantize import GROUP, SLICE_ROWS, CodedWeight, quantise_in_groups, stacked

BFLOAT16_ROUNDING = 2.0**-8  # of a number that is rounded, relative; the largest
SHAPES = [(400, 320), (64, 64), (3, 5), (SLICE_ROWS + 35, 96)]  # the kernel takes 16 · n channels, 32 · n inputs


def int4_reason() -> str:
    try:
        check_int4_products()
    except ConfigError as error:
        return str(error)
    return ""


needs_int4 = pytest.mark.skipif(bool(int4_reason()), reason=int4_reason())


def drawn(rows: int, columns: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def activations(rows: int, inner: int) -> Tensor:
    return drawn(rows, inner, seed=2) * torch.logspace(-3, 3, rows)[:, None]  # each row has a range of its own


@needs_int4
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out", "inner"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_an_int4_product_is_that_of_the_numbers(out: int, inner: int, dtype: torch.dtype, bias: bool) -> None:
    """Up to bfloat16's rounding of the activations and of the sum."""
    weight, x = quantise_in_groups(drawn(out, inner)), drawn(9, inner, seed=2).to(dtype)
    offset = (drawn(1, out, seed=3)[0] * 10).to(dtype) if bias else None
    y = Int4Linear(weight, offset)(x)
    assert (y.dtype, y.shape) == (dtype, (9, out))
    numbers = weight.numbers(torch.float64)[:, :inner]
    exact = x.double() @ numbers.t()
    bound = BFLOAT16_ROUNDING * (x.double().abs() @ numbers.abs().t() + exact.abs()) + 1e-4
    if offset is not None:
        exact += offset.double()
        bound += BFLOAT16_ROUNDING * exact.abs()
    assert ((y.double() - exact).abs() <= bound).all()


@needs_int4
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out", "inner"), SHAPES)
def test_an_int4_row_does_not_depend_on_its_company(out: int, inner: int, bias: bool) -> None:
    linear = Int4Linear(quantise_in_groups(drawn(out, inner)), drawn(1, out)[0] if bias else None)
    x = activations(33, inner)
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in range(1, 34):
        assert torch.equal(linear(x[:rows]), alone[:rows])
        assert torch.equal(linear(x[-rows:]), alone[-rows:])


@needs_int4
def test_rows_of_zeros_and_rows_that_are_not_finite() -> None:
    bias = drawn(1, 96)[0]
    linear, x = Int4Linear(quantise_in_groups(drawn(96, 320)), bias), drawn(4, 320, seed=2)
    clean = linear(x)
    x[0], x[1, 7], x[2, 9] = 0.0, torch.inf, torch.nan
    y = linear(x)
    assert torch.equal(y[0], bias)
    assert not y[1:3].isfinite().any()
    assert torch.equal(y[3], clean[3])


def test_a_weight_is_rounded_to_the_nearest_step_of_its_group() -> None:
    weight = drawn(SLICE_ROWS + 3, 70).bfloat16()
    weight[5], weight[6] = 0, 0.5
    rounded = quantise_in_groups(weight)
    assert rounded.group == GROUP
    assert rounded.codes.shape == (len(weight), 96)
    assert fits_int4(rounded)
    numbers, steps = rounded.numbers(torch.float32), rounded.steps.repeat_interleave(GROUP, 1)
    error = (numbers[:, :70] - weight.float()).abs()
    # A step and an offset are bfloat16 numbers, so that the last integer may miss the largest number of a group.
    ends = 8 * BFLOAT16_ROUNDING * steps[:, :70] + BFLOAT16_ROUNDING * weight.float().abs().amax()
    assert (error <= 0.501 * steps[:, :70] + ends).all()
    assert error.square().mean().sqrt() > 0.2 * steps.mean()  # it is rounded
    full = rounded.codes[:5].unflatten(1, (-1, GROUP))[:, :2]
    assert (full.amin(2) == -8).all()
    assert (full.amax(2) == 7).all()
    assert not numbers[5].any()
    assert torch.allclose(numbers[6, :64], torch.tensor(0.5))


@needs_int4
@pytest.mark.parametrize(("out", "inner"), SHAPES)
def test_numbers_are_rounded_part_by_part(out: int, inner: int) -> None:
    """The result is that of the whole weight's codes, which then never lie in memory together."""
    weight = drawn(out, inner)
    linear, whole = Int4Linear(weight), Int4Linear(quantise_in_groups(weight))
    assert torch.equal(linear.weight, whole.weight)
    assert torch.equal(linear.steps, whole.steps)
    assert (linear.out_features, linear.in_features) == (whole.out_features, whole.in_features)


@needs_int4
def test_codes_that_the_kernel_cannot_keep_are_rounded_anew() -> None:
    weight = CodedWeight(torch.arange(-100, 100, dtype=torch.int8)[:, None].repeat(1, 64), torch.full((200, 1), 0.1))
    assert not fits_int4(weight)
    again = Int4Linear(weight.numbers(torch.float32))
    assert torch.equal(Int4Linear(weight).weight, again.weight)


@needs_int4
def test_the_bytes_of_an_int4_product() -> None:
    linear = Int4Linear(quantise_in_groups(drawn(400, 320)), drawn(1, 400)[0])
    assert linear.num_bytes == 400 * 320 / 2 + 400 * 10 * 4 + 400 * 4


@needs_int4
@pytest.mark.parametrize("group", [32, 64, 96, 512])
def test_integers_that_are_given_are_kept(group: int) -> None:
    """Groups that the kernel has not are cut into smaller ones with equal steps."""
    generator = torch.Generator().manual_seed(4)
    integers = torch.randint(-8, 8, (64, 2 * group), generator=generator, dtype=torch.int8)
    weight = CodedWeight(integers, torch.rand(64, 2, generator=generator).bfloat16().float())
    assert fits_int4(weight)
    y = Int4Linear(weight)(torch.eye(2 * group))
    assert torch.equal(y, weight.numbers(torch.bfloat16).float().t())


def test_integers_that_the_kernel_cannot_keep() -> None:
    integers = torch.tensor([[-8, 7] * 16] * 4, dtype=torch.int8)
    assert fits_int4(CodedWeight(integers, torch.full((4, 1), 0.5)))
    assert not fits_int4(CodedWeight(integers, torch.full((4, 1), 0.1).half().float()))  # bfloat16 has no such number
    assert not fits_int4(CodedWeight(integers, torch.full((4, 1), 0.5), torch.full((4, 1), 0.1)))
    assert not fits_int4(CodedWeight(integers + 1, torch.full((4, 1), 0.5)))
    assert not fits_int4(CodedWeight(integers, torch.full((4, 2), 0.5)))


def test_stacked_integers_are_the_stacked_weights() -> None:
    one, other = quantise_in_groups(drawn(5, 64)), quantise_in_groups(drawn(3, 64, seed=2))
    both = stacked([one, other])
    assert both is not None
    assert torch.equal(both.numbers(torch.float32), torch.cat([w.numbers(torch.float32) for w in (one, other)]))
    order = torch.tensor([2, 0, 7])
    assert torch.equal(both.take_rows(order).numbers(torch.float32), both.numbers(torch.float32)[order])
    assert stacked([one, quantise_in_groups(drawn(3, 32))]) is None
    assert stacked([one, CodedWeight(other.codes, other.steps)]) is None


@pytest.mark.parametrize("found", ["DEFAULT", "NEON"])
def test_int4_products_are_refused_where_they_are_scalar_code(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: found)
    with pytest.raises(ConfigError, match=f"int4 weights need a CPU with AVX2 or AVX512 .*, and torch finds {found}"):
        check_int4_products()
