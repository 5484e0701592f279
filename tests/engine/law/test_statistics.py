"""The statistics that judge the engine, on data whose answer is known. All random data are seeded."""

import numpy as np
import pytest

from tests.engine.law.statistics import benjamini_hochberg, chi2_sf, g_test, two_sample_g_test, uniformity

LAW = dict(enumerate(np.random.default_rng(0).dirichlet(np.full(40, 0.7)).tolist()))


def samples(law: dict[int, float], draws: int, count: int, seed: int) -> list[dict[int, int]]:
    drawn = np.random.default_rng(seed).multinomial(draws, list(law.values()), size=count)
    return [dict(zip(law, row, strict=True)) for row in drawn.tolist()]


@pytest.mark.parametrize(
    ("statistic", "df", "p"),
    [
        (3.841458821, 1, 0.05),
        (18.307038053, 10, 0.05),
        (149.449252779, 100, 0.001),
        (0.0, 7, 1.0),
        (2 * 9.210340372, 2, 1e-4),  # e^(−x / 2)
    ],
)
def test_quantiles_of_chi_squared(statistic: float, df: int, p: float) -> None:
    assert chi2_sf(statistic, df) == pytest.approx(p, rel=1e-6)


def test_a_g_statistic_by_hand() -> None:
    """60, 40 against ½, ½: G = 2·(60·ln 1.2 + 40·ln 0.8) = 4.0271, Williams' q = 1 + (2 + 2 − 1) / 600."""
    assert g_test({"a": 60, "b": 40}, {"a": 0.5, "b": 0.5}) == pytest.approx(chi2_sf(4.027102 / 1.005, 1), rel=1e-5)


def test_p_values_of_true_laws_are_uniform() -> None:
    """400 samples, many cells of which expect fewer than 5: a false alarm at 1e-3 each."""
    assert uniformity([g_test(s, LAW) for s in samples(LAW, 300, 400, seed=1)], bins=20) > 1e-3
    left, right = samples(LAW, 300, 400, seed=2), samples(LAW, 900, 400, seed=3)
    found = [two_sample_g_test(a, b) for a, b in zip(left, right, strict=True)]
    assert uniformity(found, bins=20) > 1e-3


def test_a_law_that_is_off_is_refused() -> None:
    weights = {o: p * (1.1 if o % 2 else 0.9) for o, p in LAW.items()}
    total = sum(weights.values())
    other = {o: p / total for o, p in weights.items()}
    (sample,) = samples(other, 20_000, 1, seed=7)
    (reference,) = samples(LAW, 20_000, 1, seed=5)
    assert g_test(sample, LAW) < 1e-6
    assert g_test(sample, other) > 1e-3
    assert two_sample_g_test(sample, reference) < 1e-6


def test_draws_counted_twice_are_refused() -> None:
    """Right frequencies, but half as many independent draws as claimed."""
    (sample,) = samples(LAW, 5000, 1, seed=6)
    assert g_test(sample, LAW) > 1e-3
    assert g_test({o: 2 * n for o, n in sample.items()}, LAW) < 1e-3


def test_an_impossible_outcome_is_refused_whatever_its_share() -> None:
    law = {"a": 1.0, "b": 0.0}
    assert g_test({"a": 10}, law) == 1.0
    for outcome in ("b", "c"):
        with pytest.raises(AssertionError, match="excludes"):
            g_test({"a": 10**9, outcome: 1}, law)


def test_what_does_not_sum_to_one_is_no_law() -> None:
    with pytest.raises(AssertionError, match="sum to 1"):
        g_test({"a": 10}, {"a": 0.6, "b": 0.39})


def test_small_cells_are_pooled() -> None:
    """a is expected 90 times; b, c and d less than 5 times each are one cell that expects 10."""
    law = {"a": 0.9, "b": 0.04, "c": 0.04, "d": 0.02}
    merged = g_test({"a": 80, "b": 20}, {"a": 0.9, "b": 0.1})
    assert g_test({"a": 80, "b": 1, "c": 0, "d": 19}, law) == pytest.approx(merged)
    assert merged < 0.01


def test_a_pool_that_stays_small_takes_the_next_cell() -> None:
    law = {"a": 0.5, "b": 0.49, "c": 0.01}
    merged = g_test({"a": 60, "b": 40}, {"a": 0.5, "b": 0.5})
    assert g_test({"a": 60, "b": 38, "c": 2}, law) == pytest.approx(merged)


def test_benjamini_and_hochbergs_own_example() -> None:
    """Their section 3.2: of 15 tests at 0.05 the first four are refused (Bonferroni refuses three)."""
    values = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.324, 0.4262, 0.5719, 0.6528]
    named = {str(n): p for n, p in enumerate([*values, 0.759, 1.0])}
    assert benjamini_hochberg(named, 0.05) == ["0", "1", "2", "3"]
    assert benjamini_hochberg({"a": 0.02, "b": 0.9}, 0.03) == []
    assert benjamini_hochberg({"a": 0.029, "b": 0.028}, 0.03) == ["b", "a"]  # the larger one carries the smaller


def test_uniformity_refuses_what_is_crowded() -> None:
    even = [(n + 0.5) / 100 for n in range(100)]
    assert uniformity(even) == pytest.approx(1.0)
    assert uniformity([p**2 for p in even]) < 1e-3  # too many small ones
    assert uniformity([0.5 + p / 2 for p in even]) < 1e-3  # too few: draws that fit too well
    assert uniformity([*even, 0.0, 1.0]) > 0.5
    with pytest.raises(AssertionError, match="too few"):
        uniformity([0.0] * 24)
