"""For tokenizers in the shape of published families: the ids are those of the checkpoint's tokenizer.json, the text
streams as it decodes, and AutoTokenizer, which does neither reliably, is why it is not used."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from engine.config import ConfigError
from engine.detokenize import Detokenizer
from engine.models.tokenizer import BYTE_TOKEN, Tokenizer
from engine.types import InvalidRequest
from tests.engine.models.tokenizer_families import ADVERSARIAL, FAMILIES, QWEN2_SPLIT, byte_level, save_family, split
from tests.examples import examples

REPLACEMENT = "\ufffd"
WITH_BYTES = ("llama2", "mistral", "gemma", "phi3")
Families = dict[str, tuple[Path, Tokenizer, Backend]]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    """Name → (directory, ours, the file's own)."""
    root = tmp_path_factory.mktemp("families")
    paths = {name: save_family(name, root / name) for name in FAMILIES}
    return {
        name: (path, Tokenizer(str(path)), Backend.from_file(str(path / "tokenizer.json")))
        for name, path in paths.items()
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_are_those_of_the_file(name: str, families: Families) -> None:
    _, ours, own = families[name]
    for text in ADVERSARIAL:
        for special in (True, False):
            ids = own.encode(text, add_special_tokens=special).ids
            assert ours.encode(text, special=special) == ours.encode_long(text, special=special) == ids
            assert ours.decode(ids) == own.decode(ids)
            assert max(ids, default=0) < len(ours.vocab)


def streamed(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer.decode, prompt, tokenizer.special_ids)
    return "".join(map(detokenizer.push, output)) + detokenizer.flush()


@pytest.mark.parametrize("name", FAMILIES)
def test_text_streams_as_it_decodes(name: str, families: Families) -> None:
    """After any prompt that ends between characters."""
    _, ours, own = families[name]
    for text in ADVERSARIAL:
        ids = ours.encode(text)
        whole = own.decode(ids)
        for length in range(len(ids) + 1):
            before = own.decode(ids[:length])
            if not before.endswith(REPLACEMENT):
                assert before + streamed(ours, ids[:length], ids[length:]) == whole


def test_the_corpus_reaches_bytes_special_tokens_and_stripped_spaces(families: Families) -> None:
    """Otherwise the two tests above would prove little."""
    for name, (_, ours, _) in families.items():
        ids = {i for text in ADVERSARIAL for i in ours.encode(text, special=False)}
        assert ids & ours.special_ids, name
        assert (name in WITH_BYTES) == bool(ids & ours._byte_ids), name
    for name in ("llama2", "mistral"):
        ours = families[name][1]
        assert ours.decode(ours.encode("a")) == "a"
        assert ours.decode(ours.encode("a a")[-1:]) == ours.decode(ours.encode("a a")[-1:]).lstrip()


@examples(100)
@given(data=st.data(), name=st.sampled_from(WITH_BYTES))
def test_any_bytes_stream(data: st.DataObject, name: str, families: Families) -> None:
    """Bytes that are no characters too. The backend gives up a run of bytes as a whole if one of them is invalid, even
    the characters that a client has read by then; here they stay."""
    _, ours, own = families[name]
    parts = [c.encode()[:n] for c in "é€🙂" for n in range(1, 5)] + [b"\x80", b"\xff", b"a", b" "]
    runs = data.draw(st.lists(st.sampled_from(parts), max_size=8))
    names = [[f"<0x{byte:02X}>" for byte in run] for run in runs]
    more = sorted(ours.special_ids) + ours.encode("the cat", special=False)
    ids = [i for run in names for i in ([ours.vocab[n] for n in run] if data.draw(st.booleans()) else more[:3])]
    ids += data.draw(st.lists(st.sampled_from(more), max_size=3))
    assert streamed(ours, [], ids) == ours.decode(ids)
    if all(is_text(run) or not holds_text(run) for run in byte_runs(ours, ids)):
        assert ours.decode(ids) == own.decode(ids)


def byte_runs(tokenizer: Tokenizer, ids: list[int]) -> list[bytes]:
    names = [tokenizer.name(i) or "" for i in ids if i not in tokenizer.special_ids]
    runs = [b""]
    for name in names:
        byte = BYTE_TOKEN.fullmatch(name)
        if byte:
            runs[-1] += bytes.fromhex(byte[1])
        else:
            runs.append(b"")
    return runs


def is_text(data: bytes) -> bool:
    return REPLACEMENT not in data.decode("utf-8", "replace")


def holds_text(data: bytes) -> bool:
    return bool(data.decode("utf-8", "ignore"))


def test_a_character_that_was_read_survives_the_invalid_byte_after_it(families: Families) -> None:
    _, ours, own = families["llama2"]
    emoji, cut = (ours.encode(text, special=False)[1:] for text in ("🙂", "🙂"))
    ids = [*emoji, *cut[:2], ours.vocab["a"]]
    assert own.decode(ids) == REPLACEMENT * 6 + "a"
    assert streamed(ours, [], ids) == ours.decode(ids) == f"🙂{REPLACEMENT * 2}a"


def test_special_tokens_at_the_end_of_a_prompt_hide_no_space(families: Families) -> None:
    """The space of the output's first word is stripped at the beginning of a text only."""
    _, ours, own = families["phi3"]
    prompt = [*ours.encode("the cat"), *[ours.vocab["<|end|>"], ours.vocab["<|user|>"]] * 4]
    output = ours.encode("sat", special=False)
    assert streamed(ours, prompt, output) == own.decode([*prompt, *output])[len(own.decode(prompt)) :] == " sat"


def auto(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


@pytest.mark.parametrize("name", ["llama2", "qwen2 with another split"])
def test_auto_tokenizer_encodes_other_ids(name: str, families: Families) -> None:
    """transformers #45488: it builds the pre-tokenizer of its class instead of the file's. If this test fails, that
    has been mended; the others still hold."""
    path, ours, own = families[name]
    texts = ["  two  spaces", "1234 and 56789", "12345678901234567890", "</s>a"]
    assert all(ours.encode(text) == own.encode(text).ids for text in texts)
    assert [text for text in texts if auto(path).encode(text) != own.encode(text).ids]


@pytest.mark.parametrize(("name", "added"), [("gemma", "<mask>"), ("granite", "<|endoftext|>")])
def test_auto_tokenizer_adds_a_token_one_past_the_vocabulary(name: str, added: str, families: Families) -> None:
    """transformers #45920: it adds special tokens of its class. The model's table need not have a row for them."""
    path, ours, own = families[name]
    size = own.get_vocab_size()
    assert auto(path).encode(added, add_special_tokens=False) == [size]
    assert ours.encode(added, special=False) == own.encode(added, add_special_tokens=False).ids
    assert max(ours.vocab.values()) == size - 1


def test_a_token_that_only_a_configuration_names_is_not_added(tmp_path: Path) -> None:
    path = save_family("qwen2", tmp_path, pad_token="<|pad|>", additional_special_tokens=["<|new|>"])
    assert Tokenizer(str(path)).vocab == Backend.from_file(str(path / "tokenizer.json")).get_vocab()
    assert auto(path).convert_tokens_to_ids("<|pad|>") >= len(Tokenizer(str(path)).vocab)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_token_that_is_special_by_its_role_alone_is_encoded_as_the_file_does_and_not_shown(
    file: str, tmp_path: Path
) -> None:
    backend = byte_level((), split(QWEN2_SPLIT))
    backend.add_tokens([AddedToken("<|stop|>", normalized=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / file).write_text(json.dumps({"eos_token": {"content": "<|stop|>"}}))
    ours, ids = Tokenizer(str(tmp_path)), backend.encode("a<|stop|>b").ids
    assert ours.special_ids == {ours.vocab["<|stop|>"]}
    assert ours.encode("a<|stop|>b") == ids
    assert (ours.decode(ids), backend.decode(ids)) == ("ab", "a<|stop|>b")
    assert ours.data(ours.vocab["<|stop|>"]) == b""


def test_an_ordinary_word_that_is_named_for_padding_is_shown(tmp_path: Path) -> None:
    ours = Tokenizer(str(save_family("qwen2", tmp_path, pad_token="a", eos_token="b")))
    a, b = ours.vocab["a"], ours.vocab["b"]
    assert ours.named_ids == {a, b}
    assert (ours.decode([a, b]), ours.data(a), ours.data(b)) == ("a", b"a", b"")


@pytest.mark.parametrize("flags", [(True, None), (None, True), (True, True), (False, False), (None, None)])
def test_configuration_files_place_special_tokens_where_the_post_processor_does_not(
    flags: tuple[bool | None, bool | None], tmp_path: Path
) -> None:
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    path = save_family("qwen2", tmp_path, **names, add_bos_token=flags[0], add_eos_token=flags[1])
    ours = Tokenizer(str(path))
    bos, eos = (ours.vocab[name] for name in names.values())
    plain = ours.encode("the cat", special=False)
    assert ours.encode("the cat") == [*([bos] if flags[0] else []), *plain, *([eos] if flags[1] else [])]


def test_a_template_of_the_text_alone_does_not_say_how_a_text_begins(tmp_path: Path) -> None:
    ours = Tokenizer(str(save_family("phi3", tmp_path, add_bos_token=True)))
    assert ours.encode("the cat") == [ours.vocab["<s>"], *ours.encode("the cat", special=False)]


@pytest.mark.parametrize(
    ("name", "field", "flag"),
    [("llama2", "add_bos_token", False), ("llama3", "add_bos_token", False), ("gemma", "add_eos_token", True)],
)
def test_the_post_processor_of_the_file_is_followed_against_its_configuration(
    name: str, field: str, flag: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_family(name, tmp_path, **{field: flag})
    ours, own = Tokenizer(str(path)), Backend.from_file(str(path / "tokenizer.json"))
    assert ours.encode("the cat") == own.encode("the cat").ids
    assert f"says {field} {str(flag).lower()}, but the post-processor" in caplog.text


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_in_order_is_opened_without_a_warning(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        Tokenizer(str(save_family(name, tmp_path)))
    assert caplog.text == ""


def test_a_token_to_begin_with_that_does_not_exist(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_family("qwen2", tmp_path, add_bos_token=True, bos_token="<|nowhere|>")
    ours = Tokenizer(str(path))
    assert ours.encode("a") == ours.encode("a", special=False)
    assert "add_bos_token has no effect" in caplog.text


def test_merges_are_not_dropped_at_random(tmp_path: Path) -> None:
    """Dropout is a setting for training, like truncation and padding."""
    path = save_family("qwen2", tmp_path)
    clean = Tokenizer(str(path)).encode("the cat sat on the mat")
    content = json.loads((path / "tokenizer.json").read_text("utf-8"))
    content["model"]["dropout"] = 0.9
    (path / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    assert Tokenizer(str(path)).encode("the cat sat on the mat") == clean


def test_a_lone_surrogate_is_not_text(families: Families) -> None:
    for encode in (families["qwen2"][1].encode, families["qwen2"][1].encode_long):
        with pytest.raises(InvalidRequest, match="lone surrogate"):
            encode("a\ud83d")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"chat_template": "{{ a }}"}}, "{{ a }}"),
        ({"tokenizer_config.json": {"chat_template": "{{ a }}"}, "chat_template.jinja": "{{ b }}"}, "{{ b }}"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
                }
            },
            "d",
        ),
    ],
)
def test_the_chat_template_is_kept(files: dict[str, Any], expected: str | None, tmp_path: Path) -> None:
    path = save_family("qwen2", tmp_path)
    for name, content in files.items():
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    assert Tokenizer(str(path)).chat_template == expected


def without_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").rename(path / "tokenizer.model")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "another format": (without_tokenizer, "holds no tokenizer.json. A conversion of another format"),
    "half a file": (lambda p: (p / "tokenizer.json").write_text('{"version":'), "tokenizer.json is malformed"),
    "another object": (lambda p: (p / "tokenizer.json").write_text("{}"), "tokenizer.json is malformed"),
    "half a configuration": (lambda p: (p / "tokenizer_config.json").write_text("{"), "tokenizer_config.json is malf"),
    "a list": (lambda p: (p / "special_tokens_map.json").write_text("[]"), "special_tokens_map.json is malformed"),
    "no UTF-8": (lambda p: (p / "chat_template.jinja").write_bytes(b"\xff"), "chat_template.jinja is malformed"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_files_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    damage, message = DAMAGES[name]
    damage(save_family("qwen2", tmp_path))
    with pytest.raises(ConfigError, match=message) as caught:
        Tokenizer(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_a_template_of_two_parts_is_the_files_own(tmp_path: Path) -> None:
    """RobertaProcessing and BertProcessing place special tokens too."""
    path = save_family("qwen2", tmp_path, add_bos_token=True, bos_token="<|im_start|>")
    backend = Backend.from_file(str(path / "tokenizer.json"))
    vocab = backend.get_vocab()
    sep, cls = (("<|im_end|>", vocab["<|im_end|>"]), ("<think>", vocab["<think>"]))
    backend.post_processor = processors.RobertaProcessing(sep, cls)
    backend.save(str(path / "tokenizer.json"))
    assert Tokenizer(str(path)).encode("the") == backend.encode("the").ids
