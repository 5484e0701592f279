"""Traces: a complete exchange becomes spans after the fact, so nothing is made of them while tokens flow.

One trace tells why a request took as long as it did: its span, and of each choice the queue, the prefill and the
decode with its rounds in columns (names.py has the names). Steps of the engine, which serve many requests at once, are
roots of their own with links to these.
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

MAX_LINKS = 64  # of an engine step; the SDK keeps no more than 128, and says nothing
MAX_CHOICES = 16  # of a request that have spans: those of 64 with 500 rounds held the event loop for 60 to 150 ms
REMEMBERED = 256  # exchanges that ended: the engine's steps are told of up to a quarter of a second later

Level = Literal["off", "request", "packed", "rounds"]
"""
off       no spans
request   one span per request
packed    and its choices' queue, prefill and decode, with their rounds in columns; and steps of the engine
rounds    and spans of their own for up to 64 rounds of each choice
"""


@dataclass(frozen=True, slots=True)
class TraceConfig:
    level: Level = "packed"
    steps: float = 0.01  # share of the engine's steps that get a span, if they served a request that is traced


@dataclass(frozen=True, slots=True)
class Clock:
    """From monotonic seconds to the nanoseconds of the wall clock; made once per exchange, so no span is torn."""

    offset_ns: int

    @classmethod
    def now(cls) -> "Clock":
        return cls(time.time_ns() - time.monotonic_ns())

    def wall_ns(self, monotonic_s: float) -> int:
        return self.offset_ns + round(monotonic_s * 1e9)


class Tracer:
    """A listener (app/telemetry/exchange.py) that makes spans, of requests whose client does not forbid it."""

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
        self._ended: deque[tuple[set[str], SpanContext]] = deque(maxlen=REMEMBERED)  # (engine requests, their span)

    def began(self, exchange: Exchange) -> None:
        context = parent(exchange)
        if context is None or self._config.level == "off":
            return
        clock = Clock.now()
        span = self._tracer.start_span(
            f"{name.OPERATION_NAME} {self._client.model.name}",
            context,
            kind=_kind(context),
            start_time=clock.wall_ns(exchange.began),
        )
        if not span.is_recording():  # the sampler's choice
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
        assert exchange.finished is not None, "it is complete"
        with ExitStack() as whatever_fails:
            whatever_fails.callback(span.end, clock.wall_ns(exchange.finished))
            if self._config.level != "request":
                whatever_fails.callback(self._write_choices, span, exchange, clock)
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
            span.set_status(Status(StatusCode.ERROR))  # without a description: those quote the client
        span.set_attributes(request_attributes(exchange, self._client.model.name))
        if exchange.texts is not None:
            span.set_attributes(text_attributes(exchange, exchange.texts, self._client.detokenize))

    def _write_choices(self, span: Span, exchange: Exchange, clock: Clock) -> None:
        assert exchange.finished is not None, "it is complete"
        context = trace.set_span_in_context(span)
        records = [(index, output.record) for index, output in enumerate(exchange.outputs) if output.record is not None]
        for index, record in records[:MAX_CHOICES]:
            for piece in choice_pieces(index, record, rounds=self._config.level == "rounds"):
                self._write(piece.within(exchange.began, exchange.finished), context, clock)
        if len(records) > MAX_CHOICES:
            span.set_attribute(name.CHOICES_OMITTED, len(records) - MAX_CHOICES)

    def _write(self, piece: Piece, context: Context, clock: Clock, links: Sequence[Link] = ()) -> None:
        span = self._tracer.start_span(
            piece.name, context, attributes=piece.attributes, links=links, start_time=clock.wall_ns(piece.began)
        )
        within = trace.set_span_in_context(span, context)
        for part in piece.parts:
            self._write(part, within, clock)
        span.end(clock.wall_ns(piece.ended))

    def _write_step(self, step: StepStats, clock: Clock) -> None:
        """Nothing, if no request that it served is traced: they may have been told not to be."""
        served = list(self._served(step))[:MAX_LINKS]
        if served:
            piece = step_piece(step, [trace.format_trace_id(context.trace_id) for context in served])
            self._write(piece, Context(), clock, [Link(context) for context in served])

    def _served(self, step: StepStats) -> Iterator[SpanContext]:
        """The spans of the requests that were in it, of one with several choices once."""
        in_it = set(step.requests)
        for exchange, (span, _) in self._open.items():
            if any(request.id in in_it for request in exchange.requests):
                yield span.get_span_context()
        for ids, context in self._ended:
            if not in_it.isdisjoint(ids):
                yield context


def parent(exchange: Exchange) -> Context | None:
    """What the request's span hangs from; None: the client said not to trace it.

    The client's word comes first, because Serve's spans sample anew what a client did not sample (Ray 2.60); of several
    `traceparent`, which a proxy may have joined by commas, any that says no. Then Serve's span, where it made one: it
    hangs from the client's, or stands for a client that sent no context.
    """
    if any(_forbids(said) for said in ",".join(exchange.headers.getlist("traceparent")).split(",")):
        return None
    current = trace.get_current_span()
    if current.get_span_context().is_valid:
        return trace.set_span_in_context(current, Context())
    return TraceContextTextMapPropagator().extract(exchange.headers, Context())


def _forbids(traceparent: str) -> bool:
    said = TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())
    context = trace.get_current_span(said).get_span_context()
    return context.is_valid and not context.trace_flags.sampled


def _kind(context: Context) -> SpanKind:
    """Whether the request came from another process, as far as traces know."""
    above = trace.get_current_span(context).get_span_context()
    return SpanKind.INTERNAL if above.is_valid and not above.is_remote else SpanKind.SERVER
