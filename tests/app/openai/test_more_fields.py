"""Fields that complete vLLM's surface: best_of, token ids in replies, truncated prompts, usage in every chunk."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from app.client import Token
from app.fake_engine import FakeEngineClient, blank, note, spell
from app.main import create_app
from app.openai.prompts import bad_word_ids
from engine.types import Output, Request, TokenLogprob
from tests.app.harness import PROMPT, Exchange, call, events

CHAT = "/v1/chat/completions"
MESSAGES = {"model": "fake", "messages": [{"role": "user", "content": "abc"}]}


def post(client: FakeEngineClient | None = None, /, **fields: Any) -> Exchange:
    return call(create_app(client or FakeEngineClient()), PROMPT | fields)


def reply(client: FakeEngineClient | None = None, /, **fields: Any) -> Any:
    done = post(client, **fields)
    assert done.status == 200, done.reply
    return json.loads(done.reply)


def chat(client: FakeEngineClient | None = None, /, **fields: Any) -> Exchange:
    return call(create_app(client or FakeEngineClient()), MESSAGES | fields, path=CHAT)


# --- best_of ---------------------------------------------------------------------------------------------------------


def scored(*scores: Sequence[float]) -> Any:
    """A script in which choice i says its letter once for each of its log-probabilities."""

    def script(request: Request) -> Iterator[Output]:
        assert request.params.logprobs is not None, "without log-probabilities nothing can be chosen"
        values = scores[request.choice_index]
        letter = ord("a") + request.choice_index
        record = blank(request, ())
        record.output_tokens = len(values)
        told = tuple(TokenLogprob(letter, value) for value in values)
        yield Output(
            request.id, (letter,) * len(values), chr(letter) * len(values), "length", None, record=record, logprobs=told
        )

    return script


def test_best_of_returns_the_texts_with_the_highest_mean_logprob_best_first() -> None:
    """The sum would choose b, which is short."""
    client = FakeEngineClient(scored((-2.0, -2.0), (-3.0,), (-1.0, -1.0, -1.0, -1.0), (-5.0,)))
    body = reply(client, n=2, best_of=4)
    assert [(c["index"], c["text"], c["logprobs"]) for c in body["choices"]] == [(0, "cccc", None), (1, "aa", None)]
    assert len(client.submitted) == 4
    assert body["usage"]["completion_tokens"] == 8, "every candidate counts, as in OpenAI's API"
    assert body["usage"]["prompt_tokens"] == 3


def test_best_of_keeps_the_logprobs_that_the_client_wants() -> None:
    (choice,) = reply(FakeEngineClient(scored((-2.0,), (-1.0,))), best_of=2, logprobs=0)["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-1.0]


def test_best_of_chooses_among_the_candidates_of_each_prompt() -> None:
    client = FakeEngineClient(scored((-2.0,), (-1.0,), (-1.0,)))
    choices = reply(client, prompt=["x", "y"], best_of=3)["choices"]
    assert [(c["index"], c["text"]) for c in choices] == [(0, "b"), (1, "b")], "of equals the first"
    assert len(client.submitted) == 6


def unequal(request: Request) -> Iterator[Output]:
    """Choice i emits i + 1 tokens in a round each. The last choices are the best."""
    record = blank(request)
    for _ in range(request.choice_index + 1):
        note(record, 2, 1, 1)
    told = (TokenLogprob(97, float(request.choice_index)),)
    yield Output(request.id, (97,), "a", "length", None, record=record, logprobs=told)


@pytest.mark.parametrize("n", [1, 2])
def test_the_rounds_are_those_of_the_choices_that_best_of_returns(n: int) -> None:
    told = reply(FakeEngineClient(unequal), n=n, best_of=3, speculation={"steps": True})
    speculation = told["metrics"]["speculative_decoding"]
    assert speculation["num_spec_steps"] == 6, "the sums count every candidate"
    listed = speculation["choices"] if n > 1 else [speculation]
    assert [len(choice["per_step_accepted"]) for choice in listed] == [3, 2][:n]


def test_best_of_n_is_no_choice() -> None:
    client = FakeEngineClient()
    reply(client, n=2, best_of=2)
    assert [request.params.logprobs for request in client.submitted] == [None, None]


# --- token ids -------------------------------------------------------------------------------------------------------


def test_ids_of_prompt_and_text_in_a_whole_reply() -> None:
    (choice,) = reply(max_tokens=5, return_token_ids=True)["choices"]
    assert choice["prompt_token_ids"] == [97, 98, 99]
    assert choice["token_ids"] == [97, 98, 99, 97, 98]
    assert "token_ids" not in reply(max_tokens=5)["choices"][0]


def test_ids_of_a_stream_join_to_those_of_the_whole() -> None:
    *chunks, _ = events(post(max_tokens=8, stream=True, return_token_ids=True))
    parts = [chunk["choices"][0] for chunk in chunks]
    assert len(parts) > 1
    assert [part["prompt_token_ids"] for part in parts] == [[97, 98, 99]] + [None] * (len(parts) - 1)
    assert [token for part in parts for token in part["token_ids"]] == list(b"abcabcab")


def test_a_chat_tells_the_prompts_ids_beside_its_choices() -> None:
    body = json.loads(chat(n=2, max_tokens=3, return_token_ids=True).reply)
    assert body["prompt_token_ids"] == [97, 98, 99]
    assert [sorted(choice) for choice in body["choices"]] == [
        ["finish_reason", "index", "logprobs", "message", "token_ids"]
    ] * 2
    first, *rest, _ = events(chat(max_tokens=8, stream=True, return_token_ids=True))
    assert first["prompt_token_ids"] == [97, 98, 99]
    assert rest
    assert not any("prompt_token_ids" in chunk for chunk in rest)


# --- special tokens --------------------------------------------------------------------------------------------------


class WithSpecial(FakeEngineClient):
    """Its token 1 is special and named <end>."""

    def token(self, token_id: int) -> Token:
        return Token("<end>", b"", special=True) if token_id == 1 else super().token(token_id)


def two_tokens(request: Request) -> Iterator[Output]:
    shown = "" if request.params.skip_special_tokens else "<end>"
    told = (TokenLogprob(1, -1.0), TokenLogprob(97, -1.0))
    yield Output(request.id, (1, 97), shown + "a", "length", record=blank(request, ()), logprobs=told)


@pytest.mark.parametrize(("skip", "offsets", "texts"), [(True, [0, 0], ["", "a"]), (False, [0, 5], ["<end>", "a"])])
def test_offsets_and_origins_count_the_special_tokens_that_the_text_shows(
    skip: bool, offsets: list[int], texts: list[str]
) -> None:
    asked = {"skip_special_tokens": skip, "logprobs": 0, "speculation": {"tokens": True}}
    (choice,) = reply(WithSpecial(two_tokens), **asked)["choices"]
    assert choice["logprobs"]["text_offset"] == offsets
    (part,) = choice["speculation"]["rounds"]
    assert [token["text"] for token in part["tokens"]] == texts


# --- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["abcdef", list(b"abcdef")])
def test_a_truncated_prompt_keeps_its_end(prompt: Any) -> None:
    client = FakeEngineClient()
    body = reply(client, prompt=prompt, truncate_prompt_tokens=4, echo=True, max_tokens=0)
    assert client.submitted[0].prompt_ids == tuple(b"cdef")
    assert body["choices"][0]["text"] == "cdef"
    assert body["usage"]["prompt_tokens"] == 4
    assert reply(prompt=prompt, truncate_prompt_tokens=6, max_tokens=1)["usage"]["prompt_tokens"] == 6


def test_a_truncated_prompt_keeps_its_special_tokens() -> None:
    client = FakeEngineClient()
    client.bos = (7, 8)
    for most, kept in ((4, (7, 8, *b"ef")), (2, tuple(b"ef")), (8, (7, 8, *b"abcdef")), (7, (7, 8, *b"bcdef"))):
        reply(client, prompt="abcdef", truncate_prompt_tokens=most)
        assert client.submitted[-1].prompt_ids == kept
    reply(client, prompt="abcdef", truncate_prompt_tokens=2, add_special_tokens=False)
    assert client.submitted[-1].prompt_ids == tuple(b"ef")


def test_a_prompt_that_is_not_shortened_is_repeated_as_it_was_sent() -> None:
    """Its tokens may spell another text: here they begin with a special token."""
    client = FakeEngineClient()
    client.bos = (1,)
    assert reply(client, prompt="abc", truncate_prompt_tokens=5, echo=True, max_tokens=0)["choices"][0]["text"] == "abc"


def test_minus_one_truncates_to_what_the_context_leaves() -> None:
    client = FakeEngineClient(max_model_len=32)
    body = reply(client, prompt="a" * 500 + "b", truncate_prompt_tokens=-1, max_tokens=8)
    assert body["usage"]["prompt_tokens"] == 24
    assert client.submitted[0].prompt_ids[-1] == ord("b")
    asked = MESSAGES | {"messages": [{"role": "user", "content": "c" * 500}], "truncate_prompt_tokens": -1}
    done = call(create_app(client), asked, path=CHAT)
    assert json.loads(done.reply)["usage"]["prompt_tokens"] == 31


def test_truncated_prompts_count_with_what_is_kept() -> None:
    client = FakeEngineClient(max_prompt_tokens=20)
    assert post(client, prompt=["a" * 30] * 2, truncate_prompt_tokens=10).status == 200
    error = json.loads(post(client, prompt=["a" * 30] * 3, truncate_prompt_tokens=10).reply)["error"]
    assert error["code"] == "too_many_prompt_tokens"


# --- bad words -------------------------------------------------------------------------------------------------------


class Spelling(FakeEngineClient):
    """Its tokens are letters, and a space with the letter behind it is one token."""

    async def tokenize(self, text: str, *args: Any, **options: Any) -> list[int]:
        bare = await super().tokenize(text.lstrip(), *args, **options)
        return [bare[0] + 100, *bare[1:]] if text.startswith(" ") and text != " " else bare


def test_bad_words_have_two_spellings_where_the_space_makes_no_token_of_its_own() -> None:
    client = Spelling()
    reply(client, bad_words=[" ab", "c", "ab"])
    assert client.submitted[0].params.bad_word_ids == ((97, 98), (197, 98), (99,), (199,))
    plain = FakeEngineClient()  # its space is a token
    reply(plain, bad_words=["ab"])
    assert plain.submitted[0].params.bad_word_ids == ((97, 98),)


def test_the_first_bad_word_that_is_too_long_ends_the_reading() -> None:
    client = FakeEngineClient()
    done = post(client, bad_words=["a" * 129, *map(str, range(60))])
    assert (done.status, json.loads(done.reply)["error"]["param"]) == (400, "bad_words")
    assert [text for field, text in client.tokenized if field == "bad_words"] == ["a" * 129]


class Inline(FakeEngineClient):
    """Tokenizes on the event loop without a pause, as the engine's tokenizer does with texts that are not long. A word
    is one token."""

    async def tokenize(self, text: str, *args: Any, **options: Any) -> list[int]:
        return [len(text) % 256]


@pytest.mark.parametrize(("length", "pauses"), [(4, 0), (3_000, 3)])
def test_long_bad_words_are_read_with_pauses(length: int, pauses: int) -> None:
    async def count() -> int:
        turns = 0
        reading = asyncio.create_task(bad_word_ids(Inline(), ["a" * length] * 4))
        await asyncio.sleep(0)  # it reads until its first pause
        while not reading.done():
            turns += 1
            await asyncio.wait([reading], timeout=0)
        return turns

    assert (asyncio.run(count()) >= pauses) if pauses else (asyncio.run(count()) == 0)


# --- the rest --------------------------------------------------------------------------------------------------------


def test_every_chunk_tells_the_usage_so_far() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, asked in (("/v1/completions", PROMPT), (CHAT, MESSAGES)):
        done = call(
            create_app(FakeEngineClient()),
            asked | {"max_tokens": 8, "stream": True, "stream_options": options},
            path=path,
        )
        *chunks, last, _ = events(done)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == [3, 6, 8]
        assert all(chunk["usage"]["prompt_tokens"] == 3 for chunk in chunks)
        assert [chunk["usage"]["total_tokens"] for chunk in chunks] == [6, 9, 11]
        assert last["choices"] == []
        assert last["usage"].items() >= chunks[-1]["usage"].items()


def test_several_choices_count_together() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = events(post(prompt=["ab", "cde"], n=2, max_tokens=4, stream=True, stream_options=options))
    assert chunks[-1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 16, "total_tokens": 21}
    assert last["usage"]["total_tokens"] == 21


def test_completions_take_the_newer_name_of_max_tokens() -> None:
    client = FakeEngineClient()
    reply(client, max_completion_tokens=5)
    reply(client, max_completion_tokens=5, max_tokens=5)
    assert [request.params.max_tokens for request in client.submitted] == [5, 5]


def test_chats_have_the_fields_too() -> None:
    client = FakeEngineClient()
    fields = {"allowed_token_ids": [97], "bad_words": ["b"], "skip_special_tokens": False, "truncate_prompt_tokens": 2}
    assert chat(client, max_tokens=3, **fields).status == 200
    (request,) = client.submitted
    assert request.prompt_ids == tuple(b"bc")
    params = replace(request.params, max_tokens=16)
    assert (params.allowed_token_ids, params.bad_word_ids, params.skip_special_tokens) == ((97,), ((98,),), False)


def test_the_default_script_is_what_these_tests_think() -> None:
    outputs = list(spell(Request("r", (97, 98, 99))))
    assert [len(output.token_ids) for output in outputs[:2]] == [3, 3]
