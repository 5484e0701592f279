"""POST /v1/chat/completions: messages, replies in chat's shape, and refusals before any work."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from app.client import Chat, RenderedChat
from app.fake_engine import FakeEngineClient, blank, spell
from app.main import create_app
from app.openai.chat import INERT, NEUTRAL
from engine.types import InvalidRequest, Output, Request
from tests.app.harness import Exchange, call, events
from tests.app.test_disconnect import run, until

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "abc"}
CHAT = {"model": "fake", "messages": [USER], "max_completion_tokens": 7}


def chat(client: FakeEngineClient | None = None, /, **fields: Any) -> Exchange:
    return call(create_app(client or FakeEngineClient()), CHAT | fields, path=PATH)


def reply(client: FakeEngineClient | None = None, /, **fields: Any) -> Any:
    done = chat(client, **fields)
    assert done.status == 200, done.reply
    return json.loads(done.reply)


def streamed(client: FakeEngineClient | None = None, /, **fields: Any) -> list[Any]:
    data = events(chat(client, stream=True, **fields))
    assert data.pop() == "[DONE]"
    return data


def error_of(done: Exchange) -> Any:
    error = json.loads(done.reply)["error"]
    assert error["type"] == "invalid_request_error"
    return error


def saying(*parts: str) -> Any:
    """A script whose outputs are these texts."""

    def script(request: Request) -> Iterator[Output]:
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            record = blank(request, ()) if last else None
            yield Output(request.id, (1,), part, "stop" if last else None, record=record)

    return script


def test_a_whole_reply() -> None:
    client = FakeEngineClient()
    body = reply(client)
    (request,) = client.submitted
    assert (body["id"], body["object"], body["model"]) == (f"chatcmpl-{request.id}", "chat.completion", "fake")
    message = {"role": "assistant", "content": "abcabca", "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    assert body["usage"]["total_tokens"] == 10
    assert body["metrics"]["speculative_decoding"]["num_draft_tokens"]


def test_a_stream_equals_the_whole() -> None:
    asked = {"n": 2, "seed": 3, "logprobs": True, "top_logprobs": 2, "speculation": {"k": 3, "tokens": True}}
    body, chunks = reply(**asked), streamed(**asked)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for choice in body["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert len(parts) > 1
        assert [part["delta"].get("role") for part in parts] == ["assistant", *[None] * (len(parts) - 1)]
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
        assert [part["finish_reason"] for part in parts] == [*[None] * (len(parts) - 1), "length"]
        joined = [entry for part in parts for entry in part["logprobs"]["content"]]
        assert joined == choice["logprobs"]["content"]
        rounds = [told for part in parts for told in part["speculation"]["rounds"]]
        assert rounds == choice["speculation"]["rounds"]
    assert chunks[-1]["usage"] == body["usage"]
    assert chunks[-1].keys() - chunks[0].keys() == {"usage", "metrics", "seed"}


def test_usage_in_an_event_of_its_own() -> None:
    *chunks, last = streamed(stream_options={"include_usage": True})
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 7)
    assert {chunk["usage"] for chunk in chunks} == {None}


def test_an_empty_answer_has_a_role_too() -> None:
    (chunk,) = streamed(FakeEngineClient(saying("")))
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}


def test_log_probabilities_in_chats_shape() -> None:
    body = reply(logprobs=True, top_logprobs=1, max_completion_tokens=2)
    first = body["choices"][0]["logprobs"]["content"][0]
    top = [{"token": "b", "logprob": -0.5, "bytes": [98]}]
    assert first == {"token": "a", "logprob": -9.5, "bytes": [97], "top_logprobs": top}
    assert body["choices"][0]["logprobs"]["refusal"] is None
    assert reply(logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_many_log_probabilities_are_encoded_in_pieces() -> None:
    body = reply(FakeEngineClient(max_model_len=600), logprobs=True, max_completion_tokens=400)
    assert len(body["choices"][0]["logprobs"]["content"]) == 400
    assert body["choices"][0]["logprobs"]["refusal"] is None


def test_without_a_limit_the_answer_may_fill_the_context() -> None:
    client = FakeEngineClient(max_model_len=64)
    body = reply(client, max_completion_tokens=None)
    assert client.submitted[0].params.max_tokens == 64 - 3 == body["usage"]["completion_tokens"]
    full = chat(FakeEngineClient(max_model_len=3), max_completion_tokens=None)
    assert (full.status, error_of(full)["code"], error_of(full)["param"]) == (
        400,
        "context_length_exceeded",
        "messages",
    )
    over = chat(FakeEngineClient(max_model_len=9))
    assert (over.status, error_of(over)["param"]) == (400, "max_completion_tokens")


def test_every_field_reaches_the_engine() -> None:
    client = FakeEngineClient()
    reply(
        client,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        stop=["zz"],
        logit_bias={"5": 1},
        presence_penalty=0.1,
        frequency_penalty=0.2,
        prediction={"type": "content", "content": [{"type": "text", "text": "abd"}]},
        speculation={"k": 2},
        n=2,
    )
    first, second = client.submitted
    params = first.params
    assert (params.temperature, params.top_p, params.seed, params.stop) == (0.5, 0.9, 7, ("zz",))
    assert (params.logit_bias, params.presence_penalty, params.frequency_penalty) == (((5, 1.0),), 0.1, 0.2)
    assert (first.prediction_ids, first.k) == (tuple(b"abd"), 2)
    assert (first.prompt_ids, second.choice_index) == (second.prompt_ids, 1)


def test_what_the_template_is_given() -> None:
    client = FakeEngineClient()
    call_of = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "system", "content": "s", "name": "n"},
        {"role": "developer", "content": [{"type": "text", "text": "d"}]},
        {"role": "assistant", "content": None, "tool_calls": [call_of], "refusal": None, "annotations": []},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
        {"role": "assistant", "content": "a", "reasoning_content": "r"},
    ]
    reply(client, messages=messages, continue_final_message=True, chat_template_kwargs={"enable_thinking": False})
    call_of = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert client.chats == [
        Chat(
            (
                {"role": "system", "content": "s", "name": "n"},
                {"role": "developer", "content": [{"type": "text", "text": "d"}]},
                {"role": "assistant", "content": "", "tool_calls": [call_of]},
                {"role": "tool", "content": "3", "tool_call_id": "c"},
                {"role": "assistant", "content": "a", "reasoning_content": "r"},
            ),
            add_generation_prompt=False,
            continue_final_message=True,
            variables={"enable_thinking": False},
        )
    ]
    reply(client)
    assert (client.chats[1].add_generation_prompt, client.chats[1].continue_final_message) == (True, False)


@pytest.mark.parametrize(
    ("template_adds", "asked", "expected"), [(True, None, True), (False, None, False), (False, True, True)]
)
def test_bos_comes_once(template_adds: bool, asked: bool | None, expected: bool) -> None:
    client = FakeEngineClient()
    client.bos = (1,)

    async def template(chat: Chat) -> RenderedChat:
        return RenderedChat("x", template_adds)

    client.template = template
    reply(client, add_special_tokens=asked)
    assert client.submitted[0].prompt_ids == ((1, 120) if expected else (120,))


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "abc"}, "messages", "valid list"),
        ({"messages": None}, "messages", "required"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role", "'system'"),
        ({"messages": [{"content": "a"}]}, "messages.0.role", "required"),
        ({"messages": [USER, {"role": "user"}]}, "messages.1", "content is required"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content", "must be a string"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content", "at least one part"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content", "lone surrogate"),
        ({"messages": [USER | {"colour": "red"}]}, "messages.0.colour", "unknown field"),
        (
            {"messages": [USER | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content",
            "'image_url'",
        ),
        (
            {"messages": [USER | {"content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}]},
            "messages.0.content",
            "part 1 is of type 'input_audio'",
        ),
        ({"tools": [{"type": "function"}]}, "tools", "not supported yet"),
        ({"tool_choice": "auto"}, "tool_choice", "not supported yet"),
        ({"functions": [{}]}, "functions", "not supported yet"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported yet"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "not supported yet"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "not supported yet"),
        ({"modalities": ["text", "audio"]}, "modalities", "not supported yet"),
        ({"prompt": "abc"}, "prompt", "unknown field"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs", "top_logprobs must be"),
        ({"logprobs": 3}, "logprobs", "valid boolean"),
        ({"max_tokens": 3}, "max_completion_tokens", "send one of them"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens must not be negative"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "begin"),
        ({"n": 65}, "n", "at most 64"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"temperature": 3}, "temperature", "between 0 and 2"),
    ],
)
def test_refused_before_any_work(fields: dict[str, Any], param: str, said: str) -> None:
    client = FakeEngineClient()
    done = chat(client, **fields)
    error = error_of(done)
    assert (done.status, error["param"]) == (400, param)
    assert said in error["message"]
    assert (client.chats, client.submitted) == ([], [])


def test_inert_and_neutral_fields_change_nothing() -> None:
    asked = dict.fromkeys(INERT, "x") | NEUTRAL
    assert reply(**asked)["choices"] == reply()["choices"]


def test_a_template_that_refuses_costs_a_400() -> None:
    client = FakeEngineClient()

    async def template(chat: Chat) -> RenderedChat:
        raise InvalidRequest("the chat template: no system role", "messages", "chat_template_error")

    client.template = template
    for stream in (False, True):
        done = chat(client, stream=stream)
        assert (done.status, error_of(done)["message"]) == (400, "the chat template: no system role")
    assert client.submitted == []


@pytest.mark.parametrize("server", [False, True])
def test_leaving_while_the_template_is_rendered_frees_everything(server: bool) -> None:
    """server: the server cancels the request's task instead."""
    client = FakeEngineClient()
    ended = []

    async def template(chat: Chat) -> RenderedChat:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(chat)
        raise AssertionError

    client.template = template

    async def scenario() -> None:
        exchange = Exchange(create_app(client), json.dumps(CHAT).encode(), path=PATH)
        running = asyncio.create_task(exchange.run())
        await until(lambda: bool(client.chats))
        if server:
            running.cancel()
        else:
            exchange.leave()
        await asyncio.gather(running, return_exceptions=True)
        assert exchange.sent == []

    run(scenario())
    assert ended == client.chats
    assert (client.submitted, client.open) == ([], {})


TAGS = ("<think>", "</think>")


@pytest.mark.parametrize(
    ("prompt", "parts"), [("abc", ("<th", "ink>why", "</think", ">so")), ("abc<think>\n", ("wh", "y</", "think>so"))]
)
def test_reasoning_is_told_apart(prompt: str, parts: tuple[str, ...]) -> None:
    asked = {"messages": [{"role": "user", "content": prompt}]}
    make = lambda: FakeEngineClient(saying(*parts), reasoning_tags=TAGS)  # noqa: E731
    message = reply(make(), **asked)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("why", "so")
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed(make(), **asked)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "why"
    assert "".join(delta.get("content", "") for delta in deltas) == "so"
    untold = reply(FakeEngineClient(saying(*parts)), **asked)["choices"][0]["message"]
    assert (untold["content"], "reasoning_content" in untold) == ("".join(parts), False)


def test_completions_keep_the_tags() -> None:
    client = FakeEngineClient(saying("<think>why</think>so"), reasoning_tags=TAGS)
    done = call(create_app(client), {"model": "fake", "prompt": "abc"})
    assert json.loads(done.reply)["choices"][0]["text"] == "<think>why</think>so"


def test_both_forms_take_one_path() -> None:
    asked = {"model": "fake", "seed": 1, "max_tokens": 5}
    chats, texts = FakeEngineClient(spell), FakeEngineClient(spell)
    call(create_app(chats), asked | {"messages": [USER]}, path=PATH)
    call(create_app(texts), asked | {"prompt": "abc"})
    assert chats.submitted[0].params == texts.submitted[0].params
    assert chats.submitted[0].prompt_ids == texts.submitted[0].prompt_ids
