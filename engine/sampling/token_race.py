"""Gumbel races on the CPU over a small vocabulary, in which each token's clock is a hash of its own.

The winners are those of a race over all of gumbel_noise. Every token is hashed, but only a token that may win gets its
two logarithms. A token beats the likeliest one only if its clock is earlier than the likeliest one's clock times the
ratio of their masses. 1 − u is a lower bound of the clock −log(u), and the hash's upper half gives 1 − u.
"""

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling import elementwise
from engine.sampling.candidates import KeptTokens
from engine.sampling.hashing import GOLDEN, STEPS, mix_array
from engine.sampling.race import Bits, Floats, Ids, clocks_of, few_held, row_winners

HASHED_TOGETHER = 32_768  # hashes; so many stay in a processor's second cache with what is needed to make them
FEW = 8  # where at most one token in so many is left, only these are hashed
MARGIN = 1e-3  # relative margin of a limit, for rounding in fp32
LARGEST_SCORE = 1e9  # over the temperature; beyond it rounding may decide, and every token gets its noise
LOWEST_TEMPERATURE = 1e-30  # below it products of temperature and noise lose digits
UPPER_HALF = 2.0**32  # values of the upper half of a hash


class TokenNoise:
    """The noise of R rows. The hashes are made once, for all races of the rows; the rest when a race needs it."""

    def __init__(self, keys: Tensor, positions: Tensor, temperatures: Tensor, vocab_size: int) -> None:
        bits = keys.numpy().view(np.uint64) + (positions.numpy() + 1).view(np.uint64) * np.uint64(GOLDEN)
        self._rows = mix_array(bits)
        self._temperatures = temperatures.numpy()
        self._vocab_size = vocab_size

    def race(self, scores: Tensor, rows: Ids) -> Ids:
        """Winners [n] of `rows` [n] of the noise over scores [n, vocab'], fp32 or fp64; vocab' ≤ vocab_size."""
        kept = few_held(scores, FEW) or self._rivals(scores, rows)
        return self.race_few(rows[kept.rows], kept, len(rows))

    def race_few(self, noise_rows: Ids, kept: KeptTokens, rows: int) -> Ids:
        """Winners [rows] among the kept tokens [m]; noise_rows [m]: each one's row of the noise. Id 0 if none."""
        return row_winners(kept, kept.values + self.noise(noise_rows, kept.tokens), rows)

    def noise(self, rows: Ids, tokens: Ids) -> Floats:
        """Temperature times noise [m] of tokens [m] in `rows` [m] of the noise."""
        return self._temperatures[rows] * -np.log(clocks_of(self._bits(rows, tokens)))

    def _rivals(self, scores: Tensor, rows: Ids) -> KeptTokens:
        """All tokens that may win."""
        values, temperatures = scores.numpy(), self._temperatures[rows]
        leaders = values.argmax(1)
        best = values[np.arange(len(rows)), leaders].astype(np.float64)
        clock = clocks_of(self._bits(rows, leaders))
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            limit = clock * UPPER_HALF * (1 + MARGIN)
            limit[~(np.abs(best) <= LARGEST_SCORE * temperatures) | (temperatures < LOWEST_TEMPERATURE)] = np.inf
        masses = (scores - torch.from_numpy(best).to(scores.dtype)[:, None]).float()
        elementwise.exp(masses.mul_(torch.from_numpy(1 / temperatures).float()[:, None]), masses)
        # A NaN, of a row whose best is not finite, is no larger than anything: all its tokens run.
        masses.mul_(torch.from_numpy(limit).float()[:, None]).add_(2)  # what the last step of the hash may change
        gaps = self._gaps[:, : values.shape[1]]
        if not np.array_equal(rows, np.arange(len(gaps))):
            gaps = gaps[rows]
        places = np.flatnonzero(~(gaps > masses.numpy()))
        owners, tokens = np.divmod(places, values.shape[1])
        return KeptTokens(owners, tokens, values[owners, tokens])

    @cached_property
    def _gaps(self) -> NDArray[np.float32]:
        """2³² · (1 − u) [R, vocab] of all tokens, each up to 2 too large."""
        ids = np.arange(1, self._vocab_size + 1).view(np.uint64) * np.uint64(GOLDEN)
        gaps = torch.empty(len(self._rows), self._vocab_size)
        together = max(1, HASHED_TOGETHER // self._vocab_size)
        for part, rows in zip(
            gaps.split(together), np.split(self._rows, range(together, len(gaps), together)), strict=True
        ):
            bits = ids + rows[:, None]
            shifted = np.empty_like(bits)
            for shift, factor in STEPS[:-1]:
                np.right_shift(bits, np.uint64(shift), out=shifted)
                np.bitwise_xor(bits, shifted, out=bits)
                np.multiply(bits, np.uint64(factor), out=bits)
            # The last step changes the lowest 33 bits only.
            np.invert(bits, out=bits)
            np.right_shift(bits, np.uint64(32), out=bits)
            part.copy_(torch.from_numpy(bits.view(np.int64)))
        return gaps.numpy()

    def _bits(self, rows: Ids, tokens: Ids) -> Bits:
        return mix_array(self._rows[rows] + (tokens + 1).view(np.uint64) * np.uint64(GOLDEN))
