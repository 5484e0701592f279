"""Budgets that keep the project small, and calls that shipped code must not make."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("app", "benchmarks", "cache", "deployments", "engine", "policies", "scripts")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_README_LINES = 80
MAX_MODEL_BYTES = 16_000_000
SOURCE_SUFFIXES = {".py", ".js", ".css", ".html"}


def shipped(root: Path) -> list[Path]:
    """Source files of the packages; tests are not shipped."""
    files = (p for package in PACKAGES for p in (root / package).rglob("*"))
    return sorted(p for p in files if p.suffix in SOURCE_SUFFIXES)


def long_files(paths: list[Path], limit: int) -> list[str]:
    lines = {p: len(p.read_text("utf-8").splitlines()) for p in paths}
    return [f"{p.name}: {n} lines" for p, n in lines.items() if n > limit]


def long_functions(path: Path, limit: int) -> list[str]:
    """Functions of more than `limit` lines, signature and docstring included, decorators not."""
    functions = (n for n in _nodes(path) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    sizes = [(f.name, (f.end_lineno or f.lineno) - f.lineno + 1) for f in functions]
    return [f"{path.name}:{name}: {n} lines" for name, n in sizes if n > limit]


def unsafe_loads(path: Path) -> list[str]:
    """Ways by which loading a model could run code of its author's: pickle, torch.load, trust_remote_code."""
    return [f"{path.name}:{line}: {what}" for node in _nodes(path) for line, what in _unsafe(node)]


def _unsafe(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    elif isinstance(node, ast.Attribute):
        names = [ast.unparse(node)]
    elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
        trusted = not (isinstance(node.value, ast.Constant) and node.value.value is False)
        names = ["trust_remote_code"] if trusted else []
    else:
        return
    for name in names:
        if name in ("torch.load", "torch.save", "trust_remote_code") or "pickle" in name.split("."):
            yield getattr(node, "lineno", 0), name


def _nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text("utf-8"), str(path)))


def python(paths: list[Path]) -> list[Path]:
    return [p for p in paths if p.suffix == ".py"]


def tree_bytes(root: Path) -> int:
    return sum(p.stat().st_size for p in root.rglob("*") if p.is_file())


def named_tests(text: str) -> list[str]:
    """Paths below tests/ in a text, without the full stop that may follow one."""
    return [name.rstrip("./") for name in re.findall(r"\btests/[\w./-]*\w", text)]


def missing_tests(page: Path, root: Path) -> list[str]:
    return [name for name in named_tests(page.read_text("utf-8")) if not (root / name).exists()]


def test_no_source_file_is_too_long() -> None:
    assert long_files(shipped(ROOT), MAX_FILE_LINES) == []


def test_no_function_is_too_long() -> None:
    assert [found for p in python(shipped(ROOT)) for found in long_functions(p, MAX_FUNCTION_LINES)] == []


def test_the_readme_is_short() -> None:
    assert long_files([ROOT / "README.md"], MAX_README_LINES) == []  # raises where there is none


def test_every_test_that_the_documents_name_exists() -> None:
    pages = sorted((ROOT / "docs").glob("*.md"))
    assert any(named_tests(page.read_text("utf-8")) for page in pages)
    assert [f"{page.name}: {name}" for page in pages for name in missing_tests(page, ROOT)] == []


def test_the_models_stay_within_their_bytes() -> None:
    assert 0 < tree_bytes(ROOT / "models") <= MAX_MODEL_BYTES


def test_no_shipped_code_loads_what_can_run_code() -> None:
    assert [found for p in python(shipped(ROOT)) for found in unsafe_loads(p)] == []


def test_every_package_is_looked_at() -> None:
    assert {p.relative_to(ROOT).parts[0] for p in shipped(ROOT)} == set(PACKAGES)


def test_a_long_file_and_a_long_function_are_found(tmp_path: Path) -> None:
    path = tmp_path / "app" / "long.py"
    path.parent.mkdir()
    path.write_text("class A:\n    async def f(self):\n        a = 1\n        return a\n")
    assert shipped(tmp_path) == [path]
    assert long_files([path], 4) == []
    assert long_files([path], 3) == ["long.py: 4 lines"]
    assert long_functions(path, 3) == []
    assert long_functions(path, 2) == ["long.py:f: 3 lines"]


def test_a_named_test_that_is_not_there_is_found(tmp_path: Path) -> None:
    (tmp_path / "tests" / "a").mkdir(parents=True)
    (tmp_path / "tests" / "a" / "test_b.py").touch()
    page = tmp_path / "page.md"
    page.write_text("| tests/a, tests/a/test_b.py | (tests/a/test_c.py). See tests/d.")
    assert missing_tests(page, tmp_path) == ["tests/a/test_c.py", "tests/d"]


def test_bytes_are_counted_in_every_folder(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "one").write_bytes(b"123")
    (tmp_path / "a" / "b" / "two").write_bytes(b"45")
    assert tree_bytes(tmp_path) == 5


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("import pickle", "pickle"),
        ("import pickle as p", "pickle"),
        ("from pickle import loads", "pickle"),
        ("from multiprocessing.reduction import pickle", "multiprocessing.reduction.pickle"),
        ("from torch import load", "torch.load"),
        ("x = torch.load('file')", "torch.load"),
        ("f = torch.load", "torch.load"),
        ("m = Auto.from_pretrained('x', trust_remote_code=True)", "trust_remote_code"),
        ("m = Auto.from_pretrained('x', trust_remote_code=flag)", "trust_remote_code"),
    ],
)
def test_an_unsafe_load_is_found(tmp_path: Path, code: str, what: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(f"import torch\n{code}\n")
    assert f"bad.py:2: {what}" in unsafe_loads(path)


@pytest.mark.parametrize("code", ["x = json.load(f)", "m = Auto.from_pretrained('x', trust_remote_code=False)"])
def test_a_safe_load_is_not_reported(tmp_path: Path, code: str) -> None:
    path = tmp_path / "good.py"
    path.write_text(f"{code}\n")
    assert unsafe_loads(path) == []
