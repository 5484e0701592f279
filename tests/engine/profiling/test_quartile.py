"""The lower quartile of repeated measurements."""

import pytest

from engine.profiling.quartile import lower_quartile


@pytest.mark.parametrize("disturbed", [[3.0, 8.0, 2.5, 9.0], [9.0, 8.0, 7.0, 6.0]])
def test_disturbed_runs_do_not_move_it(disturbed: list[float]) -> None:
    assert lower_quartile([*disturbed, 2.0, 1.0]) == 2.0


@pytest.mark.parametrize("count", range(1, 14))
def test_at_least_a_quarter_of_the_values_do_not_exceed_it_and_fewer_lie_below(count: int) -> None:
    values = [float(i) for i in reversed(range(count))]
    quartile = lower_quartile(values)
    assert sum(value <= quartile for value in values) >= count / 4 > sum(value < quartile for value in values)
