"""What Numba compiles for CPUs (engine/kernels/cpu_*.py): whether it is there, numbers as it takes them, threads."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

PART_BYTES = 1 << 22  # of memory that a thread must get to read: to wake it took 40 µs, to read so much 150 to 400
STORED_AS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}  # NumPy has no bfloat16


@cache
def compiled_module(name: str) -> ModuleType | None:
    """The module engine.kernels.`name`; None, with a warning, where Numba cannot be used."""
    try:
        if find_spec("numba") is None:
            raise ImportError("numba is not installed")
        return import_module(f"engine.kernels.{name}")
    except (ImportError, RuntimeError) as error:  # Numba raises RuntimeError where it can keep nothing it compiled
        log.warning("this CPU computes with torch alone, which is slower, since %s cannot be used: %s", name, error)
        return None


def as_stored(tensor: Tensor) -> Any:
    """A NumPy array over the same memory, with integers for numbers of 16 bits."""
    return tensor.detach().view(STORED_AS.get(tensor.dtype, tensor.dtype)).numpy()


def type_of_sums(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def counted_memory(num_bytes: Callable[[], int]) -> Tensor | None:
    """Stands for memory that compiled code allocates by itself, while torch's profiler counts memory; None otherwise.
    Keep it as long as that memory."""
    return torch.empty(num_bytes(), dtype=torch.uint8) if torch._C._autograd._profiler_enabled() else None


def in_parts(function: Callable[..., None], read_bytes: int, *given: Any) -> None:
    """Call function(*given, part, parts) for all parts, in as many threads as torch has and as the bytes are worth."""
    parts = parts_of(read_bytes)
    if parts == 1:
        function(*given, 0, 1)
        return
    others = [_threads(torch.get_num_threads() - 1).submit(function, *given, part, parts) for part in range(1, parts)]
    function(*given, 0, parts)
    for other in others:
        other.result()


def together(function: Callable[[int, int], None], read_bytes: int) -> None:
    """As in_parts, for parts that wait for each other: no others keep their threads busy."""
    if parts_of(read_bytes) == 1:
        function(0, 1)
        return
    with _together:
        in_parts(function, read_bytes)


def parts_of(read_bytes: int) -> int:
    """How many threads so many bytes are worth."""
    return 1 if _one_part.get() else min(torch.get_num_threads(), 1 + read_bytes // PART_BYTES)


@contextmanager
def one_part() -> Iterator[None]:
    """Nothing is shared among threads meanwhile."""
    token = _one_part.set(True)
    try:
        yield
    finally:
        _one_part.reset(token)


_together = Lock()
_one_part = ContextVar("_one_part", default=False)


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    """Threads of the process. They sleep between calls."""
    return ThreadPoolExecutor(count, "compiled")
