"""Read the tensors of a safetensors checkpoint (format: https://github.com/huggingface/safetensors#format).

Files are read and not mapped into memory. The pages of a mapping count as this process's memory until the kernel takes
them back, and a mapped file that somebody truncates kills the process.
"""

import json
import logging
import mmap
import operator
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.config import ConfigError
from engine.models.weight_files import INDEX, WEIGHTS, pickle_reason, weight_files

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
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

log = logging.getLogger(__name__)

Read = Callable[[str, tuple[int, ...]], Tensor]  # (name, shape) → the tensor


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies in its file."""

    file: Path
    dtype: str  # as the format names it
    shape: tuple[int, ...]
    start: int  # its first byte, from the beginning of the file
    num_bytes: int


class Shards:
    """All tensors of a checkpoint. One file is open at a time."""

    def __init__(self, directory: Path) -> None:
        """Read the headers of all files. Raises ConfigError, naming the file, for one that is missing or broken."""
        self.directory = directory
        self.tensors = _stored_tensors(directory)
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


def _stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    index, single = directory / INDEX, directory / WEIGHTS
    if not index.is_file():
        if single.is_file():
            return read_header(single)
        raise ConfigError(f"{directory} holds no {WEIGHTS}{pickle_reason([p.name for p in _files(directory)])}")
    tensors = _indexed_tensors(directory, index)
    if single.is_file() and any(tensor.file != single for tensor in tensors.values()):
        _compare(directory, tensors, read_header(single))
    return tensors


def _compare(directory: Path, indexed: dict[str, StoredTensor], single: dict[str, StoredTensor]) -> None:
    """Raise ConfigError if the two sets of weights in a directory are not of the same names, shapes and dtypes."""
    ours, theirs = ({n: (t.shape, t.dtype) for n, t in tensors.items()} for tensors in (indexed, single))
    if different := sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n)):
        raise ConfigError(
            f"{directory} holds both {WEIGHTS} and {INDEX}, and they differ in {len(different)} tensors, "
            f"{different[0]!r} among them: remove the one that is not to be read"
        )
    log.warning("%s holds both %s and %s: the files of the index are read", directory, WEIGHTS, INDEX)


def _indexed_tensors(directory: Path, index: Path) -> dict[str, StoredTensor]:
    names = weight_files(index)
    if missing := sorted({file for file in names.values() if not (directory / file).is_file()}):
        raise ConfigError(f"{directory}: {INDEX} names files that are missing: {', '.join(missing)}")
    headers = {file: read_header(directory / file) for file in sorted(set(names.values()))}
    for name, file in names.items():
        if name not in headers[file]:
            raise ConfigError(f"{directory}: {INDEX} says that {file} holds {name!r}, and it does not")
    return {name: headers[file][name] for name, file in names.items()}


def _files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file. Raises ConfigError if the file is truncated or its header is wrong."""
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise ValueError(f"the header's length is {length:,} bytes, the file's {size:,}")
            header: dict[str, dict[str, Any]] = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        tensors = {name: _stored(file, 8 + length, entry) for name, entry in header.items()}
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file} is truncated or no safetensors file: {error}") from error
    if (needed := max((t.start + t.num_bytes for t in tensors.values()), default=0)) > size:
        raise ConfigError(f"{file} is truncated: its header names {needed:,} bytes, and it has {size:,}")
    return tensors


def _stored(file: Path, data_start: int, entry: dict[str, Any]) -> StoredTensor:
    """Raises ValueError for an entry whose bytes do not fit its shape."""
    (first, end), shape = map(operator.index, entry["data_offsets"]), tuple(map(operator.index, entry["shape"]))
    dtype = entry["dtype"]
    if not 0 <= first <= end or min(shape, default=0) < 0 or max(shape, default=0) > sys.maxsize:
        raise ValueError(f"a tensor of shape {shape} lies at bytes {first} to {end}")
    if dtype in DTYPES and prod(shape) * DTYPES[dtype].itemsize != end - first:
        raise ValueError(f"a tensor of shape {shape} and dtype {dtype} has {end - first:,} bytes")
    return StoredTensor(file, dtype, shape, data_start + first, end - first)
