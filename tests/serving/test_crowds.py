"""Crowds over real sockets: bodies that stop half-way, beside an idle server and a full one."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest

from app.middleware import MAX_UNFINISHED_BODIES
from tests.serving.conftest import ARGS, Served

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PLACES = ARGS["max_running"] + ARGS["max_waiting"]
LIMIT_S = 60


def connect(served: Served) -> HTTPConnection:
    url = urlsplit(served.url)
    return HTTPConnection(url.hostname or "", url.port, timeout=LIMIT_S)


def ask(served: Served, method: str, path: str, fields: dict[str, Any] | None = None) -> int:
    """The status of a reply that was read to its end."""
    with closing(connect(served)) as connection:
        connection.request(method, path, None if fields is None else json.dumps(fields))
        reply = connection.getresponse()
        reply.read()
        return reply.status


def health(served: Served) -> dict[str, Any]:
    with closing(connect(served)) as connection:
        connection.request("GET", "/health")
        load: dict[str, Any] = json.loads(connection.getresponse().read())
        return load


@contextmanager
def half_body(served: Served) -> Iterator[socket.socket]:
    url = urlsplit(served.url)
    with socket.create_connection((url.hostname, url.port), LIMIT_S) as sent:
        sent.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n{")
        yield sent


def read_to_the_end(sent: socket.socket) -> bytes:
    """All until the server closes."""
    return b"".join(iter(lambda: sent.recv(65_536), b""))


def test_half_bodies_hold_up_nobody_and_are_answered(served: Served) -> None:
    """More than Serve would let in at once if they counted like requests at work."""
    with ExitStack() as stack:
        halves = [stack.enter_context(half_body(served)) for _ in range(PLACES + 64)]
        assert ask(served, "GET", "/health") == 200
        assert ask(served, "POST", "/v1/completions", {"model": "demo", "prompt": "a", "max_tokens": 4}) == 200
        replies = [read_to_the_end(half) for half in halves]
    for reply in replies:
        head, _, body = reply.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408")
        assert b"connection: close" in head.lower()
        assert json.loads(body)["error"]["code"] == "request_timeout"
    assert len(replies) < MAX_UNFINISHED_BODIES


def test_a_full_server_still_refuses_beside_half_bodies(served: Served) -> None:
    fields = {"model": "demo", "prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with ExitStack() as stack:
        for connection in [stack.enter_context(closing(connect(served))) for _ in range(PLACES)]:
            connection.request("POST", "/v1/completions", json.dumps(fields))
        for _ in range(64):
            stack.enter_context(half_body(served))
        limit = time.monotonic() + LIMIT_S
        while (load := health(served))["running"] + load["waiting"] < PLACES:
            assert time.monotonic() < limit, load
        assert ask(served, "POST", "/v1/completions", fields | {"max_tokens": 1}) == 429
