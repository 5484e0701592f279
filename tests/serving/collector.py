"""A collector of our own: OTLP over real HTTP, as the protocol's own classes read it."""

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2

PATIENCE_S = 30


@dataclass(frozen=True)
class Span:
    """One that arrived. Times are nanoseconds of the wall clock; ids are hexadecimal, "" for none."""

    name: str
    trace: str
    id: str
    parent: str
    kind: str  # SERVER, INTERNAL, …
    begin: int
    end: int
    attributes: dict[str, Any]
    links: list[tuple[str, str]]  # (trace, id)
    failed: bool
    resource: dict[str, Any]
    scope: str


@dataclass
class Collector:
    """What arrived so far; `answer` decides what becomes of a post, and may take its time."""

    spans: list[Span] = field(default_factory=list)
    posts: int = 0
    answer: Callable[[], int] = lambda: 200  # the status
    _port: int = 0  # once it is open: kept while it is closed
    _server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def open(self) -> None:
        self._server = _server(self, self._port)
        self._port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """From now on connections are refused."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def take(self, path: str, body: bytes, encoding: str | None) -> int:
        """The status."""
        self.posts += 1
        status = self.answer() if path == "/v1/traces" else 404
        if status == 200:
            self.spans += parse(gzip.decompress(body) if encoding == "gzip" else body)
        return status

    def of(self, trace: str, id: str | None = None) -> list[Span]:
        """Those of a trace, or the one of it with that id."""
        return [span for span in list(self.spans) if span.trace == trace and id in (None, span.id)]

    def wait(self, found: Callable[[], Any]) -> Any:
        """The first result that is true; fails after PATIENCE_S, with what arrived."""
        limit = time.monotonic() + PATIENCE_S
        while time.monotonic() < limit:
            if result := found():
                return result
            time.sleep(0.02)
        pytest.fail(f"not among {[(span.name, span.trace[:4]) for span in self.spans][-20:]}")

    def request(self, trace: str) -> Span:
        """The span of the one request in this trace, once it is there; its choices' spans came before it, or with it.

        The engine ends a request that was cancelled after the client has left, so this can take a moment.
        """
        named = ("text_completion ", "chat ")
        spans = self.wait(lambda: [span for span in self.of(trace) if span.name.startswith(named)])
        assert len(spans) == 1
        span: Span = spans[0]
        return span


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port of this machine."""
    collector = Collector()
    collector.open()
    try:
        yield collector
    finally:
        collector.close()


def _server(collector: Collector, port: int) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status = collector.take(self.path, body, self.headers.get("content-encoding"))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """The exporter gave up on a slow answer."""

    return Server(("127.0.0.1", port), Handler)


def parse(body: bytes) -> list[Span]:
    """Raises google.protobuf's DecodeError for what is no ExportTraceServiceRequest."""
    export = ExportTraceServiceRequest()
    export.ParseFromString(body)
    return [
        _span(span, {kv.key: value(kv.value) for kv in of.resource.attributes}, scope.scope.name)
        for of in export.resource_spans
        for scope in of.scope_spans
        for span in scope.spans
    ]


def _span(span: trace_pb2.Span, resource: dict[str, Any], scope: str) -> Span:
    return Span(
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        begin=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes={kv.key: value(kv.value) for kv in span.attributes},
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        resource=resource,
        scope=scope,
    )


def value(any_value: AnyValue) -> Any:
    """As Python, with the type that it was sent with: an int stays one, a list is of one type."""
    kind = any_value.WhichOneof("value")
    assert kind is not None
    if kind == "array_value":
        return [value(item) for item in any_value.array_value.values]
    return getattr(any_value, kind)
