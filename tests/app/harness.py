"""A raw ASGI caller: full control over what the client sends and when it leaves, which httpx's transport lacks."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message

PROMPT = {"model": "fake", "prompt": "abc"}


@dataclass
class Exchange:
    """One request to an ASGI app. `leave` makes the client disconnect; with `fail_sends`, sends then fail."""

    app: ASGIApp
    body: bytes = b""
    method: str = "POST"
    path: str = "/v1/completions"
    headers: Mapping[str, str | bytes] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)  # the request's body in parts; overrides body
    sent: list[Message] = field(default_factory=list)
    state: dict[str, Any] | None = None
    left: asyncio.Event = field(default_factory=asyncio.Event)
    fail_sends: bool = False
    received: int = 0  # messages that the app has taken

    def scope(self) -> dict[str, Any]:
        state = {} if self.state is None else {"state": self.state}
        return state | {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), _encoded(value)) for name, value in self.headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }

    async def receive(self) -> Message:
        parts = self.chunks or [self.body]
        if self.received < len(parts):
            self.received += 1
            more = self.received < len(parts)
            return {"type": "http.request", "body": parts[self.received - 1], "more_body": more}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await asyncio.sleep(0)
        if self.left.is_set() and self.fail_sends:
            raise OSError("the connection is closed")
        self.sent.append(message)

    async def run(self) -> "Exchange":
        await self.app(self.scope(), self.receive, self.send)
        return self

    def leave(self) -> None:
        self.left.set()

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def reply_headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def reply(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def finished(self) -> bool:
        last = self.sent[-1] if self.sent else {}
        return last.get("type") == "http.response.body" and not last.get("more_body", False)


def _encoded(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


def call(app: ASGIApp, fields: Any = None, **options: Any) -> Exchange:
    """Run one exchange to its end, with `fields` as its JSON body."""
    body = b"" if fields is None else json.dumps(fields).encode()

    async def exchange() -> Exchange:
        return await asyncio.wait_for(Exchange(app, body, **options).run(), timeout=30)

    return asyncio.run(exchange())


def events(exchange: Exchange) -> list[Any]:
    """The data of a stream's events, parsed; [DONE] stays a string."""
    parts = exchange.reply.decode().split("\n\n")
    assert parts.pop() == "", "a stream ends with a complete event"
    assert all(part.startswith("data: ") for part in parts)
    data = [part.removeprefix("data: ") for part in parts]
    return [item if item == "[DONE]" else json.loads(item) for item in data]
