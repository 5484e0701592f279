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

from engine.sampling import elementwise
from engine.sampling.long_row import (
    EXP_ERROR,
    FP32_ROUNDING,
    LARGEST_EXPONENT,
    MARGIN,
    ROUNDING_PER_TOKEN,
    SUM_BLOCK,
    Ids,
    LongRow,
    Numbers,
)

LONG_ROW = 16_384  # logits; longer rows are cut one by one
FEW = 4  # a row in which more than one token in so many is a candidate is sorted whole
LOWEST_TEMPERATURE = 1e-30  # below it scores leave the range of fp32
TOGETHER = 163_840  # logits that share a pass: so many stay in a processor's cache

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Cuts:
    """How to cut F rows. Every array is [F]."""

    temperature: Floats
    top_p: Floats
    floor: Floats  # the lowest score that min-p keeps
    wanted: Bools  # whether to cut the row: its top_p is below 1, and no other filter than min_p is on


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """All tokens [m] that rows keep, in ascending order of (row, token)."""

    rows: Ids
    tokens: Ids
    values: Numbers  # their logits


NO_TOKENS = KeptTokens(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))


@dataclass(frozen=True, slots=True)
class CutRows:
    """What was found for F rows, each of which is in one of the three."""

    kept: KeptTokens  # of rows that keep few
    last_removed: dict[int, float]  # row → the largest logit that is removed, for rows that keep many
    left: list[int]  # not wanted, or only a sum in a higher precision, or a sort of the whole row, can decide

    def write(self, logits: Tensor, result: Tensor) -> None:
        """Write the rows of logits [F, vocab] that were cut to `result`, with −inf for the tokens that are removed."""
        for row in set(range(len(logits))) - self.last_removed.keys() - set(self.left):
            result[row].fill_(-inf)
        result.numpy()[self.kept.rows, self.kept.tokens] = self.kept.values
        for row, last_removed in self.last_removed.items():
            torch.threshold(logits[row], last_removed, -inf, out=result[row])


def cut_rows(logits: Tensor, cuts: Cuts) -> CutRows:
    """Find what the cuts remove from logits [F, vocab], contiguous, in fp32 or fp64."""
    rows, vocab = logits.shape
    if vocab > LONG_ROW:
        return _cut_long_rows(logits, cuts)
    together = max(1, TOGETHER // vocab)
    masses = torch.empty(min(together, rows), vocab, dtype=logits.dtype)
    kept: list[KeptTokens] = []
    found = CutRows(NO_TOKENS, {}, [])
    for first in range(0, rows, together):
        part = slice(first, first + together)
        chosen = Cuts(cuts.temperature[part], cuts.top_p[part], cuts.floor[part], cuts.wanted[part])
        if not chosen.wanted.any():
            found.left.extend(range(rows)[part])
            continue
        cut = _cut(logits[part], chosen, masses[: len(logits[part])])
        found.left.extend(first + row for row in cut.left)
        kept.append(KeptTokens(cut.kept.rows + first, cut.kept.tokens, cut.kept.values))
    if not kept:
        return found
    every = KeptTokens(
        np.concatenate([k.rows for k in kept]),
        np.concatenate([k.tokens for k in kept]),
        np.concatenate([k.values for k in kept]),
    )
    return CutRows(every, {}, found.left)


def _cut_long_rows(logits: Tensor, cuts: Cuts) -> CutRows:
    """As cut_rows, row by row: so all that a row needs stays in the processor's cache."""
    masses = torch.empty(logits.shape[1], dtype=logits.dtype)
    kept: list[tuple[int, Ids, Numbers]] = []
    found = CutRows(NO_TOKENS, {}, [])
    columns = (cuts.temperature, cuts.top_p, cuts.floor, cuts.wanted & (cuts.temperature >= LOWEST_TEMPERATURE))
    for i, (temperature, top_p, floor, wanted) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        row = LongRow(logits[i], temperature, masses)
        cut = row.cut(top_p, floor) if wanted else None
        if isinstance(cut, float):
            found.last_removed[i] = cut
        elif cut is None:
            found.left.append(i)
        else:
            kept.append((i, *cut))
    if kept:
        rows = np.repeat([i for i, _, _ in kept], [len(tokens) for _, tokens, _ in kept])
        every = KeptTokens(rows, np.concatenate([k[1] for k in kept]), np.concatenate([k[2] for k in kept]))
        found = CutRows(every, found.last_removed, found.left)
    return found


def _cut(logits: Tensor, cuts: Cuts, masses: Tensor) -> CutRows:
    """As cut_rows, for rows that share every pass. masses: scratch memory."""
    best = logits.amax(-1)
    wanted = cuts.wanted & np.isfinite(best.numpy()) & (cuts.temperature >= LOWEST_TEMPERATURE)
    with np.errstate(all="ignore"):  # rows that are not wanted may hold anything
        law = _Masses.of(logits, best, cuts.temperature, masses)
        outside = (1 - cuts.top_p) * law.total
        smallest = (1 - MARGIN) * outside / logits.shape[1]
        held = masses.numpy() >= smallest.astype(masses.numpy().dtype)[:, None]
        if not wanted.all():
            held[~wanted] = False
        if np.count_nonzero(held) * FEW > held.size:
            held[held.sum(1) * FEW > held.shape[1]] = False  # flat rows are left
        candidates = _Candidates.of(logits.numpy(), held)
        scores = (candidates.table.astype(np.float64) - best.double().numpy()[:, None]) / cuts.temperature[:, None]
        lowest = _lowest_kept(scores, cuts.top_p, law.total / law.best, law.rounding)
        decided = wanted & (np.exp(lowest) * law.best > (1 + 2 * MARGIN) * smallest)  # a NaN is not
        kept = (scores >= np.maximum(lowest, cuts.floor)[:, None]).sum(1)
    cut = candidates.table[np.arange(len(logits)), kept - 1]
    return CutRows(candidates.above(np.where(decided, cut, inf)), {}, np.flatnonzero(~decided).tolist())


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The logits [C] that a mask holds, in the order of the rows."""

    rows: Ids  # [C]
    tokens: Ids  # [C]
    values: Numbers  # [C]
    table: Numbers  # [F, most of a row] each row's logits, the largest first, then −inf

    @classmethod
    def of(cls, logits: Numbers, held: Bools) -> "_Candidates":
        count, vocab = logits.shape
        places = np.flatnonzero(held)
        starts = np.searchsorted(places, np.arange(count + 1) * vocab)
        sizes = np.diff(starts)
        rows = np.repeat(np.arange(count), sizes)
        values = logits.reshape(-1)[places]
        table = np.full((count, max(1, sizes.max())), -inf, logits.dtype)
        table[rows, np.arange(len(places)) - starts[rows]] = values
        table.sort(axis=1)
        return cls(rows, places - rows * vocab, values, table[:, ::-1])

    def above(self, cut: Numbers) -> KeptTokens:
        """Those that are at least as large as the cut [F] of their row."""
        kept = np.flatnonzero(self.values >= cut[self.rows])
        return KeptTokens(self.rows[kept], self.tokens[kept], self.values[kept])


@dataclass(frozen=True, slots=True)
class _Masses:
    """The masses of rows: each is e^(logit / temperature), or e^score, which differs from it by a factor of its row."""

    total: Floats  # [F]
    best: Floats  # [F] the mass of the best logit
    rounding: float  # bound on the relative error of a total

    @classmethod
    def of(cls, logits: Tensor, best: Tensor, temperature: Floats, scratch: Tensor) -> "_Masses":
        """`scratch` [F, vocab] gets the masses.

        An operation on the way to an exponent x gives its mass a relative error of |x| · FP32_ROUNDING. For a score s
        the mean of |s|, weighted by mass, is at most the logarithm of the number of logits, because the entropy of
        their law is.
        """
        count, vocab = logits.shape
        exponents = best.double().numpy() / temperature
        plain, hot = bool((temperature == 1).all()), torch.from_numpy(1 / temperature).to(logits.dtype)[:, None]
        if (np.abs(exponents) < LARGEST_EXPONENT).all():  # nothing overflows: the best need not be subtracted
            operations, size = 2 * (not plain), float(np.abs(exponents).max()) + log(vocab)
            exponents_of_all = logits if plain else torch.mul(logits, hot, out=scratch)
        else:
            operations, size, exponents = 3, log(vocab), np.zeros(count)
            exponents_of_all = torch.sub(logits, best[:, None], out=scratch).mul_(hot)
        elementwise.exp(exponents_of_all, scratch)
        whole = vocab // SUM_BLOCK * SUM_BLOCK
        blocks = scratch[:, :whole].reshape(count, -1, SUM_BLOCK).sum(-1)
        total = blocks.double().sum(-1) + scratch[:, whole:].double().sum(-1)
        rounding = (operations * size + SUM_BLOCK + EXP_ERROR) * FP32_ROUNDING
        if logits.dtype == torch.float64:
            rounding = vocab * ROUNDING_PER_TOKEN
        return cls(total.numpy(), np.exp(exponents), rounding)


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
