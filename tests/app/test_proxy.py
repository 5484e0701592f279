"""The middleware around Serve's proxy: strange headers, Serve's own errors, hidden paths and the drain."""

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.proxy import DRAIN_PATH, SERVE_ERRORS, CleanHeaders, Draining, ErrorShape, HiddenPaths
from app.request_ids import is_request_id
from tests.app.harness import Exchange, call

TOKEN = "the-launcher's"
TOLD = {"authorization": f"Bearer {TOKEN}"}
JSON_TYPE, TEXT, STREAM = b"application/json", b"text/plain; charset=utf-8", b"text/event-stream"
Pairs = list[tuple[bytes, bytes]]


class Seen:
    """An application that notes the headers of its requests and answers 200."""

    def __init__(self) -> None:
        self.headers: list[Headers] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers.append(Headers(scope=scope))
        await reply(send, 200, JSON_TYPE, b"{}")


async def reply(send: Send, status: int, content_type: bytes, *bodies: bytes, more: Pairs | None = None) -> None:
    """`bodies`: parts of a body; an empty last one leaves the reply without an end."""
    headers = [(b"content-type", content_type), *(more or [])]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for number, body in enumerate(bodies, 1):
        unfinished = number < len(bodies) or body == b""
        if body:
            await send({"type": "http.response.body", "body": body, "more_body": unfinished})


def answering(status: int, content_type: bytes, *bodies: bytes, more: Pairs | None = None) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await reply(send, status, content_type, *bodies, more=more)

    return app


def error_of(done: Exchange) -> dict[str, Any]:
    assert done.finished
    assert done.reply_headers["content-type"] == "application/json"
    body = json.loads(done.reply)
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return dict(body["error"])


@pytest.mark.parametrize("value", [b"\xff", b"a" * 129, b"a" * 30_000, b"a\tb", b"", "né".encode()])
def test_a_request_id_that_no_log_should_hold_is_replaced(value: bytes) -> None:
    seen = Seen()
    assert call(CleanHeaders(seen), headers={"x-request-id": value}).status == 200
    (ids,) = [headers.getlist("x-request-id") for headers in seen.headers]
    assert len(ids) == 1
    assert is_request_id(ids[0])
    assert ids[0].encode("latin-1") != value


def test_every_request_has_an_id_of_its_own() -> None:
    seen = Seen()
    for _ in range(2):
        call(CleanHeaders(seen))
    assert seen.headers[0]["x-request-id"] != seen.headers[1]["x-request-id"]


@pytest.mark.parametrize("value", ["a", "a" * 128, "req-7f/2 (retry)"])
def test_a_fit_request_id_stays(value: str) -> None:
    seen = Seen()
    call(CleanHeaders(seen), headers={"x-request-id": value})
    assert seen.headers[0].getlist("x-request-id") == [value]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-request-timeout-seconds", b"\xff"),
        ("x-request-timeout-seconds", b"soon"),
        ("x-request-timeout-seconds", b"nan"),
        ("x-request-timeout-seconds", "٣".encode()),  # a digit to Python, not to HTTP
        ("x-request-disconnect-disabled", b"\xff"),
        ("x-session-id", b"\xff"),
        ("x_session_id", b"\xff"),
        ("serve_multiplexed_model_id", b"\xff"),
    ],
)
def test_a_header_that_the_proxy_cannot_read_is_refused_by_name(name: str, value: bytes) -> None:
    seen = Seen()
    done = call(CleanHeaders(seen), headers={name: value})
    assert done.status == 400
    error = error_of(done)
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_header", name)
    assert is_request_id(done.reply_headers["x-request-id"])
    assert seen.headers == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-request-timeout-seconds", b"2.5"),
        ("x-request-timeout-seconds", b"-1"),
        ("x-request-disconnect-disabled", b"?1"),
        ("x-session-id", b"a"),
        ("user-agent", b"caf\xe9"),
        ("traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
    ],
)
def test_other_headers_pass_as_they_are(name: str, value: bytes) -> None:
    seen = Seen()
    assert call(CleanHeaders(seen), headers={name: value}).status == 200
    assert seen.headers[0][name].encode("latin-1") == value


def test_a_traceparent_that_is_no_ascii_is_left_out() -> None:
    seen = Seen()
    assert call(CleanHeaders(seen), headers={"traceparent": b"\xff"}).status == 200
    assert "traceparent" not in seen.headers[0]


@pytest.mark.parametrize("status", [404, 408, 429, 500, 502, 503])
def test_a_plain_error_gets_openais_shape(status: int) -> None:
    inside = b"Traceback: Deployment(name='Replica') at 10.0.0.1"
    serve = answering(status, TEXT, inside[:9], inside[9:], more=[(b"retry-after", b"3")])
    done = call(CleanHeaders(ErrorShape(serve)), headers={"x-request-id": "mine"})
    assert done.status == status
    error = error_of(done)
    assert [error["message"], error["type"], error["code"]] == list(SERVE_ERRORS.get(status, SERVE_ERRORS[500]))
    assert (done.reply_headers["retry-after"], done.reply_headers["x-request-id"]) == ("3", "mine")


async def raising(scope: Scope, receive: Receive, send: Send) -> None:
    raise RuntimeError("/secret/path")


async def silent(scope: Scope, receive: Receive, send: Send) -> None:
    pass


@pytest.mark.parametrize("serve", [raising, silent, answering(500, TEXT, b"half", b"")])
def test_a_reply_that_never_came_is_a_500(serve: ASGIApp) -> None:
    done = call(ErrorShape(serve))
    assert done.status == 500
    assert error_of(done)["code"] == "replica_lost"


@pytest.mark.parametrize(
    ("status", "content_type", "bodies"),
    [
        (400, JSON_TYPE, [b'{"error"', b":1}"]),
        (200, TEXT, [b"success"]),
        (200, STREAM, [b"data: 1\n\n", b"data: 2\n\n"]),
    ],
)
def test_the_applications_replies_pass_as_they_are(status: int, content_type: bytes, bodies: list[bytes]) -> None:
    done = call(ErrorShape(answering(status, content_type, *bodies)))
    assert (done.status, done.reply, done.finished) == (status, b"".join(bodies), True)


def test_a_stream_that_broke_off_ends_with_an_error_event() -> None:
    done = call(ErrorShape(answering(200, STREAM, b"data: 1\n\n", b"")))
    assert done.finished
    *events, last, end = done.reply.decode().split("\n\n")
    assert (events, end) == (["data: 1"], "")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stream_broken"


def test_half_a_reply_that_is_no_stream_stays_half() -> None:
    """The connection breaks, so that no client takes the reply for complete."""
    done = call(ErrorShape(answering(200, JSON_TYPE, b'{"half', b"")))
    assert not done.finished


def test_serves_own_list_of_routes_is_closed() -> None:
    app = HiddenPaths(answering(200, JSON_TYPE, b"{}"))
    assert [call(app, method="GET", path=path).status for path in ("/-/routes", "/-/healthz", "/")] == [404, 200, 200]
    assert error_of(call(app, method="GET", path="/-/routes"))["code"] == "not_found"


class Held:
    """An application whose replies end when `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", STREAM)]})
        await self.go.wait()
        await send({"type": "http.response.body", "body": b"whole"})


async def tell(app: ASGIApp, seconds: float = 7.5) -> int:
    async def with_query(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "query_string": f"seconds={seconds}".encode()}, receive, send)

    done = await Exchange(with_query, path=DRAIN_PATH, headers=TOLD).run()
    assert done.status == 200
    return int(json.loads(done.reply)["open"])


def test_a_drain_refuses_what_is_new_and_waits_for_what_runs() -> None:
    async def scenario() -> None:
        held = Held()
        app = Draining(held, TOKEN)
        streams = [Exchange(app), Exchange(app), Exchange(app, method="GET", path="/ui/events")]
        running = [asyncio.create_task(stream.run()) for stream in streams]
        await asyncio.sleep(0)
        assert await tell(app) == 2  # the page's events, a GET, are not waited for
        late = [await Exchange(app).run(), await Exchange(app, method="GET", path="/health").run()]
        assert [refused.status for refused in late] == [503, 503]
        assert error_of(late[0])["code"] == "shutting_down"
        assert late[0].reply_headers["retry-after"] == "8"
        assert late[0].reply_headers["connection"] == "close"
        held.go.set()
        await asyncio.gather(*running)
        assert [stream.reply for stream in streams] == [b"whole"] * 3
        assert await tell(app) == 0

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_drain_without_time_ends_what_runs_and_says_so_in_the_stream() -> None:
    async def scenario() -> None:
        held = Held()
        app = Draining(ErrorShape(held), TOKEN)
        stream = Exchange(app)
        running = asyncio.create_task(stream.run())
        await asyncio.sleep(0)
        assert await tell(app, 0) == 1
        await running
        assert stream.finished
        assert json.loads(stream.reply.removeprefix(b"data: "))["error"]["code"] == "stream_broken"

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_reply_that_has_not_begun_when_the_drain_is_over_is_a_503() -> None:
    """Serve's proxy swallows the cancellation, and sends nothing."""

    async def waiting(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    async def scenario() -> None:
        app = Draining(ErrorShape(waiting), TOKEN)
        whole = Exchange(app)
        running = asyncio.create_task(whole.run())
        await asyncio.sleep(0)
        assert await tell(app, 0) == 1
        await running
        assert (whole.status, error_of(whole)["code"]) == (503, "shutting_down")
        assert whole.reply_headers["connection"] == "close"

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_request_that_failed_or_was_cancelled_is_not_waited_for() -> None:
    async def scenario() -> None:
        failing = Draining(raising, TOKEN)
        with pytest.raises(RuntimeError):
            await Exchange(failing).run()
        assert await tell(failing) == 0
        held = Draining(Held(), TOKEN)
        running = asyncio.create_task(Exchange(held).run())
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert await tell(held) == 0

    asyncio.run(asyncio.wait_for(scenario(), 30))


@pytest.mark.parametrize(
    ("token", "method", "authorization"),
    [
        (TOKEN, "POST", "Bearer wrong"),
        (TOKEN, "POST", ""),
        (TOKEN, "GET", f"Bearer {TOKEN}"),
        (None, "POST", "Bearer None"),
    ],
)
def test_nobody_else_can_drain(token: str | None, method: str, authorization: str) -> None:
    app = Draining(answering(404, JSON_TYPE, b"{}"), token)
    assert call(app, method=method, path=DRAIN_PATH, headers={"authorization": authorization}).status == 404
    assert call(app).status == 404  # the application's own answer, not the drain's


@pytest.mark.parametrize("query", [b"", b"seconds=", b"seconds=nan", b"seconds=-4", b"x=9"])
def test_a_drain_without_a_time_still_tells_clients_one_second(query: bytes) -> None:
    async def with_query(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "query_string": query}, receive, send)

    app = Draining(Seen(), TOKEN)
    assert call(with_query, path=DRAIN_PATH, headers=TOLD).status == 200
    assert call(app).reply_headers["retry-after"] == "1"


@pytest.mark.parametrize("layer", [CleanHeaders, HiddenPaths, ErrorShape, lambda app: Draining(app, TOKEN)])
def test_other_protocols_pass(layer: Any) -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    async def send(message: Message) -> None:
        raise AssertionError("nothing is sent")

    for kind in ("lifespan", "websocket"):
        asyncio.run(layer(app)({"type": kind, "headers": [], "path": "/-/routes"}, receive, send))
    assert seen == ["lifespan", "websocket"]
