"""The import rules of docs/architecture.md: modules are imported in a fresh process and sys.modules inspected."""

import ast
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SERVER = frozenset({"ray", "starlette", "fastapi", "uvicorn", "pydantic", "opentelemetry"})
MODELS = frozenset({"torch", "transformers", "tokenizers", "safetensors"})

# Import the modules of each argument (comma-separated) in a child of its own; print what is then in its sys.modules.
PROBE = """
import importlib, json, os, sys
for group in sys.argv[1:]:
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        try:
            for name in group.split(","):
                importlib.import_module(name)
            print(json.dumps([group, sorted({key.split(".")[0] for key in sys.modules})]))
            sys.stdout.flush()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(f"cannot import {group}")
"""


def modules_under(root: Path, package: str) -> list[str]:
    """Dotted names of all modules of a package, found by walking the tree; so a new file is covered when it is made."""
    paths = sorted((root / package.replace(".", "/")).rglob("*.py"))
    return [".".join(p.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for p in paths]


def loaded_by(root: Path, groups: list[str]) -> dict[str, set[str]]:
    """{group: top-level packages in sys.modules after importing it alone}; a group is modules joined by commas."""
    command = [sys.executable, "-c", PROBE, *groups]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    loaded = {group: set(tops) for group, tops in map(json.loads, done.stdout.splitlines())}
    assert loaded.keys() == set(groups)
    return loaded


def violations(root: Path, modules: list[str], forbidden: frozenset[str]) -> dict[str, list[str]]:
    """{module: forbidden top-level packages that importing it loads}, for the modules that load any.

    All modules are imported together first: only where that loads something forbidden does it matter which one did.
    """
    together = ",".join(modules)
    if not loaded_by(root, [together])[together] & forbidden:
        return {}
    return {name: sorted(tops & forbidden) for name, tops in loaded_by(root, modules).items() if tops & forbidden}


def rule(package: str) -> frozenset[str]:
    """What no module of the package may load."""
    return {
        "app": MODELS | {"ray"},
        "engine": SERVER,
        "policies": MODELS | SERVER,
        "cache": MODELS | SERVER,
    }[package]


def without_kernels(modules: list[str]) -> list[str]:
    """The modules that are imported where Triton is not installed: engine.kernels.triton_modules imports the others."""
    return [name for name in modules if not imports_triton(ROOT / f"{name.replace('.', '/')}.py")]


def imports_triton(path: Path) -> bool:
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return any(line.startswith(("import triton", "from triton")) for line in lines)


@pytest.mark.parametrize("package", ["app", "engine", "policies"])
def test_no_module_of_a_package_loads_what_its_package_must_not(package: str) -> None:
    modules = modules_under(ROOT, package)
    assert package in modules
    modules = modules if find_spec("triton") else without_kernels(modules)
    assert violations(ROOT, modules, rule(package)) == {}


def test_the_engine_s_tests_need_no_server() -> None:
    """They run on a machine with a GPU, where only torch, transformers and pytest are installed."""
    modules = [name for package in ("engine", "cache", "policies") for name in modules_under(ROOT, f"tests.{package}")]
    assert {"tests.engine.test_matrix", "tests.cache.test_machine", "tests.policies.test_planner"} <= set(modules)
    assert violations(ROOT, modules, SERVER) == {}


def test_the_engine_without_kernels_and_adapter_loads_neither_triton_nor_transformers() -> None:
    """Triton may not be installed, and transformers takes a second of a start. The adapter needs both."""
    modules = without_kernels(modules_under(ROOT, "engine"))
    for name in ("engine.models.adapter", "engine.models.adapter_config"):
        modules.remove(name)
    assert {"engine.engine", "engine.kernels.race", "engine.kernels.paged_attention"} <= set(modules)
    assert not {"engine.kernels.race_kernel", "engine.kernels.paged_launch"} & set(modules)
    assert not {"triton", "transformers"} & loaded_by(ROOT, [",".join(modules)]).popitem()[1]


def test_in_cache_only_what_touches_memory_may_load_torch() -> None:
    modules = modules_under(ROOT, "cache")
    assert "cache" in modules
    found = violations(ROOT, modules, rule("cache"))
    assert found.keys() <= {f"cache.{name}" for name in ("storage", "mapped", "gathered", "memory", "transfer")}
    assert {top for tops in found.values() for top in tops} <= {"torch"}


def test_the_modules_that_the_edge_shares_with_the_engine_are_light() -> None:
    shared = ["engine.types", "engine.speculation", "engine.config"]
    assert violations(ROOT, shared, MODELS | SERVER | {"numpy"}) == {}


def named_imports(path: Path, package: str) -> list[str]:
    """Imports of the package that a module's own text names."""
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return [f"{path.name}: {name}" for name in names if name.split(".")[0] == package]


def test_the_edge_and_the_deployment_know_policies_through_the_engine_only() -> None:
    modules = sorted(path for package in ("app", "deployments") for path in (ROOT / package).rglob("*.py"))
    assert modules
    assert [found for path in modules for found in named_imports(path, "policies")] == []
    assert set(named_imports(ROOT / "engine" / "config.py", "policies")) == {"config.py: policies.config"}


def test_only_deployments_imports_ray() -> None:
    """Benchmarks and scripts run in process, on a machine without Ray."""
    modules = modules_under(ROOT, "benchmarks") + modules_under(ROOT, "scripts")
    assert violations(ROOT, modules, frozenset({"ray"})) == {}


def test_a_forbidden_import_anywhere_in_a_package_is_found(tmp_path: Path) -> None:
    package = tmp_path / "edge"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "inner" / "__init__.py").touch()
    (package / "good.py").write_text("import json\n")
    (package / "inner" / "bad.py").write_text("from pydantic import BaseModel\n")
    (package / "indirect.py").write_text("import edge.inner.bad\n")
    modules = modules_under(tmp_path, "edge")
    assert modules == ["edge", "edge.good", "edge.indirect", "edge.inner", "edge.inner.bad"]
    found = violations(tmp_path, modules, frozenset({"pydantic"}))
    assert found == {"edge.indirect": ["pydantic"], "edge.inner.bad": ["pydantic"]}


def test_a_module_that_cannot_be_imported_is_an_error_not_a_pass(tmp_path: Path) -> None:
    (tmp_path / "edge").mkdir()
    (tmp_path / "edge" / "__init__.py").write_text("raise RuntimeError('broken')\n")
    with pytest.raises(AssertionError, match="cannot import edge"):
        violations(tmp_path, ["edge"], frozenset())
