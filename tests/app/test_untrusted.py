"""Whatever a client sends, its span reaches the collector complete, and the log quotes nothing of it."""

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.trace import StatusCode

from engine.types import Output, Request
from tests.app.harness import PROMPT, call
from tests.app.telemetry.tracing import Traced, record_of, told

MARK = "Zebrafinch"
HALF = "\ud800"  # of a surrogate pair


def spoken(request: Request) -> Iterator[Output]:
    yield Output(request.id, (1,), f"{MARK} ")
    yield Output(request.id, (2,), "sang", "stop", record=record_of(request))


@pytest.mark.parametrize(
    ("fields", "attribute", "expected"),
    [
        ({"max_tokens": 10**30}, "gen_ai.request.max_tokens", 2**63 - 1),
        ({"max_tokens": 10**4000}, "gen_ai.request.max_tokens", 2**63 - 1),
        ({"max_tokens": 2**40}, "gen_ai.request.max_tokens", 2**40),
        ({"seed": 10**30}, "gen_ai.request.seed", None),  # refused before anything is made of it
        ({"top_k": 10**30}, "gen_ai.request.top_k", None),
        ({"model": HALF}, "gen_ai.request.model", "?"),
        ({"model": "né 🙂"}, "gen_ai.request.model", "né 🙂"),
        ({"model": "m" * 500}, "gen_ai.request.model", "m" * 128),
        ({"prompt": HALF}, "gen_ai.input.messages", None),
        ({"stop": ["a", HALF]}, "gen_ai.request.stop_sequences", None),
        ({"max_tokens": 4000, "stop": ["a", "né"]}, "gen_ai.request.stop_sequences", ("a", "né")),
    ],
)
def test_every_attribute_can_be_encoded(
    fields: dict[str, Any], attribute: str, expected: object, caplog: pytest.LogCaptureFixture
) -> None:
    traced = Traced(text=True)
    call(traced.app, PROMPT | fields)
    assert traced.attributes().get(attribute) == expected
    with caplog.at_level(logging.WARNING, "opentelemetry"):
        (span,) = encode_spans([traced.span()]).resource_spans[0].scope_spans[0].spans
    assert {pair.key for pair in span.attributes} == traced.attributes().keys()
    assert [record for record in caplog.records if record.name.startswith("opentelemetry")] == []


@pytest.mark.parametrize("ids", [[10**30], [-5], [300]])
def test_ids_that_nobody_checked_are_not_told_as_text(ids: list[int], caplog: pytest.LogCaptureFixture) -> None:
    traced = Traced(text=True)
    assert call(traced.app, PROMPT | {"prompt": ids}).status >= 400
    assert "gen_ai.input.messages" not in traced.attributes()
    assert traced.span().status.status_code is StatusCode.ERROR
    assert "failed to take" not in caplog.text


def test_a_prompt_of_ids_is_told_as_text() -> None:
    traced = Traced(spoken, text=True)
    call(traced.app, PROMPT | {"prompt": [[104, 105], [106]], "n": 2})
    messages = json.loads(traced.attributes()["gen_ai.input.messages"])
    assert [message["parts"] for message in messages] == [[{"type": "text", "content": text}] for text in ("hi", "j")]


def test_a_refused_body_is_not_told_as_text() -> None:
    traced = Traced(text=True)
    call(traced.app, {"prompt": MARK})
    assert MARK not in traced.span().to_json()


def test_text_that_cannot_be_told_costs_only_itself(caplog: pytest.LogCaptureFixture) -> None:
    def broken(ids: Sequence[int]) -> str:
        raise RuntimeError("no text for these ids")

    def failing(request: Request) -> Iterator[Output]:
        yield Output(request.id, (), "", "error", "broken", record=record_of(request))

    traced = Traced(failing, text=True)
    traced.client.detokenize = broken  # type: ignore[assignment, method-assign]
    call(traced.app, PROMPT | {"prompt": [104, 105]})
    assert "no text for these ids" in caplog.text
    assert traced.attributes()["error.type"] == "engine_error"
    assert traced.span().status.status_code is StatusCode.ERROR
    for phase in ("queue", "prefill", "decode"):
        assert told(traced.span(f"specdec.{phase}"))["specdec.choice.index"] == 0
