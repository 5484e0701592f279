"""Traced applications over the fake engine, and what their spans say."""

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler
from starlette.types import ASGIApp

from app.fake_engine import FakeEngineClient, Script
from app.main import create_app
from app.telemetry.exchange import Exchange
from app.telemetry.tracer import TraceConfig, TraceLevel, Tracer
from engine.types import DRAFTERS, REASONS, Output, Request, RequestRecord, RoundRecord, StepStats

# (k, reason, α ‰, drafted, accepted, emitted, drafter, batch, began, draft, verify, step µs): the prompt's end, a full
# acceptance, a full rejection, a plain round, and one that a stop cut: two tokens were verified, one came through.
ROUNDS = [
    (0, None, 700, 0, 0, 1, None, 2, 29_000, 0, 900, 1_000),
    (4, "policy", 710, 4, 4, 5, "model", 3, 31_000, 400, 1_000, 1_500),
    (4, "acceptance", 720, 3, 0, 1, "ngram", 3, 33_000, 300, 1_100, 1_600),
    (0, "load", 600, 0, 0, 1, None, 4, 35_000, 0, 800, 1_000),
    (2, "cap", 610, 2, 1, 1, "model", 1, 37_000, 200, 700, 1_200),
]
STEPS = [20, 21, 23, 24, 25]


def round_of(step: int, *facts: Any) -> RoundRecord:
    """A row of ROUNDS as the engine records it."""
    k, reason, alpha, drafted, accepted, emitted, drafter, *times = facts
    why = -1 if reason is None else REASONS.index(reason)
    who = -1 if drafter is None else DRAFTERS.index(drafter)
    return RoundRecord(k, why, alpha, drafted, accepted, emitted, who, step, *times)


def record_of(request: Request, rounds: list[Any] | None = None) -> RequestRecord:
    """The record of a request that waited 10 ms, read its prompt for 20 ms and decoded for 70 ms."""
    now = time.monotonic()
    rounds = ROUNDS if rounds is None else rounds
    parts = [round_of(step, *facts) for step, facts in zip(chain(STEPS, count(100)), rounds, strict=False)]
    return RequestRecord(
        request.id,
        seed=request.params.seed or 5,
        prompt_tokens=len(request.prompt_ids),
        k_max=8,
        arrived=now,
        admitted=now + 0.01,
        first_token=now + 0.03 if rounds else None,
        finished=now + 0.1,
        drafter="cascade",
        cached_tokens=2,
        preemptions=1,
        output_tokens=sum(part.emitted for part in parts),
        policy="goodput",
        fixed_k=request.k,
        lenience=request.lenience,
        rounds=parts,
        waiting_ahead=6,
        prefill_passes=2,
        prediction_tokens=len(request.prediction_ids),
        prediction_accepted=len(request.prediction_ids) // 3,
    )


def recorded(request: Request) -> Iterator[Output]:
    """Two outputs, and the record of ROUNDS."""
    yield Output(request.id, (1,), "first ")
    yield Output(request.id, (2, 3), "second", "stop", record=record_of(request))


class Patient:
    """Makes an exchange as long as its records say, because the fake engine answers at once."""

    def began(self, exchange: Exchange) -> None:
        pass

    def ended(self, exchange: Exchange) -> None:
        ends = [record.finished for record in exchange.records if record.finished is not None]
        assert exchange.finished is not None
        exchange.finished = max(exchange.finished, *ends) if ends else exchange.finished

    def stepped(self, steps: Sequence[StepStats]) -> None:
        pass


class Traced:
    """An application, its engine and its tracer; spans are kept as they end."""

    def __init__(
        self,
        script: Script = recorded,
        *,
        level: TraceLevel = "packed",
        steps: float = 1.0,
        text: bool = False,
        sampler: Sampler | None = None,
    ) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler, shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.client = FakeEngineClient(script)
        self.tracer = Tracer(self.client, self.provider, TraceConfig(level, steps), text=text)
        self.app: ASGIApp = create_app(self.client, [Patient(), self.tracer])

    def spans(self, name: str | None = None) -> list[ReadableSpan]:
        """Return the spans of this name, oldest first; None: the request spans."""
        spans = sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)
        return [
            span
            for span in spans
            if (span.name == name if name else span.name.startswith(("text_completion ", "chat ")))
        ]

    def span(self, name: str | None = None) -> ReadableSpan:
        (span,) = self.spans(name)
        return span

    def attributes(self, name: str | None = None) -> dict[str, Any]:
        return told(self.span(name))


def sticking_out(spans: Sequence[ReadableSpan]) -> list[str]:
    """Return the names of the spans that begin before their parent or end after it."""
    by_id = {span.context.span_id: span for span in spans if span.context is not None}
    pairs = [(span, by_id.get(span.parent.span_id)) for span in spans if span.parent is not None]
    return [
        span.name
        for span, above in pairs
        if above is not None and not (_times(above)[0] <= _times(span)[0] <= _times(span)[1] <= _times(above)[1])
    ]


def _times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


def told(span: ReadableSpan) -> dict[str, Any]:
    attributes: Mapping[str, Any] = span.attributes or {}
    return dict(attributes)


def step(number: int = 7, requests: tuple[str, ...] = (), **more: Any) -> StepStats:
    return StepStats(
        step=number, sequences=3, prefill_tokens=11, drafted=8, accepted=5, emitted=9, draft_us=400, draft_steps=4,
        draft_tokens=5, score_us=1000, target_forward_us=800, draft_forward_us=300, step_us=2000, running=3,
        waiting=2, preempted=1, policy_us=50, began=time.monotonic(), requests=requests, **more,
    )  # fmt: skip
