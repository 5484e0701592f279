"""Finds where top-p and min-p cut rows on the CPU by sorting only the tokens that top-p can keep.

The tokens with less than (1 − p) / vocab of the mass have less than 1 − p of it together, so top-p removes them all. A
model's law leaves few others. The result is exact: a row for which rounding could decide is left to its caller.
"""

from dataclasses import dataclass
from math import inf, isqrt, log

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LONG_ROW = 16_384  # logits; a sample of a longer row tells where its cut should be
SAMPLE_STRIDE = 37  # every 37th logit is in the sample; odd, since vocabularies are padded to even sizes
SAMPLED_SHARE = 0.7  # of the mass to remove, which the candidates may lack by the sample
FEWEST_SAMPLED = 16  # of the sample that are candidates: a peaked law's best tokens are seldom in the sample
MOST_CANDIDATES = 4096  # of a row; a row with more is flat
TOGETHER = 163_840  # logits that share a pass: so many stay in a processor's cache
LARGEST_EXPONENT = 60  # e⁶⁰ times a vocabulary is within the range of fp32
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
        found.last_removed.update({first + row: last for row, last in cut.last_removed.items()})
        found.left.extend(first + row for row in cut.left)
        kept.append(KeptTokens(cut.kept.rows + first, cut.kept.tokens, cut.kept.values))
    if kept:
        columns = zip(*((k.rows, k.tokens, k.values) for k in kept), strict=True)
        found = CutRows(KeptTokens(*map(np.concatenate, columns)), found.last_removed, found.left)
    return found


def _cut(logits: Tensor, cuts: Cuts, masses: Tensor) -> CutRows:
    """As cut_rows, for rows that share every pass. masses: scratch memory."""
    best = logits.amax(-1)
    wanted = cuts.wanted & np.isfinite(best.numpy()) & (cuts.temperature >= LOWEST_TEMPERATURE)
    with np.errstate(all="ignore"):  # rows that are not wanted may hold anything
        law = _Masses.of(logits, best, cuts.temperature, masses)
        outside = (1 - cuts.top_p) * law.total
        smallest = (1 - MARGIN) * outside / logits.shape[1]
        if len(logits) == 1 and wanted[0] and logits.shape[1] > LONG_ROW:
            sample = _Sample.of(masses.numpy()[0], float(outside[0]))
            if sample.num_candidates > MOST_CANDIDATES:
                row = FlatRow(logits[0], float(best), float(cuts.temperature[0]), masses[0], float(law.best[0]), sample)
                last = row.last_removed(float(cuts.top_p[0]), float(cuts.floor[0]))
                return CutRows(NO_TOKENS, {}, [0]) if last is None else CutRows(NO_TOKENS, {0: last}, [])
            smallest = np.maximum(smallest, sample.smallest)
        held = masses.numpy() >= smallest.astype(masses.numpy().dtype)[:, None]
        if not wanted.all():
            held[~wanted] = False
        candidates = _Candidates.of(logits.numpy(), held)
        if candidates is None:
            return CutRows(NO_TOKENS, {}, list(range(len(logits))))
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
    def of(cls, logits: Numbers, held: Bools) -> "_Candidates | None":
        """None if they are too many."""
        count, vocab = logits.shape
        if np.count_nonzero(held) > min(MOST_CANDIDATES, vocab // 4) * count:
            return None
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
class _Sample:
    """What a sample of a row's masses tells. Guesses, which the cut that is found with them confirms."""

    num_candidates: int  # tokens to sort, if all tokens from the smallest candidate on are sorted
    smallest: float  # mass of the smallest candidate
    low: float  # the cut should lie above this mass …
    high: float  # … and not above this one

    @classmethod
    def of(cls, masses: Numbers, outside: float) -> "_Sample":
        """outside: the mass that top-p may remove."""
        sample = np.sort(masses[::SAMPLE_STRIDE])
        below = sample.cumsum(dtype=np.float64) * SAMPLE_STRIDE
        start, cut = (int(n) for n in np.searchsorted(below, (SAMPLED_SHARE * outside, outside)))
        start = min(start, len(sample) - FEWEST_SAMPLED)
        spread = isqrt(len(sample))  # two to three standard deviations of a position in the middle, more at the ends
        return cls(
            num_candidates=(len(sample) - start) * SAMPLE_STRIDE,
            smallest=float(sample[start]),
            low=float(sample[cut - spread]) if cut >= spread else -1.0,
            high=float(sample[cut + spread]) if cut + spread < len(sample) else inf,
        )


class FlatRow:
    """One row of logits [vocab] of which top-p keeps many tokens. Only tokens near the cut are sorted."""

    def __init__(
        self, logits: Tensor, best: float, temperature: float, masses: Tensor, best_mass: float, sample: _Sample
    ) -> None:
        self._logits = logits
        self._best = best
        self._temperature = temperature
        self._masses = masses
        self._best_mass = best_mass
        self._low, self._high = sample.low, sample.high

    def last_removed(self, top_p: float, floor: float) -> float | None:
        """The largest logit that is removed; None if the cut is not clear, or not where top-p makes it."""
        masses = self._masses.numpy()
        near = np.flatnonzero((masses > self._low) & (masses <= self._high))
        if not 0 < len(near) <= 2 * MOST_CANDIDATES:  # many tokens have the same mass
            return None
        total, above = _accurate_sum(masses), 0.0
        if self._high < inf:
            above = _accurate_sum(torch.threshold(self._masses, self._high, 0.0).numpy())
        of_near = float(masses[near].sum(dtype=np.float64))
        values = np.sort(self._logits.numpy()[near])[::-1]
        scores = (values.astype(np.float64) - self._best) / self._temperature
        exact = np.exp(scores) * self._best_mass
        rounding = self._rounding(above, total - above - of_near, total, top_p)
        total += float(exact.sum()) - of_near  # the error of these masses in fp32 is known
        law = np.array([total]) / self._best_mass
        lowest = float(_lowest_kept(scores[None], np.array([top_p]), law, rounding, above / self._best_mass)[0])
        at_cut = float(np.exp(lowest)) * self._best_mass
        if not self._low * (1 + MARGIN) < at_cut < self._high * (1 - MARGIN) or lowest < floor:
            return None
        lowest_kept = values[int((scores >= lowest).sum()) - 1]
        return float(np.nextafter(lowest_kept, np.array(-inf, values.dtype)))

    def _rounding(self, above: float, below: float, total: float, top_p: float) -> float:
        """Bound on the error of (mass above − top_p · mass) / mass.

        The mean of |s| over tokens of mass m, weighted by mass, is at most log(vocab / m), see _Masses. An error of a
        token's mass counts 1 − top_p times above the cut and top_p times below it, one of a sum always.
        """
        vocab, best = len(self._logits), self._best_mass
        rounding = vocab * ROUNDING_PER_TOKEN
        if self._logits.dtype == torch.float64:
            return rounding
        rounding += (above / total + top_p) * 3 * FP32_ROUNDING
        operations = (0 if best != 1 else 1) if self._temperature == 1 else 3
        for part, weight in ((above, 1 - top_p), (below, top_p)):
            if part > 0:
                size = abs(log(best)) + log(vocab * best / part)
                rounding += weight * part / total * (operations * size + EXP_ERROR) * FP32_ROUNDING
        return rounding


def _accurate_sum(masses: Numbers) -> float:
    """Groups of four are added in the masses' type, the rest in fp64: a whole sum in fp64 takes twice as long."""
    quarter = len(masses) // 4
    fours = np.add.reduce(masses[: 4 * quarter].reshape(4, -1), axis=0)
    return float(fours.sum(dtype=np.float64)) + float(masses[4 * quarter :].sum(dtype=np.float64))


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
            torch.exp(logits, out=scratch) if plain else torch.mul(logits, hot, out=scratch).exp_()
        else:
            operations, size, exponents = 3, log(vocab), np.zeros(count)
            torch.sub(logits, best[:, None], out=scratch).mul_(hot).exp_()
        whole = vocab // SUM_BLOCK * SUM_BLOCK
        blocks = scratch[:, :whole].reshape(count, -1, SUM_BLOCK).sum(-1)
        total = blocks.double().sum(-1) + scratch[:, whole:].double().sum(-1)
        rounding = (operations * size + SUM_BLOCK + EXP_ERROR) * FP32_ROUNDING
        if logits.dtype == torch.float64:
            rounding = vocab * ROUNDING_PER_TOKEN
        return cls(total.numpy(), np.exp(exponents), rounding)


def _lowest_kept(scores: Floats, top_p: Floats, total: Floats, rounding: float, above: float = 0.0) -> Floats:
    """The score [F] at which the masses, summed from the largest on, reach top_p of `total`; NaN if not clearly one.

    scores [F, n]: descending; rounding: bound on the error of a share; above: mass of all tokens above these.
    """
    rows = np.arange(len(scores))
    shares = (above + np.exp(scores).cumsum(1)) / total[:, None]
    last = (shares < top_p[:, None]).sum(1).clip(max=scores.shape[1] - 1)
    lowest = scores[rows, last]
    first = (scores > lowest[:, None]).sum(1)
    end = (scores >= lowest[:, None]).sum(1)
    without = np.where(first > 0, shares[rows, first - 1], above / total)
    clear = (without + rounding < top_p) & (top_p < shares[rows, end - 1] - rounding)
    return np.where(clear, lowest, np.nan)
