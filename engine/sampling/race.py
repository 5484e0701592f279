"""Gumbel races on the CPU, block by block: the winners of the plain race over all of gumbel_noise, for less work.

The two earliest clocks of a block of tokens are known from the block's own hashes. The best token that is the first of
its block gives a score to beat; no other token of a block exceeds the block's best score with its second clock; so most
blocks need no more noise. Plain numpy, whose calls on arrays of this size cost a third of torch's.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.hashing import BLOCK, FIRST_CLOCK_SALT, GOLDEN, SECOND_CLOCK_SALT, SECOND_TOKEN_SALT, mix_array

SLACK = 1e-6  # of a bound, for rounding
LOWEST_FINITE = np.finfo(np.float64).min  # finite: the bound of a block without a token that may be drawn lies below it

Floats = NDArray[np.float64]
Bits = NDArray[np.uint64]
Ids = NDArray[np.int64]
_WITHIN = np.arange(BLOCK)


@dataclass(frozen=True, slots=True)
class BlockClocks:
    """The two earliest clocks of blocks of tokens, and which of the block's tokens have them."""

    first: Floats
    second: Floats
    first_id: Ids
    second_id: Ids

    @classmethod
    def of(cls, rows: Bits, blocks: int) -> "BlockClocks":
        """Of every block of rows [R, 1]; [R, blocks] each."""
        numbers = np.arange(1, blocks + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        bits = mix_array(mix_array(rows ^ np.uint64(FIRST_CLOCK_SALT)) + numbers)
        others = mix_array(bits + np.uint64(SECOND_CLOCK_SALT))
        first, start = _clocks(bits) / BLOCK, np.arange(blocks) * BLOCK
        first_place = (bits % np.uint64(BLOCK)).view(np.int64)
        turn = (mix_array(bits + np.uint64(SECOND_TOKEN_SALT)) % np.uint64(BLOCK - 1)).view(np.int64) + 1
        second = first + _clocks(others) / (BLOCK - 1)
        return cls(first, second, start + first_place, start + (first_place + turn) % BLOCK)


class BlockNoise:
    """The noise of R rows, as far as a race over them needs it: made once, raced over as often as there are scores."""

    def __init__(self, keys: Tensor, positions: Tensor, temperatures: Tensor, vocab_size: int) -> None:
        bits = keys.numpy().view(np.uint64) + (positions.numpy() + 1).view(np.uint64) * np.uint64(GOLDEN)
        self._rows = mix_array(bits)[:, None]
        self._temperatures = temperatures.numpy()[:, None]
        self._clocks = BlockClocks.of(self._rows, -(-vocab_size // BLOCK))
        self._first_noise = -np.log(self._clocks.first) * self._temperatures
        bounds = -np.log(self._clocks.second) * self._temperatures
        self._bounds = bounds + SLACK * (1 + np.abs(bounds))

    def race(self, scores: Tensor, at: Ids) -> Ids:
        """Winners [n] of rows `at` [n] over their scores [n, vocab'], fp32 or fp64; vocab' at most the noise's."""
        maxima, known = _block_maxima(scores), scores.numpy()
        blocks, every = maxima.shape[1], np.arange(len(at))
        firsts = self._clocks.first_id[at, :blocks]
        leaders = self._first_noise[at, :blocks] + _scores(known, every[:, None], firsts)
        best = leaders.argmax(1)
        finals = leaders[every, best]
        ids = np.where(finals == -np.inf, 0, firsts[every, best])  # the lowest id, where every token is forbidden
        # A forbidden block never runs, even if all leaders are forbidden. A block with a NaN does, and the NaN wins.
        row, block = np.nonzero(~(self._bounds[at, :blocks] + maxima < np.maximum(finals, LOWEST_FINITE)[:, None]))
        rivals = self._run(known, at[row], row, block)
        for r, final, token in zip(row.tolist(), *(part.tolist() for part in rivals), strict=True):
            held = finals[r]
            if final > held or (np.isnan(final) and not np.isnan(held)) or (final == held and token < ids[r]):
                finals[r], ids[r] = final, token
        return ids

    def _run(self, scores: NDArray[np.floating], at: Ids, row: Ids, block: Ids) -> tuple[Floats, Ids]:
        """(winning score, its token) of each block [n], of row `row` [n] of the scores and `at` [n] of the noise."""
        ids = block[:, None] * BLOCK + _WITHIN
        finals = _scores(scores, row[:, None], ids) + self._temperatures[at] * self._noise(at, block, ids)
        every, winners = np.arange(len(row)), finals.argmax(1)
        return finals[every, winners], ids[every, winners]

    def _noise(self, at: Ids, block: Ids, ids: Ids) -> Floats:
        """What gumbel_noise gives the ids [n, BLOCK] of these blocks."""
        place, clocks = (at, block), self._clocks
        times = _clocks(mix_array(self._rows[at] + (ids + 1).view(np.uint64) * np.uint64(GOLDEN)))
        times += clocks.second[place][:, None]
        every = np.arange(len(at))
        times[every, clocks.second_id[place] % BLOCK] = clocks.second[place]
        times[every, clocks.first_id[place] % BLOCK] = clocks.first[place]
        return -np.log(times)


def _scores(scores: NDArray[np.floating], row: Ids, ids: Ids) -> NDArray[np.floating]:
    """Scores of ids in their rows; −inf beyond the vocabulary, where its last block may reach."""
    vocab = scores.shape[1]
    if vocab % BLOCK == 0:
        return scores[row, ids]
    return np.where(ids < vocab, scores[row, np.minimum(ids, vocab - 1)], -np.inf)


def _block_maxima(scores: Tensor) -> NDArray[np.floating]:
    """[R, vocab] → [R, blocks], by torch: numpy's maximum over short rows takes ten times as long."""
    whole = scores.shape[-1] // BLOCK * BLOCK
    if whole == scores.shape[-1]:
        return scores.unflatten(1, (-1, BLOCK)).amax(-1).numpy()
    parts = [scores[:, :whole].unflatten(1, (-1, BLOCK)).amax(-1)] if whole else []
    return torch.cat([*parts, scores[:, whole:].amax(-1, keepdim=True)], 1).numpy()


def _clocks(bits: Bits) -> Floats:
    return -np.log(((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52)
