"""The gain that speculation can bring, by Leviathan, Kalman and Matias 2023 (arXiv 2211.17192), and for `match`.

α is the chance that a draft whose position was reached is accepted. The formulas take it to be the same and independent
at each position. Real text differs: easy passages accept in runs. k is the number of drafts per round (the paper's γ).
Every factor is a ratio to plain decoding, without a unit. Standard library and numpy only.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def expected_tokens(alpha: float, k: int) -> float:
    """Mean tokens that a round emits for one sequence: (1 − α^(k+1)) / (1 − α), equation 1.

    Computed as 1 + α + … + αᵏ: exact at α = 1, and without the quotient's cancellation near it. Raises ValueError
    unless 0 ≤ α ≤ 1 and k ≥ 0.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must lie between 0 and 1, not {alpha}")
    if k < 0:
        raise ValueError(f"k must not be negative, not {k}")
    return float(sum(alpha**j for j in range(k + 1)))


def walltime_factor(alpha: float, k: int, c: float) -> float:
    """Speedup over plain decoding: (1 − α^(k+1)) / ((1 − α)(kc + 1)), Theorem 3.8.

    c is the draft cost ratio: seconds of one draft step over seconds of one pass of the target. The theorem lets the
    pass over k + 1 tokens take as long as that over one. Raises ValueError as expected_tokens, and for a negative c.
    """
    return expected_tokens(alpha, k) / (1 + k * _ratio("c", c))


def rejection_acceptance(p: ArrayLike, q: ArrayLike) -> NDArray[np.float64]:
    """Chance that verifier `rejection` accepts a draft drawn from q: Σ min(p, q) = 1 − TV (§3.2, §3.3, Theorem 3.5).

    p, q [..., vocab] are laws; the result [...] is the paper's β, whose mean over positions is α. No other way of
    drawing draft and target together accepts more often. Raises ValueError when the shapes differ.

    Example: p (.5, .5, 0, 0), q (.25, .25, .5, 0): 0.5.
    """
    p, q = _laws(p, q)
    return np.minimum(p, q).sum(-1)


def coupling_acceptance(p: ArrayLike, q: ArrayLike) -> NDArray[np.float64]:
    """Chance that verifier `match` accepts: that argmax(log p + g) = argmax(log q + g) for the same Gumbel noise g.

    Σ 1 / Σ_y max(p_y / p_x, q_y / q_x) over the x that both laws allow (Daliri, Musco, Suresh 2024, arXiv 2408.07978).
    It lies between (1 − TV) / (1 + TV) and 1 − TV. p, q [..., vocab] → [...]; raises ValueError when the shapes differ.

    With the tokens in order of p / q, the inner maximum is p_y / p_x for y at and after x, and q_y / q_x before it: two
    running sums replace the V² terms. Near-ties that rounding puts in the wrong order have near-equal terms.

    Example: p (.6, .2, .2), q (.2, .2, .6): 1/5 + 1/7 + 1/5 ≈ .543, where rejection accepts .6.
    """
    p, q = _laws(p, q)
    ratio = np.full(p.shape, np.inf)
    with np.errstate(over="ignore"):
        np.divide(p, q, out=ratio, where=q > 0)
    order = np.argsort(ratio, axis=-1)
    p, q = np.take_along_axis(p, order, -1), np.take_along_axis(q, order, -1)
    at_and_after = np.cumsum(p[..., ::-1], axis=-1)[..., ::-1]
    before = np.cumsum(q, axis=-1) - q
    both = (p > 0) & (q > 0)
    with np.errstate(over="ignore"):  # an infinite sum is a token with no chance
        inner = np.divide(at_and_after, p, out=np.full(p.shape, np.inf), where=both)
        inner += np.divide(before, q, out=np.zeros(p.shape), where=both)
    return (1 / inner).sum(-1)


def _ratio(name: str, value: float) -> float:
    if not value >= 0.0:
        raise ValueError(f"{name} must not be negative, not {value}")
    return value


def _laws(p: ArrayLike, q: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
    if p.shape != q.shape:
        raise ValueError(f"the laws differ in shape: {p.shape} and {q.shape}")
    return p, q
