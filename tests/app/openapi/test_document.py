"""/openapi.json is true: every route, every field, every limit, and replies of each kind."""

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from starlette.routing import Route

from app.errors import KINDS
from app.fake_engine import FakeEngineClient
from app.keys import ApiKeys
from app.main import create_app
from app.metrics.meter import Meter
from app.openai import chat, request, tokens
from app.page.live import LivePage
from tests.app.harness import PROMPT, call, events

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "abc"}]}
GUESS = {"type": "content", "content": "abX"}


def app_for(**options: Any) -> Any:
    client = FakeEngineClient(reasoning_tags=("b", "c"))
    return create_app(client, meter=Meter(client), live_page=LivePage(client), **options)


@pytest.fixture(scope="module")
def document() -> Any:
    return json.loads(call(app_for(), method="GET", path="/openapi.json").reply)


def of_request(document: Any, name: str) -> Any:
    return document["components"]["schemas"][name]


def validate(document: Any, schema: Any, value: Any) -> None:
    jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(value)


def test_every_route_is_described_and_no_other(document: Any) -> None:
    """The live page has routes of its own, which are not part of the API."""
    routes = {route.path.replace(":path", "") for route in app_for().routes if isinstance(route, Route)}
    assert {path for path in routes if not path.startswith("/ui")} == document["paths"].keys()


@pytest.mark.parametrize(
    ("name", "body", "inert", "neutral"),
    [
        ("Body", request.Body, request.INERT, request.NEUTRAL),
        ("ChatBody", chat.ChatBody, chat.INERT, chat.NEUTRAL),
        ("TokenizeText", tokens.TokenizeText, set(), tokens.NEUTRAL),
    ],
)
def test_every_field_is_described_and_no_other(document: Any, name: str, body: Any, inert: Any, neutral: Any) -> None:
    schema = of_request(document, name)
    assert schema["properties"].keys() == {*body.model_fields, *inert, *neutral}
    assert schema["additionalProperties"] is False


def limits(schema: Any) -> dict[str, Any]:
    """Keyword → its value, also of the alternatives to null."""
    found = {key: schema[key] for key in ("minimum", "maximum", "exclusiveMinimum") if key in schema}
    for one in schema.get("anyOf", ()):
        found |= limits(one)
    return found


PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
NUMBERS = ("temperature", "top_p", "top_k", "min_p", "seed", *PENALTIES)
COUNTS = ("logprobs", "max_tokens", "max_completion_tokens", "n", "best_of", "min_tokens", "truncate_prompt_tokens")


@pytest.mark.parametrize("name", [*NUMBERS, *COUNTS])
def test_a_documented_limit_is_the_limit(document: Any, name: str) -> None:
    app, told = app_for(), limits(of_request(document, "Body")["properties"][name])
    assert told
    whole = name in COUNTS or name in ("top_k", "seed")
    step = 1 if whole else 1e-3
    for keyword, limit in told.items():
        outwards = step if keyword == "maximum" else -step
        beyond = limit if keyword == "exclusiveMinimum" else limit + outwards
        assert call(app, PROMPT | {name: beyond}).status == 400
        within = limit - outwards if keyword == "exclusiveMinimum" else limit
        done = call(app, PROMPT | {name: within})
        assert done.status == 200, done.reply


REPLIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", PROMPT),
    ("/v1/completions", PROMPT | {"n": 2, "best_of": 3, "logprobs": 2, "echo": True, "return_token_ids": True}),
    ("/v1/completions", PROMPT | {"prediction": GUESS, "speculation": {"steps": True, "tokens": True}}),
    ("/v1/completions", PROMPT | {"n": 2, "speculation": {"steps": True, "k": 2}}),
    ("/v1/completions", PROMPT | {"lossy": {"lenience": 0.5}, "speculation": {"verifier": "rejection"}}),
    ("/v1/completions", PROMPT | {"max_tokens": 0, "speculation": {"mode": "off"}}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}),
    ("/tokenize", {"prompt": "abc"}),
    ("/tokenize", CHAT),
    ("/detokenize", {"tokens": [97, 98]}),
]


@pytest.mark.parametrize(("path", "asked"), REPLIES)
def test_requests_and_replies_have_the_shapes_that_are_described(document: Any, path: str, asked: Any) -> None:
    operation = document["paths"][path]["post"]
    validate(document, operation["requestBody"]["content"]["application/json"]["schema"], asked)
    done = call(app_for(), asked, path=path)
    assert done.status == 200, done.reply
    shape = operation["responses"]["200"]["content"]["application/json"]["schema"]
    validate(document, shape, json.loads(done.reply))
    with pytest.raises(jsonschema.ValidationError):
        validate(document, shape, json.loads(done.reply) | {"surprise": 1})


STREAMS: list[tuple[str, dict[str, Any]]] = [
    (path, {name: value for name, value in asked.items() if name != "best_of"})
    for path, asked in REPLIES
    if path.startswith("/v1")
]
USAGE = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize("more", [{}, {"stream_options": USAGE}])
@pytest.mark.parametrize(("path", "asked"), STREAMS)
def test_chunks_have_the_shapes_that_are_described(
    document: Any, path: str, asked: dict[str, Any], more: dict[str, Any]
) -> None:
    *chunks, end = events(call(app_for(), asked | more | {"stream": True}, path=path))
    content = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    (last, data) = content["schema"]["properties"]["data"]["anyOf"]
    (shape, error) = data["contentSchema"]["anyOf"]
    assert {"const": end} == last
    for chunk in chunks:
        validate(document, shape, chunk)
    with pytest.raises(jsonschema.ValidationError):
        validate(document, error, chunks[0])


@pytest.mark.parametrize("path", ["/", "/health", "/tokenizer_info", "/version", "/v1/models", "/v1/models/fake"])
def test_replies_to_get_have_the_shapes_that_are_described(document: Any, path: str) -> None:
    described = document["paths"][path.replace("/fake", "/{id}")]["get"]["responses"]["200"]["content"]
    done = call(app_for(), method="GET", path=path)
    validate(document, described["application/json"]["schema"], json.loads(done.reply))


def test_every_kind_of_error_is_described(document: Any) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        described = document["paths"][path]["post"]["responses"].keys()
        assert described == {"200", *(str(kind.status) for kind in KINDS.values())}
    assert "text/event-stream" in document["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]


def test_keys_are_described_where_they_are_needed(document: Any) -> None:
    assert "security" not in document
    app = app_for(keys=ApiKeys.from_strings(["k"]))
    described = json.loads(call(app, method="GET", path="/openapi.json", headers={"authorization": "Bearer k"}).reply)
    assert described["security"] == [{"key": []}]
    assert "401" in described["paths"]["/v1/models"]["get"]["responses"]
    without_meter = json.loads(call(create_app(FakeEngineClient()), method="GET", path="/openapi.json").reply)
    assert "/metrics" not in without_meter["paths"]
