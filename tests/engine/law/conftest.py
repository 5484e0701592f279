"""Proofs take about an hour, so they run only where they are asked for: `make proofs`, or any -m that names them."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "proofs" in config.getoption("markexpr"):
        return
    left_out = [item for item in items if item.get_closest_marker("proofs")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
