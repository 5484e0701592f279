"""Tests of draws against an exact law. Each states its false-alarm probability."""

from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Seq
from math import isclose, log
from typing import TypeVar

import torch

T = TypeVar("T", bound=Hashable)
Cell = tuple[float, tuple[int, ...]]  # expected, counted in each sample

MIN_EXPECTED = 5.0  # per cell, below which χ² is no good approximation


def chi2_sf(statistic: float, df: int) -> float:
    """P(χ²_df ≥ statistic): the regularised upper incomplete gamma function Q(df / 2, statistic / 2)."""
    half = torch.tensor([df / 2, max(statistic, 0.0) / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


def g_test(counts: Mapping[T, int], law: Mapping[T, float]) -> float:
    """p-value of independent draws under the law: refusing below a level is a false alarm with that probability.

    Cells expected less than 5 times are pooled. Williams' correction (Sokal and Rohlf, Biometry, section 17.2) brings
    the statistic's mean to that of χ². Raises AssertionError for an outcome that the law excludes (false alarm: never).
    """
    impossible = [(o, n) for o, n in counts.items() if n and not law.get(o)]
    assert not impossible, f"outcomes that the law excludes were drawn: {impossible[:5]}"
    assert isclose(sum(law.values()), 1.0, rel_tol=1e-9), "the law does not sum to 1"
    total = sum(counts.values())
    cells = _pooled([(total * p, (counts.get(o, 0),)) for o, p in law.items() if p])
    if len(cells) < 2:
        return 1.0  # everything is the same outcome
    g = 2 * sum(n * log(n / expected) for expected, (n,) in cells if n)
    df = len(cells) - 1
    correction = 1 + (sum(total / expected for expected, _ in cells) - 1) / (6 * total * df)
    return chi2_sf(g / correction, df)


def two_sample_g_test(left: Mapping[T, int], right: Mapping[T, int]) -> float:
    """p-value of both samples coming from one law, whatever that is; false alarms as in `g_test`.

    Outcomes expected less than 5 times in the smaller sample are pooled.
    """
    a, b = sum(left.values()), sum(right.values())
    pairs = [(left.get(o, 0), right.get(o, 0)) for o in {**left, **right}]
    cells = _pooled([(sum(pair) * min(a, b) / (a + b), pair) for pair in pairs])
    if len(cells) < 2:
        return 1.0
    g, inverse = 0.0, 0.0
    for _, pair in cells:
        inverse += (a + b) / sum(pair)
        g += 2 * sum(n * log(n * (a + b) / (sum(pair) * size)) for n, size in zip(pair, (a, b), strict=True) if n)
    df = len(cells) - 1
    correction = 1 + ((a + b) / a + (a + b) / b - 1) * (inverse - 1) / (6 * (a + b) * df)
    return chi2_sf(g / correction, df)


def uniformity(p_values: Seq[float], bins: int = 5) -> float:
    """p-value of p-values being uniform on (0, 1), by their counts in equal bins; false alarms as in `g_test`.

    Raises AssertionError for so few that the bins would be pooled.
    """
    assert len(p_values) >= MIN_EXPECTED * bins, f"{len(p_values)} p-values are too few for {bins} bins"
    counts = [0] * bins
    for p in p_values:
        counts[min(int(p * bins), bins - 1)] += 1
    return g_test(dict(enumerate(counts)), dict.fromkeys(range(bins), 1 / bins))


def benjamini_hochberg(p_values: Mapping[str, float], level: float) -> list[str]:
    """The hypotheses refused, smallest p first (Benjamini and Hochberg 1995).

    If all of them are true, any is refused with probability at most `level`; otherwise at most this share of the
    refused ones is expected to be true. Holds for independent tests.
    """
    ranked = sorted(p_values, key=p_values.__getitem__)
    passing = [n for n, name in enumerate(ranked, 1) if p_values[name] <= level * n / len(ranked)]
    return ranked[: max(passing, default=0)]


def _pooled(cells: list[Cell]) -> list[Cell]:
    """The cells, the smallest of them joined into one until each expects at least 5."""
    rest = sorted(cells, key=lambda cell: cell[0])  # never by what was counted
    expected, counts = rest.pop(0)
    while rest and (expected < MIN_EXPECTED or rest[0][0] < MIN_EXPECTED):
        more, others = rest.pop(0)
        expected, counts = expected + more, tuple(x + y for x, y in zip(counts, others, strict=True))
    return [(expected, counts), *rest]
