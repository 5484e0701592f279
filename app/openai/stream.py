"""Server-sent events: turns outputs into the bytes of a stream and notices when the client leaves."""

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
from app.openai.request import GenerationRequest
from engine.types import Output

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # otherwise nginx holds events back
]
DONE = b"data: [DONE]\n\n"

log = logging.getLogger(__name__)


def event(payload: dict[str, Any]) -> bytes:
    return _encoded_event(encode_json(payload))


def _encoded_event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


async def completion_events(
    outputs: AsyncGenerator[tuple[int, Output]],
    choices: Sequence[ReplyChoice],
    envelope: Envelope,
    body: GenerationRequest,
    on_error: Callable[[Exception], None],
) -> AsyncGenerator[bytes]:
    """Yield one event per output that adds text to its choice or ends it, then the usage, then [DONE].

    With include_usage (OpenAI's option) the usage comes in an event of its own, else in the event that ends the last
    choice. With continuous_usage (vLLM's option) every event tells the usage of all choices so far.

    An error before the first event is raised, because the reply can still get its status. A later error goes to
    `on_error` and becomes an error event, without [DONE].
    """
    started = False
    try:
        async with aclosing(outputs):
            async for index, output in outputs:
                await choices[index].add(output)
                if not choices[index].due:
                    continue
                encoded = await encode_choice(choices[index].take())
                for extra_fields, encoded_choices in _chunks(choices, encoded, envelope, body):
                    if not started:
                        extra_fields |= envelope.first_fields()
                    started = True
                    yield _encoded_event(b"".join(envelope.body(encoded_choices, extra_fields)))
    except Exception as error:
        if not started:
            raise
        if isinstance(error, DeadlineExceeded):  # the client or the operator set the deadline: this is no fault
            log.info("stream %s: %s", envelope.id, error)
        else:
            log.exception("stream %s broke off", envelope.id)
        on_error(error)
        yield event(error_body(error)[1])
        return
    yield DONE


def _chunks(
    choices: Sequence[ReplyChoice], encoded: bytes, envelope: Envelope, body: GenerationRequest
) -> Iterator[tuple[dict[str, Any], list[bytes]]]:
    """Yield (extra fields, encoded choices) of each chunk that can be sent once one choice is `encoded`."""
    records = [choice.record for choice in choices if choice.record is not None]
    final_fields = envelope.final_fields(records) if len(records) == len(choices) else None
    if body.include_usage:
        so_far = envelope.usage_so_far(sum(choice.num_tokens for choice in choices)) if body.continuous_usage else None
        yield {"usage": so_far}, [encoded]
        if final_fields is not None:
            yield final_fields, []
    else:
        yield final_fields or {}, [encoded]


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` and wait for the client's disconnect at the same time.

    Cancels the work and raises ClientDisconnect if the client leaves first. Call it after the whole body was read: the
    next message can then only be the disconnect.
    """
    work_task = asyncio.ensure_future(work)
    disconnect_task = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((work_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
        if not work_task.done():
            raise ClientDisconnect
        work_task.result()
    finally:
        work_task.cancel()
        disconnect_task.cancel()
        await asyncio.gather(work_task, disconnect_task, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def oserror_to_disconnect(send: Send) -> Send:
    """Wrap `send` so that its OSError, which some servers raise after the client left, becomes ClientDisconnect."""

    async def send_or_disconnect(message: Message) -> None:
        try:
            await send(message)
        except OSError as error:
            raise ClientDisconnect from error

    return send_or_disconnect
