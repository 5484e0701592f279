"""The engine with the oldest versions that it allows: models of every family, and kernels compiled by torch 2.11's
Triton."""

import os
import re
import subprocess
import tomllib
from importlib.metadata import version

import pytest

from tests.external.conftest import ROOT
from tests.external.environments import environment

pytestmark = [pytest.mark.external, pytest.mark.slow]

REQUIREMENTS = ROOT / "tests/external/clients/requirements/oldest.txt"
TRITON = "3.6"  # that torch 2.11 depends on
TESTS = [
    "tests/engine/kernels/test_compiled.py",
    "tests/engine/kernels/test_coded_compiled.py",
    "tests/engine/kernels/test_sampling_compiled.py",
    "tests/engine/models/test_adapter.py",
    "tests/engine/models/test_model_families.py",
    "tests/engine/models/test_tokenizer_families.py",
    "tests/engine/sampling/test_processors.py",
]


def lower_bounds() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return dict(re.findall(r"([\w-]+)>=([\d.]+)", " ".join(project["dependencies"])))


def installed_versions() -> dict[str, str]:
    return dict(re.findall(r"^([\w-]+)==([\d.]+?)(?:\.\*)?$", REQUIREMENTS.read_text("utf-8"), re.MULTILINE))


def test_the_environment_has_the_oldest_versions_that_are_allowed() -> None:
    bounds = lower_bounds() | {"triton": TRITON}
    assert bounds["torch"] == "2.11"
    found = installed_versions()
    assert {"transformers", "tokenizers", "numpy", "triton"} <= found.keys()
    assert found == {name: bounds[name] for name in found}


def test_the_engine_s_tests_pass_with_them() -> None:
    python = environment("oldest") / "bin/python"
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    versions = "from importlib.metadata import version; print(version('transformers'), version('triton'))"
    seen = subprocess.run(
        [str(python), "-c", versions], env=variables, capture_output=True, text=True, check=True
    ).stdout
    assert re.fullmatch(rf"5\.17\.\d+ {TRITON}\.\d+\n", seen), seen
    assert version("transformers") not in seen  # negative control: this process has others
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *TESTS]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"\d{3} passed", done.stdout), done.stdout
