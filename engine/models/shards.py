"""Read the tensors of a safetensors checkpoint (format: https://github.com/huggingface/safetensors#format).

Files are read and not mapped into memory. The pages of a mapping count as this process's memory until the kernel takes
them back, and a mapped file that somebody truncates kills the process.
"""

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from engine.config import ConfigError
from engine.models.headers import StoredTensor, stored_tensors
from engine.models.progress import Progress

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

Read = Callable[[str, tuple[int, ...]], Tensor]  # (name, shape) → the tensor


class Shards:
    """All tensors of a checkpoint. One file is open at a time."""

    def __init__(self, directory: Path) -> None:
        """Read the headers of all files. Raises ConfigError, naming the file, for one that is missing or broken."""
        self.directory = directory
        self.tensors = stored_tensors(directory)
        self._progress: Progress | None = None  # begins with the first read
        self._file: Path | None = None
        self._descriptor = -1

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
        if self._progress is None:
            self._progress = Progress(str(self.directory), sum(t.num_bytes for t in self.tensors.values()))
        data = _buffer(stored.num_bytes)
        view, done = data.numpy().data, 0
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
        return data.view(DTYPES[stored.dtype]).view(stored.shape)

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


def tensor_reader(shards: Shards, dtype: torch.dtype, device: torch.device) -> Read:
    """A function (name, shape) → the checkpoint's tensor of that name. It raises ConfigError for another shape."""

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        found = shards.stored(name).shape
        if found != shape:
            raise ConfigError(f"{shards.directory}: {name} has shape {found}, config.json says {shape}")
        tensor = shards.read(name)
        if device.type != "cpu" or tensor.dtype is dtype:
            return tensor.to(device=device, dtype=dtype)
        return _buffer(tensor.numel() * dtype.itemsize).view(dtype).view(shape).copy_(tensor)

    return read
