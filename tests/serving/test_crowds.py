"""Crowds over real sockets: bodies that stop half-way, and more requests at once than are admitted."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from select import select
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


def test_a_burst_beyond_what_is_admitted_is_refused_while_the_others_still_run(served: Served) -> None:
    """Streams too long to end meanwhile: nobody's refusal waits in Serve for somebody's end."""
    fields = {"model": "demo", "prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with ExitStack() as stack:
        connections = [stack.enter_context(closing(connect(served))) for _ in range(PLACES + 64)]
        for connection in connections:
            connection.request("POST", "/v1/completions", json.dumps(fields))
        waiting = {connection.sock: connection for connection in connections}
        refused = 0
        while refused < 64:
            ready, _, _ = select(waiting, [], [], LIMIT_S)
            assert ready, f"{refused} were refused, and then nobody was answered"
            for sock in ready:
                reply = waiting.pop(sock).getresponse()
                assert reply.status in (200, 429)
                refused += reply.status == 429
                assert reply.status == 200 or int(reply.headers["retry-after"]) >= 1
    assert refused == 64
