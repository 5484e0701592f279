"""The checkpoint's tokenizer: encodes and decodes with its tokenizer.json, and with nothing else.

transformers' AutoTokenizer is not asked: for some classes, Qwen2Tokenizer and LlamaTokenizer among them, it builds the
pre-tokenizer anew, and texts then encode to other ids than the checkpoint was trained with.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from engine.config import ConfigError
from engine.models.tokenizer_files import TokenizerSettings, read_settings
from engine.types import InvalidRequest

log = logging.getLogger(__name__)

BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")  # sentencepiece's name of a byte


class Tokenizer:
    """Encodes and decodes with the Rust tokenizer. Thread-safe: all that changes are the texts that it remembers."""

    def __init__(self, directory: str) -> None:
        """Raises ConfigError for a checkpoint without a tokenizer.json, and for a malformed file."""
        settings = read_settings(Path(directory))
        self._backend = _open_backend(Path(directory))
        _place_special_tokens(self._backend, settings, directory)
        self.vocab: dict[str, int] = self._backend.get_vocab()
        added = self._backend.get_added_tokens_decoder()
        flagged = {i for i, token in added.items() if token.special}
        ends = {self.vocab[string] for string in (settings.bos, settings.eos) if string in self.vocab}
        self.eos_id = None if settings.eos is None else self.vocab.get(settings.eos)
        self.named_ids = frozenset(self.vocab[string] for string in settings.special if string in self.vocab)
        # Left out of texts. An ordinary word is not: some checkpoints name one for padding.
        self.special_ids = frozenset(flagged | ends | (self.named_ids & added.keys()))
        self.chat_template = settings.chat_template
        self.chat_templates = settings.chat_templates
        self.special_tokens = settings.special_tokens
        self._unflagged = self.special_ids - flagged  # the backend would show these
        self._decoder = self._backend.decoder
        steps = _steps(self._decoder)
        self._bytes_of = _bytes_of(steps)
        falls_back = any(step["type"] == "ByteFallback" for step in steps)
        names = filter(BYTE_TOKEN.fullmatch, self.vocab) if falls_back else ()
        self._byte_ids = frozenset(self.vocab[name] for name in names)
        self._texts: dict[int, str] = {}  # of single tokens, by id

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text. special: with the special tokens that the checkpoint puts around a text. Raises
        InvalidRequest for a lone surrogate."""
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=special).ids
        except TypeError:
            raise _not_text() from None
        return ids

    def encode_long(self, text: str, *, special: bool = True) -> list[int]:
        """The same ids, without offsets. For a text of megabytes these would hold the GIL for a long time."""
        try:
            ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        except TypeError:
            raise _not_text() from None
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids, without special tokens unless skip_special_tokens is false.

        Text that is complete does not change when further ids follow. For that, bytes of sentencepiece are decoded
        character by character; the backend turns a whole run of them into U+FFFD if one of them is invalid.
        """
        if len(ids) == 1 and skip_special_tokens:  # half of what detokenising a text asks for
            text = self._texts.get(ids[0])
            return self._texts.setdefault(ids[0], self._decode(ids, True)) if text is None else text
        return self._decode(ids, skip_special_tokens)

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        if self._byte_ids and not self._byte_ids.isdisjoint(ids):
            hidden = self.special_ids if skip_special_tokens else ()
            names = [name for i in ids if i not in hidden and (name := self.name(i)) is not None]
            return str(self._decoder.decode(list(_split_invalid_runs(names))))
        if self._unflagged and skip_special_tokens:
            ids = [i for i in ids if i not in self._unflagged]
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def name(self, token: int) -> str | None:
        """A token's entry in the vocabulary; None for an id that only the model's embedding has."""
        name: str | None = self._backend.id_to_token(token)
        return name

    def data(self, token: int) -> bytes:
        """The bytes that a token adds to a text, not at its beginning; b"" for a special token."""
        name = self.name(token)
        if name is None or token in self.special_ids:
            return b""
        if self._bytes_of is not None:
            return self._bytes_of(name)
        return self.decode([token, token])[len(self.decode([token])) :].encode()


def _not_text() -> InvalidRequest:
    return InvalidRequest("the text holds a lone surrogate, which no tokenizer takes")


def _open_backend(directory: Path) -> Any:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{directory} holds no tokenizer.json. A conversion of another format may encode texts differently, so "
            f"none is made here: convert it with transformers.AutoTokenizer.from_pretrained({str(directory)!r})"
            f".save_pretrained({str(directory)!r}), and compare its ids with those of the original"
        )
    try:
        backend: Any = Backend.from_file(str(path))
    except Exception as error:  # the Rust library raises this class for everything
        raise ConfigError(f"{path} is malformed: {error}") from error
    backend.no_truncation()  # a checkpoint may hold settings for training batches
    backend.no_padding()
    if getattr(backend.model, "dropout", None):
        backend.model.dropout = None  # of merges, likewise
    return backend


def _place_special_tokens(backend: Any, settings: TokenizerSettings, directory: str) -> None:
    """Let a text begin with BOS and end with EOS as add_bos_token and add_eos_token say, unless the post-processor of
    tokenizer.json places special tokens itself. Warns if it contradicts them, and if there is no such token."""
    own = backend.post_processor
    if any(map(_places_tokens, _steps(own))):
        _warn_of_contradiction(backend, settings, directory)
        return
    wanted = {"bos": settings.bos if settings.add_bos else None, "eos": settings.eos if settings.add_eos else None}
    ids = {role: backend.token_to_id(token) for role, token in wanted.items() if token is not None}
    if missing := [role for role, i in ids.items() if i is None]:
        log.warning("%s: add_%s_token has no effect: tokenizer.json has no such token", directory, missing[0])
    known = {role: i for role, i in ids.items() if i is not None}
    if known:
        template = processors.TemplateProcessing(
            single=["bos", "$A", "eos"] if len(known) == 2 else ["bos", "$A"] if "bos" in known else ["$A", "eos"],
            special_tokens=[{"id": role, "ids": [i], "tokens": [wanted[role]]} for role, i in known.items()],
        )
        backend.post_processor = template if own is None else processors.Sequence([own, template])


def _places_tokens(step: dict[str, Any]) -> bool:
    """Whether a step of a post-processor adds special tokens to a text. A template of the text alone adds none."""
    if step["type"] == "TemplateProcessing":
        return any("SpecialToken" in piece for piece in step["single"])
    return step["type"] in ("BertProcessing", "RobertaProcessing")


def _warn_of_contradiction(backend: Any, settings: TokenizerSettings, directory: str) -> None:
    around: list[str] = backend.encode("a").tokens
    said = (
        ("add_bos_token", settings.add_bos, settings.bos, around[:1]),
        ("add_eos_token", settings.add_eos, settings.eos, around[-1:]),
    )
    for name, flag, token, placed in said:
        if flag is not None and token is not None and flag != (placed == [token]):
            log.warning(
                "%s: tokenizer_config.json says %s %s, but the post-processor of tokenizer.json does the contrary, and "
                "is followed",
                *(directory, name, str(flag).lower()),
            )


def _split_invalid_runs(names: Sequence[str]) -> Iterator[str]:
    """The names, with the valid characters in each invalid run of bytes as names of their own."""
    for is_byte, group in groupby(names, lambda name: BYTE_TOKEN.fullmatch(name) is not None):
        run = list(group)
        text = bytes(int(name[3:5], 16) for name in run).decode("utf-8", "surrogateescape") if is_byte else ""
        if not any("\udc80" <= character <= "\udcff" for character in text):
            yield from run
        else:  # surrogateescape turns an invalid byte 0xNN into U+DCNN
            yield from (f"<0x{ord(c) - 0xDC00:02X}>" if "\udc80" <= c <= "\udcff" else c for c in text)


def _bytes_of(steps: Sequence[dict[str, Any]]) -> Callable[[str], bytes] | None:
    """A function vocabulary entry → bytes, from the decoder's steps; None if an entry's bytes depend on others."""
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


def _steps(component: Any) -> list[dict[str, Any]]:
    """The steps of a decoder or post-processor of the backend, with those of nested sequences."""
    return [] if component is None else list(_flattened(json.loads(component.__getstate__())))


def _flattened(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if step["type"] == "Sequence":
        for inner in step.get("decoders") or step.get("processors") or ():
            yield from _flattened(inner)
    else:
        yield step


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
