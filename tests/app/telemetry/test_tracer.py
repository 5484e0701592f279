"""A finished exchange becomes one trace with the engine's records, and nothing else is exported."""

import asyncio
import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from app.fake_engine import FakeEngineClient, Script
from app.main import create_app
from app.telemetry import names
from app.telemetry.tracer import TraceLevel, Tracer
from engine.types import InvalidRequest, Output, Overloaded, Request
from tests.app.harness import PROMPT, Exchange, call
from tests.app.telemetry.test_spans import ANY, ASKED
from tests.app.telemetry.tracing import Traced, record_of, recorded, step, told

MARK = "Zebrafinch"  # in what the client and the model say


@pytest.mark.parametrize(
    ("level", "names"),
    [
        ("off", set()),
        ("request", {"text_completion fake"}),
        (
            "packed",
            {"text_completion fake", "specdec.queue", "specdec.prefill", "specdec.decode", "specdec.engine_step"},
        ),
    ],
)
def test_levels(level: TraceLevel, names: set[str]) -> None:
    traced = Traced(level=level)
    call(traced.app, PROMPT)
    traced.client.stepped([step(requests=(traced.client.submitted[0].id,))])
    assert {span.name for span in traced.exporter.get_finished_spans()} == names


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


def test_a_step_is_a_root_with_links_to_the_requests_that_it_served() -> None:
    traced = Traced()
    for _ in range(3):
        call(traced.app, PROMPT | {"n": 2})
    ids = [request.id for request in traced.client.submitted]
    traced.client.stepped([step(requests=(ids[0], ids[1], ids[4], "unknown"), predicted_us=1900, predicted_tokens=7.5)])
    span, requests = traced.span("specdec.engine_step"), traced.spans()
    assert span.parent is None
    assert sorted(link.context.span_id for link in span.links) == sorted(map(span_id, (requests[0], requests[2])))
    said = told(span)
    traces = [trace.format_trace_id(requests[i].context.trace_id) for i in (0, 2)]
    assert sorted(said["specdec.step.trace_ids"]) == sorted(traces)
    assert span.context is not None
    assert trace.format_trace_id(span.context.trace_id) not in traces
    assert (said["specdec.step.index"], said["specdec.step.batch_size"], said["specdec.step.failed"]) == (7, 3, False)
    assert (said["specdec.step.predicted_us"], said["specdec.step.predicted_tokens"]) == (1900, 7.5)
    assert span.end_time - span.start_time == pytest.approx(2e6, abs=1e3)  # type: ignore[operator]


def test_steps_are_sampled_and_those_that_served_nobody_have_no_span() -> None:
    for steps in (0.0, 1.0):
        traced = Traced(steps=steps)
        call(traced.app, PROMPT)
        traced.client.stepped([step(requests=(traced.client.submitted[0].id,)), step()] * 50)
        assert len(traced.spans("specdec.engine_step")) == 50 * steps


def test_steps_have_no_trace_unless_the_operator_wants_them() -> None:
    """Beside the requests they would be half of a viewer's list of traces."""
    traced = Traced()
    traced.tracer = Tracer(traced.client, traced.provider)
    traced.app = create_app(traced.client, [traced.tracer])
    call(traced.app, PROMPT)
    traced.client.stepped([step(requests=(traced.client.submitted[0].id,))] * 1000)
    assert len(traced.spans()) == 1
    assert traced.spans("specdec.engine_step") == []


def test_a_step_is_told_of_while_its_request_runs_and_links_are_bounded() -> None:
    def endless(request: Request) -> Iterator[Output]:
        while True:
            yield Output(request.id, (1,), "a")

    traced = Traced(endless)
    traced.client.max_open = 70

    async def scenario() -> None:
        exchanges = [Exchange(traced.app, json.dumps(PROMPT).encode()) for _ in range(70)]
        running = [asyncio.create_task(exchange.run()) for exchange in exchanges]
        await until(lambda: len(traced.client.open) == 70)
        traced.client.stepped([step(requests=tuple(traced.client.open))])
        for exchange in exchanges:
            exchange.leave()
        await asyncio.gather(*running)

    asyncio.run(scenario())
    linked = {link.context.span_id for link in traced.span("specdec.engine_step").links}
    assert len(linked) == 64
    assert linked <= set(map(span_id, traced.spans()))


TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_the_span_hangs_from_the_clients() -> None:
    traced = Traced()
    call(traced.app, PROMPT, headers={"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"})
    span = traced.span()
    assert span.kind is SpanKind.SERVER
    assert span.parent is not None
    assert trace.format_span_id(span.parent.span_id) == SPAN
    assert span.context is not None
    assert span.context.trace_state["vendor"] == "1"
    assert {trace.format_trace_id(s.context.trace_id) for s in traced.exporter.get_finished_spans()} == {TRACE}


@pytest.mark.parametrize("header", [None, "", "nonsense", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{SPAN}"])
def test_without_a_valid_context_it_is_a_root(header: str | None) -> None:
    traced = Traced()
    call(traced.app, PROMPT, headers={} if header is None else {"traceparent": header})
    assert traced.span().parent is None
    assert traced.span().kind is SpanKind.SERVER


def test_under_a_span_of_this_process_it_is_internal_and_in_that_trace() -> None:
    traced = Traced()
    with traced.provider.get_tracer("serve").start_as_current_span("replica") as above:
        call(traced.app, PROMPT, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
    assert traced.span().parent == above.get_span_context()
    assert traced.span().kind is SpanKind.INTERNAL


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the scenarios count turns of the event loop
        await asyncio.sleep(0)


class Refusing(FakeEngineClient):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def submit(self, requests: Any) -> Any:
        raise self.error


def failing(request: Request) -> Iterator[Output]:
    yield Output(request.id, (1,), "a")
    yield Output(request.id, (), "", "error", f"said {MARK}", record=record_of(request))


def late(request: Request) -> Iterator[Output]:
    yield Output(request.id, (1,), "a")
    yield Output(request.id, (), "", "error", "late", "deadline_exceeded", record=record_of(request))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "script", "error"),
    [
        ({"prompt": None}, recorded, "invalid_request_error"),
        ({MARK: 1}, recorded, "unknown_field"),
        ({"model": "other"}, recorded, "model_not_found"),
        ({"max_tokens": 4000}, recorded, "context_length_exceeded"),
        ({}, failing, "engine_error"),
        ({}, late, "deadline_exceeded"),
    ],
)
def test_a_failure_has_a_type_and_no_words(fields: dict[str, Any], script: Script, error: str, stream: bool) -> None:
    traced = Traced(script)
    call(traced.app, PROMPT | {"prompt": MARK, "stream": stream} | fields)
    span = traced.span()
    assert told(span)["error.type"] == error
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, None)
    assert span.events == ()  # of which an exception would be one, with its message
    assert MARK not in span.to_json()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Overloaded(MARK), "engine_overloaded"),
        (InvalidRequest(MARK, "prompt"), "invalid_request_error"),
        (RuntimeError(MARK), "internal_error"),
    ],
)
def test_what_the_engine_refuses_has_no_spans_of_choices(error: Exception, kind: str) -> None:
    traced = Traced()
    traced.client.submit = Refusing(error).submit  # type: ignore[method-assign]
    call(traced.app, PROMPT)
    assert traced.attributes().keys() == ANY | ASKED | {"error.type"}
    assert traced.attributes()["error.type"] == kind
    assert len(traced.exporter.get_finished_spans()) == 1
    assert MARK not in traced.span().to_json()


def test_success_has_no_error() -> None:
    traced = Traced()
    call(traced.app, PROMPT)
    assert traced.span().status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(stream: bool) -> None:
    def two_then_silent(request: Request) -> Iterator[Output]:
        yield Output(request.id, (1,), "a")
        yield Output(request.id, (2,), "b")

    traced = Traced(two_then_silent)

    async def scenario() -> None:
        exchange = Exchange(traced.app, json.dumps(PROMPT | {"stream": stream}).encode())
        running = asyncio.create_task(exchange.run())
        await until(lambda: bool(traced.client.open))
        exchange.leave()
        await running

    asyncio.run(scenario())
    assert traced.attributes()["error.type"] == "client_disconnect"
    assert traced.attributes()["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert traced.span().status.status_code is StatusCode.ERROR


def stopped(request: Request) -> Iterator[Output]:
    yield Output(request.id, (1,), "a")
    yield Output(request.id, (), "", "cancelled", record=record_of(request))


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_stops(stream: bool) -> None:
    """Also for a stream, whose status was sent before the error."""
    traced = Traced(stopped)
    call(traced.app, PROMPT | {"stream": stream})
    assert traced.attributes()["error.type"] == "engine_stopped"
    assert traced.span().status.status_code is StatusCode.ERROR


def spoken(request: Request) -> Iterator[Output]:
    yield Output(request.id, (1,), f"{MARK} ")
    yield Output(request.id, (2,), "sang", "stop", record=record_of(request))


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 2}, {"prompt": [MARK, "b"], "stop": MARK}])
def test_text_leaves_only_where_it_was_asked_for(fields: dict[str, Any]) -> None:
    asked = PROMPT | {"prompt": MARK} | fields
    silent = Traced(spoken, level="rounds")
    call(silent.app, asked)
    assert silent.spans()
    assert all(MARK not in span.to_json() for span in silent.exporter.get_finished_spans())
    open_ = Traced(spoken, level="rounds", text=True)
    call(open_.app, asked)
    said = open_.attributes()
    choices = len(told(open_.span())["gen_ai.response.finish_reasons"])
    prompts = [asked["prompt"]] if isinstance(asked["prompt"], str) else asked["prompt"]
    content = [{"role": "user", "parts": [{"type": "text", "content": prompt}]} for prompt in prompts]
    assert json.loads(said["gen_ai.input.messages"]) == content
    answer = {"role": "assistant", "parts": [{"type": "text", "content": f"{MARK} sang"}], "finish_reason": "stop"}
    assert json.loads(said["gen_ai.output.messages"]) == [answer] * choices
    assert said.get("gen_ai.request.stop_sequences") == ((asked["stop"],) if "stop" in asked else None)


def test_the_scope_names_us_and_the_schema() -> None:
    traced = Traced()
    call(traced.app, PROMPT)
    scope = traced.span().instrumentation_scope
    assert scope is not None
    assert (scope.name, scope.attributes) == ("foretoken", {"specdec.schema.version": 1})
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8"))["project"]
    assert (scope.version, names.SCOPE) == (project["version"], project["name"])
