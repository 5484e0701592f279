"""langchain-openai's OpenAI and ChatOpenAI: invoke, stream and batch."""

import asyncio
import json
import sys
from typing import Any

from langchain_openai import ChatOpenAI, OpenAI

ASKED: dict[str, Any] = json.load(sys.stdin)
PROMPT, MESSAGES = ASKED["prompt"], ASKED["messages"]
SETTINGS = {"base_url": ASKED["url"] + "/v1", "api_key": ASKED["key"], "model": ASKED["model"]}
SETTINGS |= ASKED["sampling"]


async def main() -> None:
    completions, chats = OpenAI(**SETTINGS), ChatOpenAI(**SETTINGS)
    usage = completions.generate([PROMPT]).llm_output["token_usage"]
    chat = chats.invoke(MESSAGES)
    texts = {
        "completion": completions.invoke(PROMPT),
        "completion usage": [usage["prompt_tokens"], usage["completion_tokens"]],
        "completion stream": list(completions.stream(PROMPT)),
        "async completion": await completions.ainvoke(PROMPT),
        "async completion stream": [piece async for piece in completions.astream(PROMPT)],
        "chat": chat.content,
        "chat usage": [chat.usage_metadata["input_tokens"], chat.usage_metadata["output_tokens"]],
        "chat stream": [chunk.content for chunk in chats.stream(MESSAGES)],
        "async chat": (await chats.ainvoke(MESSAGES)).content,
        "async chat stream": [chunk.content async for chunk in chats.astream(MESSAGES)],
    }
    batches = {"completion": completions.batch([PROMPT] * 3), "chat": [c.content for c in chats.batch([MESSAGES] * 3)]}
    print(json.dumps({"texts": texts, "batches": batches}))


asyncio.run(main())
