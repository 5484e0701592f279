"""How pytest-xdist's workers share the tests. conftest.py hands these hooks to pytest."""

import os
from typing import Any

import pytest

RAY_TESTS = ("tests/serving/", "tests/external/test_prometheus.py", "tests/external/clients/")
RAY_GROUP = RAY_TESTS[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """For -n auto: a worker for each core that this process may use, and one for the tests that start Ray.

    The tests that start Ray wait most of the time. Each worker takes half a gigabyte, so there are at most eight.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores + 1, 8)


def worker_group(nodeid: str) -> str:
    """The group of a test, which one worker runs as a whole.

    A module is a group, because its tests share fixtures. All tests that start Ray are one group, because two clusters
    would take the cores from the other workers.
    """
    module = nodeid.partition("::")[0]
    return RAY_GROUP if module.startswith(RAY_TESTS) else module


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker takes whole groups. Imported here, because machines that only run the engine have no xdist."""
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return worker_group(nodeid)

    return GroupScheduling(config, log)
