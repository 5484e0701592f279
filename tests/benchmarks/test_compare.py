"""Ratios and their intervals on synthetic turns whose truth is known."""

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks import compare
from benchmarks.compare import Estimate, Interval
from policies.observation import Floats

FOLDS = [0, 1] * 20


def noisy(speed: float, seed: int, turns: int = len(FOLDS), noise: float = 0.05) -> list[float]:
    return (speed * np.exp(np.random.default_rng(seed).normal(0, noise, turns))).tolist()


def test_a_resample_draws_within_each_stratum() -> None:
    drawn = compare.resample(FOLDS, seed=3)
    assert drawn.shape == (compare.RESAMPLES, len(FOLDS))
    assert np.array_equal(drawn % 2, np.broadcast_to(FOLDS, drawn.shape))
    assert len(np.unique(drawn[0])) < len(FOLDS)  # with replacement
    assert len(np.unique(drawn)) == len(FOLDS)


def test_the_seed_alone_decides_the_interval() -> None:
    new, old = noisy(1.2, 1), noisy(1.0, 2)
    first = compare.ratio(new, old, FOLDS).interval
    assert compare.ratio(new, old, FOLDS).interval == first
    assert compare.ratio(new, old, FOLDS, seed=1).interval != first


def test_ratios_are_taken_within_turns() -> None:
    """A machine that is ten times as slow in half of the turns changes nothing."""
    slow = [1.0 if turn < 20 else 0.1 for turn in range(40)]
    got = compare.ratio([1.5 * s for s in slow], slow, FOLDS).interval
    assert got == pytest.approx((1.5, 1.5, 1.5))


def test_turns_that_cannot_be_paired_are_refused() -> None:
    with pytest.raises(ValueError, match="2, 1 and 2 turns"):
        compare.ratio([1.0, 1.0], [1.0], [0, 1])


def coverage(estimate: Callable[[int], Interval], truth: float, trials: int = 200) -> float:
    found = [estimate(seed) for seed in range(trials)]
    return sum(low <= truth <= high for _, low, high in found) / trials


def test_an_interval_covers_the_truth_nineteen_times_of_twenty() -> None:
    """200 trials at 95 % have a standard deviation of 1.5 points: below .90 with a chance of 1 in 500. An interval of
    half the width covers some 70 %."""

    def ratio(seed: int) -> Interval:
        return compare.ratio(noisy(1.1, seed), noisy(1.0, 1000 + seed), FOLDS).interval

    def half_as_wide(seed: int) -> Interval:
        value, low, high = ratio(seed)
        return Interval(value, (value + low) / 2, (value + high) / 2)

    assert coverage(ratio, 1.1) > 0.90
    assert coverage(half_as_wide, 1.1) < 0.85


def rivals(seed: int, count: int = 8, noise: float = 0.1) -> dict[str, list[float]]:
    """Variants that are all equally fast."""
    return {str(k): noisy(1.0, 100 * seed + k, noise=noise) for k in range(count)}


def test_the_best_of_equals_has_no_lead() -> None:
    """What is as fast as every rival measures 1.0 against the best of them, on average over many trials; against the
    one that was luckiest in the same turns it loses."""
    fair, unfair = [], []
    for seed in range(60):
        others, new = rivals(seed), noisy(1.0, 90_000 + seed, noise=0.1)
        fair.append(compare.ratio_to_best(new, others, FOLDS).estimate.value)
        best = max(others.values(), key=lambda own, first=others["0"]: np.median(np.array(own) / first))  # type: ignore[misc]
        unfair.append(compare.ratio(new, best, FOLDS).value)
    error = np.std(fair) / len(fair) ** 0.5
    assert abs(np.mean(fair) - 1) < 4 * error
    assert np.mean(unfair) < 1 - 4 * error


def test_each_fold_is_compared_with_the_choice_of_the_other() -> None:
    """Even turns are fast with a, odd ones with b: the choice of the other fold is the wrong one in each."""
    a, b = [2.0, 1.0] * 20, [1.0, 2.0] * 20
    against = compare.ratio_to_best([2.0] * 40, {"a": a, "b": b}, FOLDS)
    assert against.best == ("b", "a")
    assert against.estimate.interval == (2.0, 2.0, 2.0)


def test_the_choice_is_part_of_what_is_resampled() -> None:
    """Two rivals of equal median and unlike turns: a fixed choice would give an interval of no width."""
    a, b = [1.0] * 40, ([0.5] * 2 + [1.5] * 2) * 10
    low, high = compare.ratio_to_best([1.0] * 40, {"a": a, "b": b}, FOLDS).estimate.interval[1:]
    assert low < high


def test_one_fold_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="folds must hold 0 and 1"):
        compare.ratio_to_best([1.0], {"a": [1.0]}, [0])
    with pytest.raises(ValueError, match="folds must hold 0 and 1"):
        compare.totals_to_best(np.ones((1, 1)), {"a": np.ones((1, 1))}, [0])


def test_geometric_mean() -> None:
    cells = [Estimate(2.0, np.array([2.0, 4.0])), Estimate(0.5, np.array([0.5, 1.0]))]
    mean = compare.geometric_mean(cells)
    assert mean.value == pytest.approx(1.0)
    assert mean.draws == pytest.approx([1.0, 2.0])


def seconds(speed: float, seed: int, repeats: int = 10) -> Floats:
    """[repeats, stages] of stages that differ by a factor of nine."""
    noise = np.exp(np.random.default_rng(seed).normal(0, 0.05, (repeats, 9)))
    return np.arange(1, 10) / speed * noise


def test_totals_are_of_time_and_not_of_ratios() -> None:
    """Twice as fast in a stage of 1 s, as fast in one of 9 s: 10 over 9.5, not the mean of the ratios."""
    old, new = np.array([[1.0, 9.0]] * 4), np.array([[0.5, 9.0]] * 4)
    assert compare.ratio_of_totals(new, old, [0, 1, 0, 1]).interval == pytest.approx((10 / 9.5,) * 3)


def test_an_interval_of_totals_covers_the_truth() -> None:
    folds = [0, 1] * 5

    def total(seed: int) -> Interval:
        return compare.ratio_of_totals(seconds(1.1, seed), seconds(1.0, 1000 + seed), folds).interval

    assert coverage(total, 1.1, trials=100) > 0.85  # the percentile bootstrap of 10 repeats is a little narrow


def test_totals_are_compared_with_the_choice_of_the_other_repeats() -> None:
    even, odd = np.array([[1.0], [4.0]] * 2), np.array([[4.0], [1.0]] * 2)
    against = compare.totals_to_best(np.full((4, 1), 2.0), {"even": even, "odd": odd}, [0, 1, 0, 1])
    assert against.best == ("odd", "even")
    assert against.estimate.interval == (2.0, 2.0, 2.0)
