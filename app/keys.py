"""API keys: where some are set, everything but GET /health and the live page's bare files needs one of them."""

import hashlib
import secrets
from collections.abc import Collection, Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.errors import error_object
from app.openai.replies import JSON

OPEN = frozenset({"/health"})  # paths that anybody may GET
READS = ("GET", "HEAD")


class ApiKeys:
    """Holds SHA-256 digests, never a key."""

    def __init__(self, hashes: Iterable[bytes]) -> None:
        """Raises ValueError without any: a server that nobody can use is a mistake, and so is one open to all."""
        self._hashes = tuple(hashes)
        if not self._hashes:
            raise ValueError("there is no API key")

    @classmethod
    def from_strings(cls, keys: Iterable[str]) -> "ApiKeys":
        return cls(_digest(key.encode()) for key in keys)

    @classmethod
    def read(cls, path: Path) -> "ApiKeys":
        """One key per line; empty lines and those that begin with # are left out.

        Raises ValueError, naming the line and not the key, for one that no header can carry; OSError if there is no
        such file.
        """
        keys = []
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            key = line.strip()
            if not key or key.startswith("#"):
                continue
            if not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError(f"{path}, line {number}: a key is printable ASCII without spaces")
            keys.append(key)
        if not keys:
            raise ValueError(f"{path} holds no API key")
        return cls.from_strings(keys)

    def accept(self, authorization: str | None) -> bool:
        """Whether the header is `Bearer KEY` (RFC 6750, section 2.1). Takes as long whichever key it is, or none."""
        scheme, _, key = (authorization or "").strip().partition(" ")
        given = _digest(key.strip().encode())
        matches = [secrets.compare_digest(given, known) for known in self._hashes]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class RequireKey:
    """Refuses by the path as the server hands it on, not by a URL made of headers that the client writes: what is not
    listed as open is closed, also where no route is."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: Collection[str] = ()) -> None:
        """`open_paths`: that anybody may GET, besides OPEN."""
        self.app = app
        self._keys = keys
        self._open = OPEN | set(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _refusal()(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["method"] in READS and _route_path(scope) in self._open:
            return True
        return self._keys.accept(Headers(scope=scope).get("authorization"))


def _route_path(scope: Scope) -> str:
    """The path below the prefix under which the server mounts this application, as the router sees it."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def _refusal() -> JSON:
    message = "this server needs an API key: send it in the header 'Authorization: Bearer KEY'"
    error = error_object(message, "invalid_request_error", "invalid_api_key")
    return JSON(error, 401, {"www-authenticate": "Bearer"})
