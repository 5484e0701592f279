"""Plain ASGI middleware: gives every request an id, limits its body, and answers unexpected exceptions."""

import asyncio
import logging
import uuid
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import BodyTimeout, BodyTooLarge, error_reply
from app.refusals import printable
from app.request_ids import is_request_id

MAX_UNFINISHED_BODIES = 256  # bodies that the server waits for at once; each further one makes the oldest give way
GRACE_S = 2.0  # a younger body does not give way: its last part may already lie in the server's buffers
READ_METHODS = ("GET", "HEAD")
MAX_LENGTH_DIGITS = 15  # digits of a content-length; int() refuses to read thousands of digits

log = logging.getLogger(__name__)


def route_path(scope: Scope) -> str:
    """Return the path without the prefix under which the server mounts this application, as the router reads it."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


class HttpMiddleware:
    """Calls `handle` for HTTP requests and passes everything else on to the wrapped application."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self.handle(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class RequestId(HttpMiddleware):
    """Gives every request a new id in `scope["state"]["request_id"]` and sends it to the client as x-request-id.

    A client that sent a valid x-request-id gets its own id back instead: Serve's proxy adds one to every request and
    repeats it in the reply. The server never uses a client's id as a key. It replaces an id that is not 1 to 128
    printable ASCII characters.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = uuid.uuid4().hex
        # A copy, because a server may share one state object among requests.
        scope["state"] = {**scope.get("state", {}), "request_id": request_id}
        given = Headers(scope=scope).getlist("x-request-id")
        keeps_id = bool(given) and all(map(is_request_id, given))
        if given and not keeps_id:
            scope["headers"] = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
            scope["headers"].append((b"x-request-id", request_id.encode()))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self.app(scope, receive, send if keeps_id else send_with_id)


class PageForBrowsers(HttpMiddleware):
    """Sends a browser from / to the live page, which needs no key. Everybody else gets what the application says."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        accept = Headers(scope=scope).get("accept", "")
        at_root = scope["method"] in READ_METHODS and route_path(scope) in ("", "/")
        if at_root and "text/html" in accept:
            page = scope.get("root_path", "") + "/ui"
            await RedirectResponse(page, 307, {"vary": "accept"})(scope, receive, send)
        else:
            await self.app(scope, receive, send)


class LastResort(HttpMiddleware):
    """Logs an unexpected exception. Sends a 500 without internal details if no reply has begun."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except Exception as error:
            log.exception("%s failed: %s %s", scope["state"]["request_id"], scope["method"], printable(scope["path"]))
            if started:
                raise  # the server then breaks the connection: half a reply must not look complete
            await error_reply(error)(scope, receive, send)


class BodyLimit(HttpMiddleware):
    """Limits the length of a request body: reading it raises BodyTooLarge.

    The content-length header or the bytes that have arrived decide, whichever exceeds the limit first.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        super().__init__(app)
        self.max_bytes = max_bytes

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        declared = Headers(scope=scope).get("content-length", "")
        declared_too_large = declared.isdecimal() and (
            len(declared) > MAX_LENGTH_DIGITS or int(declared) > self.max_bytes
        )
        read = 0

        async def receive_counted() -> Message:
            nonlocal read
            if declared_too_large:
                raise self._too_large()
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.max_bytes:
                raise self._too_large()
            return message

        await self.app(scope, receive_counted, send)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the request body exceeds {self.max_bytes} bytes, the most that this server accepts")


class DisconnectErrors(HttpMiddleware):
    """Turns every exception of the server's `receive` into ClientDisconnect.

    Ray Serve's `receive` raises TaskCancelledError when a client leaves before its body has arrived (Ray 2.60).
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:

        async def receive_or_disconnect() -> Message:
            try:
                return await receive()
            except Exception as error:
                raise ClientDisconnect from error

        await self.app(scope, receive_or_disconnect, send)


@dataclass(slots=True, eq=False)
class _Body:
    """A request body that a handler reads and that is not complete yet. Times are seconds of the event loop's clock."""

    began_s: float
    deadline_s: float
    gives_way: bool = False  # whether newer bodies shortened its deadline
    timeout: asyncio.Timeout | None = None  # of the wait for its next part

    def give_way(self, deadline_s: float) -> None:
        self.gives_way = True
        self.deadline_s = min(self.deadline_s, deadline_s)
        if self.timeout is not None and not self.timeout.expired():
            self.timeout.reschedule(self.deadline_s)


class BodyDeadline(HttpMiddleware):
    """Limits the time in which a request body may arrive: reading it later than `timeout_s` raises BodyTimeout.

    The server waits for at most `max_unfinished` bodies at once. Each further body makes the oldest unfinished one time
    out as soon as it is GRACE_S old.
    """

    def __init__(self, app: ASGIApp, timeout_s: float, max_unfinished: int = MAX_UNFINISHED_BODIES) -> None:
        super().__init__(app)
        self.timeout_s = timeout_s
        self.max_unfinished = max_unfinished
        self._unfinished: dict[_Body, None] = {}  # oldest first

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        now = asyncio.get_running_loop().time()
        body = _Body(now, now + self.timeout_s)
        complete = False

        async def receive_in_time() -> Message:
            nonlocal complete
            if complete:
                return await receive()
            self._begin(body)
            message = await self._next_part(body, receive)
            complete = not message.get("more_body", False)  # a disconnect has no such field and ends the body too
            if complete:
                self._unfinished.pop(body, None)
            return message

        try:
            await self.app(scope, receive_in_time, send)
        finally:
            self._unfinished.pop(body, None)

    def _begin(self, body: _Body) -> None:
        """Count the body among the unfinished ones, unless it has given way."""
        if body.gives_way:
            return
        self._unfinished[body] = None
        if len(self._unfinished) > self.max_unfinished:
            oldest = next(iter(self._unfinished))
            del self._unfinished[oldest]
            oldest.give_way(oldest.began_s + GRACE_S)

    async def _next_part(self, body: _Body, receive: Receive) -> Message:
        try:
            async with asyncio.timeout_at(body.deadline_s) as body.timeout:
                return await receive()
        except TimeoutError:
            raise self._too_late(body) from None
        finally:
            body.timeout = None

    def _too_late(self, body: _Body) -> BodyTimeout:
        if body.gives_way:
            return BodyTimeout(
                f"the request body was incomplete while {self.max_unfinished} newer ones arrived; send it again"
            )
        return BodyTimeout(f"the request body was incomplete {self.timeout_s:g} s after the request began")
