"""Plain ASGI middleware: a name for every request, a limit on its body, and an answer when all else fails."""

import logging
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import BodyTooLarge, error_reply

MAX_LENGTH_DIGITS = 15  # of a content-length; int() refuses to read thousands of digits
MAX_ID_LENGTH = 128  # characters of a client's x-request-id

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
        named = bool(given) and all(map(_usable, given))
        if given and not named:
            scope["headers"] = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
            scope["headers"].append((b"x-request-id", request_id.encode()))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self.app(scope, receive, send if named else send_with_id)


def _usable(client_id: str) -> bool:
    return 0 < len(client_id) <= MAX_ID_LENGTH and client_id.isascii() and client_id.isprintable()


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
