"""Bodies that come late, in halves or never: each gets an answer, delays no other request and leaves nothing behind."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.types import Message

from app import middleware
from app.fake_engine import FakeEngineClient
from app.main import create_app
from tests.app.harness import PROMPT, Exchange

BODY = json.dumps(PROMPT).encode()


@dataclass
class Stalling(Exchange):
    """Sends its chunks but the last one, which follows after `go_on`."""

    resumed: asyncio.Event = field(default_factory=asyncio.Event)

    async def receive(self) -> Message:
        if self.received == len(self.chunks) - 1 and not self.left.is_set():
            waits = [asyncio.ensure_future(event.wait()) for event in (self.resumed, self.left)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        if self.left.is_set():
            return {"type": "http.disconnect"}
        return await super().receive()

    def go_on(self) -> None:
        self.resumed.set()


def half(app: Any, **options: Any) -> Stalling:
    return Stalling(app, chunks=[BODY[:9], BODY[9:]], **options)


def run(work: Coroutine[Any, Any, None]) -> None:
    async def scenario() -> None:
        await asyncio.wait_for(work, timeout=30)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the scenarios count turns of the event loop
        await asyncio.sleep(0)


def assert_timed_out(exchange: Exchange, says: str) -> None:
    error = json.loads(exchange.reply)["error"]
    assert exchange.status == 408
    assert (error["type"], error["code"]) == ("invalid_request_error", "request_timeout")
    assert says in error["message"]
    assert exchange.reply_headers["connection"] == "close"
    assert exchange.finished


def test_a_body_that_stops_half_way_is_answered_in_time() -> None:
    client = FakeEngineClient()

    async def scenario() -> None:
        exchange = half(create_app(client, body_timeout_s=0.02))
        await exchange.run()
        assert_timed_out(exchange, "0.02 s")

    run(scenario())
    assert client.submitted == []


def test_a_body_that_trickles_has_no_more_time_than_one_that_stops() -> None:
    async def scenario() -> None:
        exchange = Exchange(create_app(FakeEngineClient(), body_timeout_s=0.05))

        async def drip() -> Message:
            await asyncio.sleep(0.004)
            return {"type": "http.request", "body": b" ", "more_body": True}

        await exchange.app(exchange.scope(), drip, exchange.send)
        assert_timed_out(exchange, "0.05 s")

    run(scenario())


def test_a_late_body_within_the_time_is_served_and_its_reply_has_all_the_time_it_needs() -> None:
    client = FakeEngineClient(lambda request: iter(()))  # running, and nothing to show

    async def scenario() -> None:
        exchange = half(create_app(client, body_timeout_s=0.05))
        running = asyncio.create_task(exchange.run())
        await until(lambda: exchange.received == 1)
        exchange.go_on()
        await until(lambda: bool(client.open))
        await asyncio.sleep(0.1)
        assert not running.done()
        exchange.leave()
        await running

    run(scenario())


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_who_reads_no_body_waits_for_none(method: str) -> None:
    async def scenario() -> None:
        exchange = half(create_app(FakeEngineClient(), body_timeout_s=0.01), method=method, path="/health")
        await exchange.run()
        assert (exchange.status, exchange.received) == (200, 0)

    run(scenario())


def test_an_empty_body_is_whole() -> None:
    async def scenario() -> None:
        exchange = Exchange(create_app(FakeEngineClient(), max_unfinished_bodies=1), headers={"content-length": "0"})
        await exchange.run()
        assert exchange.status == 400

    run(scenario())


@pytest.mark.parametrize("grace_s", [0.0, 0.03])
def test_of_too_many_unfinished_bodies_the_oldest_gives_way(grace_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "GRACE_S", grace_s)
    client = FakeEngineClient()

    async def scenario() -> None:
        app = create_app(client, max_unfinished_bodies=2)
        clock = asyncio.get_running_loop().time
        began = clock()
        exchanges = [half(app) for _ in range(4)]
        tasks = []
        for exchange in exchanges:
            tasks.append(asyncio.create_task(exchange.run()))
            await until(lambda exchange=exchange: exchange.received == 1)  # type: ignore[misc]
        await asyncio.gather(*tasks[:2])
        assert clock() - began >= grace_s
        for exchange in exchanges[:2]:
            assert_timed_out(exchange, "while 2 newer ones arrived")
        assert not any(task.done() for task in tasks[2:])
        for exchange in exchanges[2:]:
            exchange.go_on()
        await asyncio.gather(*tasks)
        assert [exchange.status for exchange in exchanges] == [408, 408, 200, 200]

    run(scenario())


def test_a_body_whose_time_is_over_as_a_newer_one_comes_costs_that_one_nothing() -> None:
    async def scenario() -> None:
        app = create_app(FakeEngineClient(), max_unfinished_bodies=1, body_timeout_s=0.01)
        late, good = half(app), Exchange(app, BODY)
        tasks = [asyncio.create_task(late.run())]
        await until(lambda: late.received == 1)
        time.sleep(0.02)  # noqa: ASYNC251 - both are due in the same turn of the event loop
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(good.run()))
        await asyncio.gather(*tasks)
        assert (late.status, good.status) == (408, 200)

    run(scenario())


@pytest.mark.parametrize(("grace_s", "statuses"), [(1000.0, {200}), (0.0, {200, 408})])
def test_a_body_that_comes_soon_does_not_give_way(
    grace_s: float, statuses: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred bodies wait for their turn, and only one may be unfinished. Without GRACE_S some would be lost."""
    monkeypatch.setattr(middleware, "GRACE_S", grace_s)

    async def scenario() -> None:
        app = create_app(FakeEngineClient(max_open=100), max_unfinished_bodies=1, body_timeout_s=1000)
        exchanges = [half(app) for _ in range(100)]
        tasks = [asyncio.create_task(exchange.run()) for exchange in exchanges]
        await until(lambda: all(exchange.received == 1 for exchange in exchanges))
        for _ in range(10):
            await asyncio.sleep(0)
        for exchange in exchanges:
            exchange.go_on()
        await asyncio.gather(*tasks)
        assert {exchange.status for exchange in exchanges} == statuses

    run(scenario())


def test_bodies_that_ended_or_whose_client_left_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "GRACE_S", 0.0)

    async def begin(app: Any) -> tuple[Stalling, asyncio.Task[Exchange]]:
        exchange = half(app)
        task = asyncio.create_task(exchange.run())
        await until(lambda: exchange.received == 1)
        return exchange, task

    async def scenario() -> None:
        app = create_app(FakeEngineClient(), max_unfinished_bodies=1, body_timeout_s=1000)
        slow, running = await begin(app)
        slow.go_on()
        await running
        gone, leaving = await begin(app)
        gone.leave()
        await leaving
        _, cancelled = await begin(app)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        last, running = await begin(app)
        for _ in range(10):
            await asyncio.sleep(0)
        last.go_on()
        await running
        assert (slow.status, gone.status, last.status) == (200, 499, 200)

    run(scenario())


class TaskCancelledError(Exception):
    """Has the name of the exception that Ray Serve's receive raises when its client leaves."""


@pytest.mark.parametrize("raises", [True, False])
def test_leaving_while_the_body_is_sent_is_one_quiet_line(raises: bool, caplog: pytest.LogCaptureFixture) -> None:
    client = FakeEngineClient()

    async def scenario() -> None:
        exchange = Exchange(create_app(client), chunks=[b"{", b""])

        async def cut() -> Message:
            if exchange.received < 1:
                return await exchange.receive()
            if raises:
                raise TaskCancelledError("Task 7 was cancelled.")
            return {"type": "http.disconnect"}

        await exchange.app(exchange.scope(), cut, exchange.send)
        assert exchange.status == 499

    with caplog.at_level(logging.DEBUG, "app"):
        run(scenario())
    assert client.submitted == []
    assert [record.levelname for record in caplog.records if record.name.startswith("app")] == ["DEBUG"]
    assert "Traceback" not in caplog.text
