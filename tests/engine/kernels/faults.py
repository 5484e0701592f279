"""Kernels with a fault put in: what the tests of a kernel must see."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest


@contextmanager
def with_fault(module: ModuleType, before: str, after: str, folder: Path) -> Iterator[ModuleType]:
    """The module, written to `folder` with one place of its text replaced. Triton needs the source in a file."""
    if os.environ["TRITON_INTERPRET"] != "1" and before != after:
        pytest.skip("a fault may read outside of its tensors, after which a process cannot use the GPU any longer")
    text = Path(str(module.__file__)).read_text("utf-8")
    assert text.count(before) == 1, before
    path = folder / "faulty_kernel.py"
    path.write_text(text.replace(before, after), "utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    faulty = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(faulty)
        yield faulty
    finally:
        del sys.modules[path.stem]
