"""An EngineClient over an engine thread of this process: the bridge between the event loop and the engine."""

import asyncio
import time
from collections.abc import AsyncIterator

from app.client import ModelCard
from deployments.engine.engine import Engine
from deployments.engine.types import EngineStats, InvalidRequest, Output, Request
from deployments.engine.worker import EngineWorker

TOKENIZE_INLINE = 4_000  # characters; longer prompts are tokenized off the event loop


class LocalClient:
    """One wake-up of the event loop per engine step, whatever the number of requests in it."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self.model = ModelCard(
            name=model_name,
            max_model_len=engine.max_model_len,
            max_spec_length=engine.max_spec_length,
            created=int(time.time()),
        )
        self._tokenizer = engine.tokenizer
        # Longer texts never fit: a token stands for no more characters than the longest token string has. (A tokenizer
        # that drops characters could fit such a text; it is refused all the same.)
        self._max_characters = engine.max_model_len * max(map(len, engine.tokenizer.vocab))
        self._queues: dict[str, asyncio.Queue[Output]] = {}  # touched by the event loop only
        self._loop: asyncio.AbstractEventLoop | None = None
        self.worker = EngineWorker(engine, self._deliver)
        self.worker.start()

    async def tokenize(self, text: str) -> list[int]:
        if len(text) <= TOKENIZE_INLINE:
            return self._tokenizer.encode(text)
        if len(text) > self._max_characters:
            limit = self.model.max_model_len
            raise InvalidRequest(
                f"this model's context is {limit} tokens; no prompt of {len(text)} characters fits it",
                "prompt",
                "context_length_exceeded",
            )
        return await asyncio.to_thread(self._tokenizer.encode_long, text)

    def submit(self, request: Request) -> AsyncIterator[Output]:
        self._loop = asyncio.get_running_loop()
        self.worker.submit(request)
        queue: asyncio.Queue[Output] = asyncio.Queue()
        self._queues[request.id] = queue
        return _until_finish(queue)

    def cancel(self, request_id: str) -> None:
        queue = self._queues.pop(request_id, None)
        if queue is not None:
            self.worker.cancel(request_id)
            queue.put_nowait(Output(request_id, (), "", "cancelled"))

    def stats(self) -> EngineStats:
        return self.worker.stats()

    def close(self) -> None:
        """End the engine thread; what runs ends as cancelled."""
        self.worker.stop()

    def _deliver(self, outputs: list[Output]) -> None:
        """On the engine thread."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        try:
            loop.call_soon_threadsafe(self._dispatch, outputs)
        except RuntimeError:  # closed between the check and the call: nobody is left to read
            return

    def _dispatch(self, outputs: list[Output]) -> None:
        for output in outputs:
            queue = self._queues.get(output.request_id)
            if queue is None:
                continue
            queue.put_nowait(output)
            if output.finish_reason:
                del self._queues[output.request_id]


async def _until_finish(queue: asyncio.Queue[Output]) -> AsyncIterator[Output]:
    while True:
        output = await queue.get()
        yield output
        if output.finish_reason:
            return
