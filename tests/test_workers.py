"""Which tests a worker of pytest-xdist runs together."""

import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import worker_group

ROOT = Path(__file__).resolve().parent.parent
SERVING = [f"tests/serving/{path.name}::test_x" for path in (ROOT / "tests/serving").glob("test_*.py")]


def test_all_tests_that_start_ray_are_one_group() -> None:
    assert len(SERVING) > 1
    assert len({worker_group(nodeid) for nodeid in SERVING}) == 1


def test_a_module_is_a_group() -> None:
    first, second = "tests/app/test_keys.py::test_a", "tests/app/test_keys.py::Test::test_b[x::y@z]"
    assert worker_group(first) == worker_group(second)
    assert len({worker_group(nodeid) for nodeid in (first, "tests/app/test_errors.py::test_a", SERVING[0])}) == 3


def test_workers_run_whole_modules() -> None:
    """Every module of a real run with two workers reports from one of them."""
    modules = ["tests/policies/test_token_cost.py", "tests/cache/test_blocks.py", "tests/engine/test_sequence.py"]
    modules = [module for module in modules if (ROOT / module).exists()]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-n",
        "2",
        "--dist",
        "loadscope",
        "-p",
        "no:cacheprovider",
        *modules,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    reports = re.findall(r"^\[(gw\d)\] .*PASSED (tests/[\w/]+\.py)::", done.stdout, re.MULTILINE)
    assert len(reports) > len(modules) > 1
    assert len(set(reports)) == len(modules)
