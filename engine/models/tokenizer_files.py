"""What the files beside tokenizer.json say: special tokens, whether a text begins and ends with one, the chat template.

Every file may be missing. None of them changes how a text is split into tokens.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import ConfigError

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTS = ("additional_special_tokens", "extra_special_tokens")  # further special tokens, older and newer spelling


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """The strings are entries of the vocabulary, or meant to be."""

    bos: str | None
    eos: str | None
    special: frozenset[str]  # every string with a role
    add_bos: bool | None  # whether a text begins with `bos`; None: the files do not say
    add_eos: bool | None
    chat_template: str | None  # Jinja
    chat_templates: dict[str, str]  # every named one, also "default"
    special_tokens: dict[str, str]  # by their roles, such as bos_token


def read_settings(directory: Path) -> TokenizerSettings:
    """Read tokenizer_config.json, and special_tokens_map.json for the roles that it leaves out. Raises ConfigError for
    a malformed file."""
    config = read_object(directory / "tokenizer_config.json")
    tokens = {**read_object(directory / "special_tokens_map.json"), **config}
    for name in LISTS:
        if not isinstance(value := tokens.get(name), list | dict | None):
            raise ConfigError(f"{directory}: {name} must be a list or an object, not {value!r}")
    templates = _chat_templates(directory, config)
    return TokenizerSettings(
        bos=_content(tokens.get("bos_token")),
        eos=_content(tokens.get("eos_token")),
        special=frozenset(_special_strings(tokens)),
        add_bos=_flag(config.get("add_bos_token")),
        add_eos=_flag(config.get("add_eos_token")),
        chat_template=templates.get("default"),
        chat_templates=templates,
        special_tokens={role: token for role in ROLES if (token := _content(tokens.get(role))) is not None},
    )


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is no such file. Raises ConfigError for a malformed file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # of UTF-8 or of JSON
        raise ConfigError(f"{path} is malformed: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is malformed: it must hold a JSON object")
    return value


def _special_strings(tokens: dict[str, Any]) -> Iterator[str]:
    listed = [tokens.get(name) or () for name in LISTS]
    further = [value for values in listed for value in (values.values() if isinstance(values, dict) else values)]
    for value in [*(tokens.get(role) for role in ROLES), *further]:
        if (string := _content(value)) is not None:
            yield string


def _content(value: Any) -> str | None:
    """A token is a string, or an object with its string as `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _chat_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """The templates by name. The files go before tokenizer_config.json, which holds one template or a list of them."""
    listed = config.get("chat_template")
    entries = listed if isinstance(listed, list) else [{"name": "default", "template": listed}]
    named = {str(entry.get("name")): entry.get("template") for entry in entries if isinstance(entry, dict)}
    named |= {path.stem: _text(path) for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    path = directory / "chat_template.jinja"
    if path.is_file():
        named["default"] = _text(path)
    return {name: template for name, template in named.items() if isinstance(template, str)}


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except ValueError as error:
        raise ConfigError(f"{path} is malformed: {error}") from error
