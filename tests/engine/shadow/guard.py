"""A CUDA device guard that does nothing, for a torch without CUDA.

torch's C++ code asks a registry for the guard of a tensor's device before many operations, and raises where there is
none. The wheel for CPUs has none for CUDA. Here the guard of the meta device, which does nothing either, is copied with
three methods of its own: they say that its device is cuda:0.

The copy depends on the order of the guard's virtual methods, which is no public interface. So the guard is first tried
in a forked process. A wrong order crashes that process and raises GuardError here.
"""

import ctypes
import faulthandler
import os
import resource
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
CUDA, META = 1, 14  # c10::DeviceType
METHODS = 32  # more than the class has; what lies behind the last one is copied and never called
ORDER = (0, 1, 2)  # places of type(), exchangeDevice() and getDevice() in the table of virtual methods
SLOT = ctypes.sizeof(ctypes.c_void_p)
META_ANY = META | 0xFF << 8  # index −1
CUDA_0 = CUDA  # c10::Device in a register: the type in the low byte, the index in the next one


class GuardError(RuntimeError):
    """The device guard of this version of torch cannot be copied."""


class _CopiedGuard:
    """The memory of a guard. It must live as long as the registry points to it."""

    def __init__(self, original: int, order: tuple[int, int, int]) -> None:
        self._table = (ctypes.c_void_p * METHODS)()
        ctypes.memmove(self._table, ctypes.c_void_p.from_address(original).value or 0, ctypes.sizeof(self._table))
        get_type = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(lambda guard: CUDA)
        exchange = ctypes.CFUNCTYPE(ctypes.c_int16, ctypes.c_void_p, ctypes.c_int16)(lambda guard, device: CUDA_0)
        get_device = ctypes.CFUNCTYPE(ctypes.c_int16, ctypes.c_void_p)(lambda guard: CUDA_0)
        self._methods = get_type, exchange, get_device
        for place, method in zip(order, self._methods, strict=True):
            self._table[place] = ctypes.cast(method, ctypes.c_void_p)
        self._object = (ctypes.c_void_p * 2)(ctypes.addressof(self._table), 0)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._object)


@contextmanager
def cuda_guard(order: tuple[int, int, int] = ORDER) -> Iterator[None]:
    """Let the registry hold a guard for CUDA. Raises GuardError if this torch needs another order, and RuntimeError if
    the registry has a guard for CUDA already: then this torch was built with CUDA."""
    _check(order)
    with _registered(order):
        yield


@contextmanager
def _registered(order: tuple[int, int, int]) -> Iterator[None]:
    registry = _registry()
    if registry[CUDA]:
        raise RuntimeError("torch has a device guard for CUDA already: the shadow needs a torch without CUDA")
    guard = _CopiedGuard(registry[META] or 0, order)
    registry[CUDA] = guard.address
    try:
        yield
    finally:
        registry[CUDA] = None


def _registry() -> ctypes.Array[ctypes.c_void_p]:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    try:
        registry = (ctypes.c_void_p * (META + 1)).in_dll(library, REGISTRY)
    except ValueError as error:
        raise GuardError(
            f"torch {torch.__version__} has no registry of device guards by the name {REGISTRY}"
        ) from error
    if not registry[META]:
        raise GuardError(f"torch {torch.__version__} has no device guard for the device type {META}, meta")
    return registry


@cache
def _check(order: tuple[int, int, int]) -> None:
    """Raises GuardError if operations on CUDA tensors fail or crash with a guard of this order."""
    status = _status_of_child(lambda: _try_guard(order))
    if status != 0:
        how = f"signal {-status}" if status < 0 else "a wrong device"
        raise GuardError(
            f"torch {torch.__version__}: a copied device guard ended in {how}. The virtual methods of "
            f"c10::impl::DeviceGuardImplInterface are not in the expected order: adapt ORDER in {__file__}"
        )


def _try_guard(order: tuple[int, int, int]) -> bool:
    """Whether the meta device's guard has the three methods at these places. They name the meta device, without an
    index. Most other methods return something else, or crash; those that return a stream of the device do not."""
    guard = _registry()[META] or 0
    table = ctypes.c_void_p.from_address(guard).value or 0
    type_at, exchange_at, get_at = (ctypes.c_void_p.from_address(table + place * SLOT).value or 0 for place in order)
    get_type = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p)(type_at)
    exchange = ctypes.CFUNCTYPE(ctypes.c_uint16, ctypes.c_void_p, ctypes.c_uint16)(exchange_at)
    get_device = ctypes.CFUNCTYPE(ctypes.c_uint16, ctypes.c_void_p)(get_at)
    return get_type(guard) == META and exchange(guard, META) == get_device(guard) == META_ANY


def _status_of_child(work: Callable[[], bool]) -> int:
    """The exit status of a forked process: 0 if work returned True, 1 if not, −n if signal n ended it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: the child starts none
        child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the parent tells what went wrong
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os._exit(0 if work() else 1)
    finally:
        os._exit(1)
