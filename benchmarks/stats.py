"""The arithmetic of the benchmarks: acceptance, predicted speedup, repetition, agreement, tables."""

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise

from benchmarks.compare import Interval
from benchmarks.lab.analysis import expected_tokens
from engine.types import StepStats

Rows = list[dict[str, object]]  # of a table: column → value

REPETITION_LIMIT = 0.10  # share of repeated 8-grams from which on α says more about loops than about text


def acceptance_rate(drafted: Sequence[int], accepted: Sequence[int]) -> float | None:
    """α: accepted drafts over reached drafts. A draft is reached if all drafts before it are accepted.

    The maximum-likelihood estimate when each reached draft is accepted with the same probability. None: no drafts.
    """
    reached = sum(min(a + 1, d) for d, a in zip(drafted, accepted, strict=True))
    return sum(accepted) / reached if reached else None


def predicted_speedup(alpha: float, k: int, plain_s: float, draft_step_s: float, verify_s: float) -> float:
    """Speedup over plain decoding if a round costs only its forwards; all times in the same unit."""
    return expected_tokens(alpha, k) * plain_s / (k * draft_step_s + verify_s)


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median over repeats of the ratio within each repeat, so that a slow repeat cancels out."""
    return statistics.median(n / d for n, d in zip(numerators, denominators, strict=True))


def decode_steps(steps: Sequence[StepStats]) -> list[StepStats]:
    """The steps of pure decoding at the fullest batch.

    Left out: steps with a prompt in them, the step right after one (the draft model reads the prompt there), and the
    start and tail where fewer sequences run. Raises ValueError when nothing is left.
    """
    settled = [now for before, now in pairwise(steps) if not before.prefill_tokens and not now.prefill_tokens]
    if not settled:
        raise ValueError("no step is free of prefill: raise --max-tokens")
    full = max(step.sequences for step in settled)
    return [step for step in settled if step.sequences == full]


def repeated_ngram_share(outputs: Iterable[Sequence[int]], n: int = 8) -> float:
    """Share of n-grams that occurred earlier in the same output, pooled over outputs; 0.0 without any n-gram."""
    total = distinct = 0
    for tokens in outputs:
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        total += len(grams)
        distinct += len(set(grams))
    return (total - distinct) / total if total else 0.0


def first_divergence(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first difference, a missing token included; None when the sequences are equal."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return None if len(left) == len(right) else min(len(left), len(right))


def format_cell(value: object) -> str:
    """Three significant digits for floats, value [low, high] for intervals, "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, Interval):
        return f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}]"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def table(rows: Sequence[dict[str, object]]) -> str:
    """Rows with the same keys as right-aligned plain text, the keys as the head."""
    if not rows:
        return ""
    cells = [list(rows[0])] + [[format_cell(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in cells)
