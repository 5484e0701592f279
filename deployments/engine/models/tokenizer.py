"""The checkpoint's tokenizer, and the check that a draft's agrees with its target's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from deployments.engine.config import ConfigError


class Tokenizer:
    """Encode and decode through the Rust tokenizer that transformers loads. Thread-safe, holds no state."""

    def __init__(self, directory: str) -> None:
        if not (Path(directory) / "tokenizer.json").is_file():
            raise ConfigError(f"{directory} holds no tokenizer.json (only fast tokenizers are supported)")
        self.pretrained: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        self._backend = self.pretrained.backend_tokenizer
        self._backend.no_truncation()  # a checkpoint may save either with its tokenizer: meant for training batches
        self._backend.no_padding()
        self.vocab: dict[str, int] = self.pretrained.get_vocab()
        self.special_ids = frozenset(self.pretrained.all_special_ids)

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens that the checkpoint's tokenizer adds."""
        ids: list[int] = self._backend.encode(text).ids
        return ids

    def encode_long(self, text: str) -> list[int]:
        """The same ids. Computes no offsets, whose building and freeing hold the GIL long for a text of megabytes."""
        ids: list[int] = self._backend.encode_batch_fast([text])[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text


def require_same_tokenizer(target: Tokenizer, draft: Tokenizer, names: tuple[str, str]) -> None:
    """Raise ConfigError unless both map the same strings to the same ids and treat the same ids as special.

    The maps are compared, not the tables' sizes, which checkpoints pad as they like.
    """
    if target.vocab != draft.vocab:
        differing = sorted(
            (s for s in target.vocab.keys() | draft.vocab.keys() if target.vocab.get(s) != draft.vocab.get(s)),
            key=lambda s: (target.vocab.get(s, -1), s),
        )
        s = differing[0]
        raise ConfigError(
            f"the tokenizers of target {names[0]} and draft {names[1]} differ in {len(differing)} entries: "
            f"{s!r} is {target.vocab.get(s)} in the target and {draft.vocab.get(s)} in the draft"
        )
    if target.special_ids != draft.special_ids:
        raise ConfigError(
            f"special token ids differ: target {names[0]} has {sorted(target.special_ids)}, "
            f"draft {names[1]} has {sorted(draft.special_ids)}"
        )
