"""Finds where top-k, top-p and min-p cut one row of logits on the CPU, without sorting the row.

It decides what candidates.py leaves: rows with top-k, rows without top-p, and rows that need a sum in fp64.

A logit's score is (logit − best) / temperature in fp64, as in filters.apply_temperature. The result is exact: where
rounding could decide, the definition in filters.py is used. No pass over the row is shared among threads: the passes
are many and short, and on a busy machine each would wait for the slowest thread.
"""

from math import inf, isqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.long_row import ROUNDING_PER_TOKEN, SAMPLE_STRIDE

SORT_LIMIT = 4096  # rows of at most this many logits are sorted without a sample
SERIAL_LIMIT = 16_384  # numbers; torch shares a pass over more than twice as many among threads

Logits = NDArray[np.floating]
Scores = NDArray[np.float64]


class LogitsRow:
    """One row of logits [vocab], fp32 or fp64. Its best logit is finite and its temperature positive."""

    def __init__(self, logits: Tensor, best: float, temperature: float) -> None:
        self._logits = logits
        self._best = best
        self._temperature = temperature
        self._type = torch.finfo(logits.dtype)

    def threshold(self, top_k: int, top_p: float, floor: float, masses: Scores) -> float | None:
        """The lowest score that is kept; None if only the definition can decide.

        floor: the lowest score that min-p keeps. masses [vocab]: scratch memory.
        """
        kept, vocab = self._logits, len(self._logits)  # what top-k keeps
        if top_k < vocab:
            kth = self._score(float(np.partition(kept.numpy(), vocab - top_k)[vocab - top_k]))
            floor = max(floor, kth)
            if top_p < 1:
                kept = torch.from_numpy(kept.numpy()[kept.numpy() > self.last_below(kth)])
        if top_p == 1:
            return floor
        lowest = self._lowest_in_top_p(kept, top_p, masses[: len(kept)])
        return None if lowest is None else max(floor, lowest)

    def last_below(self, threshold: float) -> float:
        """The largest number of the row's type whose score is below a threshold of at most 0; −inf if there is none."""
        low = high = guess = self._round(max(self._best + threshold * self._temperature, self._type.min))
        step = self._type.eps * (abs(guess) + abs(self._best))
        while self._score(low) >= threshold:
            if low == self._type.min:
                return -inf
            low, step = self._round(max(guess - step, self._type.min)), 2 * step + self._type.tiny
        while self._score(high) < threshold:
            high, step = self._round(min(guess + step, self._best)), 2 * step + self._type.tiny
        while low < (middle := self._round(low / 2 + high / 2)) < high:
            low, high = (low, middle) if self._score(middle) >= threshold else (middle, high)
        return low

    def _lowest_in_top_p(self, kept: Tensor, top_p: float, masses: Scores) -> float | None:
        """The lowest score of the smallest set of best logits, with all equals, that has top_p of the mass of `kept`.

        Only logits near it are sorted. None if it is not among these, or if the mass of the set, with or without its
        lowest score, is so close to top_p that rounding could decide.
        """
        logits = kept.numpy()
        with np.errstate(over="ignore"):  # a low temperature
            np.subtract(logits, self._best, out=masses, dtype=np.float64)
            masses *= 1 / self._temperature
            np.exp(masses, out=masses)
        total = float(masses.sum())
        low, high = self._bracket(logits, (1 - top_p) * total)
        near, above = logits >= low, 0.0
        if high < inf:
            below = logits < high
            near &= below
            # Capped at the mass of `high`: logits from `high` on have this mass each, those below keep theirs.
            cap = float(np.exp(self._score(high)))
            capped = float(np.minimum(masses, cap, out=masses).sum())
            above = total - capped + cap * (len(logits) - np.count_nonzero(below))
        rounding = len(self._logits) * ROUNDING_PER_TOKEN
        return self._first_to_reach(top_p, logits[np.flatnonzero(near)], above, total, rounding)

    def _first_to_reach(self, top_p: float, near: Logits, above: float, total: float, rounding: float) -> float | None:
        """The score at which the masses, summed from the largest on, reach top_p of `total`; None if not clearly one.

        near: logits in any order; above: mass of all logits above these; rounding: bound on the error of a share.
        """
        scores = self._scores(np.sort(near)[::-1])
        mass = (above + np.exp(scores).cumsum()) / total
        last = int(np.searchsorted(mass, top_p))
        if last == len(scores):
            return None
        first, end = (int(np.searchsorted(-scores, -scores[last], side)) for side in ("left", "right"))
        without = mass[first - 1] if first else above / total
        return float(scores[last]) if without + rounding < top_p < mass[end - 1] - rounding else None

    def _bracket(self, logits: Logits, outside: float) -> tuple[float, float]:
        """[low, high) that should hold the logit at which the masses, summed from the smallest on, reach `outside`."""
        if len(logits) <= SORT_LIMIT:
            return -inf, inf
        sample = np.sort(logits[::SAMPLE_STRIDE])
        position = int(np.searchsorted(np.exp(self._scores(sample)).cumsum(), outside / SAMPLE_STRIDE))
        spread = isqrt(len(sample))  # two to three standard deviations of a position in the middle, more at the ends
        low = float(sample[position - spread]) if position >= spread else -inf
        return low, float(sample[position + spread]) if position + spread < len(sample) else inf

    def _scores(self, logits: Logits) -> Scores:
        with np.errstate(over="ignore"):  # a low temperature
            return (logits.astype(np.float64) - self._best) / self._temperature

    def _score(self, logit: float) -> float:
        return (logit - self._best) / self._temperature

    def _round(self, number: float) -> float:
        """The number rounded to the row's type."""
        return float(torch.tensor(number, dtype=self._logits.dtype))
