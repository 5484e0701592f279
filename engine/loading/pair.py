"""Whether a draft's tokenizer fits the target's: with the same ids the draft drafts everything, else what both have."""

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.config import ConfigError
from engine.drafters.translation import Spellings, Translation
from engine.models.tokenizer import Tokenizer

LEAST_SHARED = 0.01  # share of the target's tokens; below it hardly a draft could be right

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Side:
    """What is compared of a checkpoint."""

    name: str
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    vocab_size: int  # rows of its embedding; checkpoints pad them, so they may differ


def check_pair(target: Side, draft: Side) -> Translation | None:
    """None if both map the same strings to the same ids; otherwise how the draft reads and drafts the target's tokens.

    A special token that only one of the two has, such as a token for padding, is no difference unless its id is another
    token's. Logs what differs. Raises ConfigError if hardly any token is shared.
    """
    if _same_ids(target.tokenizer, draft.tokenizer):
        _warn_of_differences(target, draft)
        return None
    ours, theirs = (Spellings.of(side.tokenizer, side.vocab_size) for side in (target, draft))
    shared = len(set(ours.data.values()) & set(theirs.data.values()))
    if shared < LEAST_SHARED * len(ours.data) or not shared:
        raise ConfigError(
            f"target {target.name} and draft {draft.name} share {shared:,} of the target's {len(ours.data):,} tokens, "
            f"and at least {LEAST_SHARED:.0%} are needed: take a draft whose tokenizer is closer to the target's"
        )
    log.info(
        "draft %s has another tokenizer: %s of %s of its tokens (%.1f %%) are shared; drafts are restricted to them",
        *(draft.name, f"{shared:,}", f"{len(theirs.data):,}", 100 * shared / len(theirs.data)),
    )
    return Translation(ours, theirs)


def check_drafts(target: Side, drafts: Seq[Side]) -> Translation | None:
    """Check each draft against the target as check_pair does. Raises ConfigError also if one of several drafts has
    other ids than the target."""
    translations = [check_pair(target, draft) for draft in drafts]
    if len(drafts) < 2:
        return translations[0] if drafts else None
    for draft, translation in zip(drafts, translations, strict=True):
        if translation is not None:
            raise ConfigError(
                f"draft {draft.name} has another tokenizer than target {target.name}, and several drafts need the "
                "target's: name it alone as draft, or leave it out"
            )
    return None


def _same_ids(one: Tokenizer, other: Tokenizer) -> bool:
    if one.vocab == other.vocab:
        return True
    alone = _lone_specials(one, other) | _lone_specials(other, one)
    return all(one.vocab.get(s) == other.vocab.get(s) for s in (one.vocab.keys() | other.vocab.keys()) - alone)


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
    texts = [f"{name} {ours} and {theirs}" for name, (ours, theirs) in differences.items() if ours != theirs]
    if target.tokenizer.chat_template != draft.tokenizer.chat_template:
        texts.append("chat templates")
    if texts:
        log.warning("target %s and draft %s differ in %s; the target's hold", target.name, draft.name, "; ".join(texts))
