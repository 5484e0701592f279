"""deadline_s: what reaches the engine, and how a request that ran out of time ends, whole or as a stream."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from app.fake_engine import FakeEngineClient
from app.main import create_app
from engine.types import Output, Request
from tests.app.harness import PROMPT, Exchange, call, events

LATE = "the deadline of 2.5 s has passed"


def post(client: FakeEngineClient, **fields: Any) -> Exchange:
    return call(create_app(client), PROMPT | fields)


def late(texts: int, of_choice: int = 0) -> FakeEngineClient:
    """An engine that writes some text for each choice, lets one of them run out of time, and the others run on."""

    def script(request: Request) -> Iterator[Output]:
        for _ in range(texts):
            yield Output(request.id, (1,), "a")
        if request.choice_index == of_choice:
            yield Output(request.id, (), "", "error", LATE, "deadline_exceeded")

    return FakeEngineClient(script)


@pytest.mark.parametrize("seconds", [2.5, 3, 1e-300, 1e300])
def test_the_deadline_reaches_every_choice(seconds: float) -> None:
    client = FakeEngineClient(lambda request: [Output(request.id, (), "", "error")])
    post(client, deadline_s=seconds, n=2)
    assert [request.deadline_s for request in client.submitted] == [seconds] * 2


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("stream", "texts"), [(False, 0), (False, 2), (True, 0)])
def test_before_anything_is_sent_it_is_a_504(stream: bool, texts: int, n: int) -> None:
    client = late(texts)
    done = post(client, stream=stream, n=n)
    assert done.status == 504
    assert json.loads(done.reply) == {
        "error": {"message": LATE, "type": "server_error", "param": None, "code": "deadline_exceeded"}
    }
    assert done.reply_headers["x-should-retry"] == "false"
    assert "retry-after" not in done.reply_headers
    assert client.open == {}


@pytest.mark.parametrize("n", [1, 3])
def test_in_a_stream_that_has_begun_it_is_an_event_and_no_done(n: int) -> None:
    client = late(2)
    done = post(client, stream=True, n=n)
    *chunks, error = events(done)
    assert (done.status, done.finished) == (200, True)
    assert chunks
    assert all("choices" in chunk for chunk in chunks)
    assert error["error"] == {"message": LATE, "type": "server_error", "param": None, "code": "deadline_exceeded"}
    assert client.open == {}


@pytest.mark.parametrize("stream", [False, True])
def test_the_other_choices_are_cancelled(stream: bool) -> None:
    client = late(2, of_choice=1)
    post(client, stream=stream, n=3)
    assert sorted(client.cancelled) == [request.id for request in client.submitted if request.choice_index != 1]


def test_other_errors_may_be_tried_again() -> None:
    done = post(FakeEngineClient(lambda request: [Output(request.id, (), "", "error", "broken")]))
    assert (done.status, json.loads(done.reply)["error"]["code"]) == (500, "engine_error")
    assert "x-should-retry" not in done.reply_headers


@pytest.mark.parametrize(("code", "faults"), [("deadline_exceeded", 0), ("engine_error", 1)])
def test_a_stream_that_ran_out_of_time_is_no_fault_to_look_into(
    code: Any, faults: int, caplog: pytest.LogCaptureFixture
) -> None:
    def script(request: Request) -> list[Output]:
        return [Output(request.id, (1,), "a"), Output(request.id, (), "", "error", LATE, code)]

    with caplog.at_level(logging.INFO):
        post(FakeEngineClient(script), stream=True)
    assert LATE in caplog.text
    assert sum(entry.levelno >= logging.ERROR for entry in caplog.records) == faults


@pytest.mark.parametrize("stream", [False, True])
def test_the_fake_engine_keeps_deadlines(stream: bool) -> None:
    client = FakeEngineClient(lambda request: [])  # a request that never ends by itself
    done = post(client, deadline_s=0.01, stream=stream)
    assert (done.status, json.loads(done.reply)["error"]["code"]) == (504, "deadline_exceeded")
    assert (client.open, client.cancelled) == ({}, [])
    done = post(FakeEngineClient(), deadline_s=1e-9, stream=stream)  # past before the first token of one that would
    assert done.status == 504
    assert post(FakeEngineClient(), deadline_s=3600, stream=stream).status == 200
