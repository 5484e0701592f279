"""Tells in which files a checkpoint keeps its weights. Only safetensors are read."""

import json
import os
from pathlib import Path, PurePosixPath

from engine.config import ConfigError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NAME_BYTES = 255  # of a file's name, at most
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def weight_files(index: Path) -> dict[str, str]:
    """Tensor name → file name, from an index. Raises ConfigError if it is malformed, or names a file elsewhere or one
    that is not safetensors."""
    try:
        names: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
        too_long = [
            file for file in names.values() if any(len(os.fsencode(part)) > NAME_BYTES for part in file.split("/"))
        ]
        outside = sorted({file for file in names.values() if not _is_inside(file)})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index} is malformed: {error!r}") from error
    if too_long:
        raise ConfigError(f"{index} names a file by more than {NAME_BYTES} bytes: {too_long[0][:40]}…")
    if outside:
        raise ConfigError(f"{index} names files outside of its directory: {', '.join(outside)}")
    if others := sorted({file for file in names.values() if not file.endswith(".safetensors")}):
        raise ConfigError(f"{index} names files that are not safetensors: {', '.join(others)}")
    return names


def _is_inside(file: str) -> bool:
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts


def pickle_reason(names: list[str]) -> str:
    """What to add to "holds no safetensors": why the weights that are there instead are not read."""
    pickles = [name for name in names if name.endswith(PICKLES)]
    if not pickles:
        return " (other weight formats are not read)"
    return f"; {pickles[0]} is a pickle, and a pickle can run code when it is read: convert it to safetensors"
