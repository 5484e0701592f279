"""Settings that every test needs: one torch thread, no network, no usage reports, a cache folder of its own."""

import gc
import os
import tempfile
from collections.abc import Iterator
from typing import Any

# Before any import of ray, transformers or tokenizers: they read these once.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TRITON_INTERPRET", "1")  # transformers imports triton; 0 compiles kernels, for a GPU
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit the folder
    CACHE = tempfile.TemporaryDirectory(prefix="foretoken-tests-", ignore_cleanup_errors=True)
    os.environ["XDG_CACHE_HOME"] = CACHE.name

import pytest
import torch

from engine import engine
from engine.profiling import round_profile
from policies.observation import Timing
from tests.examples import register_profiles
from tests.kv import KINDS, use
from tests.workers import RAY_GROUP, worker_group
from tests.workers import pytest_ignore_collect as pytest_ignore_collect
from tests.workers import pytest_xdist_auto_num_workers as pytest_xdist_auto_num_workers
from tests.workers import pytest_xdist_make_scheduler as pytest_xdist_make_scheduler

gc.disable()  # until all tests are imported: what is imported stays
torch.set_num_threads(1)
register_profiles()


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
    if hasattr(config, "workerinput"):
        _order(items)


def pytest_collection_finish() -> None:
    """Let full collections pass over what was imported, which stays for good. Replicas do the same."""
    gc.collect()
    gc.freeze()
    gc.enable()


def _order(items: list[pytest.Item]) -> None:
    """Let groups that take long come first, so that the workers end at about the same time."""
    groups = {item: worker_group(item.nodeid) for item in items}
    slow = {group for item, group in groups.items() if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (groups[item] != RAY_GROUP, groups[item] not in slow))


def pytest_configure(config: pytest.Config) -> None:
    use(config.getoption("--kv"))


@pytest.fixture(scope="session", autouse=True)
def _one_profiled_round() -> Iterator[float]:
    """An engine that starts measures one kind of round, once, because most tests fix k. Yields the seconds that it may
    take for all kinds while it serves."""
    usual, profile = engine.PROFILE_S, round_profile.profile

    def briefly(*args: Any, **options: Any) -> list[Timing]:
        with pytest.MonkeyPatch.context() as patch:
            if not engine.PROFILE_S:
                patch.setattr(round_profile, "SWEEPS", 1)
                patch.setattr(round_profile, "RUNS", 1)
                patch.setattr(round_profile, "MOST_RUNS", 1)
            return profile(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "PROFILE_S", 0.0)
        patch.setattr(engine, "profile", briefly)
        yield usual


@pytest.fixture
def full_profile(_one_profiled_round: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that starts measures all kinds of rounds."""
    monkeypatch.setattr(engine, "PROFILE_S", _one_profiled_round)
