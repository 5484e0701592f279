"""Integers of weights: compiled code gives what torch gives, bit for bit."""

import pytest
import torch
from torch import Tensor

from engine.models import quantize
from engine.models.quantize import LARGEST, quantise_weight


def weights(dtype: torch.dtype) -> Tensor:
    """Rows of usual numbers, of one size, of zeros, and of the smallest and largest that there are."""
    rows = torch.randn(150, 333, generator=torch.Generator().manual_seed(4))
    rows[1], rows[2], rows[3] = 0.0, 0.5, -rows[3].abs()
    rows[4] *= 1e-38
    rows[5] *= 1e37
    rows[6, :-1] = 0.0
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("turned", [False, True])
def test_compiled_code_rounds_as_torch_does(dtype: torch.dtype, turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weights(dtype)
    weight = weight.t() if turned else weight
    compiled = quantise_weight(weight)
    monkeypatch.setattr(quantize, "compiled_module", lambda name: None)
    by_torch = quantise_weight(weight)
    assert torch.equal(compiled.codes, by_torch.codes)
    assert torch.equal(compiled.steps, by_torch.steps)
    assert int(compiled.codes.abs().amax()) == LARGEST
