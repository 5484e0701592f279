"""Where a model's draft ends for want of confidence, against plain floats."""

from math import prod

import pytest
import torch
from torch import Tensor

from engine.drafters.confidence import ConfidenceLimit

CPU = torch.device("cpu")


def lengths(laws: Tensor, limits: list[float]) -> list[int]:
    """Drafts of each sequence, given the largest probabilities [B, K] of its positions; two-token laws."""
    confidence = ConfidenceLimit.of(limits, CPU)
    assert confidence is not None
    active, counts = list(range(len(limits))), [0] * len(limits)
    for column in laws.t():
        logits = torch.stack([column, 1 - column], 1).log() + torch.randn(len(laws), 1)  # only differences count
        sure = confidence.sure_rows(logits[active], torch.tensor(active))
        active = [active[n] for n in sure]
        for i in active:
            counts[i] += 1
        if not active:
            break
    return counts


def test_a_draft_ends_before_its_joint_confidence_falls_below_the_limit() -> None:
    torch.manual_seed(1)
    highest = 0.5 + 0.5 * torch.rand(200, 6, dtype=torch.float64)
    limits = torch.rand(200, dtype=torch.float64).tolist()
    found = lengths(highest, limits)
    for row, limit, count in zip(highest.tolist(), limits, found, strict=True):
        assert prod(row[:count]) >= limit or count == 0
        assert count == 6 or prod(row[: count + 1]) < limit
    assert set(found) == set(range(7))


def test_no_limit() -> None:
    assert ConfidenceLimit.of([], CPU) is None
    assert ConfidenceLimit.of([0.0, 0.0], CPU) is None
    assert lengths(torch.full((2, 5), 0.5, dtype=torch.float64), [0.0, 0.3]) == [5, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_it_is_computed_in_enough_digits(dtype: torch.dtype) -> None:
    """Equal logits of 1000 tokens, whose sum would be rounded in bfloat16."""
    confidence = ConfidenceLimit([1.01e-3, 0.99e-3], CPU)
    assert confidence.sure_rows(torch.zeros(2, 1000, dtype=dtype), torch.tensor([0, 1])) == [1]


def test_a_broken_model_ends_nothing() -> None:
    confidence = ConfidenceLimit([0.5], CPU)
    assert confidence.sure_rows(torch.full((1, 3), torch.nan), torch.tensor([0])) == [0]
