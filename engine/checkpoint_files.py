"""Whether checkpoints can be served, from their files alone: without torch, and before anything starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from engine.config import ConfigError, EngineConfig
from engine.machine_memory import host_memory
from engine.models.config_file import read_config_file
from engine.models.headers import ITEM_BYTES, stored_tensors
from engine.models.tokenizer import Tokenizer
from engine.pair import Side, check_pair

STORED_AS = {"auto": "F32", "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # on a CPU


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """What the files of a checkpoint say."""

    directory: Path
    tokenizer: Tokenizer
    vocab_size: int  # rows of the embedding
    max_len: int | None  # tokens of its context; None: config.json does not say
    numbers: int  # in all tensors
    quantised: bool

    @classmethod
    def read(cls, directory: Path) -> "CheckpointFiles":
        """Raises ConfigError, naming the file, for one that is missing, broken or of a format that is not read."""
        config = read_config_file(directory)
        text_config = config.get("text_config") or config
        numbers = sum(prod(tensor.shape) for tensor in stored_tensors(directory).values())
        tokenizer = Tokenizer(str(directory))
        vocab_size = text_config.get("vocab_size", len(tokenizer.vocab))
        max_len = text_config.get("max_position_embeddings")
        return cls(directory, tokenizer, vocab_size, max_len, numbers, "quantization_config" in config)


def check_together(config: EngineConfig, models: Sequence[CheckpointFiles]) -> None:
    """Check target and draft against each other and against the memory of this machine. Raises ConfigError."""
    if len(models) == 2:
        target, draft = (Side(str(m.directory), m.tokenizer, frozenset(), m.vocab_size) for m in models)
        check_pair(target, draft)
    limit = models[0].max_len
    if config.max_model_len is not None and limit is not None and config.max_model_len > limit:
        raise ConfigError(f"max_model_len {config.max_model_len} is too long: target {config.target} allows {limit}")
    if config.device == "cpu":
        _check_room(config, models)


def _check_room(config: EngineConfig, models: Sequence[CheckpointFiles]) -> None:
    """Weights that stay quantised, or become so, take less and are left to the loader."""
    forms = (config.target_weights, config.draft_weights)
    plain = [m for m, form in zip(models, forms, strict=False) if form == "as_is" and not m.quantised]
    needed, available = sum(m.numbers for m in plain) * ITEM_BYTES[STORED_AS[config.dtype]], host_memory().available
    if needed > available:
        dtype = "float32" if config.dtype == "auto" else config.dtype
        raise ConfigError(
            f"the weights do not fit: they take {needed / 2**30:,.2f} GiB in {dtype}, and {available / 2**30:,.2f} GiB "
            "of memory are available: choose smaller models, a smaller dtype or int8 weights"
        )
