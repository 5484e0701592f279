"""The live page's feed: one task for all viewers, which ends with the last of them."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from app.fake_engine import FakeEngineClient
from app.main import create_app
from app.page import feed, routes
from app.page.live import LivePage
from engine.types import Output
from tests.app.harness import PROMPT, Exchange
from tests.app.page.test_live import part, step


def test_one_that_is_about_to_end_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeEngineClient(lambda request: [Output(request.id, (97,), "a")])
    app = create_app(client, live_page=LivePage(client))

    async def scenario() -> None:
        running = Exchange(app, json.dumps(PROMPT | {"stream": True}).encode())
        posted = asyncio.create_task(running.run())
        await until(lambda: bool(running.sent))
        name = running.reply_headers["x-request-id"]
        asked = Exchange(app, method="GET", path=f"/ui/api/requests/{name}")
        waiting = asyncio.create_task(asked.run())
        await asyncio.sleep(0.05)
        assert not asked.sent
        running.leave()
        await asyncio.gather(posted, waiting)
        assert json.loads(asked.reply)["status"] == "disconnected"

    play(scenario)
    monkeypatch.setattr(routes, "WAIT_FOR_RECORD_S", 0.0)

    async def impatient() -> None:
        running = Exchange(app, json.dumps(PROMPT | {"stream": True}).encode())
        posted = asyncio.create_task(running.run())
        await until(lambda: bool(running.sent))
        path = f"/ui/api/requests/{running.reply_headers['x-request-id']}"
        asked = await Exchange(app, method="GET", path=path).run()
        assert asked.status == 404, "it does not end"
        running.leave()
        await posted

    play(impatient)


def data(viewer: Exchange) -> list[Any]:
    bodies = [message["body"] for message in viewer.sent[1:]]
    return [json.loads(body.removeprefix(b"data: ")) for body in bodies if body]


class Watched:
    """A server that counts how often its feed computes something."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(feed, "EVENT_EVERY_S", 0.005)
        self.client = FakeEngineClient()
        self.live = LivePage(self.client)
        self.app = create_app(self.client, live_page=self.live)
        self.made = 0
        event = self.live.event

        def counted() -> Any:
            self.made += 1
            return event()

        monkeypatch.setattr(self.live, "event", counted)
        self.running: dict[str, asyncio.Task[Exchange]] = {}

    def join(self, name: str = "viewer") -> Exchange:
        viewer = Exchange(self.app, method="GET", path="/ui/events", headers={"name": name})
        self.running[name] = asyncio.create_task(viewer.run())
        return viewer

    async def leave(self, *viewers: Exchange) -> None:
        for viewer in viewers:
            viewer.leave()
            await self.running.pop(str(viewer.headers["name"]))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - told by the clock
        await asyncio.sleep(0.001)


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    async def go() -> None:
        before = asyncio.all_tasks()
        await asyncio.wait_for(scenario(), 30)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before, "nothing is left running"

    asyncio.run(go())


def test_a_viewer_is_told_at_once_and_then_of_what_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)

    async def scenario() -> None:
        viewer = watched.join()
        await until(lambda: len(data(viewer)) >= 2)
        assert data(viewer)[0]["state"].keys() == watched.live.state().keys()
        assert data(viewer)[1]["now"]["acceptance"] is None
        watched.client.stepped([step(0.0, [part(4, 2)])])
        await until(lambda: data(viewer)[-1]["now"]["acceptance"] == 0.5)
        await watched.leave(viewer)
        assert viewer.reply_headers["content-type"].startswith("text/event-stream")
        assert viewer.reply_headers["content-security-policy"] == routes.POLICY

    play(scenario)


def test_a_quiet_server_repeats_itself_a_quarter_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    naps = 0
    sleep = asyncio.sleep

    async def nap(seconds: float) -> None:
        nonlocal naps
        naps += seconds == feed.EVENT_EVERY_S
        await sleep(0)

    async def scenario() -> None:
        viewer = watched.join()
        await until(lambda: naps >= 40)
        quiet = watched.made
        assert 9 <= quiet <= 12
        while naps < 80:
            watched.client.stepped([])
            await sleep(0)
        assert watched.made - quiet > 30
        await watched.leave(viewer)

    monkeypatch.setattr(asyncio, "sleep", nap)
    play(scenario)


def test_viewers_share_the_work_and_the_last_one_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    tick, sleep = asyncio.Event(), asyncio.sleep

    async def nap(seconds: float) -> None:
        """The feed's own nap ends when the test says so; others take their time."""
        if seconds == feed.EVENT_EVERY_S:
            await tick.wait()
            tick.clear()
        else:
            await sleep(seconds)

    async def scenario() -> None:
        assert watched.made == 0
        viewers = [watched.join(str(i)) for i in range(5)]
        await until(lambda: all(len(data(viewer)) == 2 for viewer in viewers))
        assert watched.made == 1, "an event is made once, for all"
        watched.client.stepped([])  # so that the server is not quiet
        tick.set()
        await until(lambda: all(len(data(viewer)) == 3 for viewer in viewers))
        assert watched.made == 2
        assert all(data(viewer)[1:] == data(viewers[0])[1:] for viewer in viewers)
        await watched.leave(*viewers)
        watched.client.stepped([])
        tick.set()
        for _ in range(20):
            await sleep(0)
        assert watched.made == 2, "nothing is worked out for nobody"
        again = watched.join()
        await until(lambda: len(data(again)) >= 2)
        await watched.leave(again)

    monkeypatch.setattr(asyncio, "sleep", nap)
    play(scenario)


def test_a_viewer_whose_connection_breaks_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some servers report a disconnect only at the next send."""
    watched = Watched(monkeypatch)

    async def broken(message: Any) -> None:
        raise OSError("the connection is closed")

    async def scenario() -> None:
        viewer = Exchange(watched.app, method="GET", path="/ui/events")
        await watched.app(viewer.scope(), viewer.receive, broken)

    play(scenario)


def test_there_is_a_limit_to_viewers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_VIEWERS", 2)
    watched = Watched(monkeypatch)

    async def scenario() -> None:
        viewers = [watched.join("1"), watched.join("2")]
        await until(lambda: all(viewer.sent for viewer in viewers))
        third = watched.join("3")
        await watched.running.pop("3")
        assert (third.status, "retry-after" in third.reply_headers) == (429, True)
        await watched.leave(viewers[0])
        fourth = watched.join("4")
        await until(lambda: bool(fourth.sent))
        assert fourth.status == 200
        await watched.leave(viewers[1], fourth)

    play(scenario)


def test_the_limit_holds_for_those_who_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_VIEWERS", 2)
    watched = Watched(monkeypatch)

    async def scenario() -> None:
        viewers = [watched.join(str(n)) for n in range(20)]
        await until(lambda: all(viewer.sent for viewer in viewers))
        assert sorted(viewer.status for viewer in viewers) == [200] * 2 + [429] * 18
        await watched.leave(*viewers)

    play(scenario)


def test_a_viewer_that_neither_reads_nor_leaves_gives_up_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_VIEWERS", 1)
    monkeypatch.setattr(feed, "FEED_S", 0.01)
    monkeypatch.setattr(feed, "SLOW_VIEWER_S", 0.01)
    watched = Watched(monkeypatch)

    async def full(message: Any) -> None:
        await asyncio.Event().wait()

    async def scenario() -> None:
        stuck = Exchange(watched.app, method="GET", path="/ui/events")
        await watched.app(stuck.scope(), stuck.receive, full)
        silent = Exchange(watched.app, method="GET", path="/ui/events", chunks=[])
        silent.received = 1  # its body never comes
        await watched.app(silent.scope(), silent.receive, silent.send)
        reader = watched.join()
        await until(lambda: bool(reader.sent))
        assert reader.status == 200
        await watched.leave(reader)

    play(scenario)


def test_an_event_that_cannot_be_made_costs_only_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(monkeypatch)

    async def scenario() -> None:
        viewer = watched.join()
        await until(lambda: len(data(viewer)) >= 1)
        event = watched.live.event
        monkeypatch.setattr(watched.live, "event", lambda: 1 / 0)
        await until(lambda: bool(caplog.records))
        told = len(data(viewer))
        monkeypatch.setattr(watched.live, "event", event)
        await until(lambda: len(data(viewer)) > told)
        await watched.leave(viewer)

    play(scenario)


def test_a_viewer_is_asked_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that shuts down waits for its clients."""
    watched = Watched(monkeypatch)
    monkeypatch.setattr(feed, "FEED_S", 0.03)

    async def scenario() -> None:
        viewer = watched.join()
        await watched.running.pop("viewer")
        assert viewer.finished
        assert len(data(viewer)) >= 1

    play(scenario)
