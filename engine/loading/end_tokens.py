"""The tokens that end a text.

transformers ends a text at the tokens of generation_config.json or config.json alone. vLLM also ends it at the
tokenizer's: the fine-tunes of ChatML often name <|im_end|> there only, and without it a chat never ends. Here it is as
in vLLM, and the start says when the two differ.
"""

import logging

from engine.config import ConfigError
from engine.models.loader import Checkpoint
from engine.models.tokenizer import Tokenizer
from engine.models.tokenizer_files import read_object

log = logging.getLogger(__name__)


def end_tokens(checkpoint: Checkpoint, tokenizer: Tokenizer) -> frozenset[int]:
    """generation_config.json goes before config.json, as in transformers. The tokenizer's own is always among them.

    One that the model cannot draw is left out, with a warning. Raises ConfigError for what is no token id.
    """
    path, vocab = checkpoint.path, checkpoint.shape.vocab_size
    generation = read_object(path / "generation_config.json")
    said = (generation.get("eos_token_id"), checkpoint.raw.get("eos_token_id"))
    eos = next((found for found in said if found is not None and found != []), None)
    named = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in named):
        raise ConfigError(f"{path}: eos_token_id must be a token id or a list of them, not {eos!r}")
    own = tokenizer.eos_id
    if named and own is not None and own not in named:
        log.warning(
            "%s: the tokenizer's end token %r (%d) is not among the eos_token_id %s of the configuration: a text ends "
            "at each of them",
            *(path, tokenizer.name(own), own, eos),
        )
    ids = named if own is None else [*named, own]
    if outside := [i for i in ids if not 0 <= i < vocab]:
        ignored_ids = ", ".join(map(str, outside))
        log.warning("%s: end tokens %s are outside of the vocabulary of %d", path, ignored_ids, vocab)
    if not set(ids) - set(outside):
        log.warning("%s names no end token: a text ends at max_tokens or at a stop string", path)
    return frozenset(ids) - set(outside)
