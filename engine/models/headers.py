"""The headers of a safetensors checkpoint: where each tensor lies. Imports no torch.

Format: https://github.com/huggingface/safetensors#format
"""

import json
import logging
import operator
import os
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from engine.config import ConfigError
from engine.models.weight_files import INDEX, WEIGHTS, pickle_reason, weight_files

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
# Bytes of a number, by the format's name of its dtype.
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
ITEM_BYTES |= {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place of a tensor in its file."""

    file: Path
    dtype: str  # as the format names it
    shape: tuple[int, ...]
    start: int  # its first byte, from the beginning of the file
    num_bytes: int


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint. Raises ConfigError, naming the file, for one that is missing or broken."""
    index, single = directory / INDEX, directory / WEIGHTS
    if not index.is_file():
        if single.is_file():
            return _read_header(single)
        raise ConfigError(f"{directory} holds no {WEIGHTS}{pickle_reason([p.name for p in _files(directory)])}")
    tensors = _indexed_tensors(directory, index)
    if single.is_file() and any(tensor.file != single for tensor in tensors.values()):
        _compare(directory, tensors, _read_header(single))
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
    headers = {file: _read_header(directory / file) for file in sorted(set(names.values()))}
    for name, file in names.items():
        if name not in headers[file]:
            raise ConfigError(f"{directory}: {INDEX} says that {file} holds {name!r}, and it does not")
    return {name: headers[file][name] for name, file in names.items()}


def _files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _read_header(file: Path) -> dict[str, StoredTensor]:
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
    if dtype in ITEM_BYTES and prod(shape) * ITEM_BYTES[dtype] != end - first:
        raise ValueError(f"a tensor of shape {shape} and dtype {dtype} has {end - first:,} bytes")
    return StoredTensor(file, dtype, shape, data_start + first, end - first)
