"""llama-index's OpenAILike in both modes. Each mode answers prompts and chats."""

import asyncio
import json
import sys
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

ASKED: dict[str, Any] = json.load(sys.stdin)
PROMPT, MESSAGES = ASKED["prompt"], [ChatMessage(**message) for message in ASKED["messages"]]
SETTINGS = {"api_base": ASKED["url"] + "/v1", "api_key": ASKED["key"], "model": ASKED["model"]}
SETTINGS |= {name: ASKED["sampling"][name] for name in ("max_tokens", "temperature")}
SETTINGS |= {"additional_kwargs": {"seed": ASKED["sampling"]["seed"]}}


async def main() -> None:
    completions, chats = OpenAILike(**SETTINGS), OpenAILike(is_chat_model=True, **SETTINGS)
    texts = {
        "completion": completions.complete(PROMPT).text,
        "completion stream": [piece.delta for piece in completions.stream_complete(PROMPT)],
        "async completion": (await completions.acomplete(PROMPT)).text,
        "async completion stream": [piece.delta async for piece in await completions.astream_complete(PROMPT)],
        "chat": chats.chat(MESSAGES).message.content,
        "chat stream": [piece.delta for piece in chats.stream_chat(MESSAGES)],
        "async chat": (await chats.achat(MESSAGES)).message.content,
        "async chat stream": [piece.delta async for piece in await chats.astream_chat(MESSAGES)],
    }
    print(json.dumps({"texts": texts, "completion over chats": chats.complete(PROMPT).text}))


asyncio.run(main())
