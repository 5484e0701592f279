"""OpenAI's own client reads our replies, streams and errors: typed parsing, in process."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from app.fake_engine import FakeEngineClient, spell
from app.main import create_app
from app.tenants import cache_salt
from engine.types import Output, Request


def with_client(engine: FakeEngineClient, scenario: Callable[[AsyncOpenAI], Awaitable[Any]]) -> Any:
    async def go() -> Any:
        transport = httpx2.ASGITransport(create_app(engine))
        http = httpx2.AsyncClient(transport=transport)
        async with AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0) as client:
            return await asyncio.wait_for(scenario(client), 30)

    return asyncio.run(go())


def test_a_completion_is_parsed() -> None:
    done = with_client(
        FakeEngineClient(),
        lambda client: client.completions.create(
            model="fake", prompt="abc", max_tokens=6, user="me", n=1, extra_body={"speculation": {"k": 2}, "top_k": 5}
        ),
    )
    assert done.id.startswith("cmpl-")
    assert (done.choices[0].text, done.choices[0].finish_reason) == ("abcabc", "length")
    assert done.usage.total_tokens == 9
    assert done.metrics["speculative_decoding"]["num_spec_steps"] == 2


MESSAGES: Any = [{"role": "system", "content": "ab"}, {"role": "user", "content": [{"type": "text", "text": "c"}]}]


def test_a_chat_is_parsed() -> None:
    async def scenario(client: AsyncOpenAI) -> tuple[Any, Any]:
        asked: dict[str, Any] = {"max_completion_tokens": 2, "logprobs": True, "top_logprobs": 1}
        first = await client.chat.completions.create(model="fake", messages=MESSAGES, **asked)
        said = first.choices[0].message.model_dump()  # clients send replies back like this
        again = [*MESSAGES, said, {"role": "user", "content": "d"}]
        return first, await client.chat.completions.create(model="fake", messages=again, **asked)

    engine = FakeEngineClient()
    first, _ = with_client(engine, scenario)
    (choice,) = first.choices
    assert (first.object, choice.message.role, choice.message.content) == ("chat.completion", "assistant", "ab")
    assert (choice.message.refusal, choice.message.tool_calls, choice.finish_reason) == (None, None, "length")
    assert [(entry.token, entry.bytes) for entry in choice.logprobs.content] == [("a", [97]), ("b", [98])]
    assert [request.prompt_ids for request in engine.submitted] == [tuple(b"abc"), tuple(b"abcabd")]


def stopping(request: Request) -> Iterator[Output]:
    """The helper of OpenAI's client refuses an answer that its limit cut."""
    for output in spell(request):
        yield output._replace(finish_reason=output.finish_reason and "stop")


def test_a_streamed_chat_is_parsed() -> None:
    async def scenario(client: AsyncOpenAI) -> Any:
        async with client.chat.completions.stream(
            model="fake", messages=MESSAGES, max_completion_tokens=7, stream_options={"include_usage": True}
        ) as stream:
            return await stream.get_final_completion()

    whole = with_client(FakeEngineClient(stopping), scenario)
    assert (whole.choices[0].message.role, whole.choices[0].message.content) == ("assistant", "abcabca")
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("stop", 7)


def test_a_refused_chat_is_an_error_with_its_field() -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        with_client(
            FakeEngineClient(),
            lambda client: client.chat.completions.create(
                model="fake", messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}]
            ),
        )
    assert (refused.value.param, refused.value.code) == ("tools", "unsupported_field")


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_stream_is_parsed(include_usage: bool) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if include_usage else {}

    async def scenario(client: AsyncOpenAI) -> list[Any]:
        stream = await client.completions.create(model="fake", prompt="abc", max_tokens=7, stream=True, **options)
        return [chunk async for chunk in stream]

    chunks = with_client(FakeEngineClient(), scenario)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "abcabca"
    assert chunks[-1].usage.completion_tokens == 7
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert len(chunks[-1].choices) == (0 if include_usage else 1)


def test_what_rounds_did_is_parsed() -> None:
    asked = {"speculation": {"k": 3, "steps": True, "tokens": True}}
    done = with_client(
        FakeEngineClient(),
        lambda client: client.completions.create(model="fake", prompt="abc", max_tokens=4, extra_body=asked),
    )
    assert done.metrics["speculative_decoding"]["per_step_accepted"] == [2, 2]
    first, second = done.choices[0].speculation["rounds"]
    assert [token["source"] for token in first["tokens"]] == ["draft", "draft", "recovered"]
    assert (first["rejected"], second["tokens"]) == (["d"], [{"text": "a", "source": "draft"}])


def test_what_rounds_did_is_parsed_in_a_stream() -> None:
    asked = {"speculation": {"k": 2, "tokens": True}}

    async def scenario(client: AsyncOpenAI) -> list[Any]:
        stream = await client.completions.create(
            model="fake", prompt="abc", max_tokens=6, stream=True, extra_body=asked
        )
        return [chunk.choices[0] async for chunk in stream]

    choices = with_client(FakeEngineClient(), scenario)
    assert len(choices) == 2
    for choice in choices:
        (told,) = choice.speculation["rounds"]
        assert "".join(token["text"] for token in told["tokens"]) == choice.text == "abc"
        assert [token["source"] for token in told["tokens"]] == ["draft", "draft", "bonus"]


def test_the_choices_of_a_stream_are_parsed() -> None:
    async def scenario(client: AsyncOpenAI) -> list[Any]:
        stream = await client.completions.create(model="fake", prompt=["abc", "xy"], n=2, max_tokens=7, stream=True)
        return [chunk async for chunk in stream]

    chunks = with_client(FakeEngineClient(), scenario)
    texts, ends = [""] * 4, [0] * 4
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        ends[choice.index] += choice.finish_reason == "length"
    assert texts == ["abcabca", "abcabca", "xyxyxyx", "xyxyxyx"]
    assert ends == [1] * 4
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (5, 28)


def test_logprobs_with_echo_are_parsed() -> None:
    done = with_client(
        FakeEngineClient(),
        lambda client: client.completions.create(
            model="fake", prompt="ab", max_tokens=2, logprobs=1, echo=True, logit_bias={"97": 5}
        ),
    )
    (choice,) = done.choices
    assert choice.text == "abab"
    assert choice.logprobs.tokens == ["a", "b", "a", "b"]
    assert choice.logprobs.text_offset == [0, 1, 2, 3]
    assert choice.logprobs.token_logprobs == [None, -0.5, -9.5, -0.5]
    assert choice.logprobs.top_logprobs == [None, {"b": -0.5}, {"b": -0.5, "a": -9.5}, {"b": -0.5}]


def test_what_became_of_a_prediction_is_parsed() -> None:
    prediction = {"type": "content", "content": "abcax"}
    done = with_client(
        FakeEngineClient(),
        lambda client: client.completions.create(
            model="fake", prompt="abc", max_tokens=6, extra_body={"prediction": prediction}
        ),
    )
    details = done.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (4, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_are_parsed(stream: bool) -> None:
    def with_a_hit(request: Request) -> Iterator[Output]:
        for output in spell(request):
            if output.record is not None:
                output.record.cached_tokens = 2
            yield output

    async def scenario(client: AsyncOpenAI) -> Any:
        asked: dict[str, Any] = {
            "model": "fake",
            "prompt": "abc",
            "extra_body": {"cache_salt": "mine", "deadline_s": 60},
        }
        if not stream:
            return (await client.completions.create(**asked)).usage
        return [chunk async for chunk in await client.completions.create(**asked, stream=True)][-1].usage

    engine = FakeEngineClient(with_a_hit)
    assert with_client(engine, scenario).prompt_tokens_details.cached_tokens == 2
    assert (engine.submitted[0].cache_salt, engine.submitted[0].deadline_s) == (cache_salt("Bearer none", "mine"), 60)


@pytest.mark.parametrize(("code", "times"), [("deadline_exceeded", 1), ("engine_error", 2)])
def test_the_client_waits_for_one_deadline_only(code: Any, times: int) -> None:
    """By default the client repeats requests that ended with a status of 500 or more."""
    engine = FakeEngineClient(lambda request: [Output(request.id, (), "", "error", "over", code)])

    async def scenario(client: AsyncOpenAI) -> None:
        await client.with_options(max_retries=1).completions.create(model="fake", prompt="abc")

    with pytest.raises(openai.InternalServerError) as raised:
        with_client(engine, scenario)
    assert raised.value.code == code
    assert len(engine.submitted) == times


def test_models_are_parsed() -> None:
    async def scenario(client: AsyncOpenAI) -> tuple[list[str], str]:
        return [model.id async for model in client.models.list()], (await client.models.retrieve("fake")).id

    assert with_client(FakeEngineClient(), scenario) == (["fake"], "fake")


@pytest.mark.parametrize(
    ("options", "fields", "error", "code"),
    [
        ({}, {"n": 65}, openai.BadRequestError, None),
        ({}, {"model": "gpt"}, openai.NotFoundError, "model_not_found"),
        ({"max_open": 0}, {}, openai.RateLimitError, "engine_overloaded"),
        ({"max_model_len": 8}, {}, openai.BadRequestError, "context_length_exceeded"),
    ],
)
def test_errors_become_the_clients_exceptions(
    options: dict[str, Any], fields: dict[str, Any], error: type[openai.APIStatusError], code: str | None
) -> None:
    asked: dict[str, Any] = {"model": "fake", "prompt": "abc"} | fields
    with pytest.raises(error) as raised:
        with_client(FakeEngineClient(**options), lambda client: client.completions.create(**asked))
    assert raised.value.code == code
    assert raised.value.request_id


def test_an_error_in_a_stream_is_raised_by_the_client() -> None:
    engine = FakeEngineClient(
        lambda request: [
            Output(request.id, (1,), "a"),
            Output(request.id, (), "", "error", error="the engine gave up"),
        ]
    )

    async def scenario(client: AsyncOpenAI) -> list[Any]:
        stream = await client.completions.create(model="fake", prompt="abc", stream=True)
        return [chunk async for chunk in stream]

    with pytest.raises(openai.APIError, match="the engine gave up"):
        with_client(engine, scenario)
