"""API keys. A server with keys demands one for every request except GET /health and the live page's static files."""

import hashlib
import secrets
from collections.abc import Collection, Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.errors import error_object
from app.middleware import READ_METHODS, route_path
from app.openai.replies import JSON
from app.refusals import log_refusal

ALWAYS_OPEN = frozenset({"/health"})  # paths that need no key for a GET or HEAD


class ApiKeys:
    """The accepted API keys. Holds their SHA-256 digests and never a key itself."""

    def __init__(self, digests: Iterable[bytes]) -> None:
        """Raises ValueError for an empty set of digests: nobody could use the server."""
        self._digests = tuple(digests)
        if not self._digests:
            raise ValueError("there is no API key; give at least one")

    @classmethod
    def from_strings(cls, keys: Iterable[str]) -> "ApiKeys":
        return cls(_digest(key.encode()) for key in keys)

    @classmethod
    def read(cls, path: Path) -> "ApiKeys":
        """Read one key per line. Skips empty lines and lines that begin with #.

        Raises ValueError for a key that no header can carry, with the line number and without the key. Raises OSError
        for a file that cannot be read.
        """
        keys = []
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            key = line.strip()
            if not key or key.startswith("#"):
                continue
            if not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError(f"{path}, line {number}: a key must be printable ASCII without spaces")
            keys.append(key)
        if not keys:
            raise ValueError(f"{path} holds no API key; write one key per line")
        return cls.from_strings(keys)

    def accept(self, authorization: str | None) -> bool:
        """Whether the header is `Bearer KEY` with an accepted key (RFC 6750, section 2.1).

        The comparison takes the same time for every key, right or wrong.
        """
        scheme, _, key = (authorization or "").strip().partition(" ")
        given = _digest(key.strip().encode())
        matches = [secrets.compare_digest(given, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class RequireKey:
    """Refuses requests without an accepted key. Every path that is not listed as open is closed, even without a route.

    Reads the path from the ASGI scope. A URL built from headers would be under the client's control.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: Collection[str] = ()) -> None:
        """open_paths: paths that need no key for a GET or HEAD, in addition to ALWAYS_OPEN."""
        self.app = app
        self._keys = keys
        self._open_paths = ALWAYS_OPEN | set(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            log_refusal(scope, 401, "no accepted API key", None)
            await _refusal()(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["method"] in READ_METHODS and route_path(scope) in self._open_paths:
            return True
        return self._keys.accept(Headers(scope=scope).get("authorization"))


def _refusal() -> JSON:
    # litellm tells a wrong key from other mistakes by OpenAI's first four words.
    message = "Incorrect API key provided, or none: send one of this server's in the header 'Authorization: Bearer KEY'"
    error = error_object(message, "invalid_request_error", "invalid_api_key")
    return JSON(error, 401, {"www-authenticate": "Bearer"})
