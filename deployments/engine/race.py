"""Gumbel races on the CPU, block by block: the winners of the plain race over all of gumbel_noise, for less work.

No token of a block beats the block's best score with the block's earliest clock, so most blocks need no noise at all.
Plain numpy, whose calls on arrays of this size cost a third of torch's.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deployments.engine.hashing import BLOCK, BLOCKS_APART, GOLDEN, mix_array

FAVOURITES = 4  # blocks of a row that are run at once; the winner is mostly among them
SLACK = 1e-5  # relative, and absolute: more than fp32 rounds off the bounds

Floats = NDArray[np.float64]
Bits = NDArray[np.uint64]
Ids = NDArray[np.int64]


def pruned_race(scores: Tensor, temperatures: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """Token ids [R], drawn as randomness.race does, from CPU tensors."""
    block_maxima = _block_maxima(scores)
    runner = _Runner(scores.numpy(), temperatures.numpy(), keys.numpy(), positions.numpy(), block_maxima.shape[1])
    bounds = runner.bounds(block_maxima)
    every = np.arange(len(bounds))[:, None]
    favourites = np.empty((len(bounds), min(FAVOURITES, bounds.shape[1])), np.int64)
    for place in favourites.T:
        place[:] = bounds.argmax(1)
        bounds[every[:, 0], place] = -np.inf
    favourites.sort(1)  # the lowest id of a tie is the first that argmax sees
    finals, ids = runner.run(every, favourites)
    row, block = np.nonzero(bounds >= finals[:, None])
    if len(row):
        rivals = runner.run(row[:, None], block[:, None])
        for r, final, token in zip(row.tolist(), *(part.tolist() for part in rivals), strict=True):
            if final > finals[r] or (final == finals[r] and token < ids[r]):
                finals[r], ids[r] = final, token
    return torch.from_numpy(ids)


def _block_maxima(scores: Tensor) -> NDArray[np.floating]:
    """[R, vocab] → [R, blocks], by torch: numpy's maximum over short rows takes ten times as long."""
    whole = scores.shape[-1] // BLOCK * BLOCK
    parts = [scores[:, :whole].unflatten(1, (-1, BLOCK)).amax(-1)] if whole else []
    if whole < scores.shape[-1]:
        parts.append(scores[:, whole:].amax(-1, keepdim=True))
    return torch.cat(parts, 1).numpy()


class _Runner:
    """Bounds of all blocks, and exact results of those that are run."""

    def __init__(
        self, scores: NDArray[np.floating], temperatures: Floats, keys: Ids, positions: Ids, blocks: int
    ) -> None:
        self._scores = scores
        self._temperatures = temperatures[:, None]
        self._rows = mix_array(keys.view(np.uint64) + (positions + 1).view(np.uint64) * np.uint64(GOLDEN))[:, None]
        numbers = np.arange(1, blocks + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        self._block_bits = mix_array(mix_array(self._rows ^ np.uint64(BLOCKS_APART)) + numbers)

    def bounds(self, block_maxima: NDArray[np.floating]) -> Floats:
        """[R, blocks]: what no token of a block exceeds. From 24 bits of its clock, rounded so that it comes early."""
        upper = ((self._block_bits >> np.uint64(40)).astype(np.float32) + np.float32(1)) * np.float32(2.0**-24)
        with np.errstate(divide="ignore"):  # a clock at 0 bounds nothing, and its block is run
            noise = -np.log(np.log(upper) * np.float32(-1 / BLOCK)) * self._temperatures
        bounds: Floats = block_maxima + noise
        return bounds + SLACK * (1 + np.abs(noise))

    def run(self, row: Ids, blocks: Ids) -> tuple[Floats, Ids]:
        """(winning score, its token), [n] each, among blocks [n, m] of rows [n, 1]; the blocks of a row ascend."""
        vocab = self._scores.shape[1]
        ids = (blocks[:, :, None] * BLOCK + np.arange(BLOCK)).reshape(len(blocks), -1)
        scores = self._scores[row, np.minimum(ids, vocab - 1)]
        finals = np.where(ids < vocab, scores + self._temperatures[row[:, 0]] * self._noise(row, blocks, ids), -np.inf)
        winners = finals.argmax(1)[:, None]
        return np.take_along_axis(finals, winners, 1)[:, 0], np.take_along_axis(ids, winners, 1)[:, 0]

    def _noise(self, row: Ids, blocks: Ids, ids: Ids) -> Floats:
        """What gumbel_noise gives these ids [n, m · BLOCK]."""
        bits = self._block_bits[row, blocks]
        clocks = _clocks(mix_array(self._rows[row[:, 0]] + (ids + 1).view(np.uint64) * np.uint64(GOLDEN)))
        first = (bits % np.uint64(BLOCK)).view(np.int64) + blocks * BLOCK
        clocks[ids == np.repeat(first, BLOCK, 1)] = 0.0
        return -np.log(clocks + np.repeat(_clocks(bits) / BLOCK, BLOCK, 1))


def _clocks(bits: Bits) -> Floats:
    return -np.log(((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52)
