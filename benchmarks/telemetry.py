"""What telemetry costs per step: traces at level `packed` and, if Ray is installed, metrics.

    python -m benchmarks.telemetry --target models/demo/target --draft models/demo/draft --concurrency 8 --json

Bursts of --concurrency streamed requests run through the HTTP edge and an engine thread of this process, without and
with telemetry in turn. `µs per step` is processor time of the listeners (on the event loop) and of the exporter's
thread, which encodes spans and posts them to a collector in another process. `of a step` is this time over the mean
step without telemetry. `on / off` is the wall time per step of a burst with telemetry over that of its neighbour
without: it contains all costs, and noise. `bytes` is the size of one request's ExportTraceServiceRequest, uncompressed,
for a request with --rounds rounds.
"""

import argparse
import asyncio
import importlib.util
import itertools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message

from app.main import create_app
from app.metrics.meter import Meter
from app.openai.request import parse
from app.telemetry.exchange import Exchange, Listener
from app.telemetry.export import BoundedSpanProcessor, DroppedSpans
from app.telemetry.otlp import OtlpExporter, encode
from app.telemetry.tracer import TraceConfig, Tracer
from benchmarks import common
from benchmarks.stats import median_ratio
from deployments.bridge import REPORT_EVERY_S, LocalClient
from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import Output, Request, RequestRecord, StepStats

QUIET_S = 3 * REPORT_EVERY_S  # until all listeners have the last step
TOKENS_PER_ROUND = 5  # for max_tokens: a round seldom emits more


class TimedListeners:
    """Forwards to other listeners, adds up their processor time, and keeps steps and exchanges."""

    def __init__(self, listeners: Sequence[Listener], spent: Counter[str]) -> None:
        self.steps: list[StepStats] = []
        self.exchanges: list[Exchange] = []
        self._listeners, self._spent = listeners, spent

    def began(self, exchange: Exchange) -> None:
        self._tell(lambda listener: listener.began(exchange))

    def ended(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        self._tell(lambda listener: listener.ended(exchange))

    def stepped(self, steps: Sequence[StepStats]) -> None:
        self.steps += [step for step in steps if step.sequences]
        self._tell(lambda listener: listener.stepped(steps))

    def _tell(self, call: Callable[[Listener], None]) -> None:
        for listener in self._listeners:
            began = time.thread_time_ns()
            call(listener)
            self._spent[type(listener).__name__] += time.thread_time_ns() - began


class TimedExporter(SpanExporter):
    def __init__(self, exporter: SpanExporter, spent: Counter[str]) -> None:
        self._exporter, self._spent = exporter, spent

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        began = time.thread_time_ns()
        try:
            return self._exporter.export(spans)
        finally:
            self._spent["export"] += time.thread_time_ns() - began

    def shutdown(self) -> None:
        self._exporter.shutdown()


@contextmanager
def collector() -> Iterator[str]:
    """The URL of a collector in a process of its own, so that its work is not measured.

    It is a file to run: a spawned process would import this module with torch and Ray first.
    """
    command = [sys.executable, str(Path(__file__).with_name("trace_sink.py"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1/traces"
        finally:
            process.terminate()


async def complete(app: ASGIApp, fields: dict[str, Any]) -> None:
    """One streamed completion, read to its end. Raises RuntimeError if it is refused or breaks."""
    body = json.dumps(fields | {"model": "demo", "stream": True}).encode()
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if not waiting:
            await asyncio.Event().wait()
        return waiting.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    await app(scope, receive, send)
    if sent[0]["status"] != 200 or not any(b"[DONE]" in message.get("body", b"") for message in sent):
        raise RuntimeError(f"a request was not answered: {sent[-1]!r}")


@dataclass(frozen=True)
class Burst:
    wall_us: float  # per step
    steps: list[StepStats]
    spent_us: dict[str, float]  # processor time per step


class BurstBench:
    def __init__(self, args: argparse.Namespace, client: LocalClient, prompts: Sequence[Sequence[int]]) -> None:
        self.client = client
        self._prompts = prompts
        self._args = args
        self._salts = itertools.count()

    async def burst(self, listeners: Sequence[Listener], spent: Counter[str], provider: TracerProvider | None) -> Burst:
        listening = TimedListeners(listeners, spent)
        app = create_app(self.client, [listening])
        requests = [self._request(i) for i in range(self._args.concurrency)]
        spent.clear()
        began = time.perf_counter()
        await asyncio.gather(*(complete(app, request) for request in requests))
        wall = time.perf_counter() - began
        await asyncio.sleep(QUIET_S)
        if provider is not None:
            await asyncio.to_thread(provider.force_flush)
        count = len(listening.steps)
        return Burst(wall / count * 1e6, listening.steps, {part: ns / 1e3 / count for part, ns in spent.items()})

    def _request(self, number: int) -> dict[str, Any]:
        """A request with a salt of its own: all bursts have the same prompts, and none may be found in the cache."""
        prompt = list(self._prompts[number % len(self._prompts)])
        fixed = {"temperature": 0, "ignore_eos": True, "cache_salt": f"salt-{next(self._salts)}"}
        return {"prompt": prompt, "max_tokens": self._args.max_tokens, **fixed}

    async def long_record(self, rounds: int) -> RequestRecord:
        """The record of a request with exactly `rounds` rounds. Raises RuntimeError if it has fewer."""
        listening = TimedListeners([], Counter())
        request = self._request(0)
        room = self.client.model.max_model_len - len(request["prompt"])
        request["max_tokens"] = min(room, TOKENS_PER_ROUND * rounds)
        await complete(create_app(self.client, [listening]), request)
        (record,) = listening.exchanges[0].records
        if len(record.rounds) < rounds:
            raise RuntimeError(
                f"{record.output_tokens} tokens took {len(record.rounds)} rounds: lower --rounds, which is {rounds}"
            )
        return replace(record, rounds=record.rounds[:rounds])


def exported_bytes(client: LocalClient, record: RequestRecord) -> int:
    """Size of one request's spans at level `packed`, as they are posted."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = Tracer(client, provider, TraceConfig("packed"))
    request = Request(record.request_id, (0,) * record.prompt_tokens)
    asked = parse(b'{"model": "demo", "prompt": "a"}', client.model)
    exchange = Exchange(f"cmpl-{record.request_id}", Headers(), request_body=asked, requests=[request])
    tracer.began(exchange)
    exchange.last_outputs = {request.id: Output(request.id, (), "", "length", record=record)}
    exchange.finished = time.monotonic()
    tracer.ended(exchange)
    return len(encode(exporter.get_finished_spans()).SerializeToString())


def meters(client: LocalClient) -> list[Listener]:
    """The listener of the metrics; none if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        return []
    exporter = importlib.import_module("deployments.ray_metrics").RayMetrics(client.model.name)
    return [Meter(client, exporter)]


async def measure(bench: BurstBench, args: argparse.Namespace, url: str) -> tuple[list[tuple[Burst, Burst]], bool, int]:
    """(pairs of bursts without and with telemetry, whether metrics were included, spans lost)."""
    spent: Counter[str] = Counter()
    dropped = DroppedSpans()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BoundedSpanProcessor(TimedExporter(OtlpExporter(url), spent), dropped))
    listeners = [Tracer(bench.client, provider, TraceConfig("packed")), *meters(bench.client)]
    pairs = []
    for repeat in range(-1, args.repeats):
        off = await bench.burst([], Counter(), None)
        pair = off, await bench.burst(listeners, spent, provider)
        if repeat >= 0:
            pairs.append(pair)
    provider.shutdown()
    return pairs, len(listeners) > 1, dropped.total


def summarise(pairs: Sequence[tuple[Burst, Burst]]) -> list[dict[str, object]]:
    """Medians over the bursts."""
    step_us = median(mean(step.step_us for step in off.steps) for off, _ in pairs)
    parts = {part: median(on.spent_us[part] for _, on in pairs) for part in pairs[0][1].spent_us}
    rows: list[dict[str, object]] = [
        {"part": part, "µs per step": us, "of a step": us / step_us}
        for part, us in (parts | {"all": sum(parts.values())}).items()
    ]
    ratio = median_ratio([on.wall_us for _, on in pairs], [off.wall_us for off, _ in pairs])
    return [*rows, {"part": "on / off", "µs per step": step_us, "of a step": ratio}]


async def run(args: argparse.Namespace, prompts: Sequence[Sequence[int]]) -> tuple[list[dict[str, object]], Any]:
    """(rows, further figures)."""
    settings = common.engine_config(args, ["goodput"], args.concurrency, waiting=args.concurrency)
    engine = Engine.from_config(EngineConfig(args.target, args.draft, **settings))
    client = LocalClient(engine, "demo")
    try:
        bench = BurstBench(args, client, prompts)
        record = await bench.long_record(args.rounds)
        with collector() as url:
            pairs, metered, lost = await measure(bench, args, url)
    finally:
        client.close()
    steps = sum(len(on.steps) for _, on in pairs)
    figures = {"bytes": exported_bytes(client, record), "rounds": args.rounds, "steps": steps}
    return summarise(pairs), figures | {"metrics": metered, "spans lost": lost}


def main(argv: Sequence[str] | None = None) -> None:
    p = common.parser(__doc__)
    p.set_defaults(max_tokens=256)
    p.add_argument("--concurrency", type=common.positive, default=8)
    p.add_argument("--repeats", type=common.positive, default=10, help="pairs of bursts (default %(default)s)")
    p.add_argument("--rounds", type=common.positive, default=300, help="of the request whose bytes are counted")
    args = p.parse_args(argv)
    workload = common.prepare(args)
    about = workload.describe(max_tokens=args.max_tokens, concurrency=args.concurrency)
    report = common.describe_run(args, "telemetry", about)
    rows, figures = asyncio.run(run(args, workload.prompts))
    report["results"], report["told"] = rows, figures
    common.print_report(report, [rows, [figures]], args.json)


if __name__ == "__main__":
    main()
