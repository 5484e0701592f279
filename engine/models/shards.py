"""Read the tensors of a safetensors checkpoint (format: https://github.com/huggingface/safetensors#format).

Files are read and not mapped into memory. The pages of a mapping count as this process's memory until the kernel takes
them back, and a mapped file that somebody truncates kills the process.
"""

import mmap
import os
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from engine.config import ConfigError
from engine.models.headers import StoredTensor, stored_tensors
from engine.models.progress import Progress
from engine.models.quantize import CodedWeight

MAPPED_BYTES = 2**21  # a huge page
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Shards:
    """All tensors of a checkpoint. One file is open at a time. Any thread may read."""

    def __init__(self, directory: Path) -> None:
        """Read the headers of all files. Raises ConfigError, naming the file, for one that is missing or broken."""
        self.directory = directory
        self.tensors = stored_tensors(directory)
        self._progress: Progress | None = None  # begins with the first read
        self._file: Path | None = None
        self._descriptor = -1
        self._reading = Lock()

    def stored(self, name: str) -> StoredTensor:
        """Raises ConfigError for a tensor that the checkpoint does not hold."""
        if name not in self.tensors:
            raise ConfigError(f"{self.directory} holds no tensor {name!r}")
        return self.tensors[name]

    def read(self, name: str) -> Tensor:
        """The tensor in its own dtype, in CPU memory. Raises ConfigError if it cannot be read."""
        stored = self.stored(name)
        if stored.dtype not in DTYPES:
            raise ConfigError(f"{stored.file}: {name} has dtype {stored.dtype}; supported are {', '.join(DTYPES)}")
        data = _buffer(stored.num_bytes)
        self._read_bytes(name, stored, data)
        return data.view(DTYPES[stored.dtype]).view(stored.shape)

    def read_into(self, name: str, place: Tensor) -> None:
        """Write the tensor to `place`, contiguous CPU memory of the tensor's dtype and shape."""
        self._read_bytes(name, self.stored(name), place.view(-1).view(torch.uint8))

    def _read_bytes(self, name: str, stored: StoredTensor, data: Tensor) -> None:
        view, done = data.numpy().data, 0
        with self._reading:
            if self._progress is None:
                self._progress = Progress(str(self.directory), sum(t.num_bytes for t in self.tensors.values()))
            try:
                self._open(stored.file)
                while done < stored.num_bytes:
                    count = os.preadv(self._descriptor, [view[done:]], stored.start + done)
                    if not count:
                        raise ConfigError(f"{stored.file} became shorter while it was read: {name} is not complete")
                    done += count
            except OSError as error:
                raise ConfigError(f"{stored.file} cannot be read: {error}") from error
            self._progress.add(stored.num_bytes)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._file, self._descriptor = None, -1

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):  # missing if a header was broken
            self.close()

    def _open(self, file: Path) -> None:
        if self._file == file:
            return
        self.close()
        self._descriptor = os.open(file, os.O_RDONLY)
        self._file = file
        if hasattr(os, "posix_fadvise"):  # Linux: the disk reads ahead while the tensors read so far are converted
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_WILLNEED)


def _buffer(size: int) -> Tensor:
    """`size` bytes of CPU memory, of which a large block goes back to the system as soon as it is freed.

    Otherwise the holes that the tensors leave in the heap when they are freed add a tenth to the memory of the process.
    """
    if size < MAPPED_BYTES:
        return torch.empty(size, dtype=torch.uint8)
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux: a fault per 2 MiB
        block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8)


class Part(NamedTuple):
    """A stored tensor as rows of a larger one."""

    name: str
    shape: tuple[int, ...]  # that it must have
    order: Tensor | None = None  # which of its rows comes at each place, int64; None: the order in which it is stored


class TensorSource:
    """A checkpoint's tensors in a model's dtype, on its device.

    Its methods raise ConfigError for a tensor that is missing or has another shape.
    """

    def __init__(
        self, shards: Shards, dtype: torch.dtype, device: torch.device, discard: Callable[[str], None]
    ) -> None:
        """`discard` is told the name of each tensor that needs no further reading."""
        self._shards = shards
        self._dtype = dtype
        self._device = device
        self._discard = discard

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._stored(name, shape)
        if self._device.type != "cpu" or tensor.dtype is self._dtype:
            return tensor.to(device=self._device, dtype=self._dtype)
        return self._empty(shape).copy_(tensor)

    def stack(self, parts: Sequence[Part]) -> Tensor | CodedWeight:
        """The parts on top of each other, [Σ rows, …]. One part may be several products' rows already."""
        if len(parts) == 1 and parts[0].order is None:
            return self.read(parts[0].name, parts[0].shape)
        stack = self._empty((sum(part.shape[0] for part in parts), *parts[0].shape[1:]))
        for part, place in zip(parts, stack.split([part.shape[0] for part in parts]), strict=True):
            self._fill(place, part)
        return stack

    def _fill(self, place: Tensor, part: Part) -> None:
        """Each number is copied once where the file has the order and the dtype of `place`, at most twice elsewhere."""
        self._check_shape(part.name, part.shape)
        same = place.device.type == "cpu" and DTYPES.get(self._shards.stored(part.name).dtype) is place.dtype
        if same and part.order is None:
            self._discard(part.name)
            self._shards.read_into(part.name, place)
            return
        rows = self._stored(part.name, part.shape)
        if part.order is None:
            place.copy_(rows)
        elif same:
            torch.index_select(rows, 0, part.order, out=place)
        else:
            place.copy_(rows.to(place.dtype)[part.order])

    def _stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """In the file's dtype."""
        self._discard(name)
        self._check_shape(name, shape)
        return self._shards.read(name)

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        found = self._shards.stored(name).shape
        if found != shape:
            raise ConfigError(f"{self._shards.directory}: {name} has shape {found}, config.json says {shape}")

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        if self._device.type != "cpu":
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        return _buffer(prod(shape) * self._dtype.itemsize).view(self._dtype).view(shape)
