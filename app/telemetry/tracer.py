"""Traces. The spans of an exchange are made when it is complete, so tracing costs no time while tokens flow.

A trace shows where a request spent its time. Below the request's span each choice has spans for its queue, prefill and
decode; the decode span holds the rounds as columns (names.py lists the names). An engine step serves many requests, so
its span is the root of a trace of its own, with links to the requests' spans.
"""

import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from app.client import EngineClient
from app.telemetry import names as name
from app.telemetry.exchange import Exchange
from app.telemetry.request_span import request_attributes, text_attributes
from app.telemetry.spans import Piece, choice_pieces, step_piece
from engine.types import StepStats

MAX_LINKS = 64  # links of an engine step's span; the SDK silently drops links beyond 128
MAX_CHOICES = 16  # choices of a request with spans: 64 choices of 500 rounds held the event loop for 60 to 150 ms
MAX_ENDED_EXCHANGES = 256  # kept, because engine steps are reported up to a quarter of a second late

TraceLevel = Literal["off", "request", "packed", "rounds"]
"""
off       no spans
request   one span per request
packed    also spans for each choice's queue, prefill and decode, with the rounds as columns
rounds    also one span per round, for up to 64 rounds of each choice
"""


@dataclass(frozen=True, slots=True)
class TraceConfig:
    level: TraceLevel = "packed"
    # Share of the engine's steps that get a trace, at the levels packed and rounds. Only steps that served a traced
    # request get one. Beside the requests' traces they fill a viewer's list.
    steps: float = 0.0


@dataclass(frozen=True, slots=True)
class Clock:
    """Converts monotonic seconds to nanoseconds of the wall clock.

    One Clock serves a whole exchange, so its spans fit together even if the wall clock is set in between.
    """

    offset_ns: int

    @classmethod
    def now(cls) -> "Clock":
        return cls(time.time_ns() - time.monotonic_ns())

    def wall_ns(self, monotonic_s: float) -> int:
        return self.offset_ns + round(monotonic_s * 1e9)


class Tracer:
    """A Listener that makes spans for requests, unless the client asked not to be traced."""

    def __init__(
        self,
        client: EngineClient,
        provider: TracerProvider,
        config: TraceConfig = TraceConfig(),
        *,
        text: bool = False,
    ) -> None:
        """text: whether spans hold prompts and outputs."""
        self._client = client
        self._config = config
        self._text = text
        self._tracer = provider.get_tracer(name.SCOPE, name.VERSION, attributes=name.SCOPE_ATTRIBUTES)
        self._open: dict[Exchange, tuple[Span, Clock]] = {}
        # (ids of engine requests, span of their exchange)
        self._ended: deque[tuple[set[str], SpanContext]] = deque(maxlen=MAX_ENDED_EXCHANGES)

    def began(self, exchange: Exchange) -> None:
        context = parent_context(exchange)
        if context is None or self._config.level == "off":
            return
        clock = Clock.now()
        span = self._tracer.start_span(
            f"{name.OPERATIONS[exchange.form.object]} {self._client.model.name}",
            context,
            kind=_kind(context),
            start_time=clock.wall_ns(exchange.began),
        )
        if not span.is_recording():  # the sampler left this request out
            return
        self._open[exchange] = span, clock
        exchange.trace_id = trace.format_trace_id(span.get_span_context().trace_id)
        if self._text:
            exchange.texts = []

    def ended(self, exchange: Exchange) -> None:
        span, clock = self._open.pop(exchange, (None, None))
        if span is None or clock is None:
            return
        self._ended.append(({request.id for request in exchange.requests}, span.get_span_context()))
        assert exchange.finished is not None, "only a complete exchange ends"
        with ExitStack() as always:  # one part's failure must not cost the others
            always.callback(span.end, clock.wall_ns(exchange.finished))
            if self._config.level != "request":
                always.callback(self._write_choices, span, exchange, clock)
            self._describe(span, exchange)

    def stepped(self, steps: Sequence[StepStats]) -> None:
        if self._config.level in ("off", "request"):
            return
        clock = Clock.now()
        for step in steps:
            if random.random() < self._config.steps:
                self._write_step(step, clock)

    def _describe(self, span: Span, exchange: Exchange) -> None:
        if exchange.failure is not None:
            span.set_status(Status(StatusCode.ERROR))  # no description: error messages quote the client's input
        span.set_attributes(request_attributes(exchange, self._client.model.name))
        if exchange.texts is not None:
            span.set_attributes(text_attributes(exchange, exchange.texts, self._client.detokenize))

    def _write_choices(self, span: Span, exchange: Exchange, clock: Clock) -> None:
        assert exchange.finished is not None, "only a complete exchange has all choices"
        context = trace.set_span_in_context(span)
        records = [(index, output.record) for index, output in enumerate(exchange.outputs) if output.record is not None]
        for index, record in records[:MAX_CHOICES]:
            for piece in choice_pieces(index, record, rounds=self._config.level == "rounds"):
                self._write(piece.within(exchange.began, exchange.finished), context, clock)
        if len(records) > MAX_CHOICES:
            span.set_attribute(name.CHOICES_OMITTED, len(records) - MAX_CHOICES)

    def _write(self, piece: Piece, context: Context, clock: Clock, links: Sequence[Link] = ()) -> None:
        attributes = {name.SPAN_KIND: name.KIND_CHAIN, **piece.attributes}
        span = self._tracer.start_span(
            piece.name, context, attributes=attributes, links=links, start_time=clock.wall_ns(piece.began)
        )
        inner_context = trace.set_span_in_context(span, context)
        for part in piece.parts:
            self._write(part, inner_context, clock)
        span.end(clock.wall_ns(piece.ended))

    def _write_step(self, step: StepStats, clock: Clock) -> None:
        """Write the step's span if it served a traced request. Clients may have forbidden to trace the others."""
        spans = list(self._spans_of(step))[:MAX_LINKS]
        if spans:
            piece = step_piece(step, [trace.format_trace_id(span.trace_id) for span in spans])
            self._write(piece, Context(), clock, [Link(span) for span in spans])

    def _spans_of(self, step: StepStats) -> Iterator[SpanContext]:
        """Yield the span of every traced exchange that the step served, once for all its choices."""
        served_ids = set(step.requests)
        for exchange, (span, _) in self._open.items():
            if any(request.id in served_ids for request in exchange.requests):
                yield span.get_span_context()
        for ids, context in self._ended:
            if not served_ids.isdisjoint(ids):
                yield context


def parent_context(exchange: Exchange) -> Context | None:
    """Return the context of the request span's parent; None: the client asked not to be traced.

    The client's own headers are read first, because Serve samples again what a client did not sample (Ray 2.60). A
    proxy may have joined several `traceparent` headers by commas: one that forbids tracing is enough. Otherwise the
    parent is Serve's span if it made one. Serve's span already has the client's span as its parent.
    """
    if any(_forbids(traceparent) for traceparent in ",".join(exchange.headers.getlist("traceparent")).split(",")):
        return None
    current = trace.get_current_span()
    if current.get_span_context().is_valid:
        return trace.set_span_in_context(current, Context())
    return TraceContextTextMapPropagator().extract(exchange.headers, Context())


def _forbids(traceparent: str) -> bool:
    context = TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())
    span = trace.get_current_span(context).get_span_context()
    return span.is_valid and not span.trace_flags.sampled


def _kind(context: Context) -> SpanKind:
    """Return INTERNAL if the parent span was made in this process, else SERVER."""
    parent = trace.get_current_span(context).get_span_context()
    return SpanKind.INTERNAL if parent.is_valid and not parent.is_remote else SpanKind.SERVER
