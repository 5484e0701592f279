"""Observations for the tests of policies."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from policies.observation import Observation, RoundCost
from policies.trees import RANKS

DEPTH = 8


def machine(batch: int = 1, most: int = 0, per_token_s: float = 2e-5, **changes: Any) -> RoundCost:
    """A pass takes 1 ms and 20 µs a token, so that a single sequence's drafts cost little, and a large batch's much;
    a draft step .1 ms."""
    tokens = batch + np.arange(max(most, batch * DEPTH, DEPTH) + 1)
    usual: dict[str, Any] = {
        "base_s": 1e-4,
        "drafting_s": 2e-5,
        "model_s": 2e-5,
        "step_s": 1e-4,
        "token_s": 2e-6,
        "verify_s": 1e-3 + per_token_s * tokens,
        "padding_s": np.zeros(DEPTH + 1),
    }
    return RoundCost(**(usual | changes))


def observe(alphas: Sequence[float], cost: RoundCost | None = None, **changes: Any) -> Observation:
    """Sequences 0, 1, … of a draft model, each with the same chance at all positions, and nothing in the way."""
    batch = len(alphas)
    cost = cost or machine(batch)
    usual: dict[str, Any] = {
        "fixed": np.full(batch, -1),
        "limits": np.full(batch, DEPTH),
        "bounds": ("cap",) * batch,
        "survival": np.array(alphas)[:, None] ** np.arange(1, DEPTH + 1),
        "sibling_chances": np.zeros((batch, RANKS - 1)),
        "gaps": np.ones(batch, np.int64),
        "left": np.full(batch, 32),
        "horizon": np.full(batch, 32),
        "cost": cost,
        "alone": machine(),
        "change_s": 0.0,
        "trees": (None,) * batch,
        "held": None,
        "last": (None,) * batch,
        "rounds": 1,
        "round_s": 1e-3,
    }
    return Observation(**(usual | changes))
