"""Gumbel races on the CPU, block by block: the same winners as a race over all of gumbel_noise, with less work.

The two earliest clocks of a block of tokens have hashes of their own. The tokens with the first clocks compete, and the
best of them sets the score to beat. No other token of a block exceeds the block's best score plus the noise of its
second clock, so most blocks need no more noise. Where filters leave few tokens, only these need noise. numpy is used
because its calls on arrays of this size cost a third of torch's.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.candidates import KeptTokens
from engine.sampling.hashing import (
    BLOCK,
    FIRST_CLOCK_SALT,
    GOLDEN,
    SECOND_CLOCK_SALT,
    SECOND_TOKEN_SALT,
    mix_array,
    row_keys,
)
from engine.sampling.long_row import SAMPLE_STRIDE, Doubles, Ids, Numbers

SLACK = 1e-6  # relative margin of a bound, for rounding
RACE_ONE_IN = 64  # where at most one token in this many is left, tokens race without the earliest clocks of all blocks
LOWEST_FINITE = np.finfo(np.float64).min  # the bound of a block with excluded tokens only, −inf, lies below it

Bits = NDArray[np.uint64]
_OFFSETS = np.arange(BLOCK)  # within a block


@dataclass(frozen=True, slots=True)
class BlockClocks:
    """The two earliest clocks of blocks, and the ids of the tokens that have them; arrays of one shape."""

    first: Doubles
    second: Doubles
    first_id: Ids
    second_id: Ids

    @classmethod
    def of(cls, rows: Bits, blocks: Ids) -> "BlockClocks":
        """Make the clocks from row keys and block numbers, which are broadcast to the result's shape."""
        numbers = (blocks + 1).view(np.uint64) * np.uint64(GOLDEN)
        bits = mix_array(mix_array(rows ^ np.uint64(FIRST_CLOCK_SALT)) + numbers)
        others = mix_array(bits + np.uint64(SECOND_CLOCK_SALT))
        first, start = clocks_of(bits) / BLOCK, blocks * BLOCK
        first_offset = (bits % np.uint64(BLOCK)).view(np.int64)
        distance = (mix_array(bits + np.uint64(SECOND_TOKEN_SALT)) % np.uint64(BLOCK - 1)).view(np.int64) + 1
        second = first + clocks_of(others) / (BLOCK - 1)
        return cls(first, second, start + first_offset, start + (first_offset + distance) % BLOCK)


@dataclass(frozen=True, slots=True)
class Leaders:
    """What the two earliest clocks of all blocks give in a race, each [R, blocks]."""

    ids: Ids  # of the tokens with the first clocks
    noise: Doubles  # of these tokens
    bounds: Doubles  # no less than the noise of any other token of the block


class BlockNoise:
    """The noise of R rows. What all races of a row need is made once, the rest when a race needs it."""

    def __init__(self, keys: Tensor, positions: Tensor, temperatures: Tensor, vocab_size: int) -> None:
        self._rows = row_keys(keys, positions)
        self._temperatures = temperatures.numpy()[:, None]
        self._blocks = -(-vocab_size // BLOCK)

    @cached_property
    def _leaders(self) -> Leaders:
        clocks = BlockClocks.of(self._rows[:, None], np.arange(self._blocks))
        bounds = -np.log(clocks.second) * self._temperatures
        noise = -np.log(clocks.first) * self._temperatures
        return Leaders(clocks.first_id, noise, bounds + SLACK * (1 + np.abs(bounds)))

    def race(self, scores: Tensor, rows: Ids, above: Numbers | None = None) -> Ids:
        """As TokenNoise.race."""
        if above is not None:
            scores = scores.masked_fill(scores <= torch.from_numpy(above)[:, None], -torch.inf)
        if (held := few_held(scores, RACE_ONE_IN)) is not None:
            return self.race_few(rows[held.rows], held, len(rows))
        maxima, values = _block_maxima(scores), scores.numpy()
        best, ids = self._lead(values, rows, maxima.shape[1])
        # Blocks that could hold the winner. An excluded block never can; a block with a NaN can, and the NaN wins.
        bounds = self._leaders.bounds[rows, : maxima.shape[1]]
        i, block = np.nonzero(~(bounds + maxima < np.maximum(best, LOWEST_FINITE)[:, None]))
        winners, tokens = self._run(values, rows[i], i, block)
        for n, winner, token in zip(i.tolist(), winners.tolist(), tokens.tolist(), strict=True):
            leader = best[n]
            if winner > leader or (np.isnan(winner) and not np.isnan(leader)) or (winner == leader and token < ids[n]):
                best[n], ids[n] = winner, token
        return ids

    def race_few(self, noise_rows: Ids, kept: KeptTokens, rows: int) -> Ids:
        """Winners [rows] among the kept tokens [m]; noise_rows [m]: each one's row of the noise. Id 0 if none."""
        return row_winners(kept, kept.values + self.noise(noise_rows, kept.tokens), rows)

    def noise(self, rows: Ids, tokens: Ids) -> Doubles:
        """Temperature times noise [m] of tokens [m] in `rows` [m] of the noise."""
        return self._temperatures[rows, 0] * self._noise(rows, tokens // BLOCK, tokens[:, None])[:, 0]

    def _lead(self, scores: NDArray[np.floating], rows: Ids, blocks: int) -> tuple[Doubles, Ids]:
        """(best score, its token) [n] among the tokens with the first clocks; id 0 if all of these are excluded."""
        every, first_ids = np.arange(len(rows)), self._leaders.ids[rows, :blocks]
        leaders = self._leaders.noise[rows, :blocks] + _scores(scores, every[:, None], first_ids)
        best_block = leaders.argmax(1)
        best = leaders[every, best_block]
        return best, np.where(best == -np.inf, 0, first_ids[every, best_block])

    def _run(self, scores: NDArray[np.floating], rows: Ids, i: Ids, block: Ids) -> tuple[Doubles, Ids]:
        """(winning score, its token) of each block [n]: in row i [n] of the scores and row `rows` [n] of the noise."""
        ids = block[:, None] * BLOCK + _OFFSETS
        noisy = _scores(scores, i[:, None], ids) + self._temperatures[rows] * self._noise(rows, block, ids)
        every, winners = np.arange(len(i)), noisy.argmax(1)
        return noisy[every, winners], ids[every, winners]

    def _noise(self, rows: Ids, block: Ids, ids: Ids) -> Doubles:
        """The values of gumbel_noise for tokens `ids` [n, m] of each block [n]."""
        clocks = BlockClocks.of(self._rows[rows, None], block[:, None])
        times = clocks_of(mix_array(self._rows[rows, None] + (ids + 1).view(np.uint64) * np.uint64(GOLDEN)))
        times += clocks.second
        np.copyto(times, clocks.second, where=ids == clocks.second_id)
        np.copyto(times, clocks.first, where=ids == clocks.first_id)
        return -np.log(times)


def few_held(scores: Tensor, few: int) -> KeptTokens | None:
    """All scores [R, vocab] above −inf; None if more than one score in `few` is."""
    values, lowest = scores.numpy(), np.finfo(scores.numpy().dtype).min
    sample = values[:, ::SAMPLE_STRIDE]
    if np.count_nonzero(sample >= lowest) * few > sample.size:
        return None
    held = ~(values < lowest)  # a NaN may win, so that it is seen
    if np.count_nonzero(held) * few > held.size:
        return None
    rows, tokens = np.divmod(np.flatnonzero(held), values.shape[1])
    return KeptTokens(rows, tokens, values[rows, tokens])


def row_winners(kept: KeptTokens, noisy: Doubles, rows: int) -> Ids:
    """The token [rows] with the best of noisy [m] in each row.

    Among equals the lowest token wins. A NaN wins against any number. A row without tokens gets id 0.
    """
    result = np.zeros(rows, np.int64)
    if len(noisy):
        begins = np.empty(len(noisy), np.bool_)
        begins[0] = True
        np.not_equal(kept.rows[1:], kept.rows[:-1], out=begins[1:])
        best = np.maximum.reduceat(noisy, begins.nonzero()[0])[begins.cumsum() - 1]
        leads = ((noisy == best) | np.isnan(noisy)).nonzero()[0][::-1]
        result[kept.rows[leads]] = kept.tokens[leads]  # the first of a row is written last
    return result


def _scores(scores: NDArray[np.floating], row: Ids, ids: Ids) -> NDArray[np.floating]:
    """Scores of ids in their rows; −inf beyond the vocabulary, into which the last block may reach."""
    vocab = scores.shape[1]
    if vocab % BLOCK == 0:
        return scores[row, ids]
    return np.where(ids < vocab, scores[row, np.minimum(ids, vocab - 1)], -np.inf)


def _block_maxima(scores: Tensor) -> NDArray[np.floating]:
    """[R, vocab] → [R, blocks]. By torch: numpy takes ten times as long for maxima over short rows."""
    whole = scores.shape[-1] // BLOCK * BLOCK
    if whole == scores.shape[-1]:
        return scores.unflatten(1, (-1, BLOCK)).amax(-1).numpy()
    parts = [scores[:, :whole].unflatten(1, (-1, BLOCK)).amax(-1)] if whole else []
    return torch.cat([*parts, scores[:, whole:].amax(-1, keepdim=True)], 1).numpy()


def clocks_of(bits: Bits) -> Doubles:
    """Standard exponentials from the upper 52 bits. In place where that saves memory, which costs time."""
    clocks = (bits >> np.uint64(12)).astype(np.float64)
    clocks += 0.5
    clocks *= 2.0**-52
    np.log(clocks, out=clocks)
    return np.negative(clocks, out=clocks)
