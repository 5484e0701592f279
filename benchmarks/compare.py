"""Ratios of paired measurements with bootstrap intervals, and the comparison with the best of several.

In a turn every variant does the same work, one right after the other. Ratios are taken within turns, so that whatever
slows a whole turn down cancels out. Turns are resampled with replacement, even and odd repeats separately. Intervals
are the middle 95 % of a statistic over the resamples (percentile bootstrap, Efron 1979).

If the best of several variants is chosen on the turns that it is compared on, a part of its lead is luck. So the turns
of even repeats choose the best variant for odd repeats, and the other way round; each resample chooses again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from policies.observation import Floats, Ints

RESAMPLES = 2000
LEVEL = 0.95


class Interval(NamedTuple):
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Estimate:
    """A statistic and its values on the resamples [RESAMPLES]."""

    value: float
    draws: Floats

    @property
    def interval(self) -> Interval:
        low, high = np.quantile(self.draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return Interval(self.value, float(low), float(high))


def resample(strata: Sequence[int], seed: int = 0, count: int = RESAMPLES) -> Ints:
    """[count, n] indices of drawn turns: column i holds turns of the stratum of turn i, each equally likely."""
    rng = np.random.default_rng(seed)
    strata_array = np.array(strata)
    drawn = np.empty((count, len(strata_array)), np.int64)
    for stratum in np.unique(strata_array):
        members = np.flatnonzero(strata_array == stratum)
        drawn[:, members] = rng.choice(members, (count, len(members)))
    return drawn


def _with_itself(drawn: Ints) -> Ints:
    """The original turns as row 0, then the resamples."""
    return np.concatenate([np.arange(drawn.shape[1])[None], drawn])


def _estimate(values: Floats) -> Estimate:
    return Estimate(float(values[0]), values[1:])


def ratio(new: Sequence[float], old: Sequence[float], folds: Sequence[int], seed: int = 0) -> Estimate:
    """Median over turns of new / old."""
    if not len(new) == len(old) == len(folds):
        raise ValueError(f"{len(new)}, {len(old)} and {len(folds)} turns cannot be paired")
    ratios = np.array(new) / np.array(old)
    return _estimate(np.median(ratios[_with_itself(resample(folds, seed))], axis=1))


class AgainstBest(NamedTuple):
    estimate: Estimate
    best: tuple[str, str]  # the rival of even and of odd turns, each chosen on the others


def ratio_to_best(
    new: Sequence[float], rivals: Mapping[str, Sequence[float]], folds: Sequence[int], seed: int = 0
) -> AgainstBest:
    """Median over turns of new / rival, with the best rival of the other fold (0 or 1).

    The best rival has the highest median ratio to the first rival. Raises ValueError unless both folds have turns.
    """
    if set(folds) != {0, 1}:
        raise ValueError("the best is chosen on other turns than those compared: folds must hold 0 and 1")
    drawn = _with_itself(resample(folds, seed))
    speeds = np.array(list(rivals.values()))  # [rivals, turns]
    relative = speeds / speeds[:1]
    ratios = np.array(new) / speeds
    fold_of_turn = np.array(folds)
    of_folds: list[Floats] = []
    names: list[str] = []
    for fold in (0, 1):
        other_turns, turns = drawn[:, fold_of_turn != fold], drawn[:, fold_of_turn == fold]
        best = np.median(relative[:, other_turns], axis=2).argmax(axis=0)  # [resamples]
        of_folds.append(ratios[best[:, None], turns])
        names.append(list(rivals)[best[0]])
    return AgainstBest(_estimate(np.median(np.concatenate(of_folds, axis=1), axis=1)), (names[0], names[1]))


def geometric_mean(estimates: Sequence[Estimate]) -> Estimate:
    """Over cells with the same number of turns. A resample has the same turns in every cell."""
    value = float(np.exp(np.mean([np.log(e.value) for e in estimates])))
    return Estimate(value, np.exp(np.mean([np.log(e.draws) for e in estimates], axis=0)))


def ratio_of_totals(new: Floats, old: Floats, folds: Sequence[int], seed: int = 0) -> Estimate:
    """Total of `old` over total of `new`, seconds [repeats, stages]: how many times as fast `new` is. Repeats are
    resampled within each stage."""
    totals = [_totals(seconds[None], folds, seed)[0].sum(axis=1) for seconds in (new, old)]
    return _estimate(totals[1] / totals[0])


def totals_to_best(new: Floats, rivals: Mapping[str, Floats], folds: Sequence[int], seed: int = 0) -> AgainstBest:
    """As ratio_of_totals, against the rival with the smallest total in the other fold (0 or 1) of the repeats."""
    if set(folds) != {0, 1}:
        raise ValueError("the best is chosen on other repeats than those compared: folds must hold 0 and 1")
    new_totals = _totals(new[None], folds, seed)[0]  # [resamples, folds]
    rival_totals = _totals(np.array(list(rivals.values())), folds, seed)
    best = rival_totals.argmin(axis=0)[:, ::-1]  # [resamples, folds]: the choice of the other fold
    compared = np.take_along_axis(rival_totals, best[None], axis=0)[0].sum(axis=1)
    even, odd = (list(rivals)[i] for i in best[0])
    return AgainstBest(_estimate(compared / new_totals.sum(axis=1)), (even, odd))


def _totals(seconds: Floats, folds: Sequence[int], seed: int) -> Floats:
    """Sums over stages, [variants, 1 + RESAMPLES, folds], of seconds [variants, repeats, stages]. Every variant has the
    same resamples."""
    fold_of_turn = np.array(folds)
    totals = np.zeros((len(seconds), 1 + RESAMPLES, 2))
    for stage in range(seconds.shape[2]):
        drawn = _with_itself(resample(folds, seed + stage))
        values = seconds[:, :, stage][:, drawn]  # [variants, 1 + RESAMPLES, repeats]
        for fold in (0, 1):
            totals[:, :, fold] += values[:, :, fold_of_turn == fold].sum(axis=2)
    return totals
