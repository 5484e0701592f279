"""Whether checkpoints can be served, from their files alone: without torch, and before anything starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from math import prod
from pathlib import Path

from engine.config import ConfigError, EngineConfig
from engine.heads.files import head_kind, refuse_heads
from engine.loading.pair import Side, check_drafts
from engine.memory.machine import machine_memory
from engine.models.config_file import MODEL_TYPES, read_config_file
from engine.models.headers import ITEM_BYTES, stored_tensors
from engine.models.tokenizer import Tokenizer
from engine.profiling.machine_cpus import cpu_flags, has_int4_products, has_int8_products, smaller_weights

STORED_AS = {"auto": "F32", "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # on a CPU


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """What the files of a checkpoint say."""

    directory: Path
    tokenizer: Tokenizer | None  # None: of a head, which drafts its target's tokens
    vocab_size: int  # rows of the embedding
    max_len: int | None  # tokens of its context; None: config.json does not say
    numbers: int  # in all tensors
    quantised: bool

    @classmethod
    def read(cls, directory: Path) -> "CheckpointFiles":
        """Raises ConfigError, naming the file, for one that is missing, broken or of a format that is not read."""
        if head_kind(directory) is not None:
            return cls(directory, None, 0, None, _numbers(directory), False)
        config = read_config_file(directory)
        _check_architecture(directory, config["model_type"])
        text_config = config.get("text_config") or config
        tokenizer = Tokenizer(str(directory))
        vocab_size = text_config.get("vocab_size", len(tokenizer.vocab))
        max_len = text_config.get("max_position_embeddings")
        return cls(directory, tokenizer, vocab_size, max_len, _numbers(directory), "quantization_config" in config)


def _numbers(directory: Path) -> int:
    return sum(prod(tensor.shape) for tensor in stored_tensors(directory).values())


def _check_architecture(directory: Path, kind: str) -> None:
    """Raise ConfigError for a model type that transformers does not know. Its tables are searched as texts, because
    importing them takes seconds; what they name is left to the loader."""
    found = find_spec("transformers")
    folders = [] if found is None else [Path(folder) for folder in found.submodule_search_locations or ()]
    tables = [table.read_text("utf-8") for folder in folders for table in (folder / "models" / "auto").glob("*.py")]
    if kind not in MODEL_TYPES and tables and not any(f'"{kind}"' in table for table in tables):
        known = f"{', '.join(MODEL_TYPES)}, and what transformers {version('transformers')} can run"
        raise ConfigError(f"{directory} is a {kind!r} model; supported are {known}: choose another")


def check_together(config: EngineConfig, models: Sequence[CheckpointFiles]) -> None:
    """Check target and drafts against each other and against the memory of this machine. Raises ConfigError."""
    refuse_heads([model.directory for model in models if model.tokenizer is None], models[0].directory, len(models) - 1)
    sides = (Side(str(m.directory), m.tokenizer, frozenset(), m.vocab_size) for m in models if m.tokenizer is not None)
    target, *drafts = sides
    check_drafts(target, drafts)
    limit = models[0].max_len
    if config.max_model_len is not None and limit is not None and config.max_model_len > limit:
        raise ConfigError(f"max_model_len {config.max_model_len} is too long: target {config.target} allows {limit}")
    if config.device == "cpu":
        _check_forms(config)
        _check_room(config, models)


def _check_forms(config: EngineConfig) -> None:
    """Raise ConfigError for weights that this CPU has no products for. If the CPU's flags are unknown, the loader
    decides."""
    flags = cpu_flags()
    for name, form in (("target_weights", config.target_weights), ("draft_weights", config.draft_weights)):
        if form == "int8" and not has_int8_products(flags):
            other = "install numba, or choose "
            other += "int4 (the least memory, slower for prompts) or as_is" if has_int4_products(flags) else "as_is"
            raise ConfigError(
                f"{name} int8 needs Numba, or a CPU with VNNI instructions, which this one lacks: {other}"
            )
        if form == "int4" and not has_int4_products(flags):
            raise ConfigError(f"{name} int4 needs a CPU with AVX2 instructions, and this one has none: choose as_is")


def _check_room(config: EngineConfig, models: Sequence[CheckpointFiles]) -> None:
    """Weights that stay quantised, or become so, take less and are left to the loader."""
    forms = [config.target_weights, *(config.draft_weights for _ in config.draft_models)]
    plain = [m for m, form in zip(models, forms, strict=True) if form == "as_is" and not m.quantised]
    needed, available = sum(m.numbers for m in plain) * ITEM_BYTES[STORED_AS[config.dtype]], machine_memory().available
    if needed > available:
        dtype = "float32" if config.dtype == "auto" else config.dtype
        raise ConfigError(
            f"the weights do not fit: they take {needed / 2**30:,.2f} GiB in {dtype}, and {available / 2**30:,.2f} GiB "
            f"of memory are available: choose smaller models, {smaller_weights()}"
        )
