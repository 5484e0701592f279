"""Makes operations that torch dispatches by device, under the names foretoken::….

torch.library.custom_op would make them too. Its first call imports torch._dynamo, which takes 1.5 s or more, and each
call takes some 15 µs longer.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from engine.kernels.triton_modules import triton_module

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_library = torch.library.Library("foretoken", "FRAGMENT")


def operation(
    kernel: str | None = None,
    *,
    compiled: Callable[..., Any] | None = None,
    shapes: Callable[..., Any] | None = None,
    mutates: Iterable[str] = (),
) -> Callable[[F], F]:
    """Makes a function an operation: foretoken::NAME on the CPU and on CUDA. Its arguments' types give the schema.

    kernel: "module.function" in engine.kernels that CUDA runs where Triton can; None: CUDA runs the function.
    compiled: what the CPU runs. Where it cannot it returns None, and the CPU runs the function.
    shapes: gives results without contents for arguments without contents. mutates: arguments that are changed in place.
    """

    def make(function: F) -> F:
        name = function.__name__
        _library.define(name + torch.library.infer_schema(function, mutates_args=tuple(mutates)))
        _library.impl(name, function if compiled is None else on_cpu(function, compiled), "CPU")
        _library.impl(name, function if kernel is None else on_cuda(function, kernel), "CUDA")
        if shapes is not None:
            _library.impl(name, shapes, "Meta")
        made: F = getattr(torch.ops.foretoken, name).default
        return made

    return make


def on_cpu(function: Callable[P, T], compiled: Callable[P, T | None]) -> Callable[P, T]:
    """Runs the compiled code, or the function where that returns None."""

    @wraps(function)
    def run(*args: P.args, **options: P.kwargs) -> T:
        found = compiled(*args, **options)
        return function(*args, **options) if found is None else found

    return run


def on_cuda(function: Callable[P, T], kernel: str) -> Callable[P, T]:
    """Runs the kernel, or the function where Triton cannot run it."""
    module, _, name = kernel.partition(".")

    @wraps(function)
    def run(*args: P.args, **options: P.kwargs) -> T:
        kernels: Any = triton_module(f"engine.kernels.{module}")
        chosen: Callable[P, T] = function if kernels is None else getattr(kernels, name)
        return chosen(*args, **options)

    return run
