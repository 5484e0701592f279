"""Renders chats with the model's template on threads of their own, so that no template holds the event loop."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from app.client import Chat, RenderedChat
from engine.models.chat_template import ChatTemplate, RenderLimit
from engine.types import EngineStopped, Overloaded

THREADS = 2  # a template in a loop holds one of them until its limit


class ChatRenderer:
    """Only the event loop calls its public methods."""

    def __init__(self, template: ChatTemplate, max_open: int) -> None:
        """max_open: chats that are rendered or wait for it. The engine could hold no more."""
        self._template = template
        self._max_open = max_open
        self._open = 0
        self._closed = False
        self._threads = ThreadPoolExecutor(THREADS, "chat-template")

    async def render(self, chat: Chat) -> RenderedChat:
        if self._closed:
            raise EngineStopped("the server is shutting down")
        if self._open >= self._max_open:
            raise Overloaded(f"{self._open} chats wait for the chat template")
        limit = RenderLimit()
        self._open += 1
        try:
            text = await asyncio.get_running_loop().run_in_executor(self._threads, self._render, chat, limit)
        finally:
            self._open -= 1
            limit.cancel()  # the caller may have left
        return RenderedChat(text, self._template.needs_special_tokens)

    def close(self) -> None:
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _render(self, chat: Chat, limit: RenderLimit) -> str:
        return self._template.render(
            chat.messages,
            limit,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            variables=chat.variables,
        )
