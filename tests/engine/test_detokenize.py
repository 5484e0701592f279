"""Incremental text equals the whole text, in pieces that are never half a character nor part of a stop string."""

from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from engine.detokenize import CONTEXT, MAX_HELD, TAIL, Detokenizer, TextStream
from engine.models.tokenizer import Tokenizer
from tests.engine.pairs import Pair
from tests.examples import examples

REPLACEMENT = "\ufffd"


@pytest.fixture(scope="module")
def tokenizer(pair: Pair) -> Tokenizer:
    return Tokenizer(pair.target)


def stream(tokenizer: Tokenizer, ids: Seq[int], context: Seq[int] = ()) -> tuple[list[str], str]:
    """(the pieces, what flush gives)."""
    detokenizer = Detokenizer(tokenizer.decode, context)
    return [detokenizer.push(t) for t in ids], detokenizer.flush()


@examples(80)
@given(text=st.text(max_size=40))
def test_text_streams_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    """Most characters take several tokens here: the pieces still spell exactly the text, but for special tokens."""
    for hidden in (REPLACEMENT, *map(tokenizer.name, tokenizer.special_ids)):
        assert hidden
        text = text.replace(hidden, "")
    pieces, rest = stream(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert rest == ""
    assert not any(REPLACEMENT in piece for piece in pieces)


@examples(100)
@given(ids=st.lists(st.integers(0, 330), max_size=30), context=st.lists(st.integers(0, 330), max_size=8))
def test_any_tokens(tokenizer: Tokenizer, ids: list[int], context: list[int]) -> None:
    """Whatever bytes come, the pieces spell what the tokens decode to after a context that ends at a character."""
    pieces, rest = stream(tokenizer, ids, context)
    before = tokenizer.decode(context)
    if before.endswith(REPLACEMENT):
        context, before = [], ""
    assert before + "".join(pieces) + rest == tokenizer.decode([*context, *ids])


def byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    """Byte → the id of the token that is that byte."""
    return {byte: tokenizer.vocab[char] for byte, char in bytes_to_unicode().items()}


# Characters of one to four bytes, their beginnings, and bytes that belong to none.
WHOLE = [char.encode() for char in "aé€🙂\ufffd"]
PARTS = [char[:n] for char in WHOLE for n in range(1, len(char))] + [
    b"\x80",
    b"\xbf",
    b"\xed\xa0",
    b"\xf4\x90",
    b"\xff",
]


@examples(150)
@given(data=st.data())
def test_any_bytes(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """One token per byte, special ones between; nearly all of it is invalid. No text is lost, and what cannot change
    any more is given once more tokens came than a character has bytes."""
    of_byte = byte_tokens(tokenizer)
    choices = [[of_byte[b] for b in part] for part in WHOLE + PARTS] + [[i] for i in sorted(tokenizer.special_ids)]
    ids = [i for part in data.draw(st.lists(st.sampled_from(choices), max_size=15)) for i in part]
    detokenizer, told = Detokenizer(tokenizer.decode), ""
    for n, token in enumerate(ids, start=1):
        told += detokenizer.push(token)
        spoken = [t for t in ids[:n] if t not in tokenizer.special_ids]
        assert len(told) >= len(tokenizer.decode(spoken[: -MAX_HELD - 1])) - TAIL
    assert told + detokenizer.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("invalid", range(12))
def test_characters_after_a_run_of_invalid_bytes_are_whole(tokenizer: Tokenizer, invalid: int) -> None:
    of_byte = byte_tokens(tokenizer)
    pieces, rest = stream(tokenizer, [of_byte[b] for b in b"\x80" * invalid + "🙂€é🙂".encode()])
    assert "".join(pieces) == REPLACEMENT * invalid + "🙂€é🙂"
    assert rest == ""


def test_a_run_of_invalid_bytes_costs_as_much_per_token_as_other_text(tokenizer: Tokenizer) -> None:
    """No decode sees more than the tail, the tokens held and one more."""
    seen: list[int] = []

    def decode(ids: Seq[int]) -> str:
        seen.append(len(ids))
        return tokenizer.decode(ids)

    detokenizer, invalid = Detokenizer(decode), byte_tokens(tokenizer)[0x80]
    pieces = [detokenizer.push(invalid) for _ in range(200)]
    assert max(seen) <= TAIL + MAX_HELD + 1
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode([invalid] * 200)


def llama2() -> Callable[[Seq[int]], str]:
    """Ids → text as Llama 2's decoder has it: words begin with a space, of which the text's first is stripped; </s> is
    special and skipped."""
    backend = Backend(models.WordLevel({"</s>": 0, "▁a": 1, "▁b": 2, "▁": 3, "c": 4}, unk_token="</s>"))
    backend.add_special_tokens(["</s>"])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return lambda ids: str(backend.decode(list(ids), skip_special_tokens=True))


@examples(100)
@given(ids=st.lists(st.integers(0, 4), max_size=12))
@example(ids=[1, 0, 2])
@example(ids=[3, 2])
@example(ids=[3, 0, 3, 3, 2])
@example(ids=[1] + [0] * 12 + [2])
def test_special_tokens_do_not_eat_spaces(ids: list[int]) -> None:
    decode = llama2()
    detokenizer = Detokenizer(decode)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == decode(ids)


def test_special_tokens_without_end_cost_no_more_than_others() -> None:
    decode, seen = llama2(), [0]

    def counting(ids: Seq[int]) -> str:
        seen.append(len(ids))
        return decode(ids)

    detokenizer = Detokenizer(counting, [1])
    assert [detokenizer.push(t) for t in [0] * 50 + [2]] == [""] * 50 + [" b"]
    assert max(seen) <= CONTEXT


def test_each_character_comes_with_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("aЖ𐍈")  # one, two and four bytes, none of them merged
    assert len(ids) == 7
    assert stream(tokenizer, ids) == (["a", "", "Ж", "", "", "", "𐍈"], "")


def test_an_unfinished_character_is_flushed_as_it_is(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a𐍈")[:-1]
    assert stream(tokenizer, ids) == (["a", "", "", ""], REPLACEMENT)


def test_a_context_that_ends_inside_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("𐍈b")
    pieces, rest = stream(tokenizer, ids[2:], ids[:2])
    assert "".join(pieces) + rest == tokenizer.decode(ids[2:])


def spaced(ids: Seq[int]) -> str:
    """Words are joined by a space, except at the very beginning: text depends on the token before, as in Llama 2."""
    return " ".join(f"w{i}" for i in ids)


def test_text_that_depends_on_the_token_before() -> None:
    detokenizer = Detokenizer(spaced, [7, 8])
    assert [detokenizer.push(t) for t in (1, 2, 3)] == [" w1", " w2", " w3"]


def chars(ids: Seq[int]) -> str:
    return "".join(map(chr, ids))


def test_of_a_stop_string_that_came_too_early_twice_neither_is_held() -> None:
    """One token may hold it twice, overlapping: its end must not complete another with the next token."""
    cut = TextStream(Detokenizer(lambda ids: "".join(("aaa", "a")[token] for token in ids)), ("aa",))
    assert cut.push(0, may_stop=False) == ("aaa", False)
    assert cut.push(1, may_stop=True) == ("", False)
    assert cut.flush() == "a"


def told(text: str, stop: tuple[str, ...], may_stop_from: int = 0) -> tuple[list[str], bool]:
    """What a client sees, character by character, and whether a stop string ended it."""
    out = TextStream(Detokenizer(chars), stop)
    pieces = []
    for n, char in enumerate(text):
        piece, stopped = out.push(ord(char), may_stop=n >= may_stop_from)
        pieces.append(piece)
        if stopped:
            return pieces, True
    return [*pieces, out.flush()], False


@pytest.mark.parametrize(
    ("text", "stop", "pieces", "stopped"),
    [
        ("abcd", ("bc",), ["a", "", ""], True),
        ("abxd", ("bc",), ["a", "", "bx", "d", ""], False),
        ("aab", ("ab",), ["", "a", ""], True),
        ("ababac", ("abac",), ["", "", "", "ab", "", ""], True),
        ("abc", ("c", "abcd"), ["", "", "ab"], True),
        ("xab", ("abc",), ["x", "", "", "ab"], False),
        ("a", ("a",), [""], True),
    ],
)
def test_stop_strings_by_hand(text: str, stop: tuple[str, ...], pieces: list[str], stopped: bool) -> None:
    assert told(text, stop) == (pieces, stopped)


@examples(150)
@given(
    text=st.text("ab", max_size=20),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3).map(tuple),
)
def test_stop_strings(text: str, stop: tuple[str, ...]) -> None:
    """The text ends before the stop string that is completed first; nothing of it was sent, and no more was held back
    than could become one."""
    pieces, stopped = told(text, stop)
    ends = [n for n in range(1, len(text) + 1) if any(text[:n].endswith(s) for s in stop)]
    assert stopped == bool(ends)
    if not ends:
        assert "".join(pieces) == text
    else:
        completed = text[: ends[0]]
        assert "".join(pieces) == completed[: min(completed.find(s) for s in stop if s in completed)]
        assert len(pieces) == ends[0]
    sent = ""
    for n, piece in enumerate(pieces[: (ends[0] if ends else len(text) + 1) - 1], start=1):
        sent += piece
        held = text[len(sent) : n]
        assert text.startswith(sent)
        assert not held or any(s.startswith(held) for s in stop)


def test_a_stop_string_that_may_not_stop_yet_is_text() -> None:
    assert told("abXab", ("ab",), may_stop_from=2) == (["", "ab", "X", "", ""], True)


def test_a_stop_string_that_came_too_early_never_stops() -> None:
    """Not even if it was held back as the beginning of a longer one."""
    out = TextStream(Detokenizer(chars), ("xyz", "y"))
    assert out.push(ord("x"), may_stop=False) == ("", False)
    assert out.push(ord("y"), may_stop=False) == ("xy", False)
    assert out.push(ord("a"), may_stop=True) == ("a", False)
    assert out.push(ord("y"), may_stop=True) == ("", True)
