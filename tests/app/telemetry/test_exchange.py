"""Every exchange is followed to its end, however it ends, and no listener can harm a request."""

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from app.fake_engine import FakeEngineClient, Script, spell
from app.main import create_app
from app.telemetry.exchange import Exchange as Followed
from engine.types import InvalidRequest, Output, Overloaded, Request, StepStats
from tests.app.harness import PROMPT, Exchange, call


class Recorder:
    """A listener that records its calls."""

    def __init__(self) -> None:
        self.started: list[Followed] = []
        self.over: list[Followed] = []
        self.steps: list[StepStats] = []

    def began(self, exchange: Followed) -> None:
        self.started.append(exchange)

    def ended(self, exchange: Followed) -> None:
        assert exchange.complete
        self.over.append(exchange)

    def stepped(self, steps: Sequence[StepStats]) -> None:
        self.steps += steps


class Broken(Recorder):
    def began(self, exchange: Followed) -> None:
        raise RuntimeError("began")

    def ended(self, exchange: Followed) -> None:
        raise RuntimeError("ended")


def serve(script: Script = spell, **options: Any) -> tuple[ASGIApp, Recorder, FakeEngineClient]:
    client, recorder = FakeEngineClient(script, **options), Recorder()
    return create_app(client, [recorder]), recorder, client


def the_one(recorder: Recorder) -> Followed:
    (exchange,) = recorder.over
    assert recorder.started == [exchange]
    return exchange


@pytest.mark.parametrize("stream", [False, True])
def test_a_whole_exchange(stream: bool) -> None:
    app, recorder, client = serve()
    reply = call(app, PROMPT | {"n": 3, "stream": stream, "max_tokens": 4})
    exchange = the_one(recorder)
    assert exchange.id in reply.reply.decode()
    assert exchange.request_body is not None
    assert exchange.request_body.n == 3
    assert list(exchange.requests) == client.submitted
    assert [record.request_id for record in exchange.records] == [request.id for request in client.submitted]
    assert [output.finish_reason for output in exchange.outputs] == ["length"] * 3
    assert exchange.error is None
    assert exchange.finished is not None
    assert exchange.finished >= max(record.finished or 0 for record in exchange.records)


def test_the_order_of_choices_is_that_of_the_requests_not_of_their_ends() -> None:
    def late_first(request: Request) -> Iterator[Output]:
        for _ in range(9 if request.choice_index == 0 else 0):
            yield Output(request.id, (1,), "a")
        yield Output(request.id, (), "", "stop", record=next(r.record for r in spell(request) if r.record))

    app, recorder, client = serve(late_first)
    call(app, PROMPT | {"n": 2, "max_tokens": 1})
    assert [output.request_id for output in the_one(recorder).outputs] == [request.id for request in client.submitted]


def test_a_refused_body_ends_an_exchange_too() -> None:
    app, recorder, _ = serve()
    assert call(app, PROMPT | {"temperature": 9}).status == 400
    exchange = the_one(recorder)
    assert isinstance(exchange.error, InvalidRequest)
    assert exchange.request_body is None
    assert exchange.requests == ()
    assert exchange.records == []


def test_overload() -> None:
    app, recorder, _ = serve(max_open=1)
    assert call(app, PROMPT | {"n": 2}).status == 429
    exchange = the_one(recorder)
    assert isinstance(exchange.error, Overloaded)
    assert exchange.requests == ()


def test_a_deadline() -> None:
    app, recorder, _ = serve(lambda request: iter(()))
    assert call(app, PROMPT | {"deadline_s": 0.01}).status == 504
    assert the_one(recorder).outputs[0].error_code == "deadline_exceeded"


def test_a_stream_that_breaks_has_failed_though_its_status_was_sent() -> None:
    def breaks(request: Request) -> Iterator[Output]:
        yield Output(request.id, (97,), "a")
        yield Output(request.id, (), "", "error", "the model failed")

    app, recorder, _ = serve(breaks)
    reply = call(app, PROMPT | {"stream": True})
    assert reply.status == 200
    assert the_one(recorder).failure == "engine_error"


def test_so_has_one_that_we_break_when_the_engine_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    app, recorder, client = serve()

    def fail(token_id: int) -> Any:
        raise RuntimeError("no such token")

    monkeypatch.setattr(client, "token", fail)
    call(app, PROMPT | {"stream": True, "speculation": {"tokens": True}})
    call(app, PROMPT | {"stream": True})
    assert [exchange.failure for exchange in recorder.over] == ["internal_error", None]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(stream: bool) -> None:
    app, recorder, client = serve(lambda request: iter([Output(request.id, (1,), "a")]))

    async def scenario() -> None:
        exchange = Exchange(app, json.dumps(PROMPT | {"stream": stream, "n": 2}).encode())
        running = asyncio.create_task(exchange.run())
        await until(lambda: len(client.open) == 2)
        assert recorder.over == []
        exchange.leave()
        await running

    asyncio.run(asyncio.wait_for(scenario(), 30))
    exchange = the_one(recorder)
    assert isinstance(exchange.error, ClientDisconnect)
    assert exchange.failure == "client_disconnect"
    assert [output.finish_reason for output in exchange.outputs] == ["cancelled"] * 2


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - counts turns of the event loop
        await asyncio.sleep(0)


def test_an_exchange_is_told_of_once_the_engine_let_go_of_it() -> None:
    """The client leaves at once; the outcome of its requests is known a round later."""
    app, recorder, client = serve(lambda request: iter(()))
    told: list[Output] = []
    tell, client._ended = client._ended, told.append

    async def scenario() -> None:
        exchange = Exchange(app, json.dumps(PROMPT).encode())
        running = asyncio.create_task(exchange.run())
        await until(lambda: bool(client.open))
        exchange.leave()
        await running
        assert recorder.over == []
        tell(told[0])

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert the_one(recorder).complete


def test_a_listener_that_fails_costs_nobody_anything(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    app = create_app(FakeEngineClient(), [Broken(), recorder])
    with caplog.at_level(logging.ERROR):
        assert call(app, PROMPT).status == 200
    the_one(recorder)
    assert [record.message for record in caplog.records] == ["the listener Broken failed"] * 2


def test_steps_are_passed_on() -> None:
    _, recorder, client = serve()
    steps: list[Any] = ["one", "two"]
    client.stepped(steps)
    assert recorder.steps == steps


def test_other_routes_are_no_exchanges() -> None:
    app, recorder, _ = serve()
    assert call(app, method="GET", path="/health").status == 200
    assert recorder.started == []
