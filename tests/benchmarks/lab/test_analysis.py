"""The paper's formulas against their definitions, and acceptance against its own definition in exact fractions."""

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.lab.analysis import coupling_acceptance, expected_tokens, rejection_acceptance, walltime_factor

Law = NDArray[np.float64]
chances = st.floats(0.0, 1.0)
lengths = st.integers(0, 24)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("k", [0, 1, 5])
def test_expected_tokens_is_the_mean_over_all_outcomes(alpha: float, k: int) -> None:
    mean = 0.0
    for coins in product((True, False), repeat=k):
        chance = math.prod(alpha if coin else 1 - alpha for coin in coins)
        mean += chance * (1 + next((j for j, coin in enumerate(coins) if not coin), k))
    assert expected_tokens(alpha, k) == pytest.approx(mean)


@given(alpha=st.one_of(chances, st.floats(1 - 1e-9, 1.0)), k=lengths)
def test_expected_tokens_keeps_its_precision_up_to_alpha_1(alpha: float, k: int) -> None:
    exact = Fraction(alpha)
    closed = k + 1 if exact == 1 else (1 - exact ** (k + 1)) / (1 - exact)
    assert expected_tokens(alpha, k) == pytest.approx(float(closed), rel=1e-14)
    assert expected_tokens(1.0, k) == k + 1


def test_the_quotient_itself_would_not_do() -> None:
    """Negative control of the tolerance above: the textbook form loses half of its digits near α = 1."""
    alpha, k = 1 - 1e-9, 7
    quotient = (1 - alpha ** (k + 1)) / (1 - alpha)
    assert quotient != pytest.approx(expected_tokens(alpha, k), rel=1e-14)


@given(alpha=st.floats(0.0, 0.999), k=lengths, c=st.floats(0.0, 2.0))
def test_theorem_3_8_as_it_is_printed(alpha: float, k: int, c: float) -> None:
    rest = 1 - alpha ** (k + 1)
    assert walltime_factor(alpha, k, c) == pytest.approx(rest / ((1 - alpha) * (k * c + 1)), rel=1e-9)


def test_figures_that_the_paper_gives() -> None:
    """Table 1: (α, k, speed) for c = 0, to the digits printed there."""
    rows = [(0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 2, 2.44), (0.8, 5, 3.69), (0.9, 10, 6.86)]
    for alpha, k, speed in rows:
        assert walltime_factor(alpha, k, 0.0) == pytest.approx(speed, abs=0.006)


@given(alpha=chances, c=st.floats(0.0, 1.0), maximum=st.integers(1, 16))
def test_drafts_pay_if_and_only_if_alpha_exceeds_the_cost_ratio(alpha: float, c: float, maximum: int) -> None:
    """Corollary 3.9, with its bound on the speedup."""
    assume(alpha <= c or alpha > c + 1e-9)  # nearer than that, rounding decides
    k = max(range(maximum + 1), key=lambda length: walltime_factor(alpha, length, c))  # the lowest of equals
    if alpha <= c:
        assert k == 0
    else:
        assert k > 0
        assert walltime_factor(alpha, k, c) >= (1 + alpha) / (1 + c)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: expected_tokens(1.1, 2), "alpha"),
        (lambda: expected_tokens(math.nan, 2), "alpha"),
        (lambda: expected_tokens(0.5, -1), "k must"),
        (lambda: walltime_factor(0.5, 2, -0.1), "c must"),
        (lambda: walltime_factor(0.5, 2, math.nan), "c must"),
        (lambda: rejection_acceptance([0.5, 0.5], [1.0]), "shape"),
        (lambda: coupling_acceptance([[1.0]], [1.0]), "shape"),
    ],
)
def test_values_without_a_meaning_are_refused(call: Callable[[], object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        call()


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Law, Law]:
    """Two laws over up to 7 tokens: with zeros, shared or not; equal; near one-hot; and with vanishing chances."""
    weight = st.one_of(st.sampled_from([0.0, 1e-300, 1e-12, 1.0, 2.0]), st.floats(0.0, 1.0))
    size = draw(st.integers(1, 7))
    rows = st.lists(weight, min_size=size, max_size=size).filter(lambda row: sum(row) > 1e-290)
    p = draw(rows)
    q = draw(st.one_of(rows, st.just(p), st.permutations(p)))
    return np.array(p) / sum(p), np.array(q) / sum(q)


def exact_coupling(p: Law, q: Law) -> float:
    """The definition, in fractions: every one of the V² terms."""
    a, b = [Fraction(x) for x in p], [Fraction(x) for x in q]
    both = [x for x in range(len(a)) if a[x] and b[x]]
    return float(sum((1 / sum(max(a[y] / a[x], b[y] / b[x]) for y in range(len(a))) for x in both), Fraction(0)))


@given(pairs())
def test_coupling_acceptance_is_its_definition(laws: tuple[Law, Law]) -> None:
    p, q = laws
    assert coupling_acceptance(p, q) == pytest.approx(exact_coupling(p, q), rel=1e-12, abs=1e-290)
    assert coupling_acceptance(q, p) == pytest.approx(coupling_acceptance(p, q), rel=1e-12, abs=1e-290)


@given(pairs())
def test_coupling_acceptance_stays_within_its_bounds(laws: tuple[Law, Law]) -> None:
    p, q = laws
    distance = np.abs(p - q).sum() / 2
    assert rejection_acceptance(p, q) == pytest.approx(1 - distance, abs=1e-12)
    assert (1 - distance) / (1 + distance) - 1e-12 <= coupling_acceptance(p, q) <= 1 - distance + 1e-12


def test_known_acceptances() -> None:
    p, q = [0.6, 0.2, 0.2], [0.2, 0.2, 0.6]
    assert coupling_acceptance(p, q) == pytest.approx(0.4 + 1 / 7)
    assert rejection_acceptance(p, q) == pytest.approx(0.6)
    one_hot = [0.0, 1.0, 0.0]
    assert coupling_acceptance(p, one_hot) == rejection_acceptance(p, one_hot) == pytest.approx(0.2)
    assert coupling_acceptance(one_hot, one_hot) == rejection_acceptance(one_hot, one_hot) == 1.0
    assert coupling_acceptance(one_hot, [1.0, 0.0, 0.0]) == rejection_acceptance(one_hot, [1.0, 0.0, 0.0]) == 0.0


def test_rows_are_independent_whatever_their_leading_shape() -> None:
    random = np.random.default_rng(3)
    p, q = random.dirichlet(np.full(9, 0.3), (2, 2, 5))
    for measure in (coupling_acceptance, rejection_acceptance):
        together = measure(p, q)
        assert together.shape == (2, 5)
        assert together[1, 3] == measure(p[1, 3], q[1, 3])


def test_coupling_acceptance_of_a_large_vocabulary() -> None:
    """Against the V² terms in floats, rows peaked as a language model's are."""
    random = np.random.default_rng(4)
    logits = random.normal(0, 4, 1500)
    p, q = (np.exp(x) / np.exp(x).sum() for x in (logits, logits + random.normal(0, 1, logits.size)))
    naive = (1 / np.maximum(p[:, None] / p, q[:, None] / q).sum(0)).sum()
    assert coupling_acceptance(p, q) == pytest.approx(naive, rel=1e-10)


@pytest.mark.parametrize("concentration", [0.2, 1.0])
def test_coupling_acceptance_is_how_often_shared_noise_agrees(concentration: float) -> None:
    """200,000 draws with a fixed seed; five standard errors are missed by one seed in 1.7 million."""
    random, draws = np.random.default_rng(5), 200_000
    p, q = random.dirichlet(np.full(6, concentration), 2)
    clocks = random.exponential(size=(draws, 6))
    agreed = ((clocks / p).argmin(-1) == (clocks / q).argmin(-1)).mean()
    expected = float(coupling_acceptance(p, q))
    error = math.sqrt(expected * (1 - expected) / draws)
    assert abs(agreed - expected) < 5 * error
    assert abs(agreed - float(rejection_acceptance(p, q))) > 5 * error  # the other law is told apart
