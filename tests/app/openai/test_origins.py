"""Origins of tokens: sources follow the round's outcome, texts join to the whole text, each round appears once."""

import json
import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.client import Token
from app.fake_engine import FakeEngineClient, Script, spell
from app.main import create_app
from app.openai.origins import TokenOrigins
from engine.detokenize import Detokenizer, TextStream
from engine.types import FinishReason, Output, Request
from tests.app.harness import PROMPT, Exchange, call, events
from tests.app.openai.test_completions import record

Rounds = list[dict[str, Any]]

TELL = {"speculation": {"tokens": True}}


def post(script: Script = spell, **fields: Any) -> Exchange:
    done = call(create_app(FakeEngineClient(script)), PROMPT | TELL | fields)
    assert done.status == 200, done.reply
    return done


def whole(script: Script = spell, **fields: Any) -> list[tuple[str, Rounds]]:
    """(text, rounds) of every choice."""
    choices = json.loads(post(script, **fields).reply)["choices"]
    return [(choice["text"], choice["speculation"]["rounds"]) for choice in choices]


def streamed(script: Script = spell, **fields: Any) -> list[tuple[str, Rounds]]:
    """The same, joined from the chunks of a stream."""
    joined: dict[int, tuple[str, Rounds]] = {}
    for chunk in events(post(script, stream=True, **fields))[:-1]:
        for choice in chunk["choices"]:
            text, rounds = joined.get(choice["index"], ("", []))
            joined[choice["index"]] = (text + choice["text"], rounds + choice["speculation"]["rounds"])
    return [joined[index] for index in sorted(joined)]


def tokens(rounds: Rounds) -> list[tuple[str, str]]:
    return [(token["text"], token["source"]) for told in rounds for token in told["tokens"]]


def joined(rounds: Rounds) -> str:
    return "".join(text for text, _ in tokens(rounds))


def test_the_shape_of_a_whole_reply() -> None:
    """Seven tokens, three a round: max_tokens cuts the third round after its first draft."""
    drafted = {"drafted": 3, "accepted": 2}
    sources = ("draft", "draft", "recovered")
    three = [{"text": text, "source": source} for text, source in zip("abc", sources, strict=True)]
    assert whole(max_tokens=7) == [
        (
            "abcabca",
            [
                {"round": 0, **drafted, "tokens": three, "rejected": ["d"]},
                {"round": 1, **drafted, "tokens": three, "rejected": ["d"]},
                {"round": 2, **drafted, "tokens": three[:1], "rejected": ["d"]},
            ],
        )
    ]


def test_a_stream_tells_each_round_with_its_text() -> None:
    *chunks, _ = events(post(max_tokens=7, stream=True))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [[told["round"] for told in choice["speculation"]["rounds"]] for choice in choices] == [[0], [1], [2]]
    assert [joined(choice["speculation"]["rounds"]) for choice in choices] == ["abc", "abc", "a"]
    assert [choice["text"] for choice in choices] == ["abc", "abc", "a"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("speculation", [None, {}, {"tokens": False}, {"tokens": None}, {"k": 2, "steps": True}])
def test_nothing_is_told_unless_asked_for(speculation: Any, stream: bool) -> None:
    done = post(speculation=speculation, stream=stream)
    chunks = events(done)[:-1] if stream else [json.loads(done.reply)]
    assert any(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert all("speculation" not in choice for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize(
    ("drafts", "accepted", "added", "sources"),
    [
        ((), 0, 1, ["plain"]),
        ((1,), 1, 2, ["draft", "bonus"]),
        ((1, 2, 3), 3, 4, ["draft", "draft", "draft", "bonus"]),
        ((1, 2, 3), 1, 2, ["draft", "recovered"]),
        ((1, 2, 3), 0, 1, ["recovered"]),
        ((1, 2, 3), 3, 2, ["draft", "draft"]),  # cut
        ((1, 2, 3), 2, 0, []),
    ],
)
def test_sources_follow_from_the_round(drafts: tuple[int, ...], accepted: int, added: int, sources: list[str]) -> None:
    def script(request: Request) -> Iterator[Output]:
        ids, text = tuple(range(97, 97 + added)), "abcd"[:added]
        yield Output(request.id, ids, text, "length", record=record(request), drafts=drafts, accepted=accepted)

    ((_, rounds),) = whole(script)
    (told,) = rounds
    assert [token["source"] for token in told["tokens"]] == sources
    assert (told["drafted"], told["accepted"]) == (len(drafts), accepted)
    assert told["rejected"] == [chr(token) for token in drafts[accepted:]]


@pytest.mark.parametrize(
    ("speculation", "rest"),
    [({"mode": "off"}, ["plain"] * 3), ({"k": 0}, ["plain"] * 3), ({"k": 2}, ["draft", "draft", "bonus"])],
)
@pytest.mark.parametrize("tell", [whole, streamed])
def test_every_mode_can_be_asked(tell: Any, speculation: dict[str, Any], rest: list[str]) -> None:
    ((text, rounds),) = tell(max_tokens=3, speculation=speculation | {"tokens": True})
    assert (text, joined(rounds)) == ("abc", "abc")
    assert [source for _, source in tokens(rounds)] == rest


def test_no_tokens_are_no_rounds() -> None:
    ((text, rounds),) = whole(max_tokens=0, echo=True)
    assert (text, rounds) == ("abc", [])


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("prompt", ["abc", "aé€🙂z"])
def test_streams_and_whole_replies_tell_the_same_of_every_choice(prompt: str, logprobs: int | None, echo: bool) -> None:
    """Rounds cut characters, and the echoed prompt has no origins."""
    size = len(prompt.encode())
    fields: dict[str, Any] = {
        "prompt": [prompt, "xy"],
        "n": 2,
        "max_tokens": 2 * size,
        "echo": echo,
        "logprobs": logprobs,
    }
    told = whole(**fields)
    assert streamed(**fields) == told
    assert [text for text, _ in told] == [t for t in (prompt * (2 + echo), "xy" * (size + echo)) for _ in range(2)]
    for (text, rounds), asked in zip(told, (prompt, prompt, "xy", "xy"), strict=True):
        assert (asked if echo else "") + joined(rounds) == text
        assert [one["round"] for one in rounds] == list(range(len(rounds)))
        assert len(tokens(rounds)) == 2 * size


def test_a_character_is_the_token_that_begins_it() -> None:
    ((_, rounds),) = whole(prompt="a€z", max_tokens=5)
    assert tokens(rounds) == [("a", "draft"), ("€", "draft"), ("", "recovered"), ("", "draft"), ("z", "draft")]
    assert rounds[0]["rejected"] == ["bytes:\\x83"]  # which is no text


def test_a_round_waits_for_the_rest_of_its_text() -> None:
    *chunks, _ = events(post(prompt="a€z", max_tokens=5, stream=True))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["text"] for choice in choices] == ["a", "€z"]
    assert [[told["round"] for told in choice["speculation"]["rounds"]] for choice in choices] == [[], [0, 1]]


def said(request: Request, rounds: Sequence[tuple[str, str, int]], reason: FinishReason) -> Iterator[Output]:
    """Rounds of (tokens added, text shown, drafts accepted), with one draft more than was accepted."""
    for i, (added, text, accepted) in enumerate(rounds):
        ids = tuple(added.encode())
        last = i == len(rounds) - 1
        yield Output(
            request.id,
            ids,
            text,
            reason if last else None,
            record=record(request) if last else None,
            drafts=(*ids[:accepted], 33) if accepted else (),
            accepted=accepted,
        )


STOPPED = [("a", "a", 0), ("xyb", "xy", 2), ("cd", "", 1)]  # "bcd" is a stop string


@pytest.mark.parametrize("tell", [whole, streamed])
def test_what_a_stop_string_removed_is_not_told(tell: Any) -> None:
    """The round without tokens still appears, because its drafts count in the metrics."""
    ((text, rounds),) = tell(lambda request: said(request, STOPPED, "stop"), stop="bcd")
    assert text == joined(rounds) == "axy"
    assert tokens(rounds) == [("a", "plain"), ("x", "draft"), ("y", "draft")]
    assert [(told["drafted"], told["accepted"], told["rejected"]) for told in rounds] == [
        (0, 0, []),
        (3, 2, ["!"]),
        (2, 1, ["!"]),
    ]


@pytest.mark.parametrize("tell", [whole, streamed])
def test_a_stop_string_that_stays_is_told(tell: Any) -> None:
    kept = [*STOPPED[:2], ("cd", "bcd", 1)]
    ((text, rounds),) = tell(lambda request: said(request, kept, "stop"), stop="bcd", include_stop_str_in_output=True)
    assert text == joined(rounds) == "axybcd"
    assert [source for _, source in tokens(rounds)] == ["plain", "draft", "draft", "recovered", "draft", "recovered"]


@pytest.mark.parametrize("tell", [whole, streamed])
def test_text_that_only_seemed_to_begin_a_stop_string_is_told_once_it_is_shown(tell: Any) -> None:
    held = [("a", "a", 0), ("b", "", 0), ("x", "bx", 0)]
    ((text, rounds),) = tell(lambda request: said(request, held, "length"), stop="bcd")
    assert text == joined(rounds) == "abx"
    assert [one["round"] for one in rounds] == [0, 1, 2]


def test_rounds_come_with_the_chunk_that_shows_them() -> None:
    done = post(lambda request: said(request, STOPPED, "stop"), stop="bcd", stream=True)
    choices = [chunk["choices"][0] for chunk in events(done)[:-1]]
    assert [[one["round"] for one in choice["speculation"]["rounds"]] for choice in choices] == [[0], [], [1, 2]]


def words(token_id: int) -> Token:
    """A vocabulary in which 0 is special and token 3 is cut in two by the stop string "\\n"."""
    return (Token("</s>", b""), Token.of(b" the"), Token.of(b" cat"), Token.of(b".\n\n"))[token_id]


def told_of(ids: tuple[int, ...], text: str, reason: FinishReason, *, keeps_end: bool = False) -> list[str]:
    provenance = TokenOrigins(words, keeps_end=keeps_end)
    provenance.add(Output("r", ids, text, reason))
    return [token["text"] for told in provenance.take() for token in told["tokens"]]


def test_a_token_that_a_stop_string_cuts_keeps_what_is_left_of_it() -> None:
    assert told_of((1, 2, 3), " the cat.", "stop") == [" the", " cat", "."]
    assert told_of((1, 2, 3), " the cat.\n", "stop", keeps_end=True) == [" the", " cat", ".\n"]
    assert told_of((1, 2, 3), " the cat", "stop") == [" the", " cat"]  # as a stop token


def test_an_end_token_is_told_only_where_the_text_keeps_what_ended_it() -> None:
    assert told_of((1, 0), " the", "stop") == [" the"]
    assert told_of((1, 0), " the", "stop", keeps_end=True) == [" the", ""]
    assert told_of((1, 0, 2, 0), " the cat", "stop") == [" the", "", " cat"]  # the first of them was no end
    assert told_of((1, 0), " the", "length") == [" the", ""]


def test_a_tokenizer_that_drops_the_first_space_loses_no_text() -> None:
    assert "".join(told_of((1, 2), "the cat", "length")) == "the cat"


def test_the_text_counts_where_a_vocabulary_spells_another() -> None:
    assert "".join(told_of((1, 2), " the cat, or so", "length")) == " the cat, or so"
    assert told_of((1, 2), " t", "length") == [" t", ""]


def test_all_tokens_of_a_character_that_a_stop_string_removed_are_removed() -> None:
    provenance = TokenOrigins(lambda byte: Token.of(bytes([byte])), keeps_end=False)
    provenance.add(Output("r", tuple("a€".encode()), "a", "stop"))
    (told,) = provenance.take()
    assert told["tokens"] == [{"text": "a", "source": "plain"}]


@pytest.mark.parametrize("token", [-1, 256, 2**70])
def test_drafts_that_are_no_ids_cost_nothing(token: int) -> None:
    def script(request: Request) -> Iterator[Output]:
        yield Output(request.id, (97,), "a", "length", record=record(request), drafts=(token,))

    ((_, rounds),) = whole(script)
    assert rounds[0]["rejected"] == [f"token_id:{token}"]


TEXT = st.one_of(st.text(st.sampled_from("ab\n é€🙂"), max_size=24).map(str.encode), st.binary(max_size=12))


@st.composite
def texts(draw: st.DrawFn) -> tuple[list[bytes], list[int], tuple[str, ...], bool]:
    """(what the tokens spell, tokens in each round, stop strings, whether the text keeps the one that ends it)"""
    data, spelt = draw(TEXT), []
    while data:
        size = draw(st.integers(1, 4))
        spelt.append(data[:size])
        data = data[size:]
    rounds: list[int] = []
    while sum(rounds) < len(spelt):
        rounds.append(draw(st.integers(1, 5)))
    stop = draw(st.lists(st.text(st.sampled_from("ab\n é€"), min_size=1, max_size=3), max_size=2))
    return spelt, rounds, tuple(stop), draw(st.booleans())


@example(([b"\xed\xa0", b"\x00"], [2], (), False))
@given(texts())
def test_token_texts_join_to_the_text_whatever_is_cut_or_held_back(
    made: tuple[list[bytes], list[int], tuple[str, ...], bool],
) -> None:
    """With the engine's own detokeniser and stop strings, and each token's place from the text decoded up to it."""
    spelt, sizes, stop, keeps_end = made

    def decode(ids: Sequence[int]) -> str:
        return b"".join(spelt[i] for i in ids).decode("utf-8", "replace")

    stream = TextStream(Detokenizer(decode), stop, include=keeps_end)
    provenance = TokenOrigins(lambda i: Token.of(spelt[i]), keeps_end=keeps_end)
    text, told, used, stopped = "", [], 0, False
    while used < len(spelt) and not stopped:
        added, piece = [], ""
        for token in range(used, min(used + sizes.pop(0), len(spelt))):
            shown, stopped = stream.push(token, may_stop=True)
            added.append(token)
            piece += shown
            if stopped:
                break
        used += len(added)
        over = stopped or used == len(spelt)
        piece += stream.flush() if over and not stopped else ""
        provenance.add(Output("r", tuple(added), piece, ("stop" if stopped else "length") if over else None))
        text += piece
        told += provenance.take()
        so_far = joined(told)
        assert text.startswith(so_far)
    assert joined(told) == text
    assert [one["round"] for one in told] == list(range(len(told)))
    ends = [0] + [len(decode(range(i + 1))) for i in range(used)]
    own = [text[a:b] for a, b in pairwise(ends)]
    if not stopped or keeps_end:
        assert [shown for shown, _ in tokens(told)] == own
    else:
        assert [shown for shown, _ in tokens(told) if shown] == [part for part in own if part]


def test_no_text_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for stream in (False, True):
            assert b"qzv" in post(prompt="qzv", stream=stream).reply
    assert "qzv" not in caplog.text


def test_a_stream_that_breaks_logs_no_text(caplog: pytest.LogCaptureFixture) -> None:
    def breaks(request: Request) -> Iterator[Output]:
        yield next(iter(spell(request)))
        yield Output(request.id, (), "", "error", error="broken")

    with caplog.at_level(logging.DEBUG):
        done = post(breaks, prompt="qzv", stream=True)
    assert b"qzv" in done.reply
    assert "broke" in caplog.text
    assert "qzv" not in caplog.text
