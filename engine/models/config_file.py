"""A checkpoint's config.json, as far as it is checked without torch and transformers."""

import hashlib
import json
import logging
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.config import ConfigError
from engine.profiling.kept_files import UNUSABLE, cache_folder, replace_file

log = logging.getLogger(__name__)

# Families that engine/models/model_families.py describes; that module needs torch.
MODEL_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gemma3", "phi3", "olmo2", "smollm3", "granite"),
    *("mixtral", "qwen3_moe", "gpt_oss"),
)
# Without these transformers would fill in the values of some published model.
REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def read_config_file(directory: Path) -> dict[str, Any]:
    """The object in config.json. Whether another architecture can be served, transformers has to say. Raises
    ConfigError."""
    if not directory.is_dir():
        raise ConfigError(f"there is no directory {directory}: give the directory of a Hugging Face checkpoint")
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} holds no config.json: give the directory of a Hugging Face checkpoint")
    try:
        given: dict[str, Any] = json.loads((directory / "config.json").read_text("utf-8"))
        kind = given.get("model_type")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{directory}: config.json is malformed: {error}") from error
    if not isinstance(kind, str):
        raise ConfigError(f"{directory} is a {kind!r} model; supported are {', '.join(MODEL_TYPES)}: choose another")
    native = kind in MODEL_TYPES and "text_config" not in given
    if native and (missing := [name for name in REQUIRED if given.get(name) is None]):
        raise ConfigError(f"{directory}: config.json lacks {', '.join(missing)}")
    return given


def converted_config(directory: Path, given: dict[str, Any], convert: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """config.json, read as `given`, with the defaults and conversions of the installed version of transformers.

    `convert` imports transformers, which takes two seconds, so its result is kept in a file. A config.json
    that refers to other files is converted each time.
    """
    if "configuration_files" in given:
        return convert()
    key = hashlib.sha256(json.dumps([version("transformers"), given]).encode()).hexdigest()
    path = cache_folder() / f"config-{key[:16]}.json"
    config = _kept_config(path, key)
    if config is None:
        config = json.loads(json.dumps(convert()))  # as a later start reads it
        try:
            if read_config_file(directory) == given:  # `convert` has read it again, and it may have been replaced
                replace_file(path, json.dumps({"key": key, "config": config}))
        except OSError as error:
            log.debug("the converted config.json of %s is not kept: %s", directory, error)
    return config


def _kept_config(path: Path, key: str) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text("utf-8"))
        if content["key"] != key or not isinstance(content["config"], dict):
            raise ValueError("it is of another config.json")
        return dict(content["config"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UNUSABLE as error:
        log.warning("%s cannot be used, so config.json is converted again: %s", path, error)
        return None
