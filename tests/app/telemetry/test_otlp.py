"""The posted bytes mean the same as the SDK's, and a collector reads them."""

import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link

from app.telemetry.otlp import OtlpExporter, encode, encode_column
from tests.app.harness import PROMPT, call
from tests.app.telemetry.tracing import Traced, step


@pytest.fixture
def traced() -> Traced:
    traced = Traced(level="rounds")
    call(traced.app, PROMPT | {"n": 2}, headers={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})
    call(traced.app, PROMPT | {"model": "other"})
    traced.client.stepped([step(requests=tuple(request.id for request in traced.client.submitted))])
    with traced.provider.get_tracer("serve", attributes={"specdec.rounds.kinds": ("a",)}).start_span("theirs") as span:
        span.set_attribute("specdec.rounds.empty", [])
        span.add_event("happened", {"n": [1, 2]})
    return traced


def in_order(request: ExportTraceServiceRequest) -> ExportTraceServiceRequest:
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                span.attributes.sort(key=lambda pair: pair.key)
    return request


def test_it_is_what_the_sdk_encodes(traced: Traced) -> None:
    spans = traced.exporter.get_finished_spans()
    assert len(spans) > 15
    ours, theirs = encode(spans), encode_spans(spans)
    assert ours != theirs, "columns were not taken apart"
    assert in_order(ours) == in_order(theirs)
    assert len(ours.SerializeToString()) == len(theirs.SerializeToString())


def test_what_the_sdk_dropped_is_told() -> None:
    """A span with columns counts the attributes, events and links that its limits dropped, too."""
    limits = SpanLimits(max_span_attributes=2, max_events=1, max_links=1)
    exporter, provider = InMemorySpanExporter(), TracerProvider(span_limits=limits, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    links = [Link(tracer.start_span(name).get_span_context()) for name in "ab"]
    with tracer.start_span("s", links=links) as span:
        span.set_attributes({"a": 1, "b": 2, "specdec.rounds.k": (3, 4)})
        span.add_event("first")
        span.add_event("second")
    (ours,) = encode(exporter.get_finished_spans()).resource_spans[0].scope_spans[0].spans
    dropped = ours.dropped_attributes_count, ours.dropped_events_count, ours.dropped_links_count
    assert dropped == (1, 1, 1)
    assert [pair.key for pair in ours.attributes] == ["b", "specdec.rounds.k"]


def test_every_integer() -> None:
    rng = random.Random(0)
    edges = [sign * 2**power + by for power in range(63) for by in (-1, 0, 1) for sign in (1, -1)]
    numbers = [*edges, 2**63 - 1, -(2**63), *(rng.randrange(2**40) for _ in range(500))]
    expected = AnyValue(array_value=ArrayValue(values=[AnyValue(int_value=number) for number in numbers]))
    assert encode_column("né", numbers) == KeyValue(key="né", value=expected).SerializeToString()


class Server(HTTPServer):
    posted: list[bytes]
    status = 200


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.server.posted.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(self.server.status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: the name and signature are http.server's."""


@pytest.fixture
def collector() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.posted = []
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_it_is_posted_and_what_the_collector_says_counts(traced: Traced, collector: Server) -> None:
    spans = traced.exporter.get_finished_spans()
    exporter = OtlpExporter(f"http://127.0.0.1:{collector.server_address[1]}/v1/traces")
    assert exporter.export(spans) is SpanExportResult.SUCCESS
    posted = ExportTraceServiceRequest.FromString(collector.posted[0])
    assert in_order(posted) == in_order(encode_spans(spans))
    collector.status = 400
    assert exporter.export(spans) is SpanExportResult.FAILURE
    exporter.shutdown()
    assert exporter.export(spans) is SpanExportResult.FAILURE
    assert len(collector.posted) == 2


def test_a_batch_that_is_too_large_is_not_posted(traced: Traced, collector: Server) -> None:
    spans = traced.exporter.get_finished_spans()
    size = len(encode(spans).SerializeToString())
    address = f"http://127.0.0.1:{collector.server_address[1]}/v1/traces"
    for limit, result in ((size - 1, "FAILURE"), (size, "SUCCESS"), (0, "SUCCESS")):  # 0: there is none
        exporter = OtlpExporter(address, max_request_size=limit)
        assert exporter.export(spans).name == result
        exporter.shutdown()
    assert len(collector.posted) == 2


def test_columns_that_are_none_of_ours_are_encoded_by_the_sdk(traced: Traced, collector: Server) -> None:
    with traced.provider.get_tracer("theirs").start_span("theirs") as span:
        span.set_attribute("specdec.rounds.kinds", ("a", "b"))
    spans = traced.exporter.get_finished_spans()
    exporter = OtlpExporter(f"http://127.0.0.1:{collector.server_address[1]}/v1/traces")
    assert exporter.export(spans) is SpanExportResult.SUCCESS
    assert ExportTraceServiceRequest.FromString(collector.posted[0]) == encode_spans(spans)
    exporter.shutdown()


def test_what_cannot_be_encoded_is_a_failure(traced: Traced, collector: Server) -> None:
    """The exporting thread raises no exception either."""
    exporter = OtlpExporter(f"http://127.0.0.1:{collector.server_address[1]}/v1/traces")
    broken: Any = [*traced.exporter.get_finished_spans(), object()]
    assert exporter.export(broken) is SpanExportResult.FAILURE
    assert collector.posted == []
    exporter.shutdown()
