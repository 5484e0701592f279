"""The layout of docs/architecture.md: which package imports which, no circles, one type per name, no aliases."""

import ast
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# package → packages that it may import
ARROWS = {
    "policies": set(),
    "cache": set(),
    "engine": {"cache", "policies"},
    "app": {"engine"},
    "deployments": {"app", "engine"},
    "benchmarks": {"app", "cache", "deployments", "engine", "policies"},
    "scripts": {"app", "cache", "engine", "policies"},
}

Tree = dict[str, ast.Module]  # by dotted name


def read_tree(root: Path) -> Tree:
    """Every module of the packages."""
    paths = [path for package in ARROWS for path in (root / package).rglob("*.py")]
    return {_dotted(path.relative_to(root)): ast.parse(path.read_text("utf-8"), str(path)) for path in paths}


def _dotted(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imports(tree: Tree) -> dict[str, set[str]]:
    """{module: modules of the tree that it imports, inside functions too}."""
    found: dict[str, set[str]] = {}
    for name, module in tree.items():
        targets: set[str] = set()
        for node in ast.walk(module):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules = {f"{node.module}.{alias.name}" for alias in node.names} & tree.keys()
                targets |= modules or {node.module}
        found[name] = targets & tree.keys()
    return found


def wrong_arrows(tree: Tree) -> list[str]:
    """Imports between packages that ARROWS does not allow."""
    wrong = []
    for name, targets in imports(tree).items():
        package = name.split(".")[0]
        allowed = ARROWS[package] | {package}
        wrong += [f"{name} imports {target}" for target in sorted(targets) if target.split(".")[0] not in allowed]
    return wrong


def circle(tree: Tree) -> list[str]:
    """The modules of a circle of imports, the first one at both ends; [] where there is none."""
    try:
        TopologicalSorter(imports(tree)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def shared_type_names(tree: Tree) -> dict[str, list[str]]:
    """{name: modules}, for public classes, type aliases and NewTypes that share their name with one of another module,
    or with a constant there."""
    homes, types = defaultdict(list), set[str]()
    for module_name, module in tree.items():
        for node in module.body:
            for name in _public(node):
                homes[name].append(module_name)
                if isinstance(node, ast.ClassDef) or _is_type(name, node):
                    types.add(name)
    return {name: modules for name, modules in homes.items() if name in types and len(modules) > 1}


def _public(node: ast.stmt) -> list[str]:
    """The public names that a class or an assignment at a module's top binds."""
    if isinstance(node, ast.ClassDef):
        names = [node.name]
    else:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in names if not name.startswith("_")]


def _is_type(name: str, assignment: ast.stmt) -> bool:
    """A name in CamelCase, or one that is annotated as an alias. Constants are ALL_CAPS, and so are TypeVars."""
    if isinstance(assignment, ast.AnnAssign) and ast.unparse(assignment.annotation).endswith("TypeAlias"):
        return True
    return name[:1].isupper() and not name.isupper()


def borrowed_names(tree: Tree) -> list[str]:
    """Names that a module imports from one that only imported them itself: each has one home, and is taken from there.

    `import x as x` declares that a module hands x on: the engine does so for the packages above it.
    """
    own = {name: _defined(module) for name, module in tree.items()}
    borrowed = []
    for name, module in tree.items():
        for node in ast.walk(module):
            if not isinstance(node, ast.ImportFrom) or node.module not in tree:
                continue
            strangers = {alias.name for alias in node.names} - own[node.module]
            borrowed += [
                f"{name}: {stranger} from {node.module}"
                for stranger in sorted(strangers)
                if f"{node.module}.{stranger}" not in tree
            ]
    return borrowed


def _defined(module: ast.Module) -> set[str]:
    """Names that a module binds itself, or imports as themselves to hand them on."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names if alias.asname == alias.name}
    return names


@pytest.fixture(scope="module")
def tree() -> Tree:
    return read_tree(ROOT)


def test_packages_import_in_one_direction(tree: Tree) -> None:
    folders = {path.parent.name for path in ROOT.glob("*/*.py")} - {"tests"}
    assert folders == ARROWS.keys() == {name.split(".")[0] for name in tree}
    assert wrong_arrows(tree) == []


def test_no_modules_import_each_other_in_a_circle(tree: Tree) -> None:
    assert circle(tree) == []


def test_every_public_type_has_a_name_of_its_own(tree: Tree) -> None:
    assert shared_type_names(tree) == {}


def test_every_name_is_imported_from_its_home(tree: Tree) -> None:
    assert borrowed_names(tree) == []


def test_no_package_is_named_as_a_module_of_python() -> None:
    assert ARROWS.keys().isdisjoint(sys.stdlib_module_names)


def planted(root: Path, files: dict[str, str]) -> Tree:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_tree(root)


@pytest.mark.parametrize("line", ["import app.main", "from app import main", "def f():\n    from app.main import g"])
def test_an_arrow_in_the_wrong_direction_is_found(tmp_path: Path, line: str) -> None:
    tree = planted(tmp_path, {"app/main.py": "g = 1\n", "engine/engine.py": line})
    assert wrong_arrows(tree) == ["engine.engine imports app.main"]


def test_a_circle_is_found(tmp_path: Path) -> None:
    tree = planted(tmp_path, {"cache/a.py": "from cache import b", "cache/b.py": "from cache.a import c"})
    assert set(circle(tree)) == {"cache.a", "cache.b"}


def test_two_classes_of_one_name_are_found(tmp_path: Path) -> None:
    tree = planted(tmp_path, {"app/a.py": "class Plan: ...", "cache/b.py": "class Plan: ...\nclass _Own: ..."})
    assert shared_type_names(tree) == {"Plan": ["cache.b", "app.a"]}


@pytest.mark.parametrize(
    "line", ["Plan = tuple[int, ...]", 'Plan = NewType("Plan", int)', "Plan: TypeAlias = int", "PLAN: TypeAlias = int"]
)
def test_a_type_alias_with_the_name_of_another_type_is_found(tmp_path: Path, line: str) -> None:
    tree = planted(tmp_path, {"app/a.py": line, "cache/b.py": "class Plan: ...\nclass PLAN: ..."})
    assert list(shared_type_names(tree).values()) == [["cache.b", "app.a"]]


def test_a_constant_with_the_name_of_a_type_is_found(tmp_path: Path) -> None:
    files = {"app/a.py": 'LLM = "LLM"\nLIMIT = 1', "cache/b.py": "class LLM: ...\nLIMIT = 2"}
    assert shared_type_names(planted(tmp_path, files)) == {"LLM": ["cache.b", "app.a"]}


def test_a_name_taken_from_a_module_that_borrowed_it_is_found(tmp_path: Path) -> None:
    files = {"cache/a.py": "x = 1", "cache/b.py": "from cache.a import x", "cache/c.py": "from cache.b import x"}
    assert borrowed_names(planted(tmp_path, files)) == ["cache.c: x from cache.b"]
