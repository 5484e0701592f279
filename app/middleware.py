"""Plain ASGI middleware: a name for every request, limits on its body, and an answer when all else fails."""

import asyncio
import logging
import uuid
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import BodyTimeout, BodyTooLarge, error_reply
from app.request_ids import is_request_id

MAX_UNFINISHED_BODIES = 256  # that are waited for at once; more make the oldest give way
GRACE_S = 2.0  # for which no body gives way: it may have come, and lie in the server until its turn
MAX_LENGTH_DIGITS = 15  # of a content-length; int() refuses to read thousands of digits

log = logging.getLogger(__name__)


class RequestId:
    """Gives every request an id of our own making, in `scope["state"]["request_id"]`, and tells it to the client.

    Not to one that sent an x-request-id of its own: Serve's proxy gives every request one, and repeats it in the reply.
    A client's id is never used as a key. One that is not 1 to 128 printable ASCII characters is replaced by ours.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        # A copy, as a server may share one state among requests.
        scope["state"] = {**scope.get("state", {}), "request_id": request_id}
        given = Headers(scope=scope).getlist("x-request-id")
        named = bool(given) and all(map(is_request_id, given))
        if given and not named:
            scope["headers"] = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
            scope["headers"].append((b"x-request-id", request_id.encode()))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self.app(scope, receive, send if named else send_with_id)


class LastResort:
    """Logs an exception nobody expected and, if no reply has begun, sends a 500 that says nothing of the inside."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except Exception as error:
            log.exception("request %s failed", scope["state"]["request_id"])
            if started:
                raise  # the server then breaks the connection: half a reply must not look like a whole one
            await error_reply(error)(scope, receive, send)


class BodyLimit:
    """Raises BodyTooLarge at the reader once a body, as it arrives, exceeds the limit, or its header says it will."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        hopeless = declared.isdecimal() and (len(declared) > MAX_LENGTH_DIGITS or int(declared) > self.max_bytes)
        read = 0

        async def receive_counted() -> Message:
            nonlocal read
            if hopeless:
                raise self._too_large()
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.max_bytes:
                raise self._too_large()
            return message

        await self.app(scope, receive_counted, send)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the request body exceeds {self.max_bytes} bytes")


class DisconnectErrors:
    """Makes ClientDisconnect of what the server's own `receive` raises: then nobody is left to hear.

    Ray Serve's raises TaskCancelledError when a client leaves while its body is on its way (Ray 2.60).
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def receive_or_part() -> Message:
            try:
                return await receive()
            except Exception as error:
                raise ClientDisconnect from error

        await self.app(scope, receive_or_part, send)


@dataclass(slots=True, eq=False)
class _Body:
    """A body that a handler reads and that has not come to its end."""

    began: float  # seconds of the event loop's clock, as the next
    due: float
    gives_way: bool = False  # to newer ones, at `due`
    waiting: asyncio.Timeout | None = None  # for its next part

    def hurry(self, due: float) -> None:
        self.gives_way = True
        self.due = min(self.due, due)
        if self.waiting is not None and not self.waiting.expired():
            self.waiting.reschedule(self.due)


class BodyDeadline:
    """Raises BodyTimeout at the reader unless the whole body comes within `timeout_s` of the request.

    At most `max_unfinished` bodies are waited for at once. One more, and the one that has been unfinished longest gives
    way, once it is older than GRACE_S.
    """

    def __init__(self, app: ASGIApp, timeout_s: float, max_unfinished: int = MAX_UNFINISHED_BODIES) -> None:
        self.app = app
        self.timeout_s = timeout_s
        self.max_unfinished = max_unfinished
        self._unfinished: dict[_Body, None] = {}  # in the order in which they began

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        now = asyncio.get_running_loop().time()
        body = _Body(now, now + self.timeout_s)
        whole = False

        async def receive_in_time() -> Message:
            nonlocal whole
            if whole:
                return await receive()
            self._begin(body)
            message = await self._next_part(body, receive)
            whole = not message.get("more_body", False)  # a disconnect ends it too
            if whole:
                self._unfinished.pop(body, None)
            return message

        try:
            await self.app(scope, receive_in_time, send)
        finally:
            self._unfinished.pop(body, None)

    def _begin(self, body: _Body) -> None:
        """Count the body, unless it is counted already or has given way."""
        if body.gives_way:
            return
        self._unfinished[body] = None
        if len(self._unfinished) > self.max_unfinished:
            oldest = next(iter(self._unfinished))
            del self._unfinished[oldest]
            oldest.hurry(oldest.began + GRACE_S)

    async def _next_part(self, body: _Body, receive: Receive) -> Message:
        try:
            async with asyncio.timeout_at(body.due) as body.waiting:
                return await receive()
        except TimeoutError:
            raise self._too_late(body) from None
        finally:
            body.waiting = None

    def _too_late(self, body: _Body) -> BodyTimeout:
        if body.gives_way:
            return BodyTimeout(f"the request body was not whole, and gave way to {self.max_unfinished} newer ones")
        return BodyTimeout(f"the request body was not whole {self.timeout_s:g} s after the request")
