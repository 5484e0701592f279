"""Where kernels are tested: in Triton's interpreter on the CPU, or compiled on a GPU with TRITON_INTERPRET=0."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """The device whose tensors Triton kernels take in this process."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if os.environ["TRITON_INTERPRET"] == "1":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("compiled kernels need a GPU; without TRITON_INTERPRET=0 they are interpreted")
    return torch.device("cuda")


@pytest.fixture(scope="session", autouse=True)
def _patched_once() -> Iterator[None]:
    """Triton's interpreter patches triton.language again wherever a kernel calls a helper, which takes most of its
    time. Here it does so once."""
    if importlib.util.find_spec("triton") is None or os.environ["TRITON_INTERPRET"] != "1":
        yield
        return
    from triton.runtime import interpreter  # type: ignore[import-untyped]

    def dot(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        """Row by row: numpy's product of matrices rounds a row by its place among the others, which no GPU does."""
        rows = [np.matmul(row[None], b.data, dtype=d.data.dtype) for row in a.data]
        return interpreter.TensorHandle(np.concatenate(rows) + d.data, d.dtype.scalar)

    patch_language = interpreter._patch_lang
    scopes: dict[frozenset[int], Any] = {}

    def patch_once(function: Callable[..., Any]) -> Any:
        key = frozenset(id(value) for value in function.__globals__.values() if value in modules)
        if key not in scopes:
            scopes[key] = patch_language(function)
        return interpreter._LangPatchScope()

    modules = (interpreter.tl, interpreter.tl.core)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        yield
    for scope in reversed(scopes.values()):
        scope.restore()
