"""Where kernels are tested: in Triton's interpreter on the CPU, or compiled on a GPU with TRITON_INTERPRET=0."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from math import prod
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


def _keep_books_once(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Save a third of the interpreter's time. Its results stay the same: it computes whether a sum overflows and drops
    the answer, because assertions are off, and it makes the table of types and the shape of a tensor anew each time."""
    core, builder = interpreter.tl.core, interpreter.interpreter_builder
    assert not builder.options.debug
    patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
    numpy_type = interpreter._get_np_dtype
    of_scalar = cache(numpy_type)
    patch.setattr(interpreter, "_get_np_dtype", lambda x: numpy_type(x) if x.scalar.is_ptr() else of_scalar(x.scalar))

    @cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])

    def begin(tensor: Any, handle: Any, of_type: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, of_type, of_type.scalar
        tensor.numel, tensor.shape = shape_of(of_type.shape if of_type.is_block() else ())

    patch.setattr(core.tensor, "__init__", begin)


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
        _keep_books_once(interpreter, patch)
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        yield
    for scope in reversed(scopes.values()):
        scope.restore()
