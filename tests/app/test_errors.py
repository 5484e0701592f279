"""Every failure has OpenAI's error shape and its own status, and reveals no internals to a client."""

import json
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app import routes
from app.fake_engine import FakeEngineClient
from app.keys import ApiKeys
from app.main import create_app
from app.middleware import RequestId
from app.openai.replies import encode_json
from app.telemetry.tracer import Tracer
from engine.types import EngineStopped, Output, Request
from tests.app.harness import PROMPT, Exchange, call, events


def text_then(request: Request, last: Output | Exception | None, texts: int) -> Iterator[Output]:
    for _ in range(texts):
        yield Output(request.id, (1,), "a")
    if isinstance(last, Exception):
        raise last
    if last is not None:
        yield last


def failing(last: Output | Exception | None, texts: int = 0) -> FakeEngineClient:
    return FakeEngineClient(lambda request: text_then(request, last, texts))


def error_of(done: Exchange) -> dict[str, Any]:
    body = json.loads(done.reply)
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert done.reply_headers["content-type"] == "application/json"
    return dict(body["error"])


ENGINE_ERROR = Output("r", (), "", "error", error="the detokeniser gave up")
SILENT_ERROR = Output("r", (), "", "error")
LATE = Output("r", (), "", "error", "out of time", "deadline_exceeded")
CANCELLED = Output("r", (), "", "cancelled")
SECRET = RuntimeError("/secret/path and tensor(7)")
FAILURES: list[tuple[Any, int, str, str]] = [
    (ENGINE_ERROR, 500, "engine_error", "the detokeniser gave up"),
    (SILENT_ERROR, 500, "engine_error", "could not finish"),
    (CANCELLED, 503, "engine_stopped", "shutting down"),
    (LATE, 504, "deadline_exceeded", "out of time"),
    (SECRET, 500, "internal_error", "its log has the details"),
]


@pytest.mark.parametrize(("last", "status", "code", "message"), FAILURES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_event_is_a_status(
    last: Any, status: int, code: str, message: str, stream: bool
) -> None:
    client = failing(last)
    done = call(create_app(client), PROMPT | {"stream": stream})
    error = error_of(done)
    assert (done.status, error["type"], error["code"]) == (status, "server_error", code)
    assert message in error["message"]
    assert "secret" not in done.reply.decode()
    assert client.open == {}


@pytest.mark.parametrize(("last", "status", "code", "message"), FAILURES)
def test_a_failure_after_it_is_an_event_and_no_done(last: Any, status: int, code: str, message: str) -> None:
    client = failing(last, texts=2)
    done = call(create_app(client), PROMPT | {"stream": True})
    *chunks, error = events(done)
    assert done.status == 200
    assert done.finished
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "a"]
    assert error["error"]["code"] == code
    assert message in error["error"]["message"]
    assert "secret" not in done.reply.decode()
    assert client.open == {}


def test_a_whole_reply_that_fails_midway_is_only_an_error() -> None:
    done = call(create_app(failing(ENGINE_ERROR, texts=2)), PROMPT)
    assert (done.status, error_of(done)["code"]) == (500, "engine_error")


@pytest.mark.parametrize("stream", [False, True])
def test_an_unexpected_failure_is_logged_with_its_cause(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        call(create_app(failing(SECRET, texts=1 if stream else 0)), PROMPT | {"stream": stream})
    assert "/secret/path" in caplog.text


def test_an_engine_that_falls_silent_is_an_error_not_a_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    async def falls_silent() -> AsyncIterator[Output]:
        yield Output("r", (1,), "a")

    client = FakeEngineClient()
    monkeypatch.setattr(client, "submit", lambda requests: [falls_silent()])
    done = call(create_app(client), PROMPT | {"stream": True})
    assert b"[DONE]" not in done.reply
    assert events(done)[-1]["error"]["code"] == "engine_error"


def test_a_reply_that_breaks_midway_is_left_for_the_server_to_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the server can break the connection. If the exception were swallowed, half a reply would look complete."""

    async def half(outputs: Any, choices: Any, envelope: Any, body: Any, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("midway")

    monkeypatch.setattr(routes, "send_whole", half)
    client = FakeEngineClient()
    with pytest.raises(RuntimeError, match="midway"):
        call(create_app(client), PROMPT)
    assert client.open == {}


@pytest.mark.parametrize("stream", [False, True])
def test_an_overloaded_engine_is_a_429_with_retry_after(stream: bool) -> None:
    client = FakeEngineClient(max_open=0)
    done = call(create_app(client), PROMPT | {"stream": stream})
    error = error_of(done)
    assert (done.status, error["type"], error["code"]) == (429, "rate_limit_error", "engine_overloaded")
    assert done.reply_headers["retry-after"] == "2"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stopped_engine_is_a_503_without_retry_after(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: Request) -> AsyncIterator[Output]:
        raise EngineStopped("the engine is shutting down, or has stopped")

    client = FakeEngineClient()
    monkeypatch.setattr(client, "submit", refuse)
    done = call(create_app(client), PROMPT | {"stream": stream})
    error = error_of(done)
    assert (done.status, error["type"], error["code"]) == (503, "server_error", "engine_stopped")
    assert "retry-after" not in done.reply_headers


def test_other_replies_carry_no_retry_after() -> None:
    assert "retry-after" not in call(create_app(FakeEngineClient()), PROMPT).reply_headers


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v2", 404, "not_found"),
        ("POST", "/v1/completions/", 404, "not_found"),
        ("GET", "/v1/models/gpt", 404, "model_not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
def test_what_is_not_served(method: str, path: str, status: int, code: str) -> None:
    done = call(create_app(FakeEngineClient()), method=method, path=path)
    error = error_of(done)
    assert (done.status, error["type"], error["code"]) == (status, "invalid_request_error", code)
    if status == 405:
        assert done.reply_headers["allow"]


LIMIT = 100


@pytest.mark.parametrize(("size", "status"), [(LIMIT, 400), (LIMIT + 1, 413)])
@pytest.mark.parametrize("parts", [1, 3, 10])
def test_the_body_limit_counts_what_arrives(size: int, status: int, parts: int) -> None:
    """One byte decides. A body of exactly the limit goes on to the parser, which refuses spaces."""
    step = -(-size // parts)
    chunks = [b" " * min(step, size - start) for start in range(0, size, step)]
    done = call(create_app(FakeEngineClient(), max_body_bytes=LIMIT), chunks=chunks)
    assert done.status == status
    assert error_of(done)["code"] == ("request_too_large" if status == 413 else "invalid_json")


@pytest.mark.parametrize("declared", [str(LIMIT + 1), "9" * 5000])
def test_a_declared_length_above_the_limit_is_refused_unread(declared: str) -> None:
    app = create_app(FakeEngineClient(), max_body_bytes=LIMIT)
    done = call(app, chunks=[b"{", b"}"], headers={"content-length": declared})
    assert (done.status, done.received) == (413, 0)


def test_a_declared_length_is_not_believed_when_it_is_small() -> None:
    app = create_app(FakeEngineClient(), max_body_bytes=LIMIT)
    done = call(app, chunks=[b" " * 90] * 2, headers={"content-length": "5"})
    assert done.status == 413


def test_a_clients_request_id_is_never_used() -> None:
    """The id is not sent twice: Serve's proxy adds it, and clients would read two such headers as one wrong id."""
    client = FakeEngineClient()
    done = call(create_app(client), PROMPT, headers={"x-request-id": "job-7"})
    (request,) = client.submitted
    assert request.id != "job-7"
    assert "x-request-id" not in done.reply_headers
    done = call(create_app(client), PROMPT)
    assert done.reply_headers["x-request-id"] == client.submitted[1].id


@pytest.mark.parametrize(
    "given", ["x" * 129, "x" * 30_000, "", "a\tb", "a\x1b[2Jb", "né".encode(), b"n\xe9", b"\xff\x00"]
)
def test_a_request_id_that_no_log_should_hold_is_replaced(given: str | bytes) -> None:
    seen: list[Headers] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(Headers(scope=scope))
        await Response()(scope, receive, send)

    done = call(RequestId(inner), headers={"x-request-id": given, "accept": "*/*"})
    ours = done.reply_headers["x-request-id"]
    assert seen[0].getlist("x-request-id") == [ours]
    assert len(ours) == 32
    assert seen[0]["accept"] == "*/*"


@pytest.mark.parametrize("given", ["j", "x" * 128, "job 7/~!"])
def test_a_request_id_that_can_be_logged_stays(given: str) -> None:
    seen: list[Headers] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(Headers(scope=scope))
        await Response()(scope, receive, send)

    assert "x-request-id" not in call(RequestId(inner), headers={"x-request-id": given}).reply_headers
    assert seen[0].getlist("x-request-id") == [given]


@pytest.mark.parametrize(
    "name", ["x-request-id", "authorization", "traceparent", "tracestate", "content-length", "accept"]
)
@pytest.mark.parametrize(
    "value", [b"\xe9", b"Bearer \xff\xfe", b"\xb2\xb3", "٣".encode(), b"00-\xe9-\xe9-01", b"\x80" * 20_000]
)
def test_headers_of_any_bytes_are_read(name: str, value: bytes) -> None:
    """HTTP servers pass on header fields that no standard allows. Comparing keys must not fail for them either."""
    client = FakeEngineClient()
    tracer = Tracer(client, TracerProvider())
    assert call(create_app(client, [tracer]), PROMPT, headers={name: value}).status == 200
    keys = ApiKeys.from_strings(["secret"])
    assert call(create_app(client, [tracer], keys=keys), PROMPT, headers={name: value}).status == 401


def test_requests_with_one_label_have_ids_of_their_own() -> None:
    client = FakeEngineClient()
    app = create_app(client)
    for _ in range(2):
        call(app, PROMPT, headers={"x-request-id": "same"})
    first, second = client.submitted
    assert first.id != second.id


def test_state_that_the_server_shares_among_requests_is_kept_and_not_written_to() -> None:
    shared = {"lifespan": "value"}
    seen: list[Any] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["state"])

    call(RequestId(inner), state=shared)
    assert shared == {"lifespan": "value"}
    assert seen[0].keys() == {"lifespan", "request_id"}


def test_errors_carry_a_request_id_too() -> None:
    assert len(call(create_app(FakeEngineClient()), {}).reply_headers["x-request-id"]) == 32


@pytest.mark.parametrize("text", ["plain", "é中🙂", "\u2028\u2029\x85\r\n\0", "\ud800 half", '"\\'])
def test_json_is_one_line_and_reads_back(text: str) -> None:
    data = encode_json({"text": text})
    assert json.loads(data) == {"text": text}
    assert len(data.decode().splitlines()) == 1


def test_an_infinite_number_is_our_bug_not_the_clients_problem() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_json({"rate": float("inf")})
