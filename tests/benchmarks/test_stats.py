"""The arithmetic behind every reported figure, on data whose answer is known."""

from random import Random

import pytest

from benchmarks import stats
from engine.types import StepStats


def step(sequences: int, prefill: int = 0, number: int = 0) -> StepStats:
    return StepStats(
        step=number, sequences=sequences, prefill_tokens=prefill, drafted=0, accepted=0, emitted=sequences,
        draft_us=0, draft_steps=0, draft_tokens=0, score_us=10, target_forward_us=9, draft_forward_us=0, step_us=12,
        running=sequences, waiting=0,
    )  # fmt: skip


def test_acceptance_counts_only_reached_drafts() -> None:
    # 4 of 4; 1 of 4, so that the second was reached and rejected; 0 of 2; a plain round
    assert stats.acceptance_rate([4, 4, 2, 0], [4, 1, 0, 0]) == 5 / (4 + 2 + 1)
    assert stats.acceptance_rate([0, 0], [0, 0]) is None


def test_acceptance_recovers_the_law_that_the_plain_ratio_misses() -> None:
    """20,000 rounds at α = 0.7: the standard error is 0.0024, so 0.02 is missed less than once in 10¹⁵ seeds."""
    random, k, alpha = Random(0), 6, 0.7
    accepted = [next((j for j in range(k) if random.random() >= alpha), k) for _ in range(20_000)]
    drafted = [k] * len(accepted)
    assert stats.acceptance_rate(drafted, accepted) == pytest.approx(alpha, abs=0.02)
    assert sum(accepted) / sum(drafted) < alpha - 0.2


def test_predicted_speedup() -> None:
    assert stats.predicted_speedup(0.5, 0, plain_s=9.0, draft_step_s=1.0, verify_s=9.0) == 1.0
    assert stats.predicted_speedup(1.0, 4, plain_s=10.0, draft_step_s=1.0, verify_s=16.0) == pytest.approx(2.5)
    assert stats.predicted_speedup(0.0, 4, plain_s=10.0, draft_step_s=1.0, verify_s=16.0) == pytest.approx(0.5)


def test_ratios_are_taken_within_repeats() -> None:
    """A disturbed repeat must not move the ratio, as it moves the ratio of medians (here 3 / 10)."""
    assert stats.median_ratio([20.0, 2.0, 3.0], [10.0, 1.0, 100.0]) == 2.0
    with pytest.raises(ValueError, match="longer"):
        stats.median_ratio([1.0], [1.0, 2.0])


def test_decode_steps_leave_out_prompts_what_follows_them_and_the_tail() -> None:
    steps = [step(2, prefill=64), step(2), step(2, number=1), step(2, prefill=3), step(2), step(2, number=2), step(1)]
    assert [s.step for s in stats.decode_steps(steps)] == [1, 2]
    with pytest.raises(ValueError, match="free of prefill"):
        stats.decode_steps(steps[:2])


def test_repetition_is_counted_within_outputs() -> None:
    assert stats.repeated_ngram_share([range(20), range(20)]) == 0.0
    assert stats.repeated_ngram_share([[7] * 17]) == 0.9  # 10 n-grams, one distinct
    assert stats.repeated_ngram_share([[7] * 17, range(17)]) == 0.45
    assert stats.repeated_ngram_share([[7] * 7]) == 0.0  # no 8-gram at all


def test_first_divergence() -> None:
    assert stats.first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert stats.first_divergence([1, 2, 3], [1, 9, 3]) == 1
    assert stats.first_divergence([1, 2, 3], [1, 2]) == 2


def test_table_aligns_and_marks_the_unknown() -> None:
    text = stats.table([{"spec": "off", "tok/s": 1234.5, "α": None}, {"spec": "4", "tok/s": 0.98765, "α": 1}])
    assert text.splitlines() == ["spec  tok/s  α", " off   1234  -", "   4  0.988  1"]
    assert stats.table([]) == ""
