"""Server-sent events: how outputs become a stream's bytes, and how a client that leaves is noticed."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Send

from app.errors import DeadlineExceeded, error_body
from app.openai.choices import ReplyChoice
from app.openai.replies import Envelope, encode_choice, encode_json
from engine.types import Output

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies hold events back otherwise
]
DONE = b"data: [DONE]\n\n"

log = logging.getLogger(__name__)


def event(payload: dict[str, Any]) -> bytes:
    return _event(encode_json(payload))


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


async def completion_events(
    outputs: AsyncGenerator[tuple[int, Output]],
    choices: Sequence[ReplyChoice],
    envelope: Envelope,
    include_usage: bool,
    broke: Callable[[Exception], None],
) -> AsyncGenerator[bytes]:
    """One event per output that adds text to its choice or ends it, then the usage, then [DONE].

    The usage comes in an event of its own if the client asked for one (include_usage, as OpenAI does it), else in the
    event that ends the last choice. An error before the first event is raised, so that it can still become a status; a
    later one becomes an error event, and no [DONE] follows; `broke` is told of it.
    """
    started = False
    try:
        async with aclosing(outputs) as live:
            async for index, output in live:
                await choices[index].add(output)
                if not choices[index].due:
                    continue
                encoded = await encode_choice(choices[index].take())
                for more, own in _chunks(choices, encoded, envelope, include_usage):
                    started = True
                    yield _event(b"".join(envelope.body(own, more)))
    except Exception as error:
        if not started:
            raise
        if isinstance(error, DeadlineExceeded):  # what its client or our operator asked for: no fault to look into
            log.info("stream %s: %s", envelope.id, error)
        else:
            log.exception("stream %s broke", envelope.id)
        broke(error)
        yield event(error_body(error)[1])
        return
    yield DONE


def _chunks(
    choices: Sequence[ReplyChoice], encoded: bytes, envelope: Envelope, include_usage: bool
) -> Iterator[tuple[dict[str, Any], list[bytes]]]:
    """(what else is in it, encoded choices) of the chunks that can be sent once one choice is `encoded`."""
    records = [choice.record for choice in choices if choice.record is not None]
    end = envelope.closing(records) if len(records) == len(choices) else None
    if include_usage:
        yield {"usage": None}, [encoded]
        if end is not None:
            yield end, []
    else:
        yield end or {}, [encoded]


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


def oserror_to_disconnect(send: Send) -> Send:
    """A server may report at the next send, as an OSError, that nobody is left: make that ClientDisconnect."""

    async def guarded(message: Message) -> None:
        try:
            await send(message)
        except OSError as error:
            raise ClientDisconnect from error

    return guarded
