"""The telemetry benchmark: its arithmetic, and the whole of it on a small pair."""

import asyncio
import json
import time
from collections import Counter
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from app.fake_engine import FakeEngineClient
from app.main import create_app
from benchmarks import telemetry
from benchmarks.telemetry import Burst, TimedExporter, TimedListeners, complete, exported_bytes, summarise
from engine.types import Output, Request
from tests.app.telemetry.tracing import ROUNDS, record_of, step


def burst(wall_us: float, spent: dict[str, float]) -> Burst:
    return Burst(wall_us, [step(), step()], spent)


def test_what_telemetry_takes_is_told_over_the_time_of_a_step() -> None:
    """Steps take 2 ms; the median burst with telemetry spends 30 + 50 µs, and takes a tenth longer."""
    spent = [{"Tracer": 30.0, "export": us} for us in (50.0, 10.0, 90.0)]
    pairs = [(burst(1000 * i, {}), burst(1100 * i, told)) for i, told in enumerate(spent, start=1)]
    rows = {row.pop("part"): row for row in summarise(pairs)}
    assert rows["Tracer"] == {"µs per step": 30.0, "of a step": 0.015}
    assert rows["export"] == {"µs per step": 50.0, "of a step": 0.025}
    assert rows["all"] == {"µs per step": 80.0, "of a step": 0.04}
    assert rows["on / off"]["of a step"] == pytest.approx(1.1)


class Busy:
    """A listener, and an exporter, that take processor time."""

    def began(self, exchange: object) -> None:
        self.work()

    def ended(self, exchange: object) -> None:
        self.work()

    def stepped(self, steps: object) -> None:
        self.work()

    def work(self) -> None:
        until = time.thread_time_ns() + 1_000_000
        while time.thread_time_ns() < until:
            pass


def test_processor_time_of_listeners_is_added_up_by_name() -> None:
    spent: Counter[str] = Counter()
    listening = TimedListeners([Busy()], spent)
    listening.stepped([step()])
    listening.stepped([step()])
    assert spent.keys() == {"Busy"}
    assert spent["Busy"] >= 2_000_000
    assert len(listening.steps) == 2


def test_processor_time_of_a_failed_export_counts_too() -> None:
    class Failing(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            Busy().work()
            raise RuntimeError("no collector")

    spent: Counter[str] = Counter()
    with pytest.raises(RuntimeError, match="no collector"):
        TimedExporter(Failing(), spent).export([])
    assert spent["export"] >= 1_000_000


def test_a_request_that_is_not_answered_is_no_measurement() -> None:
    app = create_app(FakeEngineClient(name="demo"))
    asyncio.run(complete(app, {"prompt": "a"}))
    with pytest.raises(RuntimeError, match="not answered"):
        asyncio.run(complete(app, {"prompt": "a", "max_tokens": -1}))

    def broken(request: Request) -> Any:
        yield Output(request.id, (1,), "a")
        yield Output(request.id, (), "", "error", "broken")

    with pytest.raises(RuntimeError, match="not answered"):
        asyncio.run(complete(create_app(FakeEngineClient(broken, name="demo")), {"prompt": "a"}))


def test_each_round_adds_its_columns() -> None:
    """Twelve integers of two bytes or three in three bytes of frame, and a character."""
    client: Any = FakeEngineClient(name="demo")
    request = Request("r", (1, 2, 3))
    few, many = (exported_bytes(client, record_of(request, ROUNDS * times)) for times in (20, 40))
    assert 100 * 12 * 4 < many - few < 100 * 12 * 7


def test_the_whole_of_it_on_a_small_pair(small_pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--json", "--concurrency=2", "--repeats=1", "--max-tokens=16", "--rounds=4", "--prompts-count=2"]
    telemetry.main([*small_pair, *small])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    parts = {row["part"]: row["µs per step"] for row in report["results"]}
    assert parts.keys() == {"Tracer", "Meter", "export", "all", "on / off"}
    assert all(us > 0 for us in parts.values())
    assert parts["all"] == pytest.approx(parts["Tracer"] + parts["Meter"] + parts["export"])
    assert report["told"]["metrics"] is True
    assert (report["told"]["spans lost"], report["told"]["rounds"]) == (0, 4)
    assert 1000 < report["told"]["bytes"] < 10_000
