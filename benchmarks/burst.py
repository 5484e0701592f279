"""How much stalled bodies and a burst of requests disturb good streams and /health.

    python -m benchmarks.burst --url http://127.0.0.1:8000 --half-bodies 200 --burst 200

Three phases, each --repeats times. `quiet`: --good streams, one after another. `half bodies`: the same beside
--half-bodies requests that send half of their declared body and stop. `burst`: --burst streams sent at once on open
connections, without half bodies. In every phase new connections ask for /health, one at a time, every 20 ms.

Times (median and worst, in ms) run from sending a request to the first byte of its reply. `served`: streamed to the
end. `429`: refused with a Retry-After. `failed`: anything else, such as no end within --limit seconds. `client CPU`:
the processor time of this program over the phase's time, which a server on the same machine did not get.
"""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from http.client import HTTPConnection
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from benchmarks import common
from benchmarks.serving import served_model

HEALTH_PAUSE_S = 0.02
SETTLE_S = 0.5  # until the server has read what was sent, or noticed closed connections
CONNECTS_AT_ONCE = 32  # a server's backlog of new connections is short
DONE = b"data: [DONE]"


class Call(asyncio.Protocol):
    """One request on a connection of its own, which the server closes."""

    def __init__(self) -> None:
        self.status: int | None = None  # None: no reply yet
        self.whole = False  # whether the stream ended with [DONE]
        self.retry_after = False
        self.sent = 0.0  # seconds of perf_counter, as the next two
        self.first_byte: float | None = None
        self.over: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def send(self, request: bytes) -> None:
        self.sent = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        if self.first_byte is None:
            self.first_byte = time.perf_counter()
            self.status = int(data[9:12])  # HTTP/1.1 200
            self.retry_after = b"\r\nretry-after:" in data.lower()
        self.whole = self.whole or DONE in self._tail + data
        self._tail = data[-len(DONE) :]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(time.perf_counter())

    @property
    def latency_ms(self) -> float:
        assert self.first_byte is not None, "a reply came"
        return (self.first_byte - self.sent) * 1e3

    async def finish(self, limit_s: float) -> None:
        """Wait for the server to close, at most until `limit_s` after the request was sent; then leave."""
        try:
            await asyncio.wait([self.over], timeout=max(0.0, self.sent + limit_s - time.perf_counter()))
        finally:
            self.transport.abort()


@dataclass
class Phase:
    """The requests of one phase, over all repeats."""

    name: str
    seconds: float = 0.0
    cpu_s: float = 0.0  # of this program
    health: list[Call] = field(default_factory=list)
    streams: list[Call] = field(default_factory=list)

    def row(self) -> dict[str, object]:
        served = [call for call in self.streams if call.status == 200 and call.whole]
        refused = [call for call in self.streams if call.status == 429 and call.retry_after]
        healthy = [call for call in self.health if call.status == 200]
        return {
            "phase": self.name,
            "streams": len(self.streams),
            "served": len(served),
            **_times("first byte", served),
            "429": len(refused),
            **_times("429", refused),
            "failed": len(self.streams) - len(served) - len(refused),
            "/health": len(healthy),
            **_times("/health", healthy),
            "unhealthy": len(self.health) - len(healthy),
            "client CPU": round(self.cpu_s / self.seconds, 3),
        }


def _times(name: str, calls: Sequence[Call]) -> dict[str, object]:
    """Milliseconds to the first byte."""
    values = [call.latency_ms for call in calls]
    return {f"{name}: ms": median(values) if values else None, f"{name}: worst": max(values, default=None)}


@dataclass(frozen=True)
class Server:
    host: str
    port: int
    limit_s: float

    async def connect(self) -> Call:
        _, call = await asyncio.get_running_loop().create_connection(Call, self.host, self.port)
        return call

    async def connect_all(self, count: int) -> list[Call]:
        """Open connections, CONNECTS_AT_ONCE at a time, so that none waits for a full backlog."""
        turns = asyncio.Semaphore(CONNECTS_AT_ONCE)

        async def connect() -> Call:
            async with turns:
                return await self.connect()

        return list(await asyncio.gather(*(connect() for _ in range(count))))

    async def ask(self, request: bytes) -> Call:
        call = await self.connect()
        call.send(request)
        await call.finish(self.limit_s)
        return call

    def get(self, path: str) -> bytes:
        return f"GET {path} HTTP/1.1\r\nHost: {self.host}\r\nConnection: close\r\n\r\n".encode()

    def post(self, body: bytes) -> bytes:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}\r\nConnection: close\r\nContent-Length: {len(body)}"
        return f"{head}\r\n\r\n".encode() + body


@asynccontextmanager
async def measured(server: Server, phase: Phase) -> AsyncIterator[None]:
    """Measure the time of the block, and ask for /health meanwhile."""

    over = asyncio.Event()

    async def watch() -> None:
        while not over.is_set():
            phase.health.append(await server.ask(server.get("/health")))
            await asyncio.sleep(HEALTH_PAUSE_S)

    began, cpu = time.perf_counter(), time.process_time()
    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        phase.seconds += time.perf_counter() - began
        phase.cpu_s += time.process_time() - cpu
        over.set()
        await watching


async def good_streams(server: Server, phase: Phase, request: bytes, count: int) -> None:
    for _ in range(count):
        phase.streams.append(await server.ask(request))


async def burst(server: Server, phase: Phase, request: bytes, count: int) -> None:
    calls = await server.connect_all(count)
    for call in calls:
        call.send(request)
    await asyncio.gather(*(call.finish(server.limit_s) for call in calls))
    phase.streams += calls


async def measure(args: argparse.Namespace, server: Server, model: str) -> list[Phase]:
    """Every phase --repeats times, in turn."""
    fields = {"model": model, "prompt": args.prompt, "max_tokens": args.max_tokens, "temperature": 0, "stream": True}
    request = server.post(json.dumps(fields).encode())
    half = request[: len(request) - len(json.dumps(fields)) // 2]
    quiet, half_bodies, at_once = phases = [Phase("quiet"), Phase("half bodies"), Phase("burst")]
    for _ in range(args.repeats):
        async with measured(server, quiet):
            await good_streams(server, quiet, request, args.good)
        if args.half_bodies:
            halves = await server.connect_all(args.half_bodies)
            for call in halves:
                call.send(half)
            await asyncio.sleep(SETTLE_S)
            async with measured(server, half_bodies):
                await good_streams(server, half_bodies, request, args.good)
            for call in halves:
                call.transport.abort()
            await asyncio.sleep(SETTLE_S)
        if args.burst:
            async with measured(server, at_once):
                await burst(server, at_once, request, args.burst)
            await asyncio.sleep(SETTLE_S)
    return [phase for phase in phases if phase.streams]


def count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be at least 0")
    return value


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--url", default="http://127.0.0.1:8000")
    p.add_argument("--half-bodies", type=count, default=200)
    p.add_argument("--burst", type=count, default=200)
    p.add_argument("--good", type=common.positive, default=10, help="streams of the other phases (default %(default)s)")
    p.add_argument("--repeats", type=common.positive, default=3)
    p.add_argument("--prompt", default="def main(argv=None):\n")
    p.add_argument("--max-tokens", type=common.positive, default=32)
    p.add_argument(
        "--limit", type=float, default=60.0, help="seconds after which a request hangs (default %(default)s)"
    )
    args = p.parse_args(argv)
    url = urlsplit(args.url)
    server = Server(url.hostname or "127.0.0.1", url.port or 80, args.limit)
    with closing(HTTPConnection(server.host, server.port, timeout=args.limit)) as connection:
        model = served_model(connection)
    about = {name: value for name, value in vars(args).items() if name != "url"}
    report: dict[str, Any] = {"benchmark": "burst", "machine": common.describe_machine("cpu"), "models": {}}
    report["workload"] = {"model": model, **about}
    rows = [phase.row() for phase in asyncio.run(measure(args, server, model))]
    common.print_report(report | {"results": rows}, [rows], as_json=True)


if __name__ == "__main__":
    main()
