"""Log-probabilities and echo: OpenAI's columns, offsets into the text as sent, nothing lost or doubled in streams."""

import asyncio
import json
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest

from app import routes
from app.client import Token
from app.fake_engine import FakeEngineClient
from app.main import create_app
from app.openai import replies
from app.openai.logprobs import MIN_LOGPROB, LogprobColumns
from engine.types import Output, Request, TokenLogprob
from tests.app.harness import PROMPT, Exchange, call, events
from tests.app.openai.test_completions import record

COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def post(client: FakeEngineClient, **fields: Any) -> Exchange:
    return call(create_app(client), PROMPT | fields)


def choice_of(client: FakeEngineClient, **fields: Any) -> dict[str, Any]:
    """The only choice of a whole reply."""
    (choice,) = json.loads(post(client, **fields).reply)["choices"]
    return dict(choice)


def assembled(done: Exchange, index: int = 0) -> tuple[str, dict[str, list[Any]]]:
    """Text and columns of one choice, joined from the chunks of a stream."""
    chunks = [c for e in events(done)[:-1] for c in e["choices"] if c["index"] == index]
    columns = {name: [item for c in chunks for item in c["logprobs"][name]] for name in COLUMNS}
    return "".join(c["text"] for c in chunks), columns


def characters(text: str, logprobs: dict[str, Any]) -> list[str]:
    """The text from each token's offset to the next one's."""
    bounds = [*logprobs["text_offset"], len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


def test_the_columns_of_a_whole_reply() -> None:
    told = choice_of(FakeEngineClient(), prompt="abc", max_tokens=3, logprobs=2)["logprobs"]
    assert told == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [-9.5, -0.5, -9.5],
        "top_logprobs": [
            {"b": -0.5, "c": -1.0, "a": -9.5},  # one more than asked for: the token itself is not of the likeliest
            {"b": -0.5, "c": -1.0},
            {"d": -0.5, "e": -1.0, "c": -9.5},
        ],
        "text_offset": [0, 1, 2],
    }


def test_no_logprobs_unless_asked_for_and_0_tells_the_tokens_own() -> None:
    assert choice_of(FakeEngineClient(), max_tokens=2)["logprobs"] is None
    told = choice_of(FakeEngineClient(), max_tokens=2, logprobs=0)["logprobs"]
    assert told["top_logprobs"] == [{"a": -9.5}, {"b": -0.5}]


TEXTS = ["abc", "aé€🙂z", "🙂"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_and_a_whole_reply_tell_the_same(text: str, echo: bool, n: int) -> None:
    """Three bytes a round, so characters are cut and their tokens' logprobs wait for the chunk with the text."""
    size = len(text.encode())
    fields: dict[str, Any] = {"prompt": text, "max_tokens": 2 * size, "logprobs": 1, "echo": echo, "n": n}
    whole = json.loads(post(FakeEngineClient(), **fields).reply)["choices"]
    for index in range(n):
        streamed = assembled(post(FakeEngineClient(), **fields, stream=True), index)
        assert streamed == (whole[index]["text"], whole[index]["logprobs"])
        assert streamed[0] == text * (2 + echo)
        assert len(streamed[1]["tokens"]) == size * (2 + echo)


@pytest.mark.parametrize("echo", [False, True])
def test_tokens_within_a_character_have_its_offset(echo: bool) -> None:
    choice = choice_of(FakeEngineClient(), prompt="a€z", max_tokens=5, logprobs=0, echo=echo)
    assert choice["logprobs"]["text_offset"][:5] == [0, 1, 1, 1, 2]
    assert choice["logprobs"]["tokens"][:5] == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "z"]
    assert characters(choice["text"], choice["logprobs"])[:5] == ["a", "", "", "€", "z"]


@pytest.mark.parametrize("prompt", ["abé", list("abé".encode()), ["abé"], [list("abé".encode())]])
def test_echo_begins_the_text_with_the_prompt(prompt: Any) -> None:
    assert choice_of(FakeEngineClient(), prompt=prompt, max_tokens=4, echo=True)["text"] == "abéabé"
    assert choice_of(FakeEngineClient(), prompt=prompt, max_tokens=4)["text"] == "abé"


def test_echo_gives_a_text_as_it_was_sent_and_ids_as_they_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer may change a text, by lower case or by other spaces."""
    client = FakeEngineClient()
    monkeypatch.setattr(client, "detokenize", lambda ids, **options: "decoded ")
    assert choice_of(client, prompt="ABC", max_tokens=0, echo=True)["text"] == "ABC"
    assert choice_of(client, prompt=[65, 66], max_tokens=0, echo=True)["text"] == "decoded "


def test_echo_of_several_prompts_is_each_choices_own() -> None:
    choices = json.loads(post(FakeEngineClient(), prompt=["ab", "xyz"], n=2, max_tokens=1, echo=True).reply)["choices"]
    assert [c["text"] for c in choices] == ["aba", "aba", "xyzx", "xyzx"]


def test_echo_with_logprobs_tells_those_of_the_prompt_alone_too() -> None:
    client = FakeEngineClient()
    choice = choice_of(client, prompt="bcd", max_tokens=0, logprobs=1, echo=True)
    assert client.submitted[0].params.prompt_logprobs == 1
    assert (choice["text"], choice["finish_reason"]) == ("bcd", "length")
    assert choice["logprobs"] == {
        "tokens": ["b", "c", "d"],
        "token_logprobs": [None, -9.5, -0.5],
        "top_logprobs": [None, {"d": -0.5, "c": -9.5}, {"d": -0.5}],
        "text_offset": [0, 1, 2],
    }


@pytest.mark.parametrize("fields", [{"logprobs": 3}, {"echo": True}, {}])
def test_prompt_logprobs_are_only_computed_for_both(fields: dict[str, Any]) -> None:
    client = FakeEngineClient()
    post(client, **fields)
    assert client.submitted[0].params.prompt_logprobs is None


@pytest.mark.parametrize("ids", [[300], [10**12]])
def test_ids_are_decoded_only_once_the_engine_took_them(ids: list[int]) -> None:
    done = post(FakeEngineClient(), prompt=ids, echo=True)
    assert (done.status, json.loads(done.reply)["error"]["param"]) == (400, "prompt")


def test_the_echo_is_in_the_first_chunk_of_its_choice_only() -> None:
    chunks = events(post(FakeEngineClient(), max_tokens=6, echo=True, stream=True))[:-1]
    assert [c["choices"][0]["text"] for c in chunks] == ["abcabc", "abc"]


def held_back(request: Request) -> Iterator[Output]:
    """What may become a stop string is held for two steps; then it is sent, all at once."""
    for token, text in ((97, "a"), (98, ""), (99, ""), (100, "bcd")):
        yield Output(request.id, (token,), text, logprobs=(TokenLogprob(token, -float(token)),))
    yield Output(request.id, (), "", "stop", record=record(request))


def test_logprobs_of_held_text_come_with_the_next_chunk() -> None:
    chunks = [e["choices"][0] for e in events(post(FakeEngineClient(held_back), logprobs=0, stream=True))[:-1]]
    assert [c["text"] for c in chunks] == ["a", "bcd", ""]
    assert [c["logprobs"]["tokens"] for c in chunks] == [["a"], ["b", "c", "d"], []]
    assert [c["logprobs"]["text_offset"] for c in chunks] == [[0], [1, 2, 3], []]


def words(token_id: int) -> Token:
    """A vocabulary in which 0 is special, 1 and 2 look alike, and words begin with a space."""
    return (Token("<s>", b""), Token.of(b" the"), Token.of(b" the"), Token.of(b" cat"))[token_id]


def offsets(ids: list[int], text: str) -> list[int]:
    transcript = LogprobColumns(words)
    asyncio.run(transcript.add_prompt(ids, [TokenLogprob(i, -1.0) for i in ids[1:]], text))
    transcript.add([TokenLogprob(3, -1.0)])
    return list(transcript.take()["text_offset"])


def test_the_first_space_that_a_tokenizer_drops_moves_no_offset() -> None:
    assert offsets([0, 1, 3], "the cat") == [0, 0, 3, 7]
    assert offsets([0, 1, 3], " the cat") == [0, 0, 4, 8]


def test_special_tokens_that_the_client_wrote_out_are_in_the_text() -> None:
    assert offsets([0, 1, 3], "<s> the cat") == [3, 3, 7, 11]


def test_the_output_goes_on_after_the_text_whatever_the_prompts_tokens_add_up_to() -> None:
    assert offsets([1, 3], "THE CAT!!!")[-1] == 10


def test_of_tokens_that_look_alike_the_likelier_is_told() -> None:
    transcript = LogprobColumns(words)
    transcript.add([TokenLogprob(2, -3.0, ((1, -0.1), (3, -1.0)))])
    told = transcript.take()
    assert told["top_logprobs"] == [{" the": -0.1, " cat": -1.0}]
    assert told["token_logprobs"] == [-3.0]


def test_a_probability_of_0_can_be_said() -> None:
    transcript = LogprobColumns(words)
    transcript.add([TokenLogprob(3, float("-inf"), ((1, float("-inf")),))])
    told = transcript.take()
    assert (told["token_logprobs"], told["top_logprobs"]) == (
        [MIN_LOGPROB],
        [{" the": MIN_LOGPROB, " cat": MIN_LOGPROB}],
    )


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"a", "a"), ("é".encode(), "é"), (b"\xe2\x82", "bytes:\\xe2\\x82"), (b" \xff", "bytes:\\x20\\xff")],
)
def test_bytes_that_are_no_text_are_shown_as_bytes(data: bytes, text: str) -> None:
    assert Token.of(data) == Token(text, data)


def ascii_ids(count: int) -> list[int]:
    return [97 + i % 26 for i in range(count)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_prompts_columns_are_whole(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """Log-probabilities in many pieces equal those in one piece."""
    fields = {"prompt": [ascii_ids(90), ascii_ids(35)], "max_tokens": 3, "logprobs": 3, "echo": True, "seed": 1}
    told: list[list[tuple[str, dict[str, list[Any]]]]] = []
    for piece in (7, 10**6):
        monkeypatch.setattr("app.openai.logprobs.PIECE_TOKENS", piece)
        monkeypatch.setattr("app.openai.replies.PIECE_TOKENS", piece)
        done = post(FakeEngineClient(), stream=stream, **fields)
        whole = [] if stream else json.loads(done.reply)["choices"]
        told.append([assembled(done, i) for i in (0, 1)] if stream else [(c["text"], c["logprobs"]) for c in whole])
    assert told[0] == told[1]
    assert [len(column) for column in told[0][0][1].values()] == [93] * 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_large_reply_leaves_the_event_loop_to_others(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """Between two turns of another task no more than a piece's tokens are written down or encoded."""
    monkeypatch.setattr("app.openai.logprobs.PIECE_TOKENS", 10)
    monkeypatch.setattr("app.openai.replies.PIECE_TOKENS", 10)
    written, encoded = LogprobColumns._write, replies.encode_json
    work: list[int] = [0]

    def write(self: LogprobColumns, token_id: int, logprob: TokenLogprob | None) -> None:
        work[-1] += 1
        written(self, token_id, logprob)

    def encode(value: Any) -> bytes:
        work[-1] += len(value) if isinstance(value, list) else 0
        return encoded(value)

    monkeypatch.setattr(LogprobColumns, "_write", write)
    monkeypatch.setattr(replies, "encode_json", encode)

    async def other() -> None:
        while True:
            await asyncio.sleep(0)
            work.append(0)

    async def scenario() -> Exchange:
        beside = asyncio.create_task(other())
        fields = {"prompt": [ascii_ids(200)] * 3, "max_tokens": 0, "logprobs": 3, "echo": True, "stream": stream}
        done = await Exchange(create_app(FakeEngineClient()), json.dumps(PROMPT | fields).encode()).run()
        beside.cancel()
        return done

    done = asyncio.run(scenario())
    assert done.status == 200
    assert sum(work) >= 3 * 200 * 5  # written once, and encoded in four columns
    assert max(work) <= 3 * 11  # one piece each of the choices, which take turns


def test_a_long_body_says_its_length() -> None:
    done = post(FakeEngineClient(), prompt=[ascii_ids(200)] * 8, max_tokens=0, logprobs=20, echo=True)
    assert len(done.reply) > routes.MAX_JOINED_BYTES
    assert int(done.reply_headers["content-length"]) == len(done.reply)
    assert len(json.loads(done.reply)["choices"]) == 8
    assert len(done.sent) == 1 + 8 + 2  # the start, a part for each choice, what is before and behind them


def test_a_prompt_is_decoded_once_however_many_choices_echo_it(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeEngineClient()
    decode = Mock(side_effect=client.detokenize)
    monkeypatch.setattr(client, "detokenize", decode)
    done = post(client, prompt=[ascii_ids(7), ascii_ids(9)], n=4, max_tokens=0, echo=True)
    assert [choice["text"] != "" for choice in json.loads(done.reply)["choices"]] == [True] * 8
    assert sorted(len(call.args[0]) for call in decode.call_args_list) == [7, 9]


def test_a_long_prompt_is_decoded_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "DECODED_INLINE", 8)
    client, threads = FakeEngineClient(), dict[int, threading.Thread]()
    detokenize = client.detokenize

    def decode(ids: Any, **how: Any) -> str:
        threads[len(ids)] = threading.current_thread()
        return detokenize(ids, **how)

    monkeypatch.setattr(client, "detokenize", decode)
    done = post(client, prompt=[ascii_ids(8), ascii_ids(9)], max_tokens=0, echo=True)
    assert [len(choice["text"]) for choice in json.loads(done.reply)["choices"]] == [8, 9]
    assert (threads[8] is threading.main_thread(), threads[9] is threading.main_thread()) == (True, False)
