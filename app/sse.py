"""Server-sent events: how outputs become a stream's bytes, and how a client that leaves is noticed."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Send

from app.errors import EngineFailure, error_body
from app.replies import Envelope, closing, encode_json
from deployments.engine.types import EngineStopped, Output

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies hold events back otherwise
]
DONE = b"data: [DONE]\n\n"

log = logging.getLogger(__name__)


def event(payload: dict[str, Any]) -> bytes:
    return b"data: " + encode_json(payload) + b"\n\n"


async def until_finish(outputs: AsyncIterator[Output]) -> AsyncGenerator[Output]:
    """The outputs up to and including the one that finishes the request.

    Raises EngineFailure if the engine reports an error or falls silent, EngineStopped if it let go of the request.
    """
    try:
        async for output in outputs:
            if output.finish_reason == "error":
                raise EngineFailure(output.error or "the engine could not finish this request")
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


async def completion_events(
    outputs: AsyncIterator[Output], envelope: Envelope, include_usage: bool
) -> AsyncGenerator[bytes]:
    """One event per output that adds text or ends it, then the usage, then [DONE].

    The usage comes in an event of its own if the client asked for one (include_usage, as OpenAI does it), else in the
    last event with text. An error before the first event is raised, so that it can still become a status; a later one
    becomes an error event, and no [DONE] follows.
    """
    started = False
    try:
        async with aclosing(until_finish(outputs)) as live:
            async for output in live:
                for payload in _payloads(output, envelope, include_usage):
                    started = True
                    yield event(payload)
    except Exception as error:
        if not started:
            raise
        log.exception("stream %s broke", envelope.id)
        yield event(error_body(error)[1])
        return
    yield DONE


def _payloads(output: Output, envelope: Envelope, include_usage: bool) -> Iterator[dict[str, Any]]:
    if not output.text and output.finish_reason is None:
        return  # half a character, or what may become a stop string: nothing to show yet
    chunk = envelope.chunk(output.text, output.finish_reason)
    if include_usage:
        yield chunk | {"usage": None}
        if output.record is not None:
            yield envelope.usage_chunk(output.record)
    else:
        yield chunk if output.record is None else chunk | closing(output.record)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` while listening for the client's departure. Raises ClientDisconnect, with the work cancelled, if it
    leaves first. The request's body must have been read: the next message can then only be the disconnect.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def leaving_is_disconnect(send: Send) -> Send:
    """A server may report at the next send, as an OSError, that nobody is left: make that ClientDisconnect."""

    async def guarded(message: Message) -> None:
        try:
            await send(message)
        except OSError as error:
            raise ClientDisconnect from error

    return guarded
