"""ASGI middleware around Serve's own HTTP proxy, which stands between the network and every replica.

The proxy reads some headers, answers some requests and reports some failures before or instead of the application.
Here it gets the application's manners: OpenAI's error shape, no crash on a strange header, an orderly end.
deployments/proxy.py puts these around the proxy; they work around any ASGI application.
"""

import asyncio
import hmac
import logging
import math
import time
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import error_object
from app.openai.replies import JSON, encode_json
from app.request_ids import is_request_id

DRAIN_PATH = "/-/drain"
HIDDEN_PATHS = frozenset({"/-/routes"})  # Serve answers these to anybody, API key or not

# Headers that Serve 2.60 decodes as UTF-8 or reads as numbers. It raises on other bytes, or ignores the header.
TIMEOUT_HEADER = "x-request-timeout-seconds"
TEXT_HEADERS = frozenset({"x-request-disconnect-disabled", "x-session-id", "serve-multiplexed-model-id"})

# What Serve's proxy answers in plain text → message, type and code of OpenAI's error object.
SERVE_ERRORS = {
    404: ("no application is served at this path", "invalid_request_error", "not_found"),
    408: (f"the request was not finished within its {TIMEOUT_HEADER}", "invalid_request_error", "request_timeout"),
    429: ("too many requests wait; try again later", "rate_limit_error", "server_overloaded"),
    500: ("the replica of this request failed or is gone; it may be sent again", "server_error", "replica_lost"),
    503: ("no replica can serve this request; try again later", "server_error", "no_replica"),
}

log = logging.getLogger(__name__)


class CleanHeaders:
    """Gives every request an x-request-id that can be logged, and refuses with 400 what Serve's proxy cannot read.

    A `traceparent` of other bytes than ASCII is left out, as if there were none (W3C Trace Context, section 4.3).
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope)
        request_id = given.get("x-request-id", "")
        if not is_request_id(request_id):
            request_id = uuid.uuid4().hex
        kept = [(name, value) for name, value in scope["headers"] if not _replaced(name, value)]
        scope = {**scope, "headers": [*kept, (b"x-request-id", request_id.encode())]}
        fault = next(filter(None, (_fault(name, value) for name, value in given.items())), None)
        if fault is None:
            await self.app(scope, receive, send)
        else:
            name, message = fault
            refusal = error_object(message, "invalid_request_error", "invalid_header", name)
            await _reply(400, refusal, scope)(scope, receive, send)


def _replaced(name: bytes, value: bytes) -> bool:
    """Whether a header is left out: the client's x-request-id is put back where it is fit."""
    return name == b"x-request-id" or (name == b"traceparent" and not value.isascii())


def _fault(name: str, value: str) -> tuple[str, str] | None:
    """(header, why it is refused), or None. Header values are decoded as Latin-1."""
    if name == TIMEOUT_HEADER and not _is_number(value):
        return name, f"header {name} must be a number of seconds"
    if name.replace("_", "-") in TEXT_HEADERS and not value.isascii():
        return name, f"header {name} must be ASCII"
    return None


def _is_number(text: str) -> bool:
    try:
        return text.isascii() and math.isfinite(float(text))
    except ValueError:
        return False


class HiddenPaths:
    """404 for paths that Serve itself would answer to anybody."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in HIDDEN_PATHS:
            message = f"{scope['path']} is not served here; GET / lists what is"
            refusal = error_object(message, "invalid_request_error", "not_found")
            await _reply(404, refusal, scope)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


class Draining:
    """Once told to drain, refuses what is new with 503 and counts what still runs.

    The one who may tell it knows `token`: POST DRAIN_PATH?seconds=S with `Authorization: Bearer TOKEN` answers
    {"open": N}, where N counts unfinished POSTs, and starts the drain; with S = 0 it ends them. Streams of events for
    the page are GETs: they never end by themselves and are not waited for. Without a token there is no such path.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app = app
        self._authorization = None if token is None else f"Bearer {token}"
        self._open: set[asyncio.Task[Any]] = set()  # each serves one POST
        self._until: float | None = None  # monotonic seconds at which the server is expected to be gone
        self._ended = False  # whether what ran was cancelled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif self._is_told(scope):
            left = _seconds(scope["query_string"])
            self._until = time.monotonic() + left
            await JSON({"open": len(self._open)})(scope, receive, send)
            self._ended = left <= 0
            for task in tuple(self._open) if self._ended else ():
                task.cancel()
        elif self._until is not None:
            await _shutting_down(self._until, scope)(scope, receive, send)
        elif scope["method"] == "POST":
            await self._count(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _is_told(self, scope: Scope) -> bool:
        if self._authorization is None or scope["path"] != DRAIN_PATH or scope["method"] != "POST":
            return False
        given = Headers(scope=scope).get("authorization", "")
        return hmac.compare_digest(given.encode(), self._authorization.encode())

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None, "a server runs each request in a task"
        began = False

        async def send_unless_ended(message: Message) -> None:
            nonlocal began
            began = began or not self._ended
            if began:
                await send(message)

        self._open.add(task)
        try:
            await self.app(scope, receive, send_unless_ended)
        except asyncio.CancelledError:
            if not self._ended:
                raise
        finally:
            self._open.remove(task)
        if self._ended and not began:
            await _shutting_down(time.monotonic(), scope)(scope, receive, send)


def _shutting_down(until: float, scope: Scope) -> JSON:
    left = max(1, math.ceil(until - time.monotonic()))
    refusal = error_object("the server is shutting down", "server_error", "shutting_down")
    return _reply(503, refusal, scope, {"retry-after": str(left), "connection": "close"})


def _seconds(query: bytes) -> float:
    name, _, value = query.decode("latin-1").partition("=")
    return float(value) if name == "seconds" and _is_number(value) else 0.0


class ErrorShape:
    """Tells Serve's own failures as the application tells its own: a plain-text error becomes OpenAI's error object, a
    reply that never began a 500, and a stream that broke off ends with an error event.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        reply = Reply(scope, receive, send)
        try:
            await self.app(scope, receive, reply.send)
        except Exception:
            log.exception("request %s failed in the proxy", Headers(scope=scope).get("x-request-id"))
        except asyncio.CancelledError:
            await reply.finish()
            raise
        await reply.finish()


class Reply:
    """What the wrapped application sends, handed on or replaced."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._status: int | None = None
        self._headers = Headers()
        self._replaced = False  # the reply is a plain-text error: its own body is left out
        self._ended = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], Headers(raw=message["headers"])
            self._replaced = message["status"] >= 400 and self._is("text/plain")
        elif message["type"] == "http.response.body":
            self._ended = not message.get("more_body", False)
        if not self._replaced:
            await self._send(message)
        elif self._ended:
            await self._send_error(self._status or 500)

    async def finish(self) -> None:
        """Called once the application is done: end what it left open."""
        if self._ended:
            return
        if self._status is None or self._replaced:
            await self._send_error(self._status or 500)
        elif self._is("text/event-stream"):
            message = "the stream broke off: its replica is gone, or the server is shutting down"
            error = error_object(message, "server_error", "stream_broken")
            last = b"data: " + encode_json(error) + b"\n\n"
            await self._send({"type": "http.response.body", "body": last, "more_body": False})

    def _is(self, content_type: str) -> bool:
        return self._headers.get("content-type", "").startswith(content_type)

    async def _send_error(self, status: int) -> None:
        headers = {name: self._headers[name] for name in ("retry-after",) if name in self._headers}
        error = error_object(*SERVE_ERRORS.get(status, SERVE_ERRORS[500]))
        await _reply(status, error, self._scope, headers)(self._scope, self._receive, self._send)


def _reply(status: int, error: dict[str, Any], scope: Scope, headers: Mapping[str, str] | None = None) -> JSON:
    """An error reply with the x-request-id that CleanHeaders saw to."""
    request_id = Headers(scope=scope).get("x-request-id")
    named = {} if request_id is None else {"x-request-id": request_id}
    return JSON(error, status, {**named, **(headers or {})})
