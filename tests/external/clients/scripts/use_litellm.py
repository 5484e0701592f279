"""litellm: the openai route and the one for completions."""

import asyncio
import json
import sys
from typing import Any

import litellm

ASKED: dict[str, Any] = json.load(sys.stdin)
SETTINGS = {"api_base": ASKED["url"] + "/v1", "api_key": ASKED["key"]} | ASKED["sampling"]
TEXT = SETTINGS | {"model": "text-completion-openai/" + ASKED["model"], "prompt": ASKED["prompt"]}
CHAT = SETTINGS | {"model": "openai/" + ASKED["model"], "messages": ASKED["messages"]}


async def main() -> None:
    completion, chat = litellm.text_completion(**TEXT), litellm.completion(**CHAT)
    chats = await litellm.acompletion(stream=True, **CHAT)
    texts = {
        "completion": completion.choices[0].text,
        "completion usage": usage(completion),
        "completion stream": [chunk.choices[0].text or "" for chunk in litellm.text_completion(stream=True, **TEXT)],
        "async completion": (await litellm.atext_completion(**TEXT)).choices[0].text,
        "chat": chat.choices[0].message.content,
        "chat usage": usage(chat),
        "chat stream": [chunk.choices[0].delta.content or "" for chunk in litellm.completion(stream=True, **CHAT)],
        "async chat": (await litellm.acompletion(**CHAT)).choices[0].message.content,
        "async chat stream": [chunk.choices[0].delta.content or "" async for chunk in chats],
    }
    errors = {
        "field": error(temperature=-1),
        "key": error(api_key="wrong"),
        "model": error(model="openai/another"),
        "context": error(max_tokens=100_000),
    }
    print(json.dumps({"texts": texts, "errors": errors}))


def usage(reply: Any) -> list[int]:
    return [reply.usage.prompt_tokens, reply.usage.completion_tokens]


def error(**changes: Any) -> str:
    """The class of the error that a chat with these changes raises."""
    try:
        litellm.completion(num_retries=0, **CHAT | changes)
    except Exception as raised:
        return type(raised).__name__
    return "none"


asyncio.run(main())
