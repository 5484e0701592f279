"""Whether a draft's tokenizer fits the target's: both must give the same ids, and nothing else has to match."""

import logging
from dataclasses import dataclass

from engine.config import ConfigError
from engine.models.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Side:
    """What is compared of a checkpoint."""

    name: str
    tokenizer: Tokenizer
    eos_ids: frozenset[int]


def check_pair(target: Side, draft: Side) -> None:
    """Raise ConfigError unless both map the same strings to the same ids. Warn if other things differ.

    A special token that only one of the two has, such as a token for padding, is no conflict unless its id is another
    token's. The sizes of the embeddings are not compared: checkpoints pad them.
    """
    ours, theirs = target.tokenizer.vocab, draft.tokenizer.vocab
    if ours == theirs:
        _warn_of_differences(target, draft)
        return
    alone = _lone_specials(target.tokenizer, draft.tokenizer) | _lone_specials(draft.tokenizer, target.tokenizer)
    differing = {s for s in ours.keys() | theirs.keys() if ours.get(s) != theirs.get(s)} - alone
    if differing:
        s = min(differing, key=lambda s: (ours.get(s, -1), s))
        raise ConfigError(
            f"the tokenizers of target {target.name} and draft {draft.name} differ in {len(differing)} entries: "
            f"{s!r} is {ours.get(s)} in the target and {theirs.get(s)} in the draft"
        )
    _warn_of_differences(target, draft)


def _lone_specials(one: Tokenizer, other: Tokenizer) -> set[str]:
    """Special tokens of `one` whose string and id `other` does not have."""
    taken = set(other.vocab.values())
    return {s for s, i in one.vocab.items() if i in one.special_ids and s not in other.vocab and i not in taken}


def _special_ids(side: Side) -> list[int]:
    return sorted(side.tokenizer.special_ids | side.tokenizer.named_ids)


def _warn_of_differences(target: Side, draft: Side) -> None:
    differences = {
        "end tokens": (sorted(target.eos_ids), sorted(draft.eos_ids)),
        "special tokens": (_special_ids(target), _special_ids(draft)),
    }
    told = [f"{name} {ours} and {theirs}" for name, (ours, theirs) in differences.items() if ours != theirs]
    if target.tokenizer.chat_template != draft.tokenizer.chat_template:
        told.append("chat templates")
    if told:
        log.warning("target %s and draft %s differ in %s; the target's hold", target.name, draft.name, "; ".join(told))
