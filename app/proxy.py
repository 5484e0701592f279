"""ASGI middleware around Serve's own HTTP proxy, which stands between the network and every replica.

The proxy reads some headers, answers some requests and reports some failures before or instead of the application.
This middleware makes the proxy behave as the application does: it sends errors in OpenAI's shape, survives malformed
headers and ends in order. deployments/proxy.py installs it; it works around any ASGI application.
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
from app.middleware import HttpMiddleware
from app.openai.replies import JSON, encode_json
from app.request_ids import is_request_id

DRAIN_PATH = "/-/drain"
HIDDEN_PATHS = frozenset({"/-/routes"})  # Serve answers these without an API key

# Headers that Serve 2.60 decodes as UTF-8 or reads as numbers. For other bytes it raises or ignores the header.
TIMEOUT_HEADER = "x-request-timeout-seconds"
TEXT_HEADERS = frozenset({"x-request-disconnect-disabled", "x-session-id", "serve-multiplexed-model-id"})

# Status of a plain-text error of Serve's proxy → message, type and code of OpenAI's error object.
SERVE_ERRORS = {
    404: ("no application is served at this path", "invalid_request_error", "not_found"),
    408: (f"the request was not finished within its {TIMEOUT_HEADER}", "invalid_request_error", "request_timeout"),
    429: ("too many requests wait; try again later", "rate_limit_error", "server_overloaded"),
    500: ("the replica of this request failed or is gone; send the request again", "server_error", "replica_lost"),
    503: ("no replica can serve this request; try again later", "server_error", "no_replica"),
}

log = logging.getLogger(__name__)


class CleanHeaders(HttpMiddleware):
    """Gives every request an x-request-id that can be logged. Refuses headers that Serve's proxy cannot read with 400.

    Removes a `traceparent` that is not ASCII, as W3C Trace Context, section 4.3, demands for an invalid one.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        client_headers = Headers(scope=scope)
        request_id = client_headers.get("x-request-id", "")
        if not is_request_id(request_id):
            request_id = uuid.uuid4().hex
        kept = [(name, value) for name, value in scope["headers"] if not _is_removed(name, value)]
        scope = {**scope, "headers": [*kept, (b"x-request-id", request_id.encode())]}
        errors = (_header_error(name, value) for name, value in client_headers.items())
        first_error = next(filter(None, errors), None)
        if first_error is None:
            await self.app(scope, receive, send)
        else:
            name, message = first_error
            refusal = error_object(message, "invalid_request_error", "invalid_header", name)
            await _reply(400, refusal, scope)(scope, receive, send)


def _is_removed(name: bytes, value: bytes) -> bool:
    """Whether the client's header is removed. CleanHeaders adds an x-request-id again."""
    return name == b"x-request-id" or (name == b"traceparent" and not value.isascii())


def _header_error(name: str, value: str) -> tuple[str, str] | None:
    """Return (header, error message) for a header that is refused, else None. The value is decoded as Latin-1."""
    if name == TIMEOUT_HEADER and not _is_number(value):
        return name, f"header {name} must be a finite number of seconds in ASCII"
    if name.replace("_", "-") in TEXT_HEADERS and not value.isascii():
        return name, f"header {name} must be ASCII"
    return None


def _is_number(text: str) -> bool:
    try:
        return text.isascii() and math.isfinite(float(text))
    except ValueError:
        return False


class HiddenPaths(HttpMiddleware):
    """Answers 404 for paths that Serve itself would answer without an API key."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in HIDDEN_PATHS:
            message = f"the path {scope['path']} does not exist; GET / lists the paths of this server"
            refusal = error_object(message, "invalid_request_error", "not_found")
            await _reply(404, refusal, scope)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


class Draining(HttpMiddleware):
    """Lets the proxy drain: after the drain command it refuses new requests with 503 and counts the running ones.

    The command is POST DRAIN_PATH?seconds=S with `Authorization: Bearer TOKEN`. It starts the drain and answers
    {"open": N}, where N counts unfinished POSTs. S = 0 cancels them. The live page's event streams are GETs: they never
    end by themselves, so the drain does not wait for them. token None: the path does not exist.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        super().__init__(app)
        self._authorization = None if token is None else f"Bearer {token}"
        self._open_posts: set[asyncio.Task[Any]] = set()  # each task serves one POST
        self._ends_at: float | None = None  # monotonic seconds at which the server should be gone; None: no drain
        self._cancelled = False  # whether the drain cancelled the running POSTs

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_drain_command(scope):
            left_s = _seconds(scope["query_string"])
            self._ends_at = time.monotonic() + left_s
            await JSON({"open": len(self._open_posts)})(scope, receive, send)
            self._cancelled = left_s <= 0
            for task in tuple(self._open_posts) if self._cancelled else ():
                task.cancel()
        elif self._ends_at is not None:
            await _shutting_down(self._ends_at, scope)(scope, receive, send)
        elif scope["method"] == "POST":
            await self._run_counted(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _is_drain_command(self, scope: Scope) -> bool:
        if self._authorization is None or scope["path"] != DRAIN_PATH or scope["method"] != "POST":
            return False
        given = Headers(scope=scope).get("authorization", "")
        return hmac.compare_digest(given.encode(), self._authorization.encode())

    async def _run_counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None, "a server runs each request in a task"
        reply_began = False

        async def send_unless_cancelled(message: Message) -> None:
            nonlocal reply_began
            reply_began = reply_began or not self._cancelled
            if reply_began:
                await send(message)

        self._open_posts.add(task)
        try:
            await self.app(scope, receive, send_unless_cancelled)
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
        finally:
            self._open_posts.remove(task)
        if self._cancelled and not reply_began:
            await _shutting_down(time.monotonic(), scope)(scope, receive, send)


def _shutting_down(ends_at: float, scope: Scope) -> JSON:
    left_s = max(1, math.ceil(ends_at - time.monotonic()))
    refusal = error_object("the server is shutting down", "server_error", "shutting_down")
    return _reply(503, refusal, scope, {"retry-after": str(left_s), "connection": "close"})


def _seconds(query: bytes) -> float:
    name, _, value = query.decode("latin-1").partition("=")
    return float(value) if name == "seconds" and _is_number(value) else 0.0


class ErrorShape(HttpMiddleware):
    """Reports Serve's own failures in OpenAI's shape.

    A plain-text error becomes OpenAI's error object. A request without a reply gets a 500. A stream that breaks off
    ends with an error event.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
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
    """Passes the wrapped application's reply on, or replaces it by an error reply."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._status: int | None = None
        self._headers = Headers()
        self._replaced = False  # whether the reply is a plain-text error, whose body is not passed on
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
        """End a reply that the application left open. Call it once the application has returned or raised."""
        if self._ended:
            return
        if self._status is None or self._replaced:
            await self._send_error(self._status or 500)
        elif self._is("text/event-stream"):
            message = "the stream broke off: its replica is gone or the server is shutting down; send the request again"
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
    """Return an error reply with the request's x-request-id, which CleanHeaders has set."""
    request_id = Headers(scope=scope).get("x-request-id")
    id_header = {} if request_id is None else {"x-request-id": request_id}
    return JSON(error, status, {**id_header, **(headers or {})})
