"""Where top-k, top-p and min-p cut one row of logits on the CPU, found without sorting the row.

A logit's score is (logit − best) / temperature in fp64, as filters.apply_temperature has it. The result is exact: where rounding
could decide, it is left to the definition in filters.py. No pass is shared among threads, for they are many and short:
where other processes keep the cores busy, each would wait for the slowest thread.
"""

from math import inf, isqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SAMPLE_STRIDE = (
    37  # one logit in so many tells where top-p cuts; odd, since tables of tokens are padded to even numbers
)
SORT_LIMIT = 4096  # logits that are sorted without a sample
SERIAL_LIMIT = 16_384  # numbers: torch shares passes over more than twice as many among threads
ROUNDING_PER_TOKEN = (
    2.0**-50
)  # per token: sums of masses, in the definition's order or in any other, are exact to less than this

Logits = NDArray[np.floating]
Scores = NDArray[np.float64]


class LogitsRow:
    """One row of logits [vocab], fp32 or fp64, whose best is finite; its temperature is positive."""

    def __init__(self, logits: Tensor, best: float, temperature: float) -> None:
        self._logits = logits
        self._best = best
        self._temperature = temperature
        self._type = torch.finfo(logits.dtype)

    def threshold(self, top_k: int, top_p: float, floor: float, masses: Scores) -> float | None:
        """The least score that stays; None where only the definition can tell. floor: the least that min-p lets stay.

        masses [vocab] is scratch memory.
        """
        held, vocab = self._logits, len(self._logits)
        if top_k < vocab:
            kth = self._score(float(np.partition(held.numpy(), vocab - top_k)[vocab - top_k]))
            floor = max(floor, kth)
            if top_p < 1:
                held = torch.from_numpy(held.numpy()[held.numpy() > self.last_below(kth)])
        if top_p == 1:
            return floor
        first_kept = self._first_kept(held, top_p, vocab * ROUNDING_PER_TOKEN, masses[: len(held)])
        return None if first_kept is None else max(floor, first_kept)

    def last_below(self, threshold: float) -> float:
        """The greatest number of the row's type whose score is below a threshold of at most 0, or −inf."""
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

    def _first_kept(self, held: Tensor, top_p: float, doubt: float, masses: Scores) -> float | None:
        """The least score of the smallest set of best logits that has top_p of the mass of those held, with all equals.

        Only logits near it are sorted. None if it is not among them, or if the mass of the set, or of the set without
        its least score, lies within the doubt of top_p.
        """
        logits = held.numpy()
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
            # Limited to the mass at `high`, each logit from there on has as much, and those below have what they had.
            most = float(np.exp(self._score(high)))
            limited = float(np.minimum(masses, most, out=masses).sum())
            above = total - limited + most * (len(logits) - np.count_nonzero(below))
        scores = self._scores(np.sort(logits[np.flatnonzero(near)])[::-1])
        mass = (above + np.exp(scores).cumsum()) / total
        last = int(np.searchsorted(mass, top_p))
        if last == len(scores):
            return None
        first, end = (int(np.searchsorted(-scores, -scores[last], side)) for side in ("left", "right"))
        without = mass[first - 1] if first else above / total
        return float(scores[last]) if without + doubt < top_p < mass[end - 1] - doubt else None

    def _bracket(self, logits: Logits, outside: float) -> tuple[float, float]:
        """[low, high) that should hold the logit up to which the masses, from the least on, sum to `outside`."""
        if len(logits) <= SORT_LIMIT:
            return -inf, inf
        sample = np.sort(logits[::SAMPLE_STRIDE])
        place = int(np.searchsorted(np.exp(self._scores(sample)).cumsum(), outside / SAMPLE_STRIDE))
        spread = isqrt(len(sample))  # two to three standard deviations of a place in the middle, more at the ends
        low = float(sample[place - spread]) if place >= spread else -inf
        return low, float(sample[place + spread]) if place + spread < len(sample) else inf

    def _scores(self, logits: Logits) -> Scores:
        with np.errstate(over="ignore"):  # a low temperature
            return (logits.astype(np.float64) - self._best) / self._temperature

    def _score(self, logit: float) -> float:
        return (logit - self._best) / self._temperature

    def _round(self, number: float) -> float:
        """To the row's type."""
        return float(torch.tensor(number, dtype=self._logits.dtype))
