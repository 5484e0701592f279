"""Exports spans as the standard OTEL_* variables say. One provider per process; no request waits for an exporter.

Tracing is on if OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set, if OTEL_TRACES_EXPORTER names
otlp or console, or if Ray Serve has made a provider. OTEL_SDK_DISABLED=true or OTEL_TRACES_EXPORTER=none turns it off.
A value that is not supported is an error at the start.
"""

import logging
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

from opentelemetry import trace
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter, SpanExportResult
from opentelemetry.util.types import AttributeValue

from app.telemetry.otlp import OtlpExporter

QUEUE_SPANS = 16_384  # spans that may wait, unless OTEL_BSP_MAX_QUEUE_SIZE is set
QUEUE_BYTES = 32 * 2**20  # memory of the spans that wait or are being posted, as `held_bytes` estimates it
SPAN_BYTES, LINK_BYTES, INT_BYTES = 3_500, 500, 24  # bytes: a span without long attributes, a link, a column's integer
SCHEDULE_MS = 1_000  # between exports, unless OTEL_BSP_SCHEDULE_DELAY is set
SHUTDOWN_MS = 2_000  # to export what is still queued when the process ends
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
CAPTURES = {"": False, "NO_CONTENT": False, "SPAN_ONLY": True, "SPAN_AND_EVENT": True}

Loss = Literal["queue_full", "export_failed", "shutdown"]

log = logging.getLogger(__name__)


class DroppedSpans:
    """Counts the ended spans that reached no collector, by reason. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[Loss] = Counter()
        self._lock = threading.Lock()

    def add(self, loss: Loss, spans: int) -> None:
        with self._lock:
            self._counts[loss] += spans

    def counts(self) -> dict[Loss, int]:
        """Return the counts so far, without reasons that did not occur."""
        with self._lock:
            return dict(self._counts)

    @property
    def total(self) -> int:
        return sum(self.counts().values())


DROPPED_SPANS = DroppedSpans()  # one per process, because Serve makes its exporters where none of our objects exist


class BoundedSpanProcessor(BatchSpanProcessor):
    """The SDK's processor, which exports in a thread of its own, with bounded memory, counted losses and a short end.

    The SDK reports a full queue or a failed export only in its log. At the end of the process it waits 30 s for a slow
    collector (opentelemetry-sdk 1.45). It bounds the number of spans but not their size: 16,384 spans of requests with
    500 rounds hold 600 MB.
    """

    def __init__(self, exporter: SpanExporter, dropped: DroppedSpans = DROPPED_SPANS) -> None:
        """Raises ValueError for an OTEL_BSP_* variable that is not a whole number above 0."""
        self._max_spans = _positive("OTEL_BSP_MAX_QUEUE_SIZE", QUEUE_SPANS)
        self._waiting: deque[int] = deque()  # bytes of each span in the SDK's queue, oldest first
        self._held = 0  # bytes of the waiting spans and of the batch that is being exported
        self._closed = False
        self._dropped = dropped
        self._lock = threading.Lock()
        super().__init__(
            _CountingExporter(exporter, dropped, self._exporting),
            max_queue_size=self._max_spans,
            schedule_delay_millis=_positive("OTEL_BSP_SCHEDULE_DELAY", SCHEDULE_MS),
            max_export_batch_size=min(self._max_spans, _positive("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512)),
        )

    def on_end(self, span: ReadableSpan) -> None:
        """Queue the span or count it as dropped. Never waits."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        size = held_bytes(span)
        with self._lock:
            full = len(self._waiting) >= self._max_spans or self._held + size > QUEUE_BYTES
            accepted = not full and not self._closed
            if accepted:
                self._waiting.append(size)
                self._held += size
                super().on_end(span)
        if not accepted:
            self._dropped.add("queue_full" if full else "shutdown", 1)

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        # The SDK's own shutdown has no limit argument and waits for 30 s.
        self._batch_processor.shutdown(SHUTDOWN_MS)
        with self._lock:
            left = len(self._waiting)
            self._waiting.clear()
        if left:
            self._dropped.add("shutdown", left)

    @contextmanager
    def _exporting(self, spans: int) -> Iterator[None]:
        """Move so many spans from the queue to the running export, and free their bytes when the block ends."""
        with self._lock:
            size = sum(self._waiting.popleft() for _ in range(min(spans, len(self._waiting))))
        try:
            yield
        finally:
            with self._lock:
                self._held -= size


class _CountingExporter(SpanExporter):
    """Exports through another exporter and counts the spans that it could not deliver."""

    def __init__(
        self, exporter: SpanExporter, dropped: DroppedSpans, exporting: Callable[[int], AbstractContextManager[None]]
    ) -> None:
        """exporting: makes the context in which that many spans are exported."""
        self._exporter = exporter
        self._dropped = dropped
        self._exporting = exporting

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            with self._exporting(len(spans)):
                result = self._exporter.export(spans)
        finally:
            if result is not SpanExportResult.SUCCESS:
                self._dropped.add("export_failed", len(spans))
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def held_bytes(span: ReadableSpan) -> int:
    """Estimate the memory of an ended span in bytes, in a time that does not depend on the length of its columns."""
    attributes = (span.attributes or {}).values()
    return SPAN_BYTES + LINK_BYTES * len(span.links) + sum(map(_value_bytes, attributes))


def _value_bytes(value: AttributeValue) -> int:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return sys.getsizeof(value)
    return sum(map(sys.getsizeof, value)) if value and isinstance(value[0], str) else INT_BYTES * len(value)


def processors(default: str | None = None) -> list[SpanProcessor]:
    """Return a processor for each exporter that the variables name, or for `default` if they name none.

    Raises ValueError for an exporter or a protocol that is not supported.
    """
    return [BoundedSpanProcessor(_exporter(kind)) for kind in _exporter_names(default)]


def provider(attributes: Mapping[str, str]) -> TracerProvider | None:
    """Return the process's provider: Serve's if there is one, else a new one; None: tracing is off.

    attributes: of a new provider's resource. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override them. Raises
    ValueError as `processors` does.
    """
    if _disabled():
        return None
    existing = trace.get_tracer_provider()
    if isinstance(existing, TracerProvider):
        return existing
    span_processors = processors()
    if not span_processors:
        return None
    environment = OTELResourceDetector().detect().attributes
    created = TracerProvider(resource=Resource.create({**attributes, **environment}))
    for processor in span_processors:
        created.add_span_processor(processor)
    trace.set_tracer_provider(created)
    return created


def captures_text() -> bool:
    """Whether spans may hold prompts and outputs. Raises ValueError for a value that is not supported.

    Older instrumentations accept `true`. It is refused here: the operator may not expect it to record all text.
    """
    value = os.environ.get(CAPTURE, "").strip().upper()
    if value not in CAPTURES:
        raise ValueError(f"{CAPTURE} is {value!r}; it must be NO_CONTENT, SPAN_ONLY or SPAN_AND_EVENT (without events)")
    return CAPTURES[value]


def _disabled() -> bool:
    return os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or _named_exporters() == ["none"]


def _named_exporters() -> list[str]:
    value = os.environ.get("OTEL_TRACES_EXPORTER", "")
    return [kind.strip().lower() for kind in value.split(",") if kind.strip()]


def _exporter_names(default: str | None) -> list[str]:
    if _disabled():
        return []
    named = _named_exporters()
    if not named and any(os.environ.get(variable) for variable in ENDPOINTS):
        return ["otlp"]
    return named or ([] if default is None else [default])


def _exporter(kind: str) -> SpanExporter:
    if kind == "console":
        return ConsoleSpanExporter()
    if kind != "otlp":
        raise ValueError(f"OTEL_TRACES_EXPORTER names {kind!r}; it may name otlp, console or none")
    for variable in PROTOCOLS:
        if (protocol := os.environ.get(variable) or "http/protobuf") != "http/protobuf":
            raise ValueError(f"{variable} is {protocol!r}; it must be http/protobuf")
    return OtlpExporter()


def _positive(variable: str, default: int) -> int:
    value = os.environ.get(variable) or str(default)
    if not (value.isascii() and value.isdecimal() and int(value) > 0):
        raise ValueError(f"{variable} is {value!r}; it must be a whole number above 0")
    return int(value)
