"""OpenAI's own client: completions and chats, whole, streamed and asynchronous; retries and every class of error."""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

from openai import APIError, AsyncOpenAI, OpenAI

ASKED: dict[str, Any] = json.load(sys.stdin)
URL, MODEL, PROMPT, MESSAGES = ASKED["url"] + "/v1", ASKED["model"], ASKED["prompt"], ASKED["messages"]
SAMPLING: dict[str, Any] = {"model": MODEL, **ASKED["sampling"]}


def main() -> None:
    with OpenAI(base_url=URL, api_key=ASKED["key"]) as client:
        results = {"texts": texts(client), "models": [model.id for model in client.models.list()]}
        results["texts"] |= asyncio.run(asynchronous())
        results["errors"] = {name: told(call) for name, call in mistakes(client).items()} | {"stream": broken(client)}
        results["retry"] = retried(client)
    print(json.dumps(results))


def texts(client: OpenAI) -> dict[str, Any]:
    completion = client.completions.create(prompt=PROMPT, **SAMPLING)
    chat = client.chat.completions.create(messages=MESSAGES, **SAMPLING)
    pieces = [c.choices[0].text for c in client.completions.create(prompt=PROMPT, stream=True, **SAMPLING)]
    deltas = [
        c.choices[0].delta.content or ""
        for c in client.chat.completions.create(messages=MESSAGES, stream=True, **SAMPLING)
    ]
    with client.chat.completions.with_streaming_response.create(messages=MESSAGES, **SAMPLING) as raw:
        parsed = raw.parse()
    assert completion.usage is not None
    assert chat.usage is not None
    return {
        "completion": completion.choices[0].text,
        "completion stream": pieces,
        "completion usage": [completion.usage.prompt_tokens, completion.usage.completion_tokens],
        "chat": chat.choices[0].message.content,
        "chat stream": deltas,
        "chat usage": [chat.usage.prompt_tokens, chat.usage.completion_tokens],
        "chat raw": parsed.choices[0].message.content,
    }


async def asynchronous() -> dict[str, Any]:
    async with AsyncOpenAI(base_url=URL, api_key=ASKED["key"]) as client:
        completion, chat = await asyncio.gather(
            client.completions.create(prompt=PROMPT, **SAMPLING),
            client.chat.completions.create(messages=MESSAGES, **SAMPLING),
        )
        stream = await client.completions.create(prompt=PROMPT, stream=True, **SAMPLING)
        pieces = [chunk.choices[0].text async for chunk in stream]
        chats = await client.chat.completions.create(messages=MESSAGES, stream=True, **SAMPLING)
        deltas = [chunk.choices[0].delta.content or "" async for chunk in chats]
    return {
        "async completion": completion.choices[0].text,
        "async completion stream": pieces,
        "async chat": chat.choices[0].message.content,
        "async chat stream": deltas,
    }


def mistakes(client: OpenAI) -> dict[str, Callable[[], Any]]:
    """Return calls that fail, by what is wrong with them."""

    def ask(client: OpenAI = client, **changes: Any) -> Any:
        return client.completions.create(**({"prompt": PROMPT} | SAMPLING | changes))

    nobody = OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0)
    stranger = client.with_options(api_key="wrong")
    hasty = client.with_options(timeout=0.001, max_retries=0)
    return {
        "field": lambda: ask(temperature=-1),
        "context": lambda: client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=100_000),
        "key": lambda: ask(stranger),
        "model": lambda: ask(model="another"),
        "path": lambda: client.embeddings.create(model=MODEL, input="a"),
        "method": lambda: client.models.delete(MODEL),
        "size": lambda: ask(prompt="a" * (3 * 2**20)),
        "deadline": lambda: ask(max_tokens=1500, extra_body={"ignore_eos": True, "deadline_s": 0.01}),
        "connection": lambda: ask(nobody),
        "timeout": lambda: ask(hasty),
    }


def told(call: Callable[[], Any]) -> list[Any]:
    """[class, status, code, param] of the error."""
    try:
        call()
    except APIError as error:
        return [type(error).__name__, getattr(error, "status_code", None), error.code, error.param]
    return ["none"]


def broken(client: OpenAI) -> list[Any]:
    """The error that ends a stream after its first chunk."""
    late = {"ignore_eos": True, "deadline_s": 2}
    with client.completions.create(
        model=MODEL, prompt=PROMPT, n=8, max_tokens=1500, stream=True, extra_body=late
    ) as stream:
        next(iter(stream))
        return told(lambda: list(stream))


def retried(client: OpenAI) -> dict[str, Any]:
    """Ask while the server is full: first without retries, then with them, which wait as Retry-After says."""
    full = {"n": ASKED["max_choices"], "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    with client.completions.create(model=MODEL, prompt=PROMPT, stream=True, **full) as stream:
        next(iter(stream))
        refused = told(lambda: client.with_options(max_retries=0).completions.create(prompt=PROMPT, **SAMPLING))
        reply = client.with_options(max_retries=4).completions.with_raw_response.create(prompt=PROMPT, **SAMPLING)
    return {"refused": refused, "retries": reply.retries_taken, "text": reply.parse().choices[0].text}


if __name__ == "__main__":
    main()
