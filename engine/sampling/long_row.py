"""Finds where top-p and min-p cut one row of logits on the CPU by sorting only the tokens near the cut.

The masses of all tokens are made and summed in the logits' own type. A sample of them tells where the cut should be.
Exponentials in fp64 of the tokens near it, and a bound on the error of the sums, tell where it is. The result is exact:
None where the bound is too wide, or the sample misled.
"""

from math import exp, inf, isfinite, isqrt, log

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling import elementwise

SAMPLE_STRIDE = 37  # every 37th logit is in the sample; odd, since vocabularies are padded to even sizes
SAMPLED_SHARE = 0.7  # the candidates lack this share of the mass that top-p may remove, by the sample
FEWEST_SAMPLED = 16  # candidates in the sample: a peaked law's best tokens are seldom in it
MOST_CANDIDATES = 4096  # where top-p keeps more, only the tokens near the cut are sorted
LARGEST_EXPONENT = 60  # e⁶⁰ times a vocabulary is within the range of fp32
MASS_MARGIN = 1e-3  # relative margin of a mass, for rounding in fp32
ROUNDING_PER_TOKEN = 2.0**-50  # bound on the error of a sum of masses in fp64, in whatever order, per token
FP32_ROUNDING = 2.0**-24  # relative error of an operation in fp32
SUM_BLOCK = 64  # masses that are summed in fp32
EXP_ERROR = 8  # bound on the relative error of an exponential in fp32, in units of FP32_ROUNDING

Numbers = NDArray[np.floating]
Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]


class LongRow:
    """One row of logits [vocab], fp32 or fp64, and its temperature, which is positive. masses [vocab]: scratch memory.

    A token's mass is e^(logit / temperature) where all of them are in range, else e^score.
    """

    def __init__(self, logits: Tensor, temperature: float, masses: Tensor) -> None:
        self._logits = logits
        self._temperature = temperature
        self._masses = masses

    def cut(self, top_p: float, floor: float) -> "tuple[Ids, Numbers] | float | None":
        """(ids, logits) of all tokens that are kept, if they are few; else the largest logit that is removed.

        None if this is not clear. top_p is below 1; floor: the lowest score that min-p keeps.
        """
        self._best = float(self._logits.numpy().max())
        if not isfinite(self._best):
            return None
        self._make_masses()
        masses = self._masses.numpy()
        total = self._sum()
        outside = (1 - top_p) * total
        sample = np.sort(masses[::SAMPLE_STRIDE])
        below = sample.cumsum()
        start, middle = np.searchsorted(
            below, np.array((SAMPLED_SHARE * outside, outside), below.dtype) / SAMPLE_STRIDE
        )
        start = min(int(start), len(sample) - FEWEST_SAMPLED)
        if (len(sample) - start) * SAMPLE_STRIDE <= MOST_CANDIDATES:
            smallest = max(float(sample[start]), torch.finfo(self._masses.dtype).tiny)  # not 0: most masses may be 0
            return self._keep_few(smallest, total, top_p, floor)
        spread = isqrt(len(sample))  # two to three standard deviations of a position in the middle, more at the ends
        low = float(sample[middle - spread]) if middle >= spread else -1.0
        high = float(sample[middle + spread]) if middle + spread < len(sample) else inf
        return self._last_removed(low, high, top_p, floor)

    def _make_masses(self) -> None:
        """Set the masses, the mass of a score of 0, and what bounds their error.

        An operation on the way to an exponent x gives its mass a relative error of |x| · FP32_ROUNDING.
        """
        exponent = self._best / self._temperature
        if abs(exponent) < LARGEST_EXPONENT:
            self._operations, self._exponent = 2 * (self._temperature != 1), exponent
            exponents = self._logits
            if self._operations:
                exponents = torch.mul(exponents, 1 / self._temperature, out=self._masses)
        else:
            self._operations, self._exponent = 3, 0.0
            exponents = torch.sub(self._logits, self._best, out=self._masses).mul_(1 / self._temperature)
        elementwise.exp(exponents, self._masses)
        self._scale = exp(self._exponent)

    def _sum(self) -> float:
        whole = len(self._masses) // SUM_BLOCK * SUM_BLOCK
        sums = self._masses[:whole].view(-1, SUM_BLOCK).sum(-1).numpy()
        return float(sums.sum(dtype=np.float64)) + float(self._masses.numpy()[whole:].sum(dtype=np.float64))

    def _keep_few(self, smallest: float, total: float, top_p: float, floor: float) -> tuple[Ids, Numbers] | None:
        """(ids, logits) of the kept tokens, if all have more than the smallest mass."""
        logits = self._logits.numpy()
        ids = np.flatnonzero(self._masses.numpy() >= smallest)
        values = logits[ids]
        error = self._mass_error(total, top_p) / total + SUM_BLOCK * top_p * FP32_ROUNDING
        found = self._lowest(values, 0.0, total / self._scale, top_p, self._rounding(error))
        if found is None or exp(found[0]) * self._scale <= smallest * (1 + MASS_MARGIN):
            return None
        lowest, descending, scores = found
        kept = values >= descending[np.searchsorted(-scores, -max(lowest, floor), "right") - 1]
        return ids[kept], values[kept]

    def _last_removed(self, low: float, high: float, top_p: float, floor: float) -> float | None:
        """The largest logit that is removed, if the lowest kept token's mass is above `low` and not above `high`."""
        masses = self._masses.numpy()
        near = np.flatnonzero((masses > low) & (masses <= high))
        if not 0 < len(near) <= 2 * MOST_CANDIDATES:  # many tokens have the same mass
            return None
        total = _accurate_sum(masses)
        above = _accurate_sum(torch.threshold(self._masses, high, 0.0).numpy()) if high < inf else 0.0
        values, of_near = self._logits.numpy()[near], float(masses[near].sum(dtype=np.float64))
        error = self._mass_error(above, 1 - top_p) + self._mass_error(total - above - of_near, top_p)
        rounding = self._rounding((error + 3 * (above + top_p * total) * FP32_ROUNDING) / total)
        # The error of the near tokens' masses in fp32 is known.
        exact = float(np.exp((values.astype(np.float64) - self._best) / self._temperature).sum())
        total = (total - of_near) / self._scale + exact
        found = self._lowest(values, above / self._scale, total, top_p, rounding)
        if found is None or found[0] < floor:
            return None
        lowest, descending, scores = found
        if not low * (1 + MASS_MARGIN) < exp(lowest) * self._scale < high * (1 - MASS_MARGIN):
            return None
        lowest_kept = descending[np.searchsorted(-scores, -lowest, "right") - 1]
        return float(np.nextafter(lowest_kept, np.array(-inf, values.dtype)))

    def _lowest(
        self, values: Numbers, above: float, total: float, top_p: float, rounding: float
    ) -> tuple[float, Numbers, Doubles] | None:
        """(the score at which the masses, summed from the largest on, reach top_p of `total`, the values in descending
        order, their scores); None if it is not clearly one of these.

        values: logits in any order; above: mass of all logits above these; rounding: bound on the error of a share.
        Both masses are of scores.
        """
        descending = np.sort(values)[::-1]
        scores = (descending.astype(np.float64) - self._best) / self._temperature
        shares = np.exp(scores).cumsum()
        shares += above
        shares /= total
        last = int(np.searchsorted(shares, top_p))
        if last == len(scores):
            return None
        lowest, rising = float(scores[last]), -scores
        first, end = int(np.searchsorted(rising, -lowest)), int(np.searchsorted(rising, -lowest, "right"))
        without = float(shares[first - 1]) if first else above / total
        if not without + rounding < top_p < float(shares[end - 1]) - rounding:
            return None
        return lowest, descending, scores

    def _mass_error(self, mass: float, weight: float) -> float:
        """Bound on the error of the mass of some tokens, times `weight`. The error of summing them is not in it.

        For scores s the mean of |s|, weighted by mass, is at most log(vocab / mass), because the entropy of the tokens'
        law is at most the logarithm of their number.
        """
        if mass <= 0:
            return 0.0
        size = abs(self._exponent) + max(0.0, log(len(self._masses) * self._scale / mass))
        return weight * mass * (self._operations * size + EXP_ERROR) * FP32_ROUNDING

    def _rounding(self, error_in_fp32: float) -> float:
        """Bound on the error of a share."""
        rounding = len(self._masses) * ROUNDING_PER_TOKEN
        return rounding + error_in_fp32 if self._masses.dtype == torch.float32 else rounding


def _accurate_sum(masses: Numbers) -> float:
    """Groups of four are added in the masses' type, the rest in fp64: a whole sum in fp64 takes twice as long."""
    quarter = len(masses) // 4
    fours = np.add.reduce(masses[: 4 * quarter].reshape(4, -1), axis=0)
    return float(fours.sum(dtype=np.float64)) + float(masses[4 * quarter :].sum(dtype=np.float64))
