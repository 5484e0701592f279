"""Gumbel races on the CPU over a small vocabulary, in which each token's clock is a hash of its own.

The winners are those of a race over all of gumbel_noise. Every token is hashed, but only a token that may win gets its
two logarithms in fp64. Compiled code finds these tokens (kernels/cpu_race.py) where scores are fp32 and Numba is there.

Elsewhere numpy finds them. One token in 64 has an early clock: the upper bits of its hash are set. These compete first.
Their best, and the lowest score that the likeliest token can end with, set the score to beat. No other token has noise
above log 64, so only the few whose scores are near enough run as well. Noise of few tokens in all is made for every one
of them: the logarithms take less time than the search for rivals.
"""

from functools import cache, cached_property
from math import log
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.models.compiled import compiled_module
from engine.sampling.candidates import KeptTokens
from engine.sampling.hashing import GOLDEN, STEPS, mix_array, mix_in_place, row_keys
from engine.sampling.long_row import Doubles, Ids, Numbers
from engine.sampling.race import Bits, clocks_of, few_held, row_winners

HASHED_TOGETHER = 32_768  # this many hashes stay in a processor's second cache, with what is needed to make them
# Tokens of all rows, five of 4,096: this many get their noise at once. A token then takes two logarithms and some 3
# times as long, but the interpreter runs 60 operations in place of 270. It was as fast at 27,000 tokens, without
# vectorised logarithms.
MADE_AT_ONCE = 20_480
CONTENDERS = 8  # tokens of a row, in the mean of a call, that there is room for: mostly there is one
HASH_ONE_IN = 8  # where at most one token in this many is left, only these are hashed
EARLY_BITS = 6  # upper bits of a hash that are set where the clock is early
EARLIEST = np.uint64((1 << 64) - (1 << 64 - EARLY_BITS))
MOST_NOISE = EARLY_BITS * log(2)  # bound on the noise of all other tokens: their clocks are later than 2^−EARLY_BITS
LEAST_NOISE = -log(53 * log(2))  # the least noise of any token: a clock is at most −log 2⁻⁵³
NOISE_MARGIN = 1e-3  # margin of a bound, for rounding; in units of the noise
LARGEST_SCORE = 1e9  # over the temperature; beyond it rounding may decide, and every token gets its noise
LOWEST_RACE_TEMPERATURE = 1e-30  # below it products of temperature and noise lose digits


class EarlyTokens(NamedTuple):
    """The tokens with early clocks of R rows [R, most of a row], and temperature times their noise. Behind a row's own
    tokens: token 0 with noise −inf."""

    ids: Ids
    noise: Doubles


class TokenNoise:
    """The noise of R rows. The hashes are made once, for all races of the rows; the rest when a race needs it."""

    def __init__(self, keys: Tensor, positions: Tensor, temperatures: Tensor, vocab_size: int) -> None:
        self.keys = row_keys(keys, positions)
        self._temperatures = temperatures.numpy()
        self._vocab_size = vocab_size

    def race(self, scores: Tensor, rows: Ids, above: Numbers | None = None) -> Ids:
        """Winners [n] of `rows` [n] of the noise over scores [n, vocab'], fp32 or fp64; vocab' ≤ vocab_size.

        above [n] in the scores' type: only tokens with higher scores run. None: all do.
        """
        if (found := self._contenders(scores.numpy(), rows, above)) is not None:
            owners, tokens = found
            if owners.tolist() == [*range(len(rows))]:
                return tokens  # one of each row, as in most races
            runners = KeptTokens(owners, tokens, scores.numpy()[owners, tokens])
            return self.race_few(rows[owners], runners, len(rows))
        made = self.__dict__.keys() & {"_early", "_every"}
        kept = few_held(scores, HASH_ONE_IN) if above is None and not made else None
        if kept is None and len(self.keys) * self._vocab_size <= MADE_AT_ONCE:
            return self._race_all(scores.numpy(), rows, above)
        kept = kept or self._rivals(scores.numpy(), rows, above)
        return self.race_few(rows[kept.rows], kept, len(rows))

    def race_few(self, noise_rows: Ids, kept: KeptTokens, rows: int) -> Ids:
        """Winners [rows] among the kept tokens [m]; noise_rows [m]: each one's row of the noise. Id 0 if none."""
        return row_winners(kept, kept.values + self.noise(noise_rows, kept.tokens), rows)

    def noise(self, rows: Ids, tokens: Ids) -> Doubles:
        """Temperature times noise [m] of tokens [m] in `rows` [m] of the noise."""
        return self._temperatures[rows] * -np.log(clocks_of(self._bits(rows, tokens)))

    def _race_all(self, scores: Numbers, rows: Ids, above: Numbers | None) -> Ids:
        if above is not None:
            scores = np.where(scores > above[:, None], scores, np.array(-np.inf, scores.dtype))
        return (self._every[rows, : scores.shape[1]] + scores).argmax(1)

    @cached_property
    def _every(self) -> Doubles:
        """Temperature times the noise of every token [R, vocab]."""
        bits = self.keys[:, None] + _offsets(self._vocab_size)
        mix_in_place(bits, np.empty_like(bits), STEPS)
        clocks = clocks_of(bits)
        return np.multiply(np.log(clocks, out=clocks), -self._temperatures[:, None], out=clocks)

    def _contenders(self, scores: Numbers, rows: Ids, above: Numbers | None) -> tuple[Ids, Ids] | None:
        """(rows, tokens) among which the winners are, by compiled code; None: it cannot tell, or there is none."""
        kernel = compiled_module("cpu_race")
        if kernel is None or scores.dtype != np.float32:
            return None
        count, width = scores.shape
        owners, tokens = np.empty((2, CONTENDERS * count), np.int64)
        limits = np.full(count, -np.inf, np.float32) if above is None else above
        given = np.ascontiguousarray(scores), self.keys[rows], self._temperatures[rows], limits
        room = np.empty((1, width), np.float32), np.empty((1, width), np.int64)
        found = kernel.contenders(*given, *room, owners, tokens)
        if found < 0:
            return None
        return owners[:found], tokens[:found]

    def _rivals(self, scores: Numbers, rows: Ids, above: Numbers | None) -> KeptTokens:
        """All tokens that may win."""
        every, temperatures = np.arange(len(rows)), self._temperatures[rows]
        ids, noise = self._early.ids[rows], self._early.noise[rows]
        if scores.shape[1] < self._vocab_size:
            inside = ids < scores.shape[1]
            ids, noise = np.where(inside, ids, 0), np.where(inside, noise, -np.inf)
        early_scores = scores[every[:, None], ids]
        best = scores.max(1).astype(np.float64)
        with np.errstate(invalid="ignore"):  # what is not finite
            early = early_scores + noise
            if above is not None:
                early[early_scores <= above[:, None]] = -np.inf
            first = early.argmax(1)
            ahead = np.maximum(early[every, first], best + temperatures * LEAST_NOISE)
            lowest = (ahead - temperatures * (MOST_NOISE + NOISE_MARGIN)).astype(scores.dtype)
            lowest = np.nextafter(lowest, np.array(-np.inf, lowest.dtype))
            held = scores > (lowest if above is None else np.maximum(lowest, above))[:, None]
            held[every, ids[every, first]] |= early[every, first] > -np.inf
            unclear = ~(np.abs(best) <= LARGEST_SCORE * temperatures) | (temperatures < LOWEST_RACE_TEMPERATURE)
        if unclear.any():
            held[unclear] = True if above is None else scores[unclear] > above[unclear, None]
        owners, tokens = np.divmod(np.flatnonzero(held), scores.shape[1])
        return KeptTokens(owners, tokens, scores[owners, tokens])

    @cached_property
    def _early(self) -> EarlyTokens:
        together = max(1, HASHED_TOGETHER // self._vocab_size)
        offsets = _offsets(self._vocab_size)
        bits = np.empty((min(together, len(self.keys)), self._vocab_size), np.uint64)
        shifted = np.empty_like(bits)
        found: list[tuple[Ids, Ids]] = []
        for first in range(0, len(self.keys), together):
            keys = self.keys[first : first + together, None]
            np.add(keys, offsets, out=bits[: len(keys)])
            rows, tokens = _find_early(bits[: len(keys)], shifted[: len(keys)])
            found.append((rows + first, tokens))
        rows, tokens = (np.concatenate(column) for column in zip(*found, strict=True))
        counts = np.bincount(rows, minlength=len(self.keys))
        ids = np.zeros((len(self.keys), max(1, counts.max(initial=0))), np.int64)
        noise = np.full(ids.shape, -np.inf)
        places = np.arange(len(rows)) - np.repeat(counts.cumsum() - counts, counts)
        ids[rows, places], noise[rows, places] = tokens, self.noise(rows, tokens)
        return EarlyTokens(ids, noise)

    def _bits(self, rows: Ids, tokens: Ids) -> Bits:
        return mix_array(self.keys[rows] + (tokens + 1).view(np.uint64) * np.uint64(GOLDEN))


@cache
def _offsets(vocab_size: int) -> Bits:
    """What tokens [vocab_size] add to a row's bits."""
    offsets = np.arange(1, vocab_size + 1).view(np.uint64) * np.uint64(GOLDEN)
    offsets.flags.writeable = False
    return offsets


def _find_early(bits: Bits, shifted: Bits) -> tuple[Ids, Ids]:
    """(rows, tokens) whose hashes of bits [R, vocab] are early. It changes bits, and `shifted`: scratch memory."""
    mix_in_place(bits, shifted, STEPS[:-1])  # the last step changes the lowest 33 bits only
    rows, tokens = np.divmod(np.flatnonzero(bits >= EARLIEST), bits.shape[1])
    return rows, tokens
