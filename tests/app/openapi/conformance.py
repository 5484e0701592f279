"""Requests that schemathesis makes from /openapi.json, valid and invalid ones, and the checks of every reply."""

from collections import Counter
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from app.fake_engine import FakeEngineClient
from app.main import create_app
from app.metrics.meter import Meter

CHECKED = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
WITH_BODIES = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
WITHOUT = ("/", "/health", "/metrics", "/tokenizer_info", "/version", "/v1/models", "/v1/models/{id}")

Seen = Counter[tuple[str, str, int]]  # (path, mode, status)


def run_cases(count: int, start: int = 0) -> Seen:
    """Make about `count` requests of an application over the fake engine. Raises for a reply that breaks its schema and
    for a status from 500 on. start: the seed."""
    client = FakeEngineClient()
    app = create_app(client, meter=Meter(client))
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    assert set(schema) == {*WITH_BODIES, *WITHOUT, "/openapi.json"}
    seen: Seen = Counter()
    for path in WITHOUT:
        _run(schema[path]["GET"], GenerationMode.POSITIVE, 10, start, seen)
    for path in WITH_BODIES:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            _run(schema[path]["POST"], mode, count // (2 * len(WITH_BODIES)), start, seen)
    assert client.open == {}, "a request is still running"
    return seen


def _run(operation: Any, mode: GenerationMode, count: int, start: int, seen: Seen) -> None:
    @seed(start)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def each(case: Any) -> None:
        response = case.call()
        seen[operation.path, mode.value, response.status_code] += 1
        case.validate_response(response, checks=CHECKED)

    each()
