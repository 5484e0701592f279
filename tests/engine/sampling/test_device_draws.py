"""Draws on another device than the CPU, of logits in the types that models have there."""

import pytest
import torch

from engine.device.staging import RoundNumbers, Staging
from engine.sampling.device_draws import DeviceFilters
from engine.types import SamplingParams

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_filters_cut_logits_of_16_bits_as_the_same_numbers_in_fp32(dtype: torch.dtype) -> None:
    params = [SamplingParams(top_k=5), SamplingParams(top_p=0.9), SamplingParams(min_p=0.1), SamplingParams()]
    filters = DeviceFilters(params, RoundNumbers(Staging(CPU)), (0, 1, 2, 3))
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    cut = filters.cut(logits)
    assert torch.equal(cut, filters.cut(logits.float()))
    kept = cut.isfinite().sum(1).tolist()
    assert kept[0] == 5
    assert max(kept[:3]) < 300 == kept[3]
