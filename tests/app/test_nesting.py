"""Spans of a real engine's records lie within their parents, whatever the engine's steps were doing."""

import asyncio
import json
from collections.abc import Callable, Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from app.main import create_app
from app.telemetry.tracer import TraceConfig, Tracer
from deployments.bridge import LocalClient
from engine.config import EngineConfig
from engine.engine import Engine
from policies.config import PolicyConfig
from tests.app.harness import Exchange
from tests.app.telemetry.tracing import sticking_out

CONFIG = EngineConfig(
    "models/demo/target",
    "models/demo/draft",
    policy=PolicyConfig(name="fixed", k=4),
    max_running=2,
    max_waiting=4,
    max_model_len=256,
    threads=1,
)
BODY = {"model": "demo", "prompt": "def main():\n    ", "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def client() -> Iterator[LocalClient]:
    client = LocalClient(Engine.from_config(CONFIG), "demo")
    yield client
    client.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the engine's thread gets there
        await asyncio.sleep(0.002)


@pytest.mark.parametrize(("tokens", "choices", "leaves"), [(24, 3, False), (200, 2, True)])
def test_spans_of_real_records(client: LocalClient, tokens: int, choices: int, leaves: bool) -> None:
    """Also for a client that leaves: the engine drops its choices only after the request has ended."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    app = create_app(client, [Tracer(client, provider, TraceConfig("rounds", steps=0.0))])
    exchange = Exchange(app, json.dumps(BODY | {"max_tokens": tokens, "n": choices}).encode())

    async def scenario() -> None:
        running = asyncio.create_task(exchange.run())
        if leaves:
            await until(lambda: len(exchange.sent) >= 4)
            exchange.leave()
        await running
        await until(lambda: any(span.name.startswith("text_completion") for span in exporter.get_finished_spans()))

    asyncio.run(asyncio.wait_for(scenario(), 60))
    spans = exporter.get_finished_spans()  # the request's was the last one
    assert sum(span.name == "specdec.decode" for span in spans) == choices
    assert sum(span.name == "specdec.round" for span in spans) > choices
    assert sticking_out(spans) == []
