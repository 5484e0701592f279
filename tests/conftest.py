"""Settings that every test needs: one torch thread, no network, no usage reports."""

import os

# Before any import of ray, transformers or tokenizers: they read these once.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

from tests.kv import KINDS, use

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kv", choices=KINDS, default="mapped", help="KV memory of the engines that tests load")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Proofs take many minutes and external tests need other programs, so they run only where they are asked for: by
    `make proofs` and `make test-external`, or any -m that names them."""
    asked = config.getoption("markexpr")
    unasked = [name for name in ("proofs", "external") if name not in asked]
    left_out = [item for item in items if any(map(item.get_closest_marker, unasked))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_configure(config: pytest.Config) -> None:
    use(config.getoption("--kv"))
