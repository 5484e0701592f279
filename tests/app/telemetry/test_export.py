"""Spans go where the variables say, and no request waits for a collector."""

import json
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.util.types import AttributeValue

from app.telemetry import export
from app.telemetry.export import BoundedSpanProcessor, DroppedSpans, captures_text, processors, provider
from app.telemetry.otlp import OtlpExporter
from deployments.tracing import exporters

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


class Collector(SpanExporter):
    """Takes one batch at a time, as soon as the test allows it, and then returns or raises `result`."""

    def __init__(self, result: SpanExportResult | Exception = SpanExportResult.SUCCESS, patience_s: float = 60) -> None:
        self.result = result
        self.patience_s = patience_s  # after which it lets itself
        self.taken: list[str] = []
        self.busy, self.let = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.busy.set()
        self.let.wait(self.patience_s)
        self.taken += [span.name for span in spans]
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def shutdown(self) -> None:
        pass


Opened = tuple[TracerProvider, BoundedSpanProcessor]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Opened]]:
    """Makes providers over a BoundedSpanProcessor and ends them after the test, also with a slow collector."""
    monkeypatch.setattr(export, "SHUTDOWN_MS", 200)
    made: list[TracerProvider] = []

    def open_(
        collector: SpanExporter, dropped: DroppedSpans, *, queue_bytes: int | None = None, **variables: int
    ) -> Opened:
        """variables: of the environment, behind OTEL_BSP_."""
        for name, number in variables.items():
            monkeypatch.setenv(f"OTEL_BSP_{name}", str(number))
        if queue_bytes is not None:
            monkeypatch.setattr(export, "QUEUE_BYTES", queue_bytes)
        outbox = BoundedSpanProcessor(collector, dropped)
        made.append(TracerProvider(shutdown_on_exit=False))
        made[-1].add_span_processor(outbox)
        return made[-1], outbox

    yield open_
    for each in made:
        each.shutdown()


def write(provider: TracerProvider, *names: str) -> None:
    for name in names:
        provider.get_tracer("test").start_span(name).end()


def test_what_is_exported_is_not_dropped(opened: Callable[..., Opened]) -> None:
    collector, dropped = Collector(), DroppedSpans()
    collector.let.set()
    provider, _ = opened(collector, dropped)
    write(provider, "a", "b")
    provider.force_flush()
    assert collector.taken == ["a", "b"]
    assert (dropped.counts(), dropped.total) == ({}, 0)


def test_a_full_queue_drops_what_comes_and_counts_it(opened: Callable[..., Opened]) -> None:
    """While the collector holds one batch, three spans wait. Ending a span never waits."""
    collector, dropped = Collector(), DroppedSpans()
    provider, _ = opened(collector, dropped, MAX_QUEUE_SIZE=3, SCHEDULE_DELAY=1)
    write(provider, "held")
    assert collector.busy.wait(30)
    write(provider, *"abcdef")
    assert dropped.counts() == {"queue_full": 3}
    collector.let.set()
    provider.force_flush()
    assert collector.taken == ["held", "a", "b", "c"]
    write(provider, "g")  # there is room again
    provider.force_flush()
    assert collector.taken[-1] == "g"
    assert dropped.total == 3


def long_span(provider: TracerProvider, name: str, rounds: int) -> None:
    """A span as large as a decode span at level `packed`, with a column of integers that Python does not share."""
    attributes = {f"specdec.rounds.c{i}": tuple(range(1000, 1000 + rounds)) for i in range(12)}
    provider.get_tracer("test").start_span(name, attributes=attributes).end()


def test_the_queue_is_bounded_by_bytes_too(opened: Callable[..., Opened]) -> None:
    """Long spans fill it though there is room for their number. The batch that the collector holds counts until it is
    let go: its spans are as large in memory as before."""
    collector, dropped = Collector(), DroppedSpans()
    provider, _ = opened(collector, dropped, queue_bytes=1_000_000, SCHEDULE_DELAY=1)
    long_span(provider, "held", 1000)
    assert collector.busy.wait(30)
    for name in "abcdef":
        long_span(provider, name, 1000)
    write(provider, "short")  # there is room for a small one
    assert dropped.counts() == {"queue_full": 4}  # each is taken for 292 kB
    collector.let.set()
    provider.force_flush()
    assert collector.taken == ["held", "a", "b", "short"]
    long_span(provider, "g", 1000)  # there is room again
    provider.force_flush()
    assert collector.taken[-1] == "g"
    assert dropped.total == 4


@pytest.mark.parametrize("result", [SpanExportResult.FAILURE, RuntimeError("no route")])
def test_what_a_failed_export_held_is_room_again(
    opened: Callable[..., Opened], result: SpanExportResult | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    collector, dropped = Collector(result), DroppedSpans()
    collector.let.set()
    provider, _ = opened(collector, dropped, queue_bytes=1_000_000)
    for _ in range(5):
        long_span(provider, "a", 1000)
        provider.force_flush()
    assert dropped.counts() == {"export_failed": 5}


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {f"specdec.rounds.c{i}": tuple(range(1000, 2000)) for i in range(12)},
        {"gen_ai.input.messages": "word " * 100_000, "gen_ai.request.stop_sequences": ["stop" * 5000] * 3},
    ],
    ids=["short", "columns", "text"],
)
def test_the_estimate_of_what_a_span_holds_is_near(attributes: dict[str, AttributeValue]) -> None:
    """The estimate is within a factor of two of what Python allocates."""
    kept: list[ReadableSpan] = []
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(20):
            span = tracer.start_span("a", attributes=own_values(attributes))
            span.end()
            kept.append(span)  # type: ignore[arg-type]
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held / 2 < sum(map(export.held_bytes, kept)) < held * 2


def own_values(attributes: dict[str, AttributeValue]) -> dict[str, AttributeValue]:
    """The same, of objects of its own: those of spans are their own too."""
    copied: dict[str, AttributeValue] = json.loads(json.dumps(attributes))
    return copied


@pytest.mark.parametrize("result", [SpanExportResult.FAILURE, RuntimeError("no route")])
def test_a_failed_export_is_counted(
    opened: Callable[..., Opened], result: SpanExportResult | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    collector, dropped = Collector(result), DroppedSpans()
    collector.let.set()
    provider, _ = opened(collector, dropped)
    write(provider, *"abc")
    provider.force_flush()
    assert dropped.counts() == {"export_failed": 3}


def test_the_end_does_not_wait_for_a_collector_that_hangs(opened: Callable[..., Opened]) -> None:
    """The collector still hangs when `shutdown` returns. Spans that waited or end later are counted as lost."""
    collector, dropped = Collector(patience_s=10), DroppedSpans()  # less than the SDK would wait for
    provider, outbox = opened(collector, dropped, SCHEDULE_DELAY=1)
    write(provider, "held")
    assert collector.busy.wait(30)
    write(provider, *"abc")
    outbox.shutdown()
    assert collector.taken == []
    assert dropped.counts() == {"shutdown": 3}
    outbox.shutdown()
    outbox.on_end(TracerProvider(shutdown_on_exit=False).get_tracer("test").start_span("late"))  # type: ignore[arg-type]
    assert dropped.counts() == {"shutdown": 4}
    collector.let.set()


def test_the_end_exports_what_is_left(opened: Callable[..., Opened]) -> None:
    collector, dropped = Collector(), DroppedSpans()
    collector.let.set()
    provider, outbox = opened(collector, dropped, SCHEDULE_DELAY=60_000)
    write(provider, *"abc")
    outbox.shutdown()
    assert collector.taken == ["a", "b", "c"]
    assert dropped.total == 0


def test_what_is_not_sampled_is_no_loss() -> None:
    collector, dropped = Collector(), DroppedSpans()
    collector.let.set()
    provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    provider.add_span_processor(BoundedSpanProcessor(collector, dropped))
    write(provider, "a")
    provider.shutdown()
    assert collector.taken == []
    assert dropped.total == 0


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Sets these OTEL_* variables and removes all others. The process has no provider."""
    for variable in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: trace.ProxyTracerProvider())
    monkeypatch.setattr(trace, "set_tracer_provider", lambda provider: None)

    def say(variables: dict[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return say


Say = Callable[[dict[str, str]], None]


@pytest.mark.parametrize(
    ("variables", "kinds"),
    [
        ({}, []),
        (ENDPOINT, [OtlpExporter]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"}, [OtlpExporter]),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, [OtlpExporter]),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, [ConsoleSpanExporter, OtlpExporter]),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "console"}, [ConsoleSpanExporter]),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, []),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "TRUE"}, []),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, [OtlpExporter]),
    ],
)
def test_which_exporters_the_variables_ask_for(
    said: Say, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], kinds: list[type[SpanExporter]]
) -> None:
    said(variables)
    made: list[SpanExporter] = []

    class Kept(BoundedSpanProcessor):
        def __init__(self, exporter: SpanExporter) -> None:
            made.append(exporter)
            super().__init__(exporter)

    monkeypatch.setattr(export, "BoundedSpanProcessor", Kept)
    found = provider({})
    assert [type(exporter) for exporter in made] == kinds
    assert (found is None) == (not kinds)
    if found is not None:
        found.shutdown()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OTEL_TRACES_EXPORTER": "jaeger"}, "OTEL_TRACES_EXPORTER names 'jaeger'"),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'"),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"),
        (ENDPOINT | {"OTEL_BSP_MAX_QUEUE_SIZE": "many"}, "OTEL_BSP_MAX_QUEUE_SIZE is 'many'"),
        (ENDPOINT | {"OTEL_BSP_SCHEDULE_DELAY": "0"}, "OTEL_BSP_SCHEDULE_DELAY is '0'"),
    ],
)
def test_what_we_do_not_have_is_refused(said: Say, variables: dict[str, str], message: str) -> None:
    said(variables)
    with pytest.raises(ValueError, match=message):
        provider({})


def test_one_provider_per_process(said: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's provider is used if there is one, whatever the variables say, unless OTEL_SDK_DISABLED is set."""
    serves = TracerProvider(shutdown_on_exit=False)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: serves)
    assert provider({}) is serves
    said(ENDPOINT)
    assert provider({}) is serves
    said({"OTEL_SDK_DISABLED": "true"})
    assert provider({}) is None


def test_ours_becomes_the_process_s(said: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(trace, "set_tracer_provider", made.append)
    said(ENDPOINT)
    ours = provider({"service.name": "foretoken", "service.instance.id": "7"})
    assert made == [ours]
    assert ours is not None
    assert ours.resource.attributes.items() >= {"service.name": "foretoken", "service.instance.id": "7"}.items()
    ours.shutdown()
    said({"OTEL_SERVICE_NAME": "mine", "OTEL_RESOURCE_ATTRIBUTES": "host.name=there"})
    named = provider({"service.name": "foretoken", "host.name": "here", "service.version": "1"})
    assert named is not None
    expected = {"service.name": "mine", "host.name": "there", "service.version": "1"}
    assert named.resource.attributes.items() >= expected.items()
    named.shutdown()


@pytest.mark.parametrize(
    ("value", "captured"),
    [(None, False), ("", False), ("NO_CONTENT", False), ("span_only", True), ("SPAN_AND_EVENT", True)],
)
def test_text_leaves_only_where_the_variable_says_so(
    monkeypatch: pytest.MonkeyPatch, value: str | None, captured: bool
) -> None:
    monkeypatch.delenv(export.CAPTURE, raising=False)
    if value is not None:
        monkeypatch.setenv(export.CAPTURE, value)
    assert captures_text() is captured


@pytest.mark.parametrize("value", ["true", "1", "EVENT_ONLY", "yes"])
def test_a_wish_for_text_that_we_cannot_follow_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(export.CAPTURE, value)
    with pytest.raises(ValueError, match=export.CAPTURE):
        captures_text()


def test_serves_own_spans_go_where_ours_go(said: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an endpoint variable, spans go to the collector on this machine."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "")  # put back afterwards
    monkeypatch.delenv("OTEL_SERVICE_NAME")
    made = exporters()
    assert [type(each) for each in made] == [BoundedSpanProcessor]
    assert TracerProvider(shutdown_on_exit=False).resource.attributes["service.name"] == "foretoken"
    for each in made:
        each.shutdown()
    said({"OTEL_TRACES_EXPORTER": "none"})
    assert exporters() == []
    assert processors("otlp") == []
