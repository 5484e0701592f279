"""A client that leaves, at any moment, frees everything that its request holds. So does a server that cancels it."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from app import routes
from app.fake_engine import FakeEngineClient, spell
from app.main import create_app
from app.openai.stream import unless_disconnected
from engine.types import Output, Request
from tests.app.harness import PROMPT, Exchange


def body(stream: bool, n: int = 1) -> bytes:
    return json.dumps(PROMPT | {"stream": stream, "n": n}).encode()


several = pytest.mark.parametrize("n", [1, 3])


def silent(request: Request) -> Iterator[Output]:
    """The request runs and has no text to show yet."""
    yield from ()


def two_then_silent(request: Request) -> Iterator[Output]:
    yield Output(request.id, (1,), "a")
    yield Output(request.id, (2,), "b")


def endless(request: Request) -> Iterator[Output]:
    while True:
        yield Output(request.id, (1,), "a")


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the scenarios count turns of the event loop
        await asyncio.sleep(0)


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a scenario to its end; tasks that it leaves behind are leaks."""

    async def scenario() -> None:
        await asyncio.wait_for(work, timeout=30)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


def assert_released(client: FakeEngineClient, n: int = 1) -> None:
    assert client.open == {}
    assert client.cancelled == [request.id for request in client.submitted]
    assert len(client.submitted) == n


@several
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_byte(stream: bool, n: int) -> None:
    client = FakeEngineClient(silent)

    async def scenario() -> None:
        exchange = Exchange(create_app(client), body(stream, n))
        running = asyncio.create_task(exchange.run())
        await until(lambda: bool(client.open))
        exchange.leave()
        await running
        assert exchange.sent == []

    run(scenario())
    assert_released(client, n)


@several
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_as_soon_as_the_request_is_sent(stream: bool, n: int) -> None:
    """The client leaves at once: a body generator might never start, and then its `finally` would never run."""
    client = FakeEngineClient(endless)

    async def scenario() -> None:
        exchange = Exchange(create_app(client), body(stream, n))
        exchange.leave()
        await exchange.run()

    run(scenario())
    assert_released(client, n)


@several
@pytest.mark.parametrize("script", [two_then_silent, endless])
@pytest.mark.parametrize("fail_sends", [False, True])
def test_leaving_in_the_middle_of_a_stream(
    script: Callable[[Request], Iterator[Output]], fail_sends: bool, n: int
) -> None:
    client = FakeEngineClient(script)

    async def scenario() -> None:
        exchange = Exchange(create_app(client), body(True, n), fail_sends=fail_sends)
        running = asyncio.create_task(exchange.run())
        await until(lambda: len(exchange.sent) >= 3)
        exchange.leave()
        await running
        assert not exchange.finished
        assert b"[DONE]" not in exchange.reply

    run(scenario())
    assert_released(client, n)


def test_a_send_that_fails_is_a_departure_too() -> None:
    """Some servers never say http.disconnect and fail the next send instead."""
    client = FakeEngineClient(endless)

    async def scenario() -> None:
        exchange = Exchange(create_app(client), body(True))

        async def send(message: Message) -> None:
            raise OSError("the connection is closed")

        await exchange.app(exchange.scope(), exchange.receive, send)

    run(scenario())
    assert_released(client)


def test_leaving_while_a_send_hangs_closes_the_engines_generator_at_once() -> None:
    """The generator then waits between two outputs. The garbage collector would close it only after the request."""
    client = FakeEngineClient()
    closed: list[str] = []

    async def outputs(request: Request) -> AsyncIterator[Output]:
        try:
            while True:
                yield Output(request.id, (1,), "a")
        finally:
            closed.append(request.id)

    async def scenario() -> None:
        kept: list[AsyncIterator[Output]] = []
        client.submit = lambda requests: kept.append(outputs(requests[0])) or kept  # type: ignore[method-assign, func-returns-value]
        exchange = Exchange(create_app(client), body(True))

        async def stuck(message: Message) -> None:
            exchange.leave()
            await asyncio.Event().wait()

        await exchange.app(exchange.scope(), exchange.receive, stuck)
        assert len(kept) == len(closed) == 1

    run(scenario())


@several
@pytest.mark.parametrize("script", [silent, endless])
@pytest.mark.parametrize("stream", [False, True])
def test_the_server_cancelling_the_request(script: Callable[[Request], Iterator[Output]], stream: bool, n: int) -> None:
    """Ray Serve cancels the task that runs the app when a client leaves."""
    client = FakeEngineClient(script)

    async def scenario() -> None:
        exchange = Exchange(create_app(client), body(stream, n))
        running = asyncio.create_task(exchange.run())
        await until(lambda: bool(client.open))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    run(scenario())
    assert_released(client, n)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_cancels_only_the_choices_that_still_run(stream: bool) -> None:
    client = FakeEngineClient(lambda request: spell(request) if request.choice_index == 1 else two_then_silent(request))

    async def scenario() -> None:
        exchange = Exchange(create_app(client), body(stream, 3))
        running = asyncio.create_task(exchange.run())
        await until(lambda: bool(client.open))
        await until(lambda: len(client.open) == 2)
        exchange.leave()
        await running

    run(scenario())
    assert client.open == {}
    assert client.cancelled == [request.id for request in client.submitted if request.choice_index != 1]


def test_leaving_after_the_end_cancels_nothing() -> None:
    client = FakeEngineClient()

    async def scenario() -> None:
        exchange = Exchange(create_app(client), body(True))
        await exchange.run()
        exchange.leave()
        assert exchange.finished

    run(scenario())
    assert (client.open, client.cancelled) == ({}, [])


def test_leaving_while_the_body_is_sent_submits_nothing() -> None:
    client = FakeEngineClient()

    async def scenario() -> None:
        exchange = Exchange(create_app(client), chunks=[b"{", b""])

        async def cut() -> Message:
            if exchange.received == 1:
                return {"type": "http.disconnect"}
            return await exchange.receive()

        await exchange.app(exchange.scope(), cut, exchange.send)
        assert exchange.status == 499

    run(scenario())
    assert client.submitted == []


@several
@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_between_submit_and_the_reply_releases_the_request(
    stream: bool, n: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("no reply today")

    monkeypatch.setattr(routes, "send_stream" if stream else "send_whole", broken)
    client = FakeEngineClient(silent)

    async def scenario() -> None:
        exchange = await Exchange(create_app(client), body(stream, n)).run()
        assert exchange.status == 500

    run(scenario())
    assert_released(client, n)
    assert "no reply today" in caplog.text


def test_many_departures_leak_nothing() -> None:
    client = FakeEngineClient(endless)
    app = create_app(client)

    async def visit(turns: int) -> None:
        exchange = Exchange(app, body(turns % 2 == 0, 1 + turns % 4), fail_sends=turns % 3 == 0)
        running = asyncio.create_task(exchange.run())
        for _ in range(turns):
            await asyncio.sleep(0)
        exchange.leave()
        await running

    async def scenario() -> None:
        await asyncio.gather(*(visit(turns) for turns in range(60)))

    run(scenario())
    assert client.open == {}
    assert client.cancelled
    assert set(client.cancelled) == {request.id for request in client.submitted}


def test_a_generators_own_finally_would_not_have_sufficed() -> None:
    """The negative control for where the cancel lives: a body generator that never starts runs no `finally`."""
    cancelled: list[str] = []

    async def body() -> AsyncIterator[bytes]:
        try:
            yield b"never"
        finally:
            cancelled.append("x")

    async def consume() -> None:
        async for _ in body():
            pass

    async def gone() -> Message:
        return {"type": "http.disconnect"}

    async def scenario() -> None:
        made = body()
        del made
        gc.collect()
        with pytest.raises(ClientDisconnect):
            await unless_disconnected(gone, _never())
        assert cancelled == []
        await consume()
        assert cancelled == ["x"]

    run(scenario())


async def _never() -> None:
    await asyncio.Event().wait()
