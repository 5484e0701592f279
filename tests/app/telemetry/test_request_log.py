"""The log's lines about requests: short, with the id that the client sees, and without any text of a prompt."""

import asyncio
import json
import logging
import re
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from app.fake_engine import FakeEngineClient
from app.keys import ApiKeys
from app.main import create_app
from app.middleware import LastResort, RequestId
from app.refusals import log_refusal
from app.telemetry.request_log import RequestLog
from engine.types import Output, Request
from tests.app.harness import PROMPT, Exchange, call

SECRET = "a secret that no log may hold"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("app.")]


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="app")


@pytest.mark.parametrize("stream", [False, True])
def test_a_finished_request_is_one_line_of_numbers(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(FakeEngineClient(), [RequestLog()])
    done = call(app, {"model": "fake", "prompt": SECRET, "n": 2, "max_tokens": 3, "stream": stream})
    assert done.status == 200
    (line,) = lines(caplog)
    ends = " streamed" if stream else ""
    assert re.fullmatch(
        rf"cmpl-\w+ length: {len(SECRET)} \+ 6 tokens, \d+ of \d+ drafts accepted, 0\.\d\d s{ends}", line
    )
    assert line.split()[0] in done.reply.decode()


def test_the_prompt_of_several_candidates_counts_once(caplog: pytest.LogCaptureFixture) -> None:
    call(create_app(FakeEngineClient(), [RequestLog()]), PROMPT | {"best_of": 3, "max_tokens": 2})
    (line,) = lines(caplog)
    assert "length: 3 + 6 tokens" in line


def test_a_client_that_leaves_gets_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def leave() -> None:
        started = asyncio.Event()

        def script(request: Request) -> tuple[Output, ...]:
            started.set()
            return ()

        exchange = Exchange(create_app(FakeEngineClient(script), [RequestLog()]), json.dumps(PROMPT).encode())
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            tasks.create_task(exchange.run())
            await started.wait()
            exchange.leave()

    asyncio.run(leave())
    (line,) = lines(caplog)
    assert re.match(r"cmpl-\w+ client_disconnect: 3 \+ 0 tokens", line)


def test_so_does_one_that_leaves_before_the_engine_has_its_request(caplog: pytest.LogCaptureFixture) -> None:
    exchange = Exchange(create_app(FakeEngineClient(), [RequestLog()]), chunks=[b"{", b"}"], received=2)
    exchange.leave()
    asyncio.run(exchange.run())
    (line,) = lines(caplog)
    assert re.fullmatch(r"cmpl-\w+ client_disconnect: nothing was generated, 0\.\d\d s", line)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": ({"model": "fake", "prompt": SECRET, "temprature": 1}, "400 POST /v1/completions: unknown field"),
    "bad value": ({"model": "fake", "prompt": SECRET, "n": 0}, "400 POST /v1/completions: n: Input should be greater"),
    "no such model": ({"model": "other", "prompt": SECRET}, "404 POST /v1/completions: the model 'other' does not"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_says_why_on_one_line(name: str, caplog: pytest.LogCaptureFixture) -> None:
    fields, reason = REFUSED[name]
    done = call(create_app(FakeEngineClient(), [RequestLog()]), fields)
    (line,) = lines(caplog)
    assert line.startswith(f"{done.reply_headers['x-request-id']} {reason}")
    assert SECRET not in caplog.text


def test_the_id_is_the_one_that_the_client_chose(caplog: pytest.LogCaptureFixture) -> None:
    call(create_app(FakeEngineClient()), {"model": "fake"}, headers={"x-request-id": "mine-7"})
    assert lines(caplog)[0].startswith("mine-7 400 POST /v1/completions: prompt is required")


def test_what_a_template_says_of_a_chat_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    scope = {"type": "http", "headers": [], "method": "POST", "path": "/v1/chat/completions"}
    log_refusal(scope | {"state": {"request_id": "r"}}, 400, SECRET, "chat_template_error")
    assert lines(caplog) == ["r 400 POST /v1/chat/completions: chat_template_error"]


@pytest.mark.parametrize(
    ("path", "shown"),
    [("/v2/nothing", "/v2/nothing"), ("/a\nb\x1b", "/a?b?"), ("/" + "x" * 300, "/" + "x" * 199 + "…")],
)
def test_an_unknown_path_is_logged_as_it_was_asked_for(path: str, shown: str, caplog: pytest.LogCaptureFixture) -> None:
    done = call(create_app(FakeEngineClient()), method="GET", path=path)
    assert lines(caplog) == [f"{done.reply_headers['x-request-id']} 404 GET {shown}: not_found"]


def test_a_missing_key_is_logged_without_the_one_that_was_sent(caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(FakeEngineClient(), keys=ApiKeys.from_strings(["right"]))
    done = call(app, {"model": "fake"}, headers={"authorization": "Bearer wrong-key"})
    assert done.status == 401
    assert lines(caplog) == [f"{done.reply_headers['x-request-id']} 401 POST /v1/completions: no accepted API key"]
    assert "wrong-key" not in caplog.text


def test_a_path_cannot_write_a_line_of_its_own_when_the_server_fails(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError

    failed = call(RequestId(LastResort(fail)), path="/a\nforetoken: all is well\x1b[2J")
    assert failed.status == 500
    (line,) = lines(caplog)
    assert line.endswith(" failed: POST /a?foretoken: all is well?[2J")
