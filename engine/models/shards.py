"""Read the tensors of a safetensors checkpoint (format: https://github.com/huggingface/safetensors#format).

Files are read and not mapped into memory. The pages of a mapping count as this process's memory until the kernel takes
them back, and a mapped file that somebody truncates kills the process.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from threading import Lock, local
from typing import NamedTuple

import torch
from torch import Tensor

from engine.config import ConfigError
from engine.models.blocks import block
from engine.models.headers import StoredTensor, stored_tensors
from engine.models.progress import Progress
from engine.models.quantize import CodedWeight, quantise_weight, wide_slices

MOST_PLACES = 1024  # that one call of the system may fill (IOV_MAX)
READ_ROWS = 512  # of a weight that becomes codes are read at once
KEPT_SHARE = 16  # a thread keeps no block of memory that is larger than the checkpoint over this
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
NUMBERS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # which stand for themselves


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

    def dtype(self, name: str) -> torch.dtype:
        """Raises ConfigError for a tensor that the checkpoint does not hold, and for one of another dtype."""
        stored = self.stored(name)
        if stored.dtype not in DTYPES:
            raise ConfigError(
                f"{stored.file}: {name} has dtype {stored.dtype}; supported are {', '.join(DTYPES)}: convert it"
            )
        return DTYPES[stored.dtype]

    def read(self, name: str) -> Tensor:
        """The tensor in its own dtype, in CPU memory. Raises ConfigError if it cannot be read."""
        tensor = block(self.stored(name).shape, self.dtype(name))
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, place: Tensor, order: Tensor | None = None) -> None:
        """Write the tensor to `place`, contiguous CPU memory of its dtype and shape. order: which of its rows comes at
        each place, int64; None: the order in which they are stored. Raises ConfigError if it cannot be read."""
        stored = self.stored(name)
        if order is None:
            places = [place.view(-1).view(torch.uint8).numpy().data]
        else:
            rows = place.view(len(place), -1).view(torch.uint8).numpy()
            places = [rows[at].data for at in order.argsort().tolist()]
        self._read(name, places, stored.start, stored.num_bytes)

    def read_rows(self, name: str, place: Tensor, first: int) -> None:
        """Write the tensor's rows from `first` on to `place`, as read_into does."""
        stored, size = self.stored(name), place.nbytes
        start = stored.start + first * (stored.num_bytes // stored.shape[0])
        self._read(name, [place.view(-1).view(torch.uint8).numpy().data], start, size)

    def _read(self, name: str, places: list[memoryview], start: int, size: int) -> None:
        """Fill the places, which have `size` bytes in all."""
        stored, done = self.stored(name), 0
        with self._reading:
            if self._progress is None:
                self._progress = Progress(str(self.directory), sum(t.num_bytes for t in self.tensors.values()))
            try:
                self._open(stored.file)
                while done < size:
                    count = os.preadv(self._descriptor, places[:MOST_PLACES], start + done)
                    if not count:
                        raise ConfigError(f"{stored.file} became shorter while it was read: {name} is not complete")
                    done += count
                    places = _behind(places, count)
            except OSError as error:
                raise ConfigError(f"{stored.file} cannot be read: {error}") from error
            self._progress.add(size)

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


def _behind(places: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the places after so many bytes."""
    for filled, place in enumerate(places):
        if count < len(place):
            return [place[count:], *places[filled + 1 :]]
        count -= len(place)
    return []


class Part(NamedTuple):
    """A stored tensor as rows of a larger one."""

    name: str
    shape: tuple[int, ...]  # that it must have
    order: Tensor | None = None  # which of its rows comes at each place, int64; None: the order in which it is stored


class _Passing(local):
    """A thread's memory for tensors that are copied elsewhere at once. It is used again and again: a system may take
    much longer to give memory than to fill it."""

    def __init__(self, most: int) -> None:
        """most: bytes of the largest block that is kept."""
        self._most = most
        self._block = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """`size` bytes, which hold until the thread takes some again."""
        if size > self._most:
            return block([size], torch.uint8)
        if size > len(self._block):
            self._block = self._block.new_empty(0)  # the old one goes before the new one comes
            self._block = block([size], torch.uint8)
        return self._block[:size]


class StoredWeight:
    """A weight that is still in its files: tensors on top of each other, in a model's dtype, on its device."""

    def __init__(self, source: "TensorSource", parts: Sequence[Part]) -> None:
        self._source, self._parts = source, parts
        self.shape = torch.Size((sum(part.shape[0] for part in parts), *parts[0].shape[1:]))
        self.dtype, self.device = source.dtype, source.device
        self.nbytes = prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """[Σ rows, …]. Raises ConfigError if it cannot be read."""
        return self._source.stack(self._parts)

    def passing(self) -> Tensor:
        """As `read`, in memory that the thread's next call overwrites."""
        return self._source.stack(self._parts, passing=True)

    def wide_slices(self) -> Iterator[tuple[slice, Tensor]]:
        """See quantize.wide_slices. Raises ConfigError if it cannot be read."""
        for first in range(0, self.shape[0], READ_ROWS):
            rows = self._source.rows(self._parts, first, min(READ_ROWS, self.shape[0] - first))
            for part, wide in wide_slices(rows):
                yield slice(first + part.start, first + part.stop), wide


class UnroundedWeight:
    """A weight that is still in its files and becomes 8-bit integers when it is laid out. So the integers of a model
    never lie in memory beside its products."""

    def __init__(self, stored: StoredWeight) -> None:
        self._stored = stored
        self.shape, self.device = stored.shape, stored.device
        self.dtype = torch.int8
        self.nbytes = prod(self.shape) + 4 * self.shape[0]  # integers, and an fp32 step for each output channel

    def rounded(self) -> CodedWeight:
        """Raises ConfigError if it cannot be read."""
        return quantise_weight(self._stored)


class TensorSource:
    """A checkpoint's tensors in a model's dtype, on its device.

    Its methods raise ConfigError for a tensor that is missing or has another shape.
    """

    def __init__(
        self, shards: Shards, dtype: torch.dtype, device: torch.device, discard: Callable[[str], None]
    ) -> None:
        """`discard` is told the name of each tensor that needs no further reading."""
        self.dtype, self.device = dtype, device
        self._shards = shards
        self._discard = discard
        most = sum(stored.num_bytes for stored in shards.tensors.values()) // KEPT_SHARE
        self._stacks, self._unconverted = _Passing(most), _Passing(most)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self._check(name, shape)
        tensor = self._empty(shape)
        self._fill(tensor, Part(name, shape))
        return tensor

    def weight(self, parts: Sequence[Part]) -> StoredWeight | CodedWeight | Tensor:
        """The parts on top of each other, [Σ rows, …]. One part may be several products' rows already."""
        for part in parts:
            self._check(part.name, part.shape)
        return StoredWeight(self, parts)

    def stack(self, parts: Sequence[Part], *, passing: bool = False) -> Tensor:
        """The parts on top of each other, [Σ rows, …]. passing: in memory that the thread's next call overwrites."""
        for part in parts:
            self._check(part.name, part.shape)
        stack = self._empty((sum(part.shape[0] for part in parts), *parts[0].shape[1:]), passing=passing)
        for part, place in zip(parts, stack.split([part.shape[0] for part in parts]), strict=True):
            self._fill(place, part)
        return stack

    def rows(self, parts: Sequence[Part], first: int, count: int) -> Tensor:
        """Rows of the parts on top of each other, [count, …] in CPU memory."""
        rows, top = torch.empty(count, *parts[0].shape[1:], dtype=self.dtype), 0
        for part in parts:
            begin, end = max(first, top), min(first + count, top + part.shape[0])
            if begin < end:
                self._fill_rows(rows[begin - first : end - first], part, begin - top)
            top += part.shape[0]
        return rows

    def _fill_rows(self, place: Tensor, part: Part, first: int) -> None:
        stored = torch.empty(place.shape, dtype=self._dtype_of_numbers(part.name))
        if part.order is None:
            self._shards.read_rows(part.name, stored, first)
        else:
            for row, at in zip(stored, part.order[first : first + len(place)].tolist(), strict=True):
                self._shards.read_rows(part.name, row, at)
        place.copy_(stored)

    def _dtype_of_numbers(self, name: str) -> torch.dtype:
        """Raises ConfigError for codes."""
        dtype = self._shards.dtype(name)
        if dtype not in NUMBERS:
            stored = self._shards.stored(name)
            raise ConfigError(
                f"{stored.file}: {name} is stored as {stored.dtype}, and no quantization_config of config.json says "
                "for which numbers: take the checkpoint's own config.json, or another checkpoint"
            )
        return dtype

    def _fill(self, place: Tensor, part: Part) -> None:
        dtype = self._dtype_of_numbers(part.name)
        if place.device.type == "cpu" and place.dtype is dtype:
            self._shards.read_into(part.name, place, part.order)
            return
        stored = self._unconverted.take(prod(part.shape) * dtype.itemsize).view(dtype).view(part.shape)
        self._shards.read_into(part.name, stored, part.order)
        place.copy_(stored)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        self._discard(name)
        found = self._shards.stored(name).shape
        if found != shape:
            raise ConfigError(f"{self._shards.directory}: {name} has shape {found}, config.json says {shape}")

    def _empty(self, shape: tuple[int, ...], *, passing: bool = False) -> Tensor:
        if self.device.type != "cpu":
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        if not passing:
            return block(shape, self.dtype)
        return self._stacks.take(prod(shape) * self.dtype.itemsize).view(self.dtype).view(shape)
