"""The burst benchmark against a small server whose places, delays and faults are known."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest

from benchmarks import burst
from benchmarks.burst import Call, Phase

HEAD = b"HTTP/1.1 %s\r\nConnection: close\r\n%s\r\n"


class Small:
    """Serves `places` streams at a time once their bodies are whole, refuses more, and counts half bodies."""

    def __init__(self, places: int, retry_after: bool = True, done: bool = True) -> None:
        self.places, self.done = places, done
        self.refusal = HEAD % (b"429 no", b"Retry-After: 1\r\n" if retry_after else b"")
        self.open = self.halves = self.most_halves = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(await self._reply(head, reader))
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _reply(self, head: bytes, reader: asyncio.StreamReader) -> bytes:
        if head.startswith(b"GET"):
            return HEAD % (b"200 OK", b"") + b'{"data": [{"id": "demo"}]}'
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        self.halves += 1
        try:
            await asyncio.sleep(0.01)
            self.most_halves = max(self.most_halves, self.halves)
            await reader.readexactly(length)
        finally:
            self.halves -= 1
        if self.open == self.places:
            return self.refusal
        self.open += 1
        await asyncio.sleep(0.3)
        self.open -= 1
        return HEAD % (b"200 OK", b"") + b"data: {}\n\n" + (b"data: [DONE]\n\n" if self.done else b"")


@contextmanager
def running(server: Small) -> Iterator[str]:
    loop = asyncio.new_event_loop()
    listening = loop.run_until_complete(asyncio.start_server(server.answer, "127.0.0.1", 0))
    thread = Thread(target=loop.run_forever)
    thread.start()
    yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"

    async def end() -> None:
        listening.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await asyncio.sleep(0.02)  # for the connections to close

    asyncio.run_coroutine_threadsafe(end(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def report(server: Small, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, dict[str, Any]]:
    with running(server) as url:
        burst.main(["--url", url, "--repeats=1", "--good=2", *options])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    return {row["phase"]: row for row in rows}


def test_every_phase_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burst, "SETTLE_S", 0.1)
    server = Small(places=3)
    rows = report(server, capsys, "--half-bodies=12", "--burst=10")
    assert [(name, row["streams"], row["served"], row["429"]) for name, row in rows.items()] == [
        ("quiet", 2, 2, 0),
        ("half bodies", 2, 2, 0),
        ("burst", 10, 3, 7),
    ]
    assert server.most_halves >= 12
    assert all(row["failed"] == row["unhealthy"] == 0 and row["/health"] > 0 for row in rows.values())
    assert rows["burst"]["first byte: worst"] >= 300 > rows["burst"]["429: ms"] > 0


def test_phases_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(Small(places=3), capsys, "--half-bodies=0", "--burst=0").keys() == {"quiet"}


@pytest.mark.parametrize("faults", [{"done": False}, {"places": 0, "retry_after": False}])
def test_a_stream_that_breaks_or_a_refusal_that_says_no_time_has_failed(
    faults: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = report(Small(**{"places": 3} | faults), capsys, "--half-bodies=0", "--burst=0")
    assert (rows["quiet"]["served"], rows["quiet"]["429"], rows["quiet"]["failed"]) == (0, 0, 2)


def test_a_server_that_never_answers_is_left_after_the_limit() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        closed.set()

    closed = asyncio.Event()

    async def scenario() -> Call:
        listening = await asyncio.start_server(silent, "127.0.0.1", 0)
        async with listening:
            server = burst.Server("127.0.0.1", listening.sockets[0].getsockname()[1], limit_s=0.05)
            call = await server.ask(server.get("/health"))
            await closed.wait()
        return call

    call = asyncio.run(scenario())
    assert call.status is None
    phase = Phase("quiet", seconds=1.0, health=[call], streams=[call])
    assert (phase.row()["failed"], phase.row()["unhealthy"], phase.row()["/health: ms"]) == (1, 1, None)


def test_the_latency_is_from_the_sending_to_the_first_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr("benchmarks.burst.time.perf_counter", lambda: now[0])

    async def scenario() -> Call:
        call = Call()
        call.connection_made(_Nowhere())
        call.send(b"GET /")
        for moment, data in ((5.25, b"HTTP/1.1 200 OK\r\n\r\ndata: [DO"), (9.0, b"NE]\n\n")):
            now[0] = moment
            call.data_received(data)
        return call

    call = asyncio.run(scenario())
    assert (call.latency_ms, call.status, call.whole) == (250.0, 200, True)


class _Nowhere(asyncio.Transport):
    def write(self, data: Any) -> None:
        """Lost."""
