"""A device "cuda:0" without a GPU: its tensors say that they lie on CUDA, and compute on the CPU.

What CUDA would refuse raises: a CPU tensor among CUDA tensors, .numpy(). What CUDA would do silently is counted: copies
between host and device, and operations for which the host waits. A pinned buffer that is written before its upload has
ended raises, and a download without blocking arrives only when the host has waited for it.

What the shadow cannot see:
- the numbers of real kernels: sums run in the CPU's order and type, so only the exactness of integers and the paths
  that the code takes are proven, and an operation of the project (`foretoken::…`) runs its CPU implementation;
- the order of several streams: there is one, and its work is done at once;
- memory: its limits, fragmentation, and reads behind the end of a tensor;
- time, and what torch's CUDA kernels launch inside of one operation: a sort counts as one;
- data races of kernels; captured graphs are emulated (emulator.py);
- a number of the host, a tensor without dimensions, where CUDA would refuse it: most operations take one;
- threads that the caller starts itself. Those of a ThreadPoolExecutor are seen.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.shadow.counting import Counts, Kind

Operation = OpOverload[..., Any]
aten = torch.ops.aten
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

# The size or the value of their result is known on the device only, so the host waits for it.
SYNCS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.repeat_interleave.Tensor,
}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
# One kernel on CUDA too. Taken apart, they would compute in another way than on the CPU.
WHOLE = {aten.scaled_dot_product_attention.default, aten.rms_norm.default}
WITHOUT_OPERATION = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "record_stream",
    "_local_scalar_dense",
)


class ShadowError(RuntimeError):
    """What CUDA would refuse, or do wrongly."""


class ShadowTensor(Tensor):
    """A tensor on the shadow device. `elem` holds its numbers on the CPU."""

    elem: Tensor

    @staticmethod
    def __new__(cls: type["ShadowTensor"], elem: Tensor) -> "ShadowTensor":
        with torch.inference_mode(False):
            tensor: ShadowTensor = Tensor._make_wrapper_subclass(
                cls,
                elem.size(),
                strides=elem.stride(),
                storage_offset=elem.storage_offset(),
                dtype=elem.dtype,
                layout=elem.layout,
                device=CUDA,
                requires_grad=False,
            )
        tensor.elem = elem
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Operation, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return active().run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        """What a launch of a kernel asks for."""
        return self.elem.data_ptr()

    def tolist(self) -> Any:
        active().cross("D2H copy", "tolist")
        return self.elem.tolist()

    def new_tensor(  # type: ignore[override]
        self, data: Any, *, dtype: torch.dtype | None = None, device: Any = None
    ) -> Tensor:
        """torch's own method makes the tensor behind the back of a dispatch mode."""
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or CUDA)

    def numpy(self, *, force: bool = False) -> NoReturn:
        raise ShadowError("numpy() of a CUDA tensor: copy it to the host first")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShadowTensor({self.elem!r})"


_active: list["ShadowDevice"] = []


def active() -> "ShadowDevice":
    """The device of the running context. Raises ShadowError outside of one."""
    if not _active:
        raise ShadowError("a tensor of the shadow device is used after its device has gone")
    return _active[-1]


class ShadowMode(TorchDispatchMode):
    """Brings every operation of one thread to the device."""

    def __init__(self, device: "ShadowDevice") -> None:
        super().__init__()
        self._device = device
        self._lifted: list[bool] = []

    def __enter__(self) -> "ShadowMode":
        # A list that indexes a tensor stays on the host, so that the device sees it cross. The flag is the thread's.
        self._lifted.append(torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(self._lifted.pop())

    def __torch_dispatch__(self, func: Operation, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._device.run(func, args, kwargs or {})


class Recorder(Protocol):
    """What captures the device's work into a graph: emulator.py."""

    def refuse(self, what: str) -> NoReturn:
        """Raises the error of what a capture does not allow."""
        ...

    def add(self, func: Operation, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """An operation has run, with these tensors of the host's memory."""
        ...


class ShadowDevice:
    """Runs operations on CUDA tensors by the rules of CUDA, and all others as they are."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.recorder: Recorder | None = None  # while a graph is captured
        self.launches = False  # whether CUDA's implementations of the project's operations are called too
        self._launching = False  # while one of them runs
        self.recorded = 0  # events and copies without blocking so far
        self.completed = 0  # of these, so many are known to have ended
        self._copies: list[tuple[int, Callable[[], None]]] = []  # their numbers, and what happens when they end
        self._pinned: dict[int, Tensor] = {}  # by address; kept, so that no other memory gets the address

    # Copies without blocking

    def cross(self, kind: Kind, operation: str, *, blocks: bool = True) -> None:
        """Count a crossing. One that blocks ends all that the device has been asked for."""
        if self.recorder is not None:
            self.recorder.refuse(f"{kind} by {operation}")
        self.counts.cross(kind, operation, blocks=blocks)
        if blocks:
            self.complete(self.recorded)

    def record(self) -> int:
        """The number of a new event or copy in the device's order."""
        if self.recorder is not None:
            self.recorder.refuse("an event")
        self.recorded += 1
        return self.recorded

    def complete(self, number: int) -> None:
        """The host knows that everything up to this number has ended."""
        self.completed = max(self.completed, number)
        while self._copies and self._copies[0][0] <= self.completed:
            self._copies.pop(0)[1]()

    def pin(self, tensor: Tensor) -> Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, ShadowTensor) and tensor.untyped_storage().data_ptr() in self._pinned

    def _upload(self, source: Tensor, operation: str, non_blocking: bool) -> None:
        unseen = non_blocking and self.is_pinned(source)
        # Memory that is not pinned is staged: the call returns early, but the buffer is free again.
        self.cross("H2D copy", operation, blocks=not non_blocking)
        if unseen:
            sent = source.clone()

            def check() -> None:
                if not torch.equal(sent, source):
                    raise ShadowError("a pinned buffer was written before its upload had ended")

            self._copies.append((self.record(), check))

    def _download(self, target: Tensor, source: Tensor, operation: str, non_blocking: bool) -> None:
        later = non_blocking and self.is_pinned(target)
        self.cross("D2H copy", operation, blocks=not later)
        if later:
            value = source.clone()

            def arrive() -> None:
                target.copy_(value)

            self._copies.append((self.record(), arrive))
        else:
            target.copy_(source)

    # Operations

    def run(self, func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run one operation. Raises ShadowError where CUDA would refuse it."""
        named = kwargs.get("device")
        on_cuda = isinstance(named, torch.device) and named.type == "cuda"
        found = _Found()
        host_args = [found.unwrap(value) for value in args]
        host_kwargs = {name: found.unwrap(value) for name, value in kwargs.items()}
        if not found.shadows and not on_cuda:
            return self._run_on_host(func, args, kwargs)
        if _composite(func):
            with ShadowMode(self):  # inference mode hands composites over whole
                result = func.decompose(*args, **{**kwargs, "device": CUDA} if on_cuda else kwargs)
            if result is not NotImplemented:
                return result
        if func is aten._to_copy.default:
            return self._copied(args[0], kwargs)
        if func is aten.copy_.default and found.plain:
            return self._copy_across(args, kwargs)
        self._check(func, args, found.plain)
        if func in SYNCS:
            self.cross("D2H sync", str(func))
        if _launches(func):
            (self.counts.launch if self._launching else self.counts.operate)(str(func))
        if self.launches and func.namespace == "foretoken":
            self._launch(func, args, kwargs, found.shadows)
        result = func(*host_args, **host_kwargs)
        if self.recorder is not None:
            self.recorder.add(func, host_args, host_kwargs, result)
        return result if named == CPU else _wrapped(result, found.shadows)

    def _run_on_host(self, func: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.recorder is not None:
            self.recorder.refuse(f"{func} on the host, which no replay would repeat,")
        if func in (aten.pin_memory.default, aten._pin_memory.default):
            return self.pin(args[0].clone())
        if func is aten.is_pinned.default:
            return self.is_pinned(args[0])
        if kwargs.get("pin_memory"):
            return self.pin(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)

    def _copied(self, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """source.to(…) with a change of device or type."""
        name, on_host = str(aten._to_copy.default), {**kwargs, "device": CPU, "non_blocking": False}
        if not isinstance(source, ShadowTensor):
            self._upload(source, name, bool(kwargs.get("non_blocking")))
            return ShadowTensor(aten._to_copy.default(source, **on_host))
        if kwargs.get("device") == CPU:
            copied: Tensor = aten._to_copy.default(source.elem, **on_host)
            if not kwargs.get("non_blocking"):
                self.cross("D2H copy", name)
                return copied
            target = self.pin(torch.zeros_like(copied))  # torch pins the memory of such a copy
            self._download(target, copied, name, non_blocking=True)
            return target
        (self.counts.launch if self._launching else self.counts.operate)(name)
        copied = aten._to_copy.default(source.elem, **on_host)
        if self.recorder is not None:
            self.recorder.add(aten._to_copy.default, [source.elem], on_host, copied)
        return ShadowTensor(copied)

    def _copy_across(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        target, source = args[:2]
        non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        name = str(aten.copy_.default)
        if isinstance(target, ShadowTensor):
            self._upload(source, name, non_blocking)
            target.elem.copy_(source)
        else:
            self._download(target, source.elem, name, non_blocking)
        return target

    def _launch(
        self, func: Operation, args: Sequence[Any], kwargs: dict[str, Any], shadows: "Sequence[ShadowTensor]"
    ) -> None:
        """Call what CUDA would call, for what it launches. Its results, and what it changes in place, are dropped."""
        recorder, self.recorder, self._launching = self.recorder, None, True
        kept = [(shadow.elem, shadow.elem.clone()) for shadow in shadows] if func._schema.is_mutable else []
        try:
            with ShadowMode(self):
                func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args, **kwargs)
        finally:
            self.recorder, self._launching = recorder, False
            for elem, value in kept:
                elem.copy_(value)

    def _check(self, func: Operation, args: Sequence[Any], plain: Sequence[Tensor]) -> None:
        """Raises ShadowError for a CPU tensor among CUDA tensors. CUDA takes numbers, and indices at the cost of an
        upload."""
        indices: list[Tensor] = []
        if func in INDEXING:
            indices = [i for i in args[1] if isinstance(i, Tensor)]
            for _ in (i for i in indices if not isinstance(i, ShadowTensor)):
                self.cross("H2D index", str(func))
            masks = [i for i in indices if isinstance(i, ShadowTensor) and i.dtype in (torch.bool, torch.uint8)]
            fills = func is not aten.index.Tensor and args[2].numel() == 1  # becomes a masked_fill
            if masks and not fills:
                self.cross("D2H sync", f"{func} by a mask")
        for tensor in plain:
            if tensor.dim() and not any(tensor is index for index in indices):
                raise ShadowError(f"{func}: a CPU tensor {tuple(tensor.shape)} among CUDA tensors")


class _Found:
    """The tensors among an operation's arguments."""

    def __init__(self) -> None:
        self.shadows: list[ShadowTensor] = []
        self.plain: list[Tensor] = []

    def unwrap(self, value: Any) -> Any:
        """The value with the host's tensors and the host's device in place of the shadow's."""
        if isinstance(value, ShadowTensor):
            self.shadows.append(value)
            return value.elem
        if isinstance(value, Tensor):
            self.plain.append(value)
        elif isinstance(value, torch.device):
            return CPU
        elif isinstance(value, list | tuple):
            return [self.unwrap(part) for part in value]
        return value


@cache
def _composite(func: Operation) -> bool:
    """Whether the operation is made of others, which CUDA would run one by one."""
    if func.namespace == "foretoken" or func in WHOLE or func in SYNCS:
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


@cache
def _launches(func: Operation) -> bool:
    """Whether the operation computes: it is no view, and makes no memory without contents."""
    name = func.name().partition("::")[2].partition(".")[0]
    return name not in WITHOUT_OPERATION and not func.is_view


def _wrapped(result: Any, shadows: Sequence[ShadowTensor]) -> Any:
    """The result on the shadow device. What was changed in place is the tensor that was given."""
    if isinstance(result, list | tuple):
        return type(result)(_wrapped(part, shadows) for part in result)
    if not isinstance(result, Tensor):
        return result
    for shadow in shadows:
        if shadow.elem is result:
            return shadow
    return ShadowTensor(result)


def activate(device: ShadowDevice) -> None:
    _active.append(device)


def deactivate() -> None:
    _active.pop()
