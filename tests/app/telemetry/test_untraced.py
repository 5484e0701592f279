"""Requests that the tracer leaves out: the client forbids it, a sampler leaves it out, or it ended too long ago."""

from typing import Any

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON
from starlette.datastructures import Headers

from app.main import create_app
from app.telemetry import tracer
from app.telemetry.exchange import Exchange
from app.telemetry.tracer import parent_context
from tests.app.harness import PROMPT, call
from tests.app.telemetry.tracing import Traced, step

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
NO, YES = (f"00-{TRACE}-{SPAN}-0{sampled}" for sampled in (0, 1))


@pytest.mark.parametrize("within", [False, True])
def test_a_client_that_says_not_to_trace_is_not_traced(within: bool) -> None:
    """Also if Serve has made a span of its own. The steps that served the request get no span either."""
    traced = Traced(level="rounds")
    header = {"traceparent": NO}
    if within:
        with traced.provider.get_tracer("serve").start_as_current_span("replica"):
            assert call(traced.app, PROMPT, headers=header).status == 200
    else:
        assert call(traced.app, PROMPT, headers=header).status == 200
    traced.client.stepped([step(requests=(traced.client.submitted[0].id,))])
    assert [span.name for span in traced.exporter.get_finished_spans()] == ["replica"] * within


@pytest.mark.parametrize(
    ("said", "traced"),
    [
        ([YES, NO], False),
        ([NO, YES], False),
        ([f"{YES}, {NO}"], False),
        (["nonsense", NO], False),
        ([YES, YES], True),
        ([YES, NO.replace(TRACE, "0" * 32)], True),  # not valid
        ([], True),
    ],
)
def test_of_several_contexts_any_may_say_no(said: list[str], traced: bool) -> None:
    headers = Headers(raw=[(b"traceparent", value.encode()) for value in said])
    assert (parent_context(Exchange("cmpl-r", headers)) is not None) is traced


class Kept:
    """A listener that records its exchanges and steps."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []

    def began(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)

    def ended(self, exchange: Exchange) -> None:
        pass

    def stepped(self, steps: Any) -> None:
        pass


@pytest.mark.parametrize("sampled", [False, True])
def test_what_a_sampler_leaves_out_has_no_trace_and_no_text(sampled: bool) -> None:
    """The exchange gets no trace id, and no step links to it."""
    traced, kept = Traced(text=True, sampler=ALWAYS_ON if sampled else ALWAYS_OFF), Kept()
    app = create_app(traced.client, [traced.tracer, kept])
    assert call(app, PROMPT).status == 200
    (exchange,) = kept.exchanges
    assert (exchange.trace_id is not None, exchange.texts is not None) == (sampled, sampled)
    assert bool(traced.exporter.get_finished_spans()) is sampled


def test_requests_that_ended_are_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "MAX_ENDED_EXCHANGES", 2)
    traced = Traced()
    for _ in range(3):
        call(traced.app, PROMPT)
    for request in traced.client.submitted:
        traced.client.stepped([step(requests=(request.id,))])
    linked = [link.context for span in traced.spans("specdec.engine_step") for link in span.links]
    assert linked == [span.context for span in traced.spans()[1:]]
