"""The bytes of single tokens, against the backend's own decoding of whole texts, for each kind of vocabulary."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from engine.models.tokenizer import Tokenizer
from tests.engine.pairs import CORPUS, save_tokenizer

TEXTS = [*CORPUS, "a  b\t\n c", "Ж𐍈 €🙂 é", "\x00\x7f\xa0\xad", "<0x41> is not a byte"]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


def byte_level(directory: Path) -> Tokenizer:
    save_tokenizer(directory)
    return Tokenizer(str(directory))


def save(backend: Backend, directory: Path) -> Tokenizer:
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(directory)
    return Tokenizer(str(directory))


def sentencepiece(directory: Path, decoder: decoders.Decoder | None = None) -> Tokenizer:
    """A BPE over characters with ▁ for space, and every byte as <0xNN> for characters it does not know."""
    seed = Backend(models.BPE())
    seed.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    seed.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=150, show_progress=False))
    trained = json.loads(seed.to_str())["model"]
    names = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {name: i for i, name in enumerate(dict.fromkeys([*names, *trained["vocab"]]))}
    backend = Backend(models.BPE(vocab, [tuple(m) for m in trained["merges"]], byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoder or decoders.Sequence(LLAMA)
    return save(backend, directory)


def metaspace(directory: Path) -> Tokenizer:
    """The newer spelling of the same; without bytes, so what it does not know is lost before it is decoded."""
    return sentencepiece(directory, decoders.Metaspace("▁", prepend_scheme="first"))


def wordpiece(directory: Path) -> Tokenizer:
    """Neither of the two: an entry's text depends on what precedes it."""
    vocab = {"[UNK]": 0, "<s>": 1, "</s>": 2, "the": 3, "cat": 4, "##s": 5, "sat": 6}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return save(backend, directory)


def joined(tokenizer: Tokenizer, ids: list[int]) -> str:
    return b"".join(tokenizer.data(i) for i in ids).decode("utf-8", "replace")


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_byte_level_tokens_join_to_the_text(text: str, tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    ids = tokenizer.encode(text)
    assert joined(tokenizer, ids) == tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_sentencepiece_tokens_join_to_the_text_and_its_first_space(text: str, tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert joined(tokenizer, ids) == f" {text}"


def test_bytes_stand_for_themselves_only_where_the_decoder_says_so(tmp_path: Path) -> None:
    with_bytes, without = sentencepiece(tmp_path / "a"), metaspace(tmp_path / "b")
    token = with_bytes.vocab["<0xE2>"]
    assert (with_bytes.data(token), without.data(token)) == (b"\xe2", b"<0xE2>")
    ids = without.encode("the cat sat")
    assert joined(without, ids) == f" {without.decode(ids)}" == " the cat sat"


def test_tokens_of_another_kind_are_as_they_read_after_themselves(tmp_path: Path) -> None:
    tokenizer = wordpiece(tmp_path)
    ids = tokenizer.encode("the cats sat")
    assert joined(tokenizer, ids) == f" {tokenizer.decode(ids)}" == " the cats sat"


@pytest.mark.parametrize("make", [byte_level, sentencepiece, wordpiece])
def test_special_and_unknown_ids_add_nothing(make: Callable[[Path], Tokenizer], tmp_path: Path) -> None:
    tokenizer = make(tmp_path)
    assert {tokenizer.name(i) for i in tokenizer.special_ids} & {"<|eos|>", "</s>"}
    assert {(tokenizer.data(i), tokenizer.decode([i])) for i in tokenizer.special_ids} == {(b"", "")}
    assert (tokenizer.data(99_999), tokenizer.name(99_999)) == (b"", None)


@pytest.mark.parametrize("make", [byte_level, sentencepiece, wordpiece])
def test_special_ids_can_be_shown(make: Callable[[Path], Tokenizer], tmp_path: Path) -> None:
    tokenizer = make(tmp_path)
    ids = tokenizer.encode("the cat", special=False)
    for special in sorted(tokenizer.special_ids):
        name = tokenizer.name(special)
        assert name is not None
        shown = tokenizer.decode([*ids, special, *ids], skip_special_tokens=False)
        assert name in shown
        assert name not in tokenizer.decode([*ids, special, *ids])
        assert tokenizer.decode([*ids, 99_999], skip_special_tokens=False) == tokenizer.decode(ids)


def test_added_tokens_stand_for_what_the_backend_makes_of_them(tmp_path: Path) -> None:
    """One has characters outside the byte alphabet, one is special though the checkpoint names no role for it."""
    save_tokenizer(tmp_path / "plain")
    backend = Backend.from_file(str(tmp_path / "plain/tokenizer.json"))
    backend.add_tokens([AddedToken("<tool 日>", normalized=False), AddedToken("<tool>", normalized=False)])
    backend.add_special_tokens([AddedToken("<|reserved|>", special=True)])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>").save_pretrained(tmp_path / "more")
    tokenizer = Tokenizer(str(tmp_path / "more"))
    ids = tokenizer.encode("a<tool 日>b<tool>c<|reserved|>d")
    assert joined(tokenizer, ids) == tokenizer.decode(ids) == "a<tool 日>b<tool>cd"
    assert tokenizer.data(tokenizer.vocab["<|reserved|>"]) == b""


def test_a_text_can_be_encoded_without_special_tokens(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    tokenizer._backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    for encode in (tokenizer.encode, tokenizer.encode_long):
        assert encode("ab") == [0, *encode("ab", special=False)]
