"""What this server answers. The completions endpoint is the one place where a request is submitted and let go."""

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.client import EngineClient, ModelCard
from app.errors import ModelNotFound
from app.replies import JSON, Envelope
from app.schemas import Completion, parse
from app.sse import HEADERS, completion_events, leaving_is_disconnect, unless_disconnected, until_finish
from deployments.engine import types
from deployments.engine.types import InvalidRequest, Output

log = logging.getLogger(__name__)

ROUTES = {
    "POST /v1/completions": "text completions, whole or streamed",
    "GET /v1/models": "the model served here",
    "GET /v1/models/{id}": "the same, by name",
    "GET /health": "whether the engine makes progress",
}


async def index(client: EngineClient, request: Request) -> Response:
    return JSON({"model": client.model.name, "routes": ROUTES})


async def list_models(client: EngineClient, request: Request) -> Response:
    return JSON({"object": "list", "data": [_model(client.model)]})


async def get_model(client: EngineClient, request: Request) -> Response:
    require_model(request.path_params["id"], client.model)
    return JSON(_model(client.model))


def _model(card: ModelCard) -> dict[str, Any]:
    """OpenAI's model object, with the limit that clients most often need beside it."""
    identity = {"id": card.name, "object": "model", "created": card.created, "owned_by": "foretoken"}
    return identity | {"max_model_len": card.max_model_len}


def require_model(name: str, card: ModelCard) -> None:
    if name != card.name:
        raise ModelNotFound(f"the model {name!r} does not exist; this server has {card.name!r}")


class Completions:
    """POST /v1/completions, as a bare ASGI app so that nothing lies between submit and the `finally` that cancels.

    A response object with a body generator would not do: a generator that never started never runs its `finally`.
    """

    def __init__(self, client: EngineClient) -> None:
        self.client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = parse(await Request(scope, receive).body(), self.client.model)
        require_model(asked.model, self.client.model)
        request = types.Request(
            id=scope["state"]["request_id"], prompt_ids=await self._prompt_ids(asked), params=asked.params, k=asked.k
        )
        envelope = Envelope(f"cmpl-{request.id}", int(time.time()), self.client.model.name)
        outputs = self.client.submit(request)
        try:
            send = leaving_is_disconnect(send)
            if asked.stream:
                reply = send_stream(completion_events(outputs, envelope, asked.include_usage), send)
            else:
                reply = send_whole(outputs, envelope, scope, receive, send)
            await unless_disconnected(receive, reply)
        except ClientDisconnect:
            log.info("request %s: the client left", request.id)
        finally:
            self.client.cancel(request.id)

    async def _prompt_ids(self, asked: Completion) -> tuple[int, ...]:
        """Raises InvalidRequest unless the prompt and the tokens asked for fit the model's context."""
        prompt = asked.prompt
        ids = await self.client.tokenize(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise InvalidRequest("prompt must hold at least one token", "prompt")
        limit, room = self.client.model.max_model_len, asked.params.max_tokens
        if len(ids) + room > limit:
            raise InvalidRequest(
                f"this model's context is {limit} tokens; {len(ids)} in the prompt and max_tokens {room} "
                f"make {len(ids) + room}",
                "prompt" if len(ids) >= limit else "max_tokens",
                "context_length_exceeded",
            )
        return tuple(ids)


async def send_whole(
    outputs: AsyncIterator[Output], envelope: Envelope, scope: Scope, receive: Receive, send: Send
) -> None:
    texts = []
    async with aclosing(until_finish(outputs)) as live:
        async for output in live:
            texts.append(output.text)
    assert output.finish_reason is not None, "until_finish ends with the output that finishes"
    assert output.record is not None, "the output that finishes carries the record"
    body = envelope.whole("".join(texts), output.finish_reason, output.record)
    await JSON(body)(scope, receive, send)


async def send_stream(events: AsyncGenerator[bytes], send: Send) -> None:
    """The reply begins with its first event: an error that comes earlier still becomes a status."""
    started = False
    async with aclosing(events) as live:
        async for data in live:
            if not started:
                await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                started = True
            await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
