"""How pytest-xdist's workers share the tests. conftest.py hands these hooks to pytest."""

import os
from collections.abc import Sequence
from pathlib import Path
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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where the whole suite runs, the first worker imports only the tests that start Ray, and the others leave these
    out: to import all modules takes a worker half a minute.

    With -m, for a part of the suite and in a worker that replaces a crashed one nothing is left out. Nor is it with
    --lf: pytest runs all tests where it finds none of those that failed.
    """
    worker = getattr(config, "workerinput", {"workerid": "gw0", "workercount": 1})
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    ray_tests, tests = config.rootpath / RAY_GROUP, config.rootpath / RAY_GROUP.partition("/")[0]
    whole = any(config.invocation_params.dir / argument in (config.rootpath, tests) for argument in config.args)
    whole = whole and not config.getoption("markexpr") and not config.getoption("lf", False)
    if not whole or not number < count > 1 or not collection_path.is_relative_to(tests):
        return None
    starts_ray = collection_path.is_relative_to(ray_tests)
    wanted = starts_ray or ray_tests.is_relative_to(collection_path) if number == 0 else not starts_ray
    return None if wanted else True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker takes whole groups. Imported here, because machines that only run the engine have no xdist."""
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class GroupScheduling(LoadScopeScheduling):
        """Each worker gets the first group that is left among those that it collected."""

        collection: list[str] | None

        def _split_scope(self, nodeid: str) -> str:
            return worker_group(nodeid)

        def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
            self.registered_collections[node] = list(collection)

        def schedule(self) -> None:
            if self.collection is None:
                tests = list(dict.fromkeys(n for found in self.registered_collections.values() for n in found))
                self.collection = tests
                for nodeid in tests:
                    self.workqueue.setdefault(worker_group(nodeid), {})[nodeid] = False
                self._check_collections()
                # A worker that has collected nothing would end the run with "no tests collected".
                self.config.pluginmanager.getplugin("dsession")._session.testscollected = len(tests)
            for node in self.registered_collections.keys() & self.assigned_work.keys():
                self._reschedule(node)

        def _check_collections(self) -> None:
            """Raises RuntimeError where no worker has all tests of a group: nobody would run it."""
            known = [set(found) for found in self.registered_collections.values()]
            for group, tests in self.workqueue.items():
                if not any(found.issuperset(tests) for found in known):
                    raise RuntimeError(f"the workers collected different tests of {group}")

        def _reschedule(self, node: Any) -> None:
            """A worker runs a test once it knows the next one, or that there is none."""
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) <= 2:
                known = set(self.registered_collections.get(node, ()))
                group = next((group for group, tests in self.workqueue.items() if known.issuperset(tests)), None)
                if group is None:
                    node.shutdown()
                else:
                    self.workqueue.move_to_end(group, last=False)
                    self._assign_work_unit(node)

    return GroupScheduling(config, log)
