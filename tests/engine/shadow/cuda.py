"""The context in which torch has one CUDA device: the shadow device. All that it replaces is put back at its end.

Events and streams are replaced too. An event records the host's clock. It has ended once the host has waited for the
device after it was recorded; before, its time cannot be read, as on CUDA.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from importlib.util import find_spec
from time import perf_counter
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor

from engine.heads.eagle import EagleHead
from engine.heads.medusa import MedusaHeads
from engine.heads.mlp_speculator import MLPSpeculator
from engine.models.adapter import AdaptedModel
from engine.models.decoder import Decoder
from tests.engine.shadow.counting import Counts
from tests.engine.shadow.device import CUDA, ShadowDevice, ShadowMode, ShadowTensor, activate, active, deactivate
from tests.engine.shadow.guard import cuda_guard

if TYPE_CHECKING:
    from tests.engine.shadow.launches import Variant

MEMORY = 8 << 30  # bytes that the device claims to have
# What runs inside of a model: (class, methods).
MODELS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (Decoder, ("forward", "logits")),
    (AdaptedModel, ("forward", "logits")),
    (EagleHead, ("project", "forward", "logits")),
    (MedusaHeads, ("logits",)),
    (MLPSpeculator, ("advance",)),
)


class ShadowEvent:
    """torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._timed = enable_timing
        self._number = 0  # in the device's order; 0: not recorded
        self._at = 0.0

    def record(self, stream: object = None) -> None:
        self._number, self._at = active().record(), perf_counter()

    def query(self) -> bool:
        """Whether all work before it has ended, as far as the host knows."""
        return self._number <= active().completed

    def synchronize(self) -> None:
        active().counts.cross("wait", "Event.synchronize")
        active().complete(self._number)

    def wait(self, stream: object = None) -> None:
        """Let a stream wait: there is one only."""

    def elapsed_time(self, end: "ShadowEvent") -> float:
        """Milliseconds. Raises RuntimeError for events without timing, not recorded, or not known to have ended."""
        if not (self._timed and end._timed):
            raise RuntimeError("both events must be made with enable_timing=True")
        if not (self._number and end._number):
            raise RuntimeError("both events must be recorded before their time is read")
        if not (self.query() and end.query()):
            raise RuntimeError("the device has not reached both events: wait for it first")
        return (end._at - self._at) * 1000


class ShadowStream:
    """torch.cuda.Stream. All of them are one."""

    device = CUDA

    def __init__(self, *args: object, **options: object) -> None:
        pass

    def synchronize(self) -> None:
        active().cross("wait", "Stream.synchronize")

    def record_event(self, event: ShadowEvent | None = None) -> ShadowEvent:
        event = event or ShadowEvent()
        event.record()
        return event

    def wait_event(self, event: ShadowEvent) -> None:
        pass

    def wait_stream(self, stream: "ShadowStream") -> None:
        pass

    def query(self) -> bool:
        return active().completed == active().recorded


def _synchronize(device: object = None) -> None:
    active().cross("wait", "synchronize")


def _within(*args: object) -> AbstractContextManager[None]:
    return nullcontext()


_STREAM = ShadowStream()
_FUNCTIONS: dict[str, Callable[..., Any] | type] = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "is_bf16_supported": lambda including_emulation=True: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "get_device_name": lambda device=None: "shadow",
    "get_device_capability": lambda device=None: (9, 0),
    "mem_get_info": lambda device=None: (MEMORY, MEMORY),
    "memory_reserved": lambda device=None: 0,
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "reset_peak_memory_stats": lambda device=None: None,
    "empty_cache": lambda: None,
    "synchronize": _synchronize,
    "current_stream": lambda device=None: _STREAM,
    "default_stream": lambda device=None: _STREAM,
    "Stream": ShadowStream,
    "Event": ShadowEvent,
    "stream": _within,
    "device": _within,
}


@contextmanager
def shadow_cuda() -> Iterator[ShadowDevice]:
    """Run the body with a CUDA device on this thread. Tensors of the device are of no use after it."""
    device = ShadowDevice()
    with ExitStack() as stack:
        stack.enter_context(cuda_guard())
        if find_spec("triton"):
            from tests.engine.shadow.launches import fake_driver

            stack.enter_context(fake_driver())
        for name, replacement in _FUNCTIONS.items():
            stack.enter_context(patch.object(torch.cuda, name, replacement))
        for name in ("tensor", "as_tensor"):
            stack.enter_context(patch.object(torch, name, _made_on_host(getattr(torch, name), device)))
        stack.enter_context(patch.object(Tensor, "pin_memory", lambda tensor, *_: _pinned(device, tensor)))
        stack.enter_context(patch.object(Tensor, "is_pinned", lambda tensor, *_: device.is_pinned(tensor)))
        for model, methods in MODELS:
            for method in methods:
                whole = _entering_model(getattr(model, method), device.counts)
                stack.enter_context(patch.object(model, method, whole))
        activate(device)
        stack.callback(deactivate)
        stack.enter_context(patch.object(ThreadPoolExecutor, "submit", _with_device(ThreadPoolExecutor.submit, device)))
        stack.enter_context(ShadowMode(device))
        yield device


@contextmanager
def launching(device: ShadowDevice) -> "Iterator[list[Variant]]":
    """Launch and count the kernels of the project's operations, none of which runs. Yields what Triton would compile.
    Without Triton they run their references, whose operations are counted."""
    with patch.object(device, "launches", True):
        if find_spec("triton") is None:
            yield []
            return
        from tests.engine.shadow.launches import launched

        with launched(lambda name: device.counts.launch(name)) as variants:
            yield variants


def _with_device(submit: Callable[..., Future[Any]], device: ShadowDevice) -> Callable[..., Future[Any]]:
    """Dispatch modes belong to a thread, so those of a pool enter one of their own."""

    @wraps(submit)
    def submitting(pool: ThreadPoolExecutor, work: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
        def working() -> Any:
            with ShadowMode(device):
                return work(*args, **options)

        return submit(pool, working)

    return submitting


def _pinned(device: ShadowDevice, tensor: Tensor) -> Tensor:
    return tensor if device.is_pinned(tensor) else device.pin(tensor.clone())


def _made_on_host(make: Callable[..., Tensor], shadow: ShadowDevice) -> Callable[..., Tensor]:
    """torch makes a tensor of numbers behind the back of a dispatch mode: first make it on the host, then send it."""

    @wraps(make)
    def making(data: Any, *, device: Any = None, pin_memory: bool = False, **options: Any) -> Tensor:
        made = data.clone() if isinstance(data, ShadowTensor) else make(data, **options)
        if pin_memory:
            made = shadow.pin(made)
        return made if device is None else made.to(device)

    return making


def _entering_model(method: Callable[..., Tensor], counts: Counts) -> Callable[..., Tensor]:
    @wraps(method)
    def entering(*args: Any, **options: Any) -> Tensor:
        with counts.in_model():
            return method(*args, **options)

    return entering
