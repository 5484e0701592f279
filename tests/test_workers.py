"""Which tests a worker of pytest-xdist runs together (tests/workers.py)."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers import worker_group

ROOT = Path(__file__).resolve().parent.parent
SERVING = [f"tests/serving/{path.name}::test_x" for path in (ROOT / "tests/serving").glob("test_*.py")]

RAY_MODULES = ["tests/serving/test_a.py", "tests/serving/test_b.py"]
MODULES = [*RAY_MODULES, "tests/app/test_c.py", "tests/app/test_d.py"]
IMPORTED = """
import os
with open("imported", "a") as file:
    print(os.environ["PYTEST_XDIST_WORKER"], __file__[__file__.rindex("tests/") :], file=file)
"""


def test_all_tests_that_start_ray_are_one_group() -> None:
    assert len(SERVING) > 1
    external = ("tests/external/test_prometheus.py::test_x", "tests/external/clients/test_clients.py::test_x")
    assert len({worker_group(nodeid) for nodeid in (*SERVING, *external)}) == 1


def test_a_module_is_a_group() -> None:
    first, second = "tests/app/test_keys.py::test_a", "tests/app/test_keys.py::Test::test_b[x::y@z]"
    assert worker_group(first) == worker_group(second)
    assert len({worker_group(nodeid) for nodeid in (first, "tests/app/test_errors.py::test_a", SERVING[0])}) == 3


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Two modules that start Ray, and two others. Each writes its worker and its name when it is imported."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    hooks = "pytest_ignore_collect, pytest_xdist_make_scheduler"
    (tmp_path / "conftest.py").write_text(f"from tests.workers import {hooks}\n")
    tests = "".join(f"def test_{n}():\n    pass\n" for n in range(4))
    for module in MODULES:
        (tmp_path / module).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / module).write_text(IMPORTED + tests)
    return tmp_path


def run(
    suite: Path, *arguments: str, expected: int = 4 * len(MODULES)
) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """({(worker, module that it imported)}, {(worker, group that it ran)}) of a real run with two workers, of so many
    tests."""
    command = [sys.executable, "-P", "-m", "pytest", "-v", "-p", "xdist", "-n", "2", "--dist", "loadscope", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = re.findall(r"^\[(gw\d)\] .*PASSED (tests/[\w/]+\.py)::", done.stdout, re.MULTILINE)
    assert len(reports) == expected
    imported = {(worker, name) for worker, name in map(str.split, (suite / "imported").read_text().splitlines())}
    return imported, {(worker, worker_group(module)) for worker, module in reports}


def test_one_worker_imports_and_runs_the_tests_that_start_ray_and_no_others(suite: Path) -> None:
    imported, ran = run(suite)
    assert imported == {("gw0" if module in RAY_MODULES else "gw1", module) for module in MODULES}
    assert ran == {(worker, worker_group(module)) for worker, module in imported}


def test_workers_run_whole_groups(suite: Path) -> None:
    """Here every worker imports everything, as always with -m."""
    imported, ran = run(suite, "-m", "not proofs")
    assert imported == {(worker, module) for worker in ("gw0", "gw1") for module in MODULES}
    assert len(ran) == 3, "two modules of tests/app and one group of tests/serving"


def test_only_tests_that_failed_run_again(suite: Path) -> None:
    cache = suite / ".pytest_cache/v/cache/lastfailed"
    cache.parent.mkdir(parents=True)
    cache.write_text(json.dumps({f"{MODULES[-1]}::test_0": True}))
    _, ran = run(suite, "--lf", expected=1)
    assert {group for _, group in ran} == {MODULES[-1]}
