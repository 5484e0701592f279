"""The sampling parameters that a checkpoint's authors recommend, in its generation_config.json.

As with vLLM's `--generation-config auto`, the fields that are present are the defaults of requests. do_sample is not
read: a temperature says the same. max_new_tokens is not either: the length of a text is the client's choice.
"""

import logging
from pathlib import Path

from engine.config import ConfigError
from engine.models.tokenizer_files import read_object
from engine.types import InvalidRequest, SamplingParams

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
TOP_K_OFF = -1  # for every token, besides 0
OTHER_MATTERS = frozenset({"transformers_version", "use_cache", "cache_implementation"})  # they say nothing of the text

log = logging.getLogger(__name__)


def sampling_defaults(directory: Path) -> dict[str, float]:
    """The defaults, by the names of SamplingParams; {} without a file. Logs one line with the fields that are ignored.

    Raises ConfigError for a value that no request may have.
    """
    path = directory / "generation_config.json"
    fields = {name: value for name, value in read_object(path).items() if value is not None}
    defaults = {name: fields[name] for name in SAMPLING_FIELDS if name in fields}
    if defaults.get("top_k") == TOP_K_OFF:
        defaults["top_k"] = 0
    try:
        if any(isinstance(value, bool) for value in defaults.values()):
            raise TypeError("true and false are no numbers")
        SamplingParams(**defaults)
    except (InvalidRequest, TypeError) as error:
        raise ConfigError(f"{path}: {error}; mend the file, or set generation_config to none") from None
    if ignored := sorted(name for name, value in fields.items() if _acts(name, value)):
        log.info("%s: ignored are %s", path, ", ".join(ignored))
    return defaults


def _acts(name: str, value: object) -> bool:
    """Whether a field that is not read would act on the text: token ids are read elsewhere, and sampling is usual."""
    usual = name.endswith(("_token_id", "_token_ids")) or name.startswith("_") or (name, value) == ("do_sample", True)
    return not usual and name not in SAMPLING_FIELDS and name not in OTHER_MATTERS
