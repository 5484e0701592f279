"""Launches Triton's kernels without a GPU, as far as the compiler: a driver that names a GPU stands for that of CUDA.

Triton then builds the function that binds a kernel's arguments, calls it, and chooses what is compiled: by types,
alignments, numbers and options. Nothing is compiled or run. In a process that interprets kernels launches are counted
only: Triton chooses at import.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.compiler import ASTSource  # type: ignore[import-untyped]
from triton.runtime import driver, jit  # type: ignore[import-untyped]

from engine.kernels.triton_modules import triton_reason

MOST_PROGRAMS = (2**31 - 1, 65535, 65535)  # of a grid on CUDA
GPU = GPUTarget("cuda", 90, 32)


class FakeDriver:
    """Triton's driver of a machine with one GPU."""

    def get_current_target(self) -> GPUTarget:
        return GPU

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


@dataclass(frozen=True, slots=True)
class Variant:
    """What Triton would compile of a kernel."""

    kernel: Any
    signature: dict[str, str]  # type by argument
    values: dict[tuple[int, ...], Any]  # of arguments that are known to the compiler
    attributes: dict[tuple[int, ...], Any]  # what it is told of addresses and numbers
    options: Any

    @property
    def name(self) -> str:
        return name_of(self.kernel)

    def source(self) -> ASTSource:
        """What triton.compile() takes."""
        return ASTSource(self.kernel, self.signature, self.values, self.attributes)


def name_of(kernel: Any) -> str:
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.__name__}"


@contextmanager
def fake_driver(found: object = None) -> Iterator[None]:
    """Triton finds a GPU, or what this driver tells it. The engine asks Triton anew, here and afterwards."""
    with patch.object(driver, "_active", found or FakeDriver()):
        triton_reason.cache_clear()
        yield
    triton_reason.cache_clear()


@contextmanager
def launched(tell: Callable[[str], None]) -> Iterator[list[Variant]]:
    """No kernel runs. tell: called with the name of a kernel before each launch. Yields what would be compiled."""
    found: list[Variant] = []
    used: list[Any] = []

    def compile_variant(
        kernel: Any, key: str, signature: Any, device: int, values: Any, options: Any, attributes: Any, warmup: bool
    ) -> object:
        variant = kernel.device_caches[device][0][key] = Variant(kernel, signature, values, attributes, options)
        found.append(variant)
        return variant

    def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def launching(*args: Any, **options: Any) -> None:
            check_grid(name_of(kernel), grid)
            used.append(kernel)
            tell(name_of(kernel))
            kernel.run(*args, grid=grid, warmup=True, **options)

        return launching

    with ExitStack() as stack:
        stack.enter_context(fake_driver())
        stack.enter_context(patch.object(jit.JITFunction, "_do_compile", compile_variant))
        stack.enter_context(patch.object(jit.KernelInterface, "__getitem__", launch))
        try:
            yield found
        finally:
            for kernel in used:
                getattr(kernel, "device_caches", {}).pop(0, None)


def check_grid(name: str, grid: tuple[int, ...]) -> None:
    """Raise ValueError for a grid that CUDA would refuse."""
    sizes = tuple(map(int, grid))
    if len(sizes) > 3 or any(not 1 <= size <= most for size, most in zip(sizes, MOST_PROGRAMS, strict=False)):
        raise ValueError(f"{name} cannot be launched over {sizes} programs: the most are {MOST_PROGRAMS}")
