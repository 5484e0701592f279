"""Renders chats with the model's template on threads of their own, so that no template holds the event loop."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from app.client import Chat, RenderedChat
from engine.models.chat_template import ChatTemplate, RenderLimit
from engine.types import EngineStopped, Overloaded

THREADS = 2  # a template in a loop holds one of them until its limit


class ChatRenderer:
    """Only the event loop calls `render`."""

    def __init__(self, open_template: Callable[[], ChatTemplate], max_open: int) -> None:
        """open_template: may take seconds. It is called once, and again after a failure.

        max_open: the most chats that are rendered or wait for it. The engine could hold no more.
        """
        self._open_template = open_template
        self._max_open = max_open
        self._open = 0
        self._closed = False
        self._threads = ThreadPoolExecutor(THREADS, "chat-template")
        self._lock = threading.Lock()  # guards _template
        self._template: Future[ChatTemplate] | None = None

    def prepare(self) -> Future[ChatTemplate]:
        """Open the template on a thread of its own unless that has begun. Any thread may call it, at any time."""
        with self._lock:
            if self._template is None or _failed(self._template):
                self._template = self._threads.submit(self._open_template)
            return self._template

    async def render(self, chat: Chat) -> RenderedChat:
        if self._closed:
            raise EngineStopped("the server is shutting down")
        if self._open >= self._max_open:
            raise Overloaded(f"{self._open} chats wait for the chat template")
        limit = RenderLimit()
        opening = self.prepare()  # before the thread is asked for, or all threads might wait for it
        self._open += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, _render, opening, chat, limit)
        finally:
            self._open -= 1
            limit.cancel()  # the caller may have left

    def close(self) -> None:
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)


def _failed(opening: Future[ChatTemplate]) -> bool:
    return opening.done() and not opening.cancelled() and opening.exception() is not None


def _render(opening: Future[ChatTemplate], chat: Chat, limit: RenderLimit) -> RenderedChat:
    template = opening.result()
    text = template.render(
        chat.messages,
        limit,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        variables=chat.variables,
    )
    return RenderedChat(text, template.needs_special_tokens)
