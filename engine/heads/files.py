"""Which heads a directory can hold, told from its config.json and the names of its tensors. Imports no torch."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from engine.config import ConfigError
from engine.models.headers import stored_tensors
from engine.models.tokenizer_files import read_object

EagleKind = Literal["eagle", "eagle3"]  # eagle: EAGLE 1 and 2, which differ in their trees only
# Heads without memory, which read one state of the target, or those of look-ahead tokens behind it.
StateKind = Literal["medusa", "mlp_speculator", "pass"]
HeadKind = EagleKind | StateKind

SUPPORTED = (
    "EAGLE, EAGLE-2 and EAGLE-3 heads are supported, from SafeAILab's files or from those of speculators, Medusa "
    "heads, MLP speculators and look-ahead embeddings (PaSS)"
)
# Fields of config.json that say so by themselves.
FIELDS: dict[str, HeadKind] = {"eagle_config": "eagle3", "draft_vocab_size": "eagle3"}
# What looks like a head but drafts in another way: a name in `architectures`, or a field → what it is called.
OTHERS = {"mask_hidden": "P-EAGLE", "parallel_drafting": "P-EAGLE"}
MLP_SPECULATOR = "mlpspeculatorpretrainedmodel"  # in `architectures`, in small letters
# A block of a Medusa head: in the authors' files, and in vLLM's.
MEDUSA_BLOCK = re.compile(r"(medusa_heads\.)?(\d+\.\d+\.linear|blocks\.\d+\.layers\.\d+)\.weight")


def head_kind(directory: Path) -> HeadKind | None:
    """The kind of head in a directory; None if it holds no head, but a model or nothing that can be read.

    Raises ConfigError for a head of a kind that is not supported, and for one whose weights cannot be read, if they
    would tell its kind.
    """
    try:
        config = read_object(directory / "config.json")
    except ConfigError:
        return None
    _refuse_others(directory, config)
    return _kind_by_config(config) or _kind_by_names(directory, config)


def refuse_heads(heads: Sequence[Path], target: Path, drafts: int) -> None:
    """Raise ConfigError for a head as a target, or as one of several drafts. drafts: their number, heads among them."""
    if target in heads:
        raise ConfigError(f"target {target} is a head, which only drafts for a target: name it as draft")
    if heads and drafts > 1:
        raise ConfigError(f"draft {heads[0]} is a head, which cannot be one of several drafts: name it alone as draft")


def _kind_by_config(config: dict[str, Any]) -> HeadKind | None:
    """The kind that config.json names."""
    names = [name.lower() for name in _architectures(config)]
    if config.get("speculators_model_type") == "eagle3" or any("eagle3" in name for name in names):
        return "eagle3"
    if config.get("model_type") == "eagle" or any("eagle" in name for name in names):
        return "eagle"
    if config.get("model_type") == "mlp_speculator" or MLP_SPECULATOR in names:
        return "mlp_speculator"
    if config.get("model_type") == "pass" or "num_lookahead_tokens" in config:
        return "pass"
    if config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        return "medusa"
    return next((kind for name, kind in FIELDS.items() if name in config), None)


def _kind_by_names(directory: Path, config: dict[str, Any]) -> HeadKind | None:
    """The kind of a head by the names of its tensors. It is for a config.json that says nothing, or that describes a
    Llama, as SafeAILab's first heads do."""
    if config.get("num_hidden_layers", 1) != 1:
        return None
    try:
        names = set(stored_tensors(directory))
    except ConfigError:
        if config and not (directory / "tokenizer.json").is_file():  # it is no model either
            raise
        return None
    if any(MEDUSA_BLOCK.fullmatch(name) for name in names):
        return "medusa"
    if any(name.endswith("hidden_norm.weight") for name in names):
        return "eagle3"
    return "eagle" if "fc.weight" in names and "norm.weight" not in names else None


def _refuse_others(directory: Path, config: dict[str, Any]) -> None:
    algorithm = config.get("speculators_model_type", "eagle3")
    if algorithm != "eagle3":
        raise ConfigError(f"{directory} holds a {algorithm!r} head of speculators, not an 'eagle3' head; {SUPPORTED}")
    for field, name in OTHERS.items():
        if config.get(field):
            raise ConfigError(f"{directory} holds a {name} head ({field} in config.json); {SUPPORTED}")
    kind = str(config.get("model_type", ""))
    if kind.endswith("_mtp"):
        raise ConfigError(f"{directory} holds MTP layers of a {kind!r} model; {SUPPORTED}")


def _architectures(config: dict[str, Any]) -> list[str]:
    listed = config.get("architectures") or []
    return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
