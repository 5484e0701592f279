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
from engine.memory.host import give_back_freed_memory
from engine.models.blocks import block
from engine.models.headers import StoredTensor, stored_tensors
from engine.models.progress import Progress
from engine.models.quantize import CodedWeight, quantise_weight, row_slices

MOST_PLACES = 1024  # that one call of the system may fill (IOV_MAX)
KEPT_SHARE = 16  # a thread keeps no block of memory that is larger than the checkpoint over this
CONVERTED_BYTES = 2**22  # stored numbers that become a model's dtype at once, about: they stay in a cache
TRIMS = 16  # times that freed memory goes back to the system while a checkpoint is read
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
        self._bytes = sum(tensor.num_bytes for tensor in self.tensors.values())
        self._untrimmed = 0  # bytes read since freed memory went back
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

    def read_into(self, name: str, place: Tensor, order: Tensor | None = None, first: int = 0) -> None:
        """Write the tensor, or some of its rows, to `place`, contiguous CPU memory of its dtype. order: which row comes
        at each place, int64; None: the rows from `first` on. Raises ConfigError if it cannot be read."""
        stored = self.stored(name)
        row_bytes = stored.num_bytes // max([1, *stored.shape[:1]])
        if order is None:
            whole = place.view(-1).view(torch.uint8).numpy().data
            self._read(name, [whole], stored.start + first * row_bytes, place.nbytes)
            return
        places = place.view(len(place), -1).view(torch.uint8).numpy()
        at = order.argsort()
        rows = order[at]
        ends = (rows.diff() != 1).nonzero().flatten() + 1  # of rows that are neighbours in the file
        for run in at.tensor_split(ends):
            start = stored.start + int(order[run[0]]) * row_bytes
            self._read(name, [places[i].data for i in run.tolist()], start, len(run) * row_bytes)

    def _read(self, name: str, places: list[memoryview], start: int, size: int) -> None:
        """Fill the places, which have `size` bytes in all."""
        stored, done = self.stored(name), 0
        with self._reading:
            if self._progress is None:
                self._progress = Progress(str(self.directory), self._bytes)
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
            self._untrimmed += size
            due = self._untrimmed * TRIMS >= self._bytes
            if due:
                self._untrimmed = 0
        if due:  # what was freed while weights were laid out would lie beside the next ones
            give_back_freed_memory()

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

    def __init__(self, source: "TensorSource", parts: Sequence[Part], known: Tensor | None = None) -> None:
        """known: the weight, if it is in memory too."""
        self._source, self._parts, self._known = source, parts, known
        self.shape = torch.Size((sum(part.shape[0] for part in parts), *parts[0].shape[1:]))
        self.dtype, self.device = source.dtype, source.device
        self.nbytes = prod(self.shape) * self.dtype.itemsize
        self.narrow = source.narrow_dtype(parts)  # the files' dtype of 16 bits, which `narrowed` keeps; None: `dtype`

    def read(self) -> Tensor:
        """[Σ rows, …]. Raises ConfigError if it cannot be read."""
        return self._source.stack(self._parts) if self._known is None else self._known

    def passing(self) -> Tensor:
        """As `read`, in memory that the thread's next call may overwrite."""
        return self._source.stack(self._parts, passing=True) if self._known is None else self._known

    def narrowed(self) -> Tensor:
        """As `passing`, in the dtype `narrow`."""
        if self._known is not None and self.narrow is not None:
            return self._known.to(self.narrow)
        return self._source.stack(self._parts, passing=True, dtype=self.narrow)

    def wide_slices(self) -> Iterator[tuple[slice, Tensor]]:
        """See quantize.wide_slices. The next part overwrites the numbers. Raises ConfigError if it cannot be read."""
        for part in row_slices(self):
            yield part, (self._source.rows(self._parts, part) if self._known is None else self._known[part]).float()


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

    def narrow_dtype(self, parts: Sequence[Part]) -> torch.dtype | None:
        """The dtype of 16 bits in which the files hold all these parts of a float32 model on a CPU. None: they do not,
        or the model is another."""
        if self.dtype is not torch.float32 or self.device.type != "cpu":
            return None
        stored = {self._shards.tensors[part.name].dtype if part.name in self._shards.tensors else "" for part in parts}
        return DTYPES[stored.pop()] if stored in ({"BF16"}, {"F16"}) else None

    def shared(self, tensor: Tensor, part: Part) -> StoredWeight | Tensor:
        """A weight whose tensor was read before, for something else."""
        return tensor if self.narrow_dtype([part]) is None else StoredWeight(self, [part], tensor)

    def stack(self, parts: Sequence[Part], *, passing: bool = False, dtype: torch.dtype | None = None) -> Tensor:
        """The parts on top of each other, [Σ rows, …]. passing: in memory that the thread's next call overwrites.
        dtype: None: the model's."""
        for part in parts:
            self._check(part.name, part.shape)
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        stack = self._passing(shape, dtype) if passing and self.device.type == "cpu" else self._empty(shape)
        for part, place in zip(parts, stack.split([part.shape[0] for part in parts]), strict=True):
            self._fill(place, part)
        return stack

    def rows(self, parts: Sequence[Part], wanted: slice) -> Tensor:
        """Rows of the parts on top of each other, in CPU memory that the thread's next call overwrites."""
        count, width = wanted.stop - wanted.start, parts[0].shape[1:]
        rows, top = self._passing((count, *width)), 0
        for part in parts:
            begin, end = max(wanted.start, top), min(wanted.stop, top + part.shape[0])
            if begin < end:
                self._fill_rows(rows[begin - wanted.start : end - wanted.start], part, begin - top)
            top += part.shape[0]
        return rows

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
        self._fill_rows(place, part, 0)

    def _fill_rows(self, place: Tensor, part: Part, first: int) -> None:
        """Write rows of a stored tensor to `place`: those that the part has from `first` on."""
        dtype = self._dtype_of_numbers(part.name)
        order = None if part.order is None else part.order[first : first + len(place)]
        if place.device.type == "cpu" and place.dtype is dtype:
            self._shards.read_into(part.name, place, order, first)
            return
        together = max(1, CONVERTED_BYTES // max(1, place[:1].numel() * dtype.itemsize))
        for top in range(0, len(place), together):
            rows = place[top : top + together]
            stored = self._unconverted.take(rows.numel() * dtype.itemsize).view(dtype).view(rows.shape)
            self._shards.read_into(
                part.name, stored, None if order is None else order[top : top + together], first + top
            )
            rows.copy_(stored)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        self._discard(name)
        found = self._shards.stored(name).shape
        if found != shape:
            raise ConfigError(f"{self._shards.directory}: {name} has shape {found}, config.json says {shape}")

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        if self.device.type != "cpu":
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        return block(shape, self.dtype)

    def _passing(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        dtype = self.dtype if dtype is None else dtype
        return self._stacks.take(prod(shape) * dtype.itemsize).view(dtype).view(shape)
