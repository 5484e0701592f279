"""Finds where top-p and min-p cut rows on the CPU by sorting only the tokens that top-p can keep.

The tokens with less than (1 − p) / vocab of the mass have less than 1 − p of it together, so top-p removes them all. A
model's law leaves few others. The result is exact: a row for which rounding could decide is left to its caller.
"""

from dataclasses import dataclass
from math import inf, log

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOST_CANDIDATES = 8192  # of a row; where more are left, a sample tells where the cut must be
TOGETHER = 163_840  # logits that share a pass: so many stay in a processor's cache
LOWEST_TEMPERATURE = 1e-30  # below it scores leave the range of fp32
MARGIN = 1e-3  # relative margin of the smallest candidate's mass, for rounding in fp32
ROUNDING_PER_TOKEN = 2.0**-50  # bound on the error of a sum of masses in fp64, in whatever order, per token
FP32_ROUNDING = 2.0**-24  # relative error of an operation in fp32
SUM_BLOCK = 64  # masses that are summed in fp32
EXP_ERROR = 8  # bound on the relative error of an exponential in fp32, in units of FP32_ROUNDING

Numbers = NDArray[np.floating]
Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Cuts:
    """How to cut F rows. Every array is [F]."""

    temperature: Floats
    top_p: Floats
    floor: Floats  # the lowest score that min-p keeps
    wanted: Bools  # whether to cut the row: its top_p is below 1, and no other filter than min_p is on


def cut_rows(logits: Tensor, cuts: Cuts, result: Tensor) -> list[int]:
    """Write logits [F, vocab], fp32 or fp64, to `result`, with −inf for the tokens that the cuts remove.

    Returns the rows that are not written: those that are not wanted, and those for which only a sum in a higher
    precision, or a sort of the whole row, can decide.
    """
    left: list[int] = []
    rows, vocab = logits.shape
    together = max(1, TOGETHER // vocab)
    masses = torch.empty(min(together, rows), vocab, dtype=logits.dtype)
    for first in range(0, rows, together):
        part = slice(first, first + together)
        if cuts.wanted[part].any():
            chosen = Cuts(cuts.temperature[part], cuts.top_p[part], cuts.floor[part], cuts.wanted[part])
            undone = _cut(logits[part], chosen, masses[: len(logits[part])], result[part])
        else:
            undone = np.arange(len(logits[part]))
        left += (undone + first).tolist()
    return left


def _cut(logits: Tensor, cuts: Cuts, masses: Tensor, result: Tensor) -> Ids:
    """As cut_rows, for rows that share every pass. masses: scratch memory."""
    best = logits.amax(-1)
    wanted = cuts.wanted & np.isfinite(best.numpy()) & (cuts.temperature >= LOWEST_TEMPERATURE)
    with np.errstate(all="ignore"):  # rows that are not wanted may hold anything
        total, rounding = mass(logits, best, cuts.temperature, masses)
        smallest = (1 - MARGIN) * (1 - cuts.top_p) * total / logits.shape[1]
        held = masses.numpy() >= smallest.astype(masses.numpy().dtype)[:, None]
        held[~wanted] = False
        candidates = _Candidates.of(logits.numpy(), held)
        if candidates is None:
            return np.arange(len(logits))
        scores = (candidates.table.astype(np.float64) - best.double().numpy()[:, None]) / cuts.temperature[:, None]
        lowest = _lowest_kept(scores, cuts.top_p, total, rounding)
        decided = wanted & (np.exp(lowest) > (1 + 2 * MARGIN) * smallest)  # a NaN is not
        kept = (scores >= np.maximum(lowest, cuts.floor)[:, None]).sum(1)
    cut = candidates.table[np.arange(len(logits)), kept - 1]
    for row in np.flatnonzero(decided).tolist():
        result[row].fill_(-inf)
    written = decided[candidates.rows] & (candidates.values >= cut[candidates.rows])
    result.numpy().reshape(-1)[candidates.places[written]] = candidates.values[written]
    return np.flatnonzero(~decided)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The logits [C] that a mask holds, in the order of the rows."""

    places: Ids  # [C] row · vocab + token
    rows: Ids  # [C]
    values: Numbers  # [C]
    table: Numbers  # [F, most of a row] each row's logits, the largest first, then −inf

    @classmethod
    def of(cls, logits: Numbers, held: Bools) -> "_Candidates | None":
        """None if they are too many."""
        count, vocab = logits.shape
        if np.count_nonzero(held) > MOST_CANDIDATES * count:
            return None
        places = np.flatnonzero(held)
        starts = np.searchsorted(places, np.arange(count + 1) * vocab)
        sizes = np.diff(starts)
        rows = np.repeat(np.arange(count), sizes)
        values = logits.reshape(-1)[places]
        table = np.full((count, max(1, sizes.max())), -inf, logits.dtype)
        table[rows, np.arange(len(places)) - starts[rows]] = values
        table.sort(axis=1)
        return cls(places, rows, values, table[:, ::-1])


def mass(logits: Tensor, best: Tensor, temperature: Floats, scratch: Tensor) -> tuple[Floats, float]:
    """(total mass [F] of each row, bound on its relative error). A token's mass is e^score; `scratch` gets them all.

    The three operations that make a score s give its mass a relative error of 3 · |s| · FP32_ROUNDING. The mean of
    |s|, weighted by mass, is at most the logarithm of the number of logits, because the entropy of their law is.
    """
    torch.sub(logits, best[:, None], out=scratch)
    if (temperature != 1).any():
        scratch.mul_(torch.from_numpy(1 / temperature).to(scratch.dtype)[:, None])
    scratch.exp_()
    count, vocab = logits.shape
    whole = vocab // SUM_BLOCK * SUM_BLOCK
    sums = scratch[:, :whole].reshape(count, -1, SUM_BLOCK).sum(-1).double().sum(-1) + scratch[:, whole:].double().sum(
        -1
    )
    if logits.dtype == torch.float64:
        return sums.numpy(), vocab * ROUNDING_PER_TOKEN
    return sums.numpy(), (3 * log(vocab) + SUM_BLOCK + EXP_ERROR) * FP32_ROUNDING


def _lowest_kept(scores: Floats, top_p: Floats, total: Floats, rounding: float) -> Floats:
    """The score [F] at which the masses, summed from the largest on, reach top_p of `total`; NaN if not clearly one.

    scores [F, n]: descending; rounding: bound on the error of a share.
    """
    rows = np.arange(len(scores))
    shares = np.exp(scores).cumsum(1) / total[:, None]
    last = (shares < top_p[:, None]).sum(1).clip(max=scores.shape[1] - 1)
    lowest = scores[rows, last]
    first = (scores > lowest[:, None]).sum(1)
    end = (scores >= lowest[:, None]).sum(1)
    without = np.where(first > 0, shares[rows, first - 1], 0.0)
    clear = (without + rounding < top_p) & (top_p < shares[rows, end - 1] - rounding)
    return np.where(clear, lowest, np.nan)
