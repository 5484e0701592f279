"""Seconds of the draft model, fitted to the profiled rounds. cost.py corrects them while serving."""

from collections.abc import Sequence
from functools import cache
from itertools import combinations

import numpy as np

from policies.observation import Floats, Timing

STEP_SHARE = 0.1  # a forward of an unmeasured draft model takes this share of the target's pass over one token; a
# further token of any pass takes this share of that
CLOSE = 0.03  # relative error of a fit: a smaller one is no better


class DraftCost:
    """Seconds of the draft model as profiled: (once, per forward, per token that it reads), by batch.

    The cost is not affine in the batch, so each profiled batch has its own fit. Rounds of other batches only separate
    the cost of a forward from that of a token where the batch's own rounds do not.
    """

    def __init__(self, timings: Sequence[Timing], pass_s: float) -> None:
        rounds = [t for t in timings if t.forwards and t.batch and t.draft_s > 0]
        self._batches = sorted({t.batch for t in rounds}) or [1]
        self._costs = np.array([[0.0, STEP_SHARE, STEP_SHARE**3]]) * pass_s  # [P, 3]
        if rounds:
            self._costs = np.array([_fit_draft(rounds, batch) for batch in self._batches])
        self.cost = cache(self._cost)

    def _cost(self, batch: int) -> Floats:
        """[3] seconds; do not write to it."""
        return np.array([np.interp(batch, self._batches, column) for column in self._costs.T])


def _fit_draft(rounds: Sequence[Timing], batch: int) -> Floats:
    """[3] non-negative costs with the least absolute relative errors, so that a few interrupted rounds change little.

    A round of twice or half the batch has a tenth of the weight.
    """
    seconds = np.array([t.draft_s for t in rounds])
    distance = np.log2(np.array([t.batch for t in rounds]) / batch)
    design = np.array([(1, t.forwards, t.read) for t in rounds]) / seconds[:, None]
    near = 10.0 ** -np.minimum(np.abs(distance), 6.0)
    weights = np.sqrt(near)
    for _ in range(8):  # iteratively reweighted least squares, which settles within 8 steps
        costs = _non_negative(design * weights[:, None], weights)
        weights = np.sqrt(near / np.maximum(np.abs(design @ costs - 1), CLOSE))
    return costs


def _non_negative(design: Floats, wanted: Floats) -> Floats:
    """x ≥ 0 that minimises |design · x − wanted|.

    It is the best of the least squares over each subset of the columns: the optimum's own support is one of them.
    """
    best, least = np.zeros(design.shape[1]), float(wanted @ wanted)
    for size in range(1, design.shape[1] + 1):
        for support in combinations(range(design.shape[1]), size):
            part = np.linalg.lstsq(design[:, support], wanted, rcond=None)[0]
            rest = wanted - design[:, support] @ part
            if (part >= 0).all() and rest @ rest < least:
                least, best = float(rest @ rest), np.zeros(design.shape[1])
                best[list(support)] = part
    return best
