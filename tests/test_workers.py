"""Which tests a worker of pytest-xdist runs together (tests/workers.py)."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.workers import worker_group

ROOT = Path(__file__).resolve().parent.parent
SERVING = [f"tests/serving/{path.name}::test_x" for path in (ROOT / "tests/serving").glob("test_*.py")]


def test_all_tests_that_start_ray_are_one_group() -> None:
    assert len(SERVING) > 1
    external = ("tests/external/test_prometheus.py::test_x", "tests/external/clients/test_clients.py::test_x")
    assert len({worker_group(nodeid) for nodeid in (*SERVING, *external)}) == 1


def test_a_module_is_a_group() -> None:
    first, second = "tests/app/test_keys.py::test_a", "tests/app/test_keys.py::Test::test_b[x::y@z]"
    assert worker_group(first) == worker_group(second)
    assert len({worker_group(nodeid) for nodeid in (first, "tests/app/test_errors.py::test_a", SERVING[0])}) == 3


def test_workers_run_whole_groups(tmp_path: Path) -> None:
    """A real run with two workers: every group's tests are reported by one of them."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    (tmp_path / "conftest.py").write_text("from tests.workers import pytest_xdist_make_scheduler\n")
    modules = ["tests/serving/test_a.py", "tests/serving/test_b.py", "tests/app/test_c.py", "tests/app/test_d.py"]
    for module in modules:
        (tmp_path / module).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / module).write_text("".join(f"def test_{n}():\n    pass\n" for n in range(4)))
    command = [sys.executable, "-P", "-m", "pytest", "-v", "-p", "xdist", "-n", "2", "--dist", "loadscope"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = re.findall(r"^\[(gw\d)\] .*PASSED (tests/[\w/]+\.py)::", done.stdout, re.MULTILINE)
    assert len(reports) == 4 * len(modules)
    groups = {(worker, worker_group(module)) for worker, module in reports}
    assert len(groups) == 3, "two modules of tests/app and one group of tests/serving"
