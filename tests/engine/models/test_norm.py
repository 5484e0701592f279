"""The norm is its formula, also where epsilon decides."""

import pytest
import torch

from engine.models.norm import RMSNorm

TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e3])
def test_the_formula(dtype: torch.dtype, scale: float) -> None:
    """At scale 1e-6 the mean square is far below epsilon: a norm without it would be 3,000 times as large."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(5, 48, generator=generator, dtype=torch.float64) * scale).to(dtype)
    weight = torch.randn(48, generator=generator, dtype=torch.float64).to(dtype)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    assert ((RMSNorm(weight, 1e-5)(x).double() - exact).abs() <= TOLERANCE[dtype] * exact.abs().max()).all()


def test_a_zero_row_stays_zero() -> None:
    assert torch.equal(RMSNorm(torch.ones(8), 1e-5)(torch.zeros(2, 8)), torch.zeros(2, 8))
