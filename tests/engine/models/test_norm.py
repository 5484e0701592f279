"""The norm is its formula, also where epsilon decides."""

import math

import pytest
import torch

from engine.models.norm import RMSNorm

TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_formula(dtype: torch.dtype, scale: float, offset: float) -> None:
    """At scale 1e-6 the mean square is far below epsilon: a norm without it would be 3,000 times as large."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(5, 48, generator=generator, dtype=torch.float64) * scale).to(dtype)
    weight = torch.randn(48, generator=generator, dtype=torch.float64).to(dtype)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (offset + weight.double())
    assert (
        (RMSNorm(weight, 1e-5, offset=offset)(x).double() - exact).abs() <= TOLERANCE[dtype] * exact.abs().max()
    ).all()


def test_a_zero_row_stays_zero() -> None:
    assert torch.equal(RMSNorm(torch.ones(8), 1e-5)(torch.zeros(2, 8)), torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dims", [1, 2])
def test_heads_in_place(dtype: torch.dtype, dims: int) -> None:
    """Each head alone or all together, with weights of their own, in a part of a larger tensor."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(5, 7, 8, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(4, 8, generator=generator, dtype=torch.float64).to(dtype)
    x = whole[:, 1:5].double()
    over = (-1,) if dims == 1 else (-2, -1)
    exact = x * (x.square().mean(over, keepdim=True) + 1e-5).rsqrt() * weight.double()
    before = whole.clone()
    RMSNorm(weight, 1e-5, dims=dims).apply_(whole[:, 1:5])
    assert ((whole[:, 1:5].double() - exact).abs() <= TOLERANCE[dtype] * exact.abs().max()).all()
    assert torch.equal(whole[:, 0], before[:, 0])
    assert torch.equal(whole[:, 5:], before[:, 5:])


def test_an_offset_is_not_rounded_away() -> None:
    """gemma's weights are small differences from 1; bf16 would lose them in the sum."""
    weight = torch.full((8,), 1e-3, dtype=torch.bfloat16)
    scaled = float(RMSNorm(weight, 1e-6, offset=1.0).weight[0])
    assert scaled / math.sqrt(8) == pytest.approx(1 + float(weight[0]), rel=1e-6)
