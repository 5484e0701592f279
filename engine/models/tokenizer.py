"""The checkpoint's tokenizer, and the check that target and draft have the same one."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from engine.config import ConfigError

BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # sentencepiece's name of a byte


class Tokenizer:
    """Encodes and decodes with the Rust tokenizer that transformers loads. Thread-safe and without state."""

    def __init__(self, directory: str) -> None:
        if not (Path(directory) / "tokenizer.json").is_file():
            raise ConfigError(f"{directory} holds no tokenizer.json; only fast tokenizers are supported")
        self.pretrained: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        self._backend = self.pretrained.backend_tokenizer
        self._backend.no_truncation()  # a checkpoint may hold settings for training batches
        self._backend.no_padding()
        self.vocab: dict[str, int] = self.pretrained.get_vocab()
        self.special_ids = frozenset(self.pretrained.all_special_ids)
        self._skipped = {i for i, token in self._backend.get_added_tokens_decoder().items() if token.special}
        self._bytes_of = _bytes_of(self._backend.decoder)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text. special: with the special tokens that the checkpoint's tokenizer adds."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=special).ids
        return ids

    def encode_long(self, text: str, *, special: bool = True) -> list[int]:
        """The same ids, without offsets. For a text of megabytes these would hold the GIL for a long time."""
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text

    def name(self, token: int) -> str | None:
        """A token's entry in the vocabulary; None for an id that only the model's embedding has."""
        name: str | None = self._backend.id_to_token(token)
        return name

    def data(self, token: int) -> bytes:
        """The bytes that a token adds to a text, not at its beginning; b"" for a special token."""
        name = self.name(token)
        if name is None or token in self._skipped:
            return b""
        if self._bytes_of is not None:
            return self._bytes_of(name)
        return self.decode([token, token])[len(self.decode([token])) :].encode()


def _bytes_of(decoder: Any) -> Callable[[str], bytes] | None:
    """A function vocabulary entry → bytes, from the backend's decoder; None if an entry's bytes depend on others."""
    steps = [] if decoder is None else list(_decoding_steps(json.loads(decoder.__getstate__())))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level
    spaces = {_space(step) for step in steps if step["type"] in ("Metaspace", "Replace")}
    if len(spaces) != 1 or None in spaces or kinds - {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        return None
    (space,) = spaces

    def sentencepiece(name: str) -> bytes:
        byte = BYTE_TOKEN.fullmatch(name) if "ByteFallback" in kinds else None
        return bytes.fromhex(byte[1]) if byte else name.replace(str(space), " ").encode()

    return sentencepiece


def _space(step: dict[str, Any]) -> str | None:
    """The string that a decoding step replaces by a space; None if it does something else."""
    if step["type"] == "Metaspace":
        return str(step["replacement"])
    pattern: str | None = step["pattern"].get("String")
    return pattern if step["content"] == " " else None


def _decoding_steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The steps of a decoder, with those of nested sequences."""
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _decoding_steps(step)
    else:
        yield decoder


def _gpt2_alphabet() -> dict[str, int]:
    """Character → byte in byte-level vocabularies (Radford et al. 2019, GPT-2). A printable byte of Latin-1 is its own
    character; the others are numbered from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _gpt2_alphabet()


def _byte_level(name: str) -> bytes:
    """The bytes of an entry. One with characters outside the alphabet is an added token, which is its own text."""
    data = [BYTE_OF.get(character) for character in name]
    return name.encode() if None in data else bytes(byte for byte in data if byte is not None)


def require_same_tokenizer(target: Tokenizer, draft: Tokenizer, names: tuple[str, str]) -> None:
    """Raise ConfigError unless both map the same strings to the same ids and treat the same ids as special.

    The sizes of the embeddings are not compared: checkpoints pad them.
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
