"""Each of the three products is the product, bias included; tiny models alone would only ever see the plain one."""

import pytest
import torch

from engine.models.linear import UNPACKED_LIMIT, Linear

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.5}  # sums of 300 products of order 1
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


def make(out: int, inner: int, dtype: torch.dtype, bias: bool) -> tuple[Linear, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out, inner, generator=generator).to(dtype)
    offset = torch.randn(out, generator=generator).to(dtype) * 10 if bias else None
    return Linear(weight, offset), weight, offset


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("out", "inner"), [(400, 300), (2000, 300)])
def test_every_product_is_the_product(out: int, inner: int, dtype: torch.dtype, bias: bool) -> None:
    """120,000 weights: plain up to three rows, packed beyond; 600,000: packed always; fp64: torch's own."""
    linear, weight, offset = make(out, inner, dtype, bias)
    for rows in (1, 3, 4, 9):
        x = torch.randn(rows, inner, generator=torch.Generator().manual_seed(rows)).to(dtype)
        exact = x.double() @ weight.double().t() + (0 if offset is None else offset.double())
        assert (linear(x).double() - exact).abs().max() < TOLERANCE[dtype]


@needs_onednn
def test_which_product_is_taken() -> None:
    small, large, exact = (
        make(400, 300, torch.float32, True)[0],
        make(2000, 300, torch.float32, True)[0],
        make(400, 300, torch.float64, True)[0],
    )
    assert small.unpacked_rows == UNPACKED_LIMIT // 120_000 == 3
    assert small.packed
    assert large.packed
    assert large.unpacked is None
    assert not exact.packed
    assert exact.unpacked is None
