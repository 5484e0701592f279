"""What captured rounds may need follows from the configuration."""

import pytest

from cache.layout import Layout
from engine.config import EngineConfig
from engine.device.round_limits import RoundLimits, table_width


def limits(**settings: int) -> RoundLimits:
    config = EngineConfig("target", device="cuda", graphs=True, max_step_tokens=8192, **settings)  # type: ignore[arg-type]
    return RoundLimits.of(config, Layout(config.max_running, 131_072, 32))


def test_the_tables_of_64_long_sequences_fit() -> None:
    """The tables of the target and of a draft. An entry has 32 bits."""
    assert limits(max_running=64).numbers > 2 * 64 * 4096 / 2
    few = limits(max_running=8).numbers
    assert few > 2 * 8 * 4096 / 2
    assert few < limits(max_running=64).numbers / 7


def test_without_graphs_there_is_no_memory_for_numbers() -> None:
    assert RoundLimits.of(EngineConfig("target"), Layout(16, 4096)).numbers == 0


def test_numbers_of_sequences_are_rounded_up() -> None:
    assert [RoundLimits(20, 4).padded(n) for n in range(1, 21)] == [1, 2, 4, 4, *[8] * 4, *[16] * 8, *[20] * 4]
    assert RoundLimits(3, 4).padded(3) == 3


@pytest.mark.parametrize(("blocks", "width"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (4096, 4096)])
def test_widths_of_tables(blocks: int, width: int) -> None:
    assert table_width(blocks) == width
