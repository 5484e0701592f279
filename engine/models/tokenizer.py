"""The checkpoint's tokenizer, and the check that a draft's agrees with its target's."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from engine.config import ConfigError

BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # how sentencepiece names the bytes that it has no characters for


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
        self._skipped = {i for i, token in self._backend.get_added_tokens_decoder().items() if token.special}
        self._bytes_of = _bytes_of(self._backend.decoder)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a prompt, with the special tokens that the checkpoint's tokenizer adds; or without them."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=special).ids
        return ids

    def encode_long(self, text: str, *, special: bool = True) -> list[int]:
        """The same ids. Computes no offsets, whose building and freeing hold the GIL long for a text of megabytes."""
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text

    def name(self, token: int) -> str | None:
        """A token's entry in the vocabulary; None for an id that only the model's tables have."""
        name: str | None = self._backend.id_to_token(token)
        return name

    def data(self, token: int) -> bytes:
        """The bytes that a token adds to a text in which it does not come first; none for a special token."""
        name = self.name(token)
        if name is None or token in self._skipped:
            return b""
        if self._bytes_of is not None:
            return self._bytes_of(name)
        return self.decode([token, token])[len(self.decode([token])) :].encode()


def _bytes_of(decoder: Any) -> Callable[[str], bytes] | None:
    """How the backend's decoder reads one vocabulary entry as bytes; None if not each entry stands for itself."""
    parts = [] if decoder is None else list(_parts(json.loads(decoder.__getstate__())))
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return _byte_level
    spaces = {_space(part) for part in parts if part["type"] in ("Metaspace", "Replace")}
    if len(spaces) != 1 or None in spaces or kinds - {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        return None
    (space,) = spaces

    def sentencepiece(name: str) -> bytes:
        byte = BYTE_TOKEN.fullmatch(name) if "ByteFallback" in kinds else None
        return bytes.fromhex(byte[1]) if byte else name.replace(str(space), " ").encode()

    return sentencepiece


def _space(part: dict[str, Any]) -> str | None:
    """What a step of the decoder reads as a space; None if it does something else."""
    if part["type"] == "Metaspace":
        return str(part["replacement"])
    pattern: str | None = part["pattern"].get("String")
    return pattern if part["content"] == " " else None


def _parts(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A decoder's steps, those of nested sequences included."""
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _parts(part)
    else:
        yield decoder


def _gpt2_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies (Radford et al. 2019, GPT-2): a printable byte of
    Latin-1 is its own character, the others are numbered from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _gpt2_alphabet()


def _byte_level(name: str) -> bytes:
    """An entry with characters outside the alphabet is an added token, and stands for its own text."""
    data = [BYTE_OF.get(character) for character in name]
    return name.encode() if None in data else bytes(byte for byte in data if byte is not None)


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
