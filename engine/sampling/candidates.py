"""Finds where top-p and min-p cut rows on the CPU by sorting only the tokens that top-p can keep.

The tokens with less than (1 − p) / vocab of the mass have less than 1 − p of it together, so top-p removes them all. A
model's law leaves few others. The result is exact: a row for which rounding could decide is left to its caller.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import inf, isnan, log, nan
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.models.compiled import compiled_module
from engine.sampling import elementwise
from engine.sampling.long_row import (
    EXP_ERROR,
    FP32_ROUNDING,
    LARGEST_EXPONENT,
    MASS_MARGIN,
    ROUNDING_PER_TOKEN,
    Doubles,
    Ids,
    LongRow,
    Numbers,
)

LONG_ROW = 16_384  # logits; longer rows are cut one by one
SUMMED = 16  # masses that are summed in fp32
LOWEST_FP32_TEMPERATURE = 1e-30  # below it scores leave the range of fp32
ROUNDING_STEPS = 4  # between neighbouring numbers; mostly one is enough
TOGETHER = 163_840  # logits that share a pass: this many stay in a processor's cache

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Cuts:
    """How to cut F rows. Every array is [F]."""

    temperature: Doubles
    top_p: Doubles
    floor: Doubles  # the lowest score that min-p keeps
    wanted: Mask  # whether to cut the row: its top_p is below 1, and no other filter than min_p is on
    by_floor: Mask  # whether min_p is the row's only filter

    def pick(self, rows: Seq[int] | slice) -> "Cuts":
        """This returns the cuts of the given rows."""
        index = rows if isinstance(rows, slice) else np.array(rows)
        return Cuts(
            self.temperature[index], self.top_p[index], self.floor[index], self.wanted[index], self.by_floor[index]
        )


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """All tokens [m] that rows keep, in ascending order of (row, token)."""

    rows: Ids
    tokens: Ids
    values: Numbers  # their logits


NO_TOKENS = KeptTokens(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))


@dataclass(frozen=True, slots=True)
class CutRows:
    """What was found for F rows. Each row is in one of the three fields."""

    kept: KeptTokens  # of rows that keep few
    last_removed: dict[int, float]  # row → the largest logit that is removed, for rows that keep many
    left: list[int]  # rows not wanted, or those that only a sum in a higher precision or a sort of the row can decide

    @classmethod
    def of(cls, lasts: Numbers) -> "CutRows":
        """This sorts the rows by what removed_up_to() found in them."""
        known = {row: last for row, last in enumerate(lasts.tolist()) if not isnan(last)}
        return cls(NO_TOKENS, known, [row for row in range(len(lasts)) if row not in known])

    def write(self, logits: Tensor, result: Tensor) -> None:
        """Write the rows of logits [F, vocab] that were cut to `result`, with −inf for the tokens that are removed."""
        for row in set(range(len(logits))) - self.last_removed.keys() - set(self.left):
            result[row].fill_(-inf)
        result.numpy()[self.kept.rows, self.kept.tokens] = self.kept.values
        for row, last_removed in self.last_removed.items():
            torch.threshold(logits[row], last_removed, -inf, out=result[row])


def removed_up_to(logits: Tensor, cuts: Cuts) -> Numbers:
    """The largest number [F] that is removed from logits [F, vocab], in fp32 or fp64, of at most LONG_ROW tokens.

    NaN for rows that are not to be cut, or for which only a sum in a higher precision or a sort of the row can decide.
    """
    by_mass: Numbers = np.full(len(logits), nan)
    if cuts.wanted.any():
        kernel = compiled_module("cpu_cuts") if logits.dtype == torch.float32 else None
        by_mass = _cut_by_sorting(logits, cuts) if kernel is None else _compiled_cuts(kernel, logits, cuts)
    if not cuts.by_floor.any():
        return by_mass
    return np.where(cuts.by_floor, _last_below_floor(logits, cuts), by_mass)


def _last_below_floor(logits: Tensor, cuts: Cuts) -> Numbers:
    """The largest number [F], in the logits' type, whose score is below the floor; NaN where a few steps of rounding do
    not lead to it. Scores are (logit − best) / temperature in fp64, as the definition has them."""
    best, coldest = logits.amax(1).double().numpy(), np.maximum(cuts.temperature, np.finfo(np.float64).tiny)
    with np.errstate(all="ignore"):
        last = (best + cuts.floor * coldest).astype(logits.numpy().dtype)
        for _ in range(ROUNDING_STEPS):
            above = np.nextafter(last, np.array(inf, last.dtype))
            is_kept, is_low = (last - best) / coldest >= cuts.floor, (above - best) / coldest < cuts.floor
            if not (is_kept | is_low).any():
                break
            below = np.nextafter(last, np.array(-inf, last.dtype))
            last = np.where(is_kept, below, np.where(is_low, above, last))
    unclear = (is_kept | is_low) & (cuts.floor > -inf) | ~np.isfinite(best)
    return np.where(unclear, np.array(nan, last.dtype), last)


def cut_rows(logits: Tensor, cuts: Cuts) -> CutRows:
    """Find what the cuts remove from logits [F, vocab], contiguous, in fp32 or fp64."""
    if logits.shape[1] > LONG_ROW:
        return _cut_long_rows(logits, cuts)
    return CutRows.of(removed_up_to(logits, cuts))


def _cut_by_sorting(logits: Tensor, cuts: Cuts) -> Numbers:
    """As _compiled_cuts, without compiled code."""
    rows, vocab = logits.shape
    together = max(1, TOGETHER // vocab)
    masses = torch.empty(min(together, rows), vocab, dtype=logits.dtype)
    found = np.full(rows, nan)
    for first in range(0, rows, together):
        part = slice(first, first + together)
        chosen = cuts.pick(part)
        if chosen.wanted.any():
            found[part] = _cut_together(logits[part], chosen, masses[: len(chosen.wanted)])
    return found


def _compiled_cuts(kernel: ModuleType, logits: Tensor, cuts: Cuts) -> Numbers:
    """The largest logit [F] that the cuts remove; NaN where that is not clear. logits: fp32."""
    rows, vocab = logits.shape
    lowest, wanted = np.empty(rows, np.float32), cuts.wanted & (cuts.temperature >= LOWEST_FP32_TEMPERATURE)
    masses, held, kept = np.empty((3, 1, vocab), np.float32)
    room = masses, held, kept, np.empty(vocab, np.int64)
    kernel.cut_rows(
        np.ascontiguousarray(logits.numpy()),
        (cuts.temperature, cuts.top_p, cuts.floor, wanted),
        room,
        FP32_ROUNDING,
        lowest,
    )
    return np.nextafter(lowest, np.float32(-inf))


def _cut_long_rows(logits: Tensor, cuts: Cuts) -> CutRows:
    """As cut_rows, row by row: so all that a row needs stays in the processor's cache."""
    masses = torch.empty(logits.shape[1], dtype=logits.dtype)
    kept: list[tuple[int, Ids, Numbers]] = []
    found = CutRows(NO_TOKENS, {}, [])
    columns = (cuts.temperature, cuts.top_p, cuts.floor, cuts.wanted & (cuts.temperature >= LOWEST_FP32_TEMPERATURE))
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


def _cut_together(logits: Tensor, cuts: Cuts, scratch: Tensor) -> Numbers:
    """The largest logit [F] that the cuts remove from rows that share every pass; NaN where that is not clear."""
    best = logits.amax(-1)
    wanted = cuts.wanted & np.isfinite(best.numpy()) & (cuts.temperature >= LOWEST_FP32_TEMPERATURE)
    every = np.arange(len(wanted))
    with np.errstate(all="ignore"):  # rows that are not wanted may hold anything
        law = _Masses.of(logits, best, cuts.temperature, scratch)
        smallest = (1 - MASS_MARGIN) * (1 - cuts.top_p) * law.total / logits.shape[1]
        held = scratch.numpy() >= smallest.astype(scratch.numpy().dtype)[:, None]
        if not wanted.all():
            held[~wanted] = False
        table = _descending(logits.numpy(), held)
        masses = law.of_sorted(table)
        shares = masses.cumsum(1, dtype=np.float64)
        shares /= law.total[:, None]
        last = (shares < cuts.top_p[:, None]).sum(1).clip(max=table.shape[1] - 1)
        lowest = table[every, last]
        first, end = (table > lowest[:, None]).sum(1), (table >= lowest[:, None]).sum(1)
        without = np.where(first > 0, shares[every, first - 1], 0.0)
        rounding = law.rounding(cuts.top_p, logits.shape[1], logits.dtype)
        clear = (without + rounding < cuts.top_p) & (cuts.top_p < shares[every, end - 1] - rounding)
        clear &= masses[every, last] > (1 + 2 * MASS_MARGIN) * smallest  # a NaN is not
        # Logits that differ may have equal scores, which stay together.
        beside = table[every, [np.maximum(first - 1, 0), last, np.minimum(end, table.shape[1] - 1)]]
        above, own, below = (beside - best.double().numpy()) / cuts.temperature
        clear &= ((above > own) | (first == 0)) & ((own > below) | (end == table.shape[1]))
        if (cuts.floor > -inf).any():
            scores = (table - best.double().numpy()[:, None]) / cuts.temperature[:, None]
            lowest = table[every, np.minimum(end, (scores >= cuts.floor[:, None]).sum(1)) - 1]
        last_removed = np.nextafter(lowest, np.array(-inf, table.dtype))
    return np.where(wanted & clear, last_removed, np.array(nan, table.dtype))


def _descending(logits: Numbers, held: Mask) -> Numbers:
    """[F, most of a row] the logits of each row that a mask holds, the largest first, then −inf."""
    count, vocab = logits.shape
    places = np.flatnonzero(held)
    starts = np.searchsorted(places, np.arange(count + 1) * vocab)
    sizes = np.diff(starts)
    table = np.full((count, max(1, sizes.max())), inf, logits.dtype)
    table[np.arange(table.shape[1]) < sizes[:, None]] = -logits.reshape(-1)[places]
    table.sort(axis=1)
    return -table


@dataclass(frozen=True, slots=True)
class _Masses:
    """The masses of rows: each is e^(logit / temperature), or e^score, which differs from it by a factor of its row."""

    total: Doubles  # [F]
    inverse: Tensor | None  # [F, 1] of the temperatures; None: all are 1
    shift: Tensor | None  # [F, 1] what is subtracted from logits first; None: nothing
    operations: int  # on the way to an exponent
    size: float  # bound on the exponents of the best logits

    @classmethod
    def of(cls, logits: Tensor, best: Tensor, temperature: Doubles, scratch: Tensor) -> "_Masses":
        """`scratch` [F, vocab] is overwritten with the masses."""
        count, vocab = logits.shape
        exponents = np.abs(best.double().numpy() / temperature)
        plain = bool((temperature == 1).all())
        inverse, shift = torch.from_numpy(1 / temperature).to(logits.dtype)[:, None], None
        operations, size = 2 * (not plain), float(exponents.max())
        if not (exponents < LARGEST_EXPONENT).all():  # something overflows unless the best is subtracted
            operations, size, shift = 3, 0.0, best[:, None]
        _exponentials(logits, None if plain else inverse, shift, scratch)
        whole = vocab // SUMMED * SUMMED
        sums = scratch[:, :whole].view(count, SUMMED, -1).sum(1)
        total = sums.double().sum(-1) + scratch[:, whole:].double().sum(-1)
        return cls(total.numpy(), None if plain else inverse, shift, operations, size)

    def rounding(self, share: Doubles, vocab: int, dtype: torch.dtype) -> Doubles:
        """Bound on the error of a share [F] of the total that some tokens have.

        An operation on the way to an exponent x gives its mass a relative error of |x| · FP32_ROUNDING. For scores s
        the mean of |s|, weighted by mass, is at most log(vocab / share) over tokens with this share, because the
        entropy of their law is at most the logarithm of their number. An error e of the tokens' mass, and f of the
        rest's, change the share by share · (1 − share) · (e + f).
        """
        if dtype == torch.float64:
            return np.full_like(share, vocab * ROUNDING_PER_TOKEN)
        sizes = 2 * (self.size + log(vocab)) - np.log(share * (1 - share))
        masses = share * (1 - share) * (self.operations * sizes + 2 * EXP_ERROR)
        return (masses + SUMMED * share) * FP32_ROUNDING + vocab * ROUNDING_PER_TOKEN

    def of_sorted(self, table: Numbers) -> Numbers:
        """The masses of logits [F, n] of these rows."""
        logits = torch.from_numpy(table)
        return _exponentials(logits, self.inverse, self.shift, torch.empty_like(logits)).numpy()


def _exponentials(logits: Tensor, inverse: Tensor | None, shift: Tensor | None, out: Tensor) -> Tensor:
    """e^((logits − shift) · inverse), which `out` gets."""
    exponents = logits if shift is None else torch.sub(logits, shift, out=out)
    return elementwise.exp(exponents if inverse is None else torch.mul(exponents, inverse, out=out), out)
