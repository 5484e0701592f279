"""Where spans go, by the standard OTEL_* variables: one provider per process, and exporters that nobody waits for.

Tracing is on where OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set, or OTEL_TRACES_EXPORTER
says otlp or console, or Ray Serve has made a provider; and off with OTEL_SDK_DISABLED=true or
OTEL_TRACES_EXPORTER=none. What a variable asks for and we do not have is an error at the start.
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

from app.telemetry.otlp import Exporter

QUEUE = 16_384  # spans; OTEL_BSP_MAX_QUEUE_SIZE goes before it
QUEUE_BYTES = 32 * 2**20  # of spans that wait or are being posted, as `held_bytes` estimates them
SPAN_BYTES, LINK_BYTES, INT_BYTES = 3_500, 500, 24  # of a span without long attributes; of an entry of a column
SCHEDULE_MS = 1_000  # between exports; OTEL_BSP_SCHEDULE_DELAY goes before it
SHUTDOWN_MS = 2_000  # for what is still queued when the process ends
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
CAPTURES = {"": False, "NO_CONTENT": False, "SPAN_ONLY": True, "SPAN_AND_EVENT": True}

Loss = Literal["queue_full", "export_failed", "shutdown"]

log = logging.getLogger(__name__)


class DroppedSpans:
    """Spans that ended and reached no collector, by why. Any thread may count."""

    def __init__(self) -> None:
        self._counts: Counter[Loss] = Counter()
        self._lock = threading.Lock()

    def add(self, loss: Loss, spans: int) -> None:
        with self._lock:
            self._counts[loss] += spans

    def counts(self) -> dict[Loss, int]:
        """So far, for losses that occurred."""
        with self._lock:
            return dict(self._counts)

    @property
    def total(self) -> int:
        return sum(self.counts().values())


DROPPED_SPANS = DroppedSpans()  # of this process: Serve makes its exporters where no object of ours is at hand


class BoundedSpanProcessor(BatchSpanProcessor):
    """The SDK's processor, which exports from a thread of its own; with losses counted, and an end that is near.

    The SDK tells of a full queue and of a failed export in its log only, and waits half a minute for a slow collector
    when the process ends (opentelemetry-sdk 1.45). It bounds the number of spans and not their size: 16,384 spans of
    requests with 500 rounds hold 600 MB.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        dropped: DroppedSpans = DROPPED_SPANS,
        *,
        queue: int | None = None,
        queue_bytes: int = QUEUE_BYTES,
        schedule_ms: float | None = None,
    ) -> None:
        """None: what OTEL_BSP_* say, or our defaults. Raises ValueError for a variable that is no number above 0."""
        self._room = queue or _positive("OTEL_BSP_MAX_QUEUE_SIZE", QUEUE)
        self._room_bytes = queue_bytes
        self._waiting: deque[int] = deque()  # bytes of each span in the SDK's queue, oldest first
        self._held = 0  # bytes of these and of the batch that is being exported
        self._closed = False
        self._dropped = dropped
        self._lock = threading.Lock()
        super().__init__(
            _Counted(exporter, dropped, self._exporting),
            max_queue_size=self._room,
            schedule_delay_millis=schedule_ms or _positive("OTEL_BSP_SCHEDULE_DELAY", SCHEDULE_MS),
            max_export_batch_size=min(self._room, _positive("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512)),
        )

    def on_end(self, span: ReadableSpan) -> None:
        """Never waits."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        size = held_bytes(span)
        with self._lock:
            full = len(self._waiting) >= self._room or self._held + size > self._room_bytes
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
        # The SDK's own shutdown takes no limit: it waits for 30 s.
        self._batch_processor.shutdown(SHUTDOWN_MS)
        with self._lock:
            left = len(self._waiting)
            self._waiting.clear()
        if left:
            self._dropped.add("shutdown", left)

    @contextmanager
    def _exporting(self, spans: int) -> Iterator[None]:
        """So many were taken out of the queue, and are let go of at the end."""
        with self._lock:
            size = sum(self._waiting.popleft() for _ in range(min(spans, len(self._waiting))))
        try:
            yield
        finally:
            with self._lock:
                self._held -= size


class _Counted(SpanExporter):
    """Exports by another, and counts what that could not deliver."""

    def __init__(
        self, exporter: SpanExporter, dropped: DroppedSpans, exporting: Callable[[int], AbstractContextManager[None]]
    ) -> None:
        """exporting: entered while so many spans are exported."""
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
    """Memory that an ended span holds, roughly. A long column takes no longer to estimate than a short one."""
    attributes = (span.attributes or {}).values()
    return SPAN_BYTES + LINK_BYTES * len(span.links) + sum(map(_value_bytes, attributes))


def _value_bytes(value: AttributeValue) -> int:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return sys.getsizeof(value)
    return sum(map(sys.getsizeof, value)) if value and isinstance(value[0], str) else INT_BYTES * len(value)


def processors(unless_said: str | None = None) -> list[SpanProcessor]:
    """One for each exporter that the variables name; `unless_said`: the one to have where they name none.

    Raises ValueError for an exporter or a protocol that we do not have.
    """
    return [BoundedSpanProcessor(_exporter(kind)) for kind in _exporters(unless_said)]


def provider(attributes: Mapping[str, str]) -> TracerProvider | None:
    """The process's provider: the one there is (Serve's), else one of ours; None: tracing is off.

    attributes: of the resource; what OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say goes before them. Raises
    ValueError as `processors` does.
    """
    if _disabled():
        return None
    there_is = trace.get_tracer_provider()
    if isinstance(there_is, TracerProvider):
        return there_is
    made = processors()
    if not made:
        return None
    said = OTELResourceDetector().detect().attributes
    ours = TracerProvider(resource=Resource.create({**attributes, **said}))
    for processor in made:
        ours.add_span_processor(processor)
    trace.set_tracer_provider(ours)
    return ours


def captures_text() -> bool:
    """Whether spans may hold prompts and outputs. Raises ValueError for a setting that we cannot follow.

    `true`, which older instrumentations take, is none: who set it may not know that it now means every word.
    """
    said = os.environ.get(CAPTURE, "").strip().upper()
    if said not in CAPTURES:
        raise ValueError(f"{CAPTURE} is {said!r}; here it can be NO_CONTENT, SPAN_ONLY or SPAN_AND_EVENT (no events)")
    return CAPTURES[said]


def _disabled() -> bool:
    return os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or _said_exporters() == ["none"]


def _said_exporters() -> list[str]:
    said = os.environ.get("OTEL_TRACES_EXPORTER", "")
    return [kind.strip().lower() for kind in said.split(",") if kind.strip()]


def _exporters(unless_said: str | None) -> list[str]:
    if _disabled():
        return []
    said = _said_exporters()
    if not said and any(os.environ.get(variable) for variable in ENDPOINTS):
        return ["otlp"]
    return said or ([] if unless_said is None else [unless_said])


def _exporter(kind: str) -> SpanExporter:
    if kind == "console":
        return ConsoleSpanExporter()
    if kind != "otlp":
        raise ValueError(f"OTEL_TRACES_EXPORTER names {kind!r}; here are otlp, console and none")
    for variable in PROTOCOLS:
        if (protocol := os.environ.get(variable) or "http/protobuf") != "http/protobuf":
            raise ValueError(f"{variable} is {protocol!r}; only http/protobuf is here")
    return Exporter()


def _positive(variable: str, default: int) -> int:
    said = os.environ.get(variable) or str(default)
    if not (said.isascii() and said.isdecimal() and int(said) > 0):
        raise ValueError(f"{variable} is {said!r}; it must be a whole number above 0")
    return int(said)
