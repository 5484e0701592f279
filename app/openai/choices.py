"""The choices of one request: an engine request for each, and the reply of each as its outputs come."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from app.client import Token
from app.errors import DeadlineExceeded, EngineFailure
from app.openai.logprobs import LogprobColumns
from app.openai.origins import TokenOrigins
from app.openai.request import CompletionRequest
from engine.types import SEED_RANGE, EngineStopped, FinishReason, Output, Request, RequestRecord

Ids = tuple[int, ...]


def engine_requests(
    body: CompletionRequest, request_id: str, prompts: Sequence[Ids], prediction: Ids, salt: str
) -> list[Request]:
    """One request per choice, those of one prompt next to each other.

    They share one seed, so that the reply can name it: their indices keep their noise apart.
    """
    several = len(prompts) * body.n > 1
    params = body.params
    if several and params.seed is None:
        params = replace(params, seed=secrets.randbelow(SEED_RANGE))
    return [
        Request(
            id=f"{request_id}-{prompt_index * body.n + choice_index}" if several else request_id,
            prompt_ids=ids,
            params=params,
            k=body.drafting.k,
            max_k=body.drafting.max_k,
            prompt_index=prompt_index,
            choice_index=choice_index,
            verifier=body.drafting.verifier,
            drafter=body.drafting.drafter,
            prediction_ids=prediction,
            lenience=body.drafting.lenience,
            cache_salt=salt,
            deadline_s=body.deadline_s,
            group=request_id,
        )
        for prompt_index, ids in enumerate(prompts)
        for choice_index in range(body.n)
    ]


class ReplyChoice:
    """One choice of the reply. Outputs go in; what of them can be shown comes out, all at once or in chunks."""

    def __init__(
        self,
        index: int,
        request: Request,
        token: Callable[[int], Token],
        echo: Callable[[], str] | None,
        *,
        tell_tokens: bool = False,
    ) -> None:
        """`echo` gives the prompt's text if the reply is to begin with it; tell_tokens: tell where each came from."""
        self.index = index
        self.record: RequestRecord | None = None  # filled by the output that finishes the choice
        self._prompt_ids = request.prompt_ids
        self._echo = echo  # until it is written
        self._transcript = None if request.params.logprobs is None else LogprobColumns(token)
        keeps_end = request.params.include_stop_str_in_output
        self._provenance = TokenOrigins(token, keeps_end=keeps_end) if tell_tokens else None
        self._text = ""
        self._reason: FinishReason | None = None

    async def add(self, output: Output) -> None:
        if self._echo is not None:
            self._text = self._echo()
            if self._transcript is not None:
                await self._transcript.prompt(self._prompt_ids, output.prompt_logprobs, self._text)
            self._echo = None
        self._text += output.text
        if self._transcript is not None:
            self._transcript.add(output.logprobs)
        if self._provenance is not None:
            self._provenance.add(output)
        self._reason, self.record = output.finish_reason, output.record

    @property
    def due(self) -> bool:
        """Whether there is something to show: not for half a character, or what may become a stop string."""
        return bool(self._text) or self._reason is not None

    def take(self) -> dict[str, Any]:
        """What came since the last take, in OpenAI's shape; `speculation` is ours (see provenance.py)."""
        text, self._text = self._text, ""
        logprobs = None if self._transcript is None else self._transcript.take()
        told = {} if self._provenance is None else {"speculation": {"rounds": self._provenance.take()}}
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": self._reason} | told


async def until_finish(outputs: AsyncIterator[Output]) -> AsyncGenerator[Output]:
    """The outputs up to and including the one that finishes the request.

    Raises EngineFailure if the engine reports an error or falls silent, DeadlineExceeded if the error is that the
    request's time is over, EngineStopped if the engine let go of the request.
    """
    try:
        async for output in outputs:
            if output.finish_reason == "error":
                failure = DeadlineExceeded if output.error_code == "deadline_exceeded" else EngineFailure
                raise failure(output.error or "the engine could not finish this request")
            if output.finish_reason == "cancelled":
                raise EngineStopped("the engine is shutting down; the request was not finished")
            yield output
            if output.finish_reason is not None:
                return
    finally:
        # Left to the garbage collector, an unfinished generator is closed in a task of its own, whenever that runs.
        if isinstance(outputs, AsyncGenerator):
            await outputs.aclose()
    raise EngineFailure("the engine ended the stream before the text was finished")


async def merged(streams: Sequence[AsyncIterator[Output]]) -> AsyncGenerator[tuple[int, Output]]:
    """(choice, output) of every stream, in the order in which they come, until all have finished.

    Raises what `until_finish` raises for the first stream that fails. No task outlives the generator.
    """
    if len(streams) == 1:
        async with aclosing(until_finish(streams[0])) as live:
            async for output in live:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, Output | Exception]] = asyncio.Queue(maxsize=len(streams))
    tasks = [asyncio.create_task(_pump(index, stream, queue)) for index, stream in enumerate(streams)]
    try:
        unfinished = len(streams)
        while unfinished:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            unfinished -= item.finish_reason is not None
            yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int, stream: AsyncIterator[Output], queue: asyncio.Queue[tuple[int, Output | Exception]]
) -> None:
    try:
        async with aclosing(until_finish(stream)) as live:
            async for output in live:
                await queue.put((index, output))
    except Exception as error:  # the reader's to raise: here it would be lost until the task is awaited
        await queue.put((index, error))
