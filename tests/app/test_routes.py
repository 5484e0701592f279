"""Health, models and the index."""

import json

import pytest

from app.fake_engine import FakeEngineClient
from app.main import create_app
from app.page.live import LivePage
from tests.app.harness import call

CARD = {
    "id": "fake",
    "object": "model",
    "created": 1_700_000_000,
    "owned_by": "foretoken",
    "max_model_len": 256,
    "vocab_size": 256,
    "limits": {
        "choices": 64,
        "prompt_tokens": 131_072,
        "spec_length": 8,
        "logprobs": 20,
        "stop": 4,
        "stop_token_ids": 64,
        "logit_bias": 1024,
        "bad_words": 64,
    },
    "sampling_defaults": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
    "speculation_defaults": {
        "policy": "goodput",
        "drafters": ["model", "ngram", "lookup", "prediction", "cascade", "suffix", "lookahead", "merged"],
        "drafter": "model",
        "verifier": "match",
    },
}


def test_health_is_ok_while_the_engine_is() -> None:
    done = call(create_app(FakeEngineClient()), method="GET", path="/health")
    assert (done.status, json.loads(done.reply)["status"]) == (200, "ok")


def test_health_is_a_503_with_the_reason_when_the_engine_is_not() -> None:
    client = FakeEngineClient()
    app = create_app(client)
    client.unhealthy = "no step for 12 s"
    done = call(app, method="GET", path="/health")
    body = json.loads(done.reply)
    assert (done.status, body["status"], body["reason"]) == (503, "unhealthy", "no step for 12 s")
    client.unhealthy = ""
    assert call(app, method="GET", path="/health").status == 200


def test_models_lists_the_one_model() -> None:
    app = create_app(FakeEngineClient())
    listed = json.loads(call(app, method="GET", path="/v1/models").reply)
    assert listed == {"object": "list", "data": [CARD]}
    assert json.loads(call(app, method="GET", path="/v1/models/fake").reply) == CARD


def test_a_models_name_may_hold_slashes() -> None:
    client = FakeEngineClient(name="org/model")
    done = call(create_app(client), method="GET", path="/v1/models/org/model")
    assert (done.status, json.loads(done.reply)["id"]) == (200, "org/model")


@pytest.mark.parametrize("page", [False, True])
def test_the_index_lists_only_routes_that_exist(page: bool) -> None:
    client = FakeEngineClient()
    app = create_app(client, live_page=LivePage(client) if page else None)
    index = json.loads(call(app, method="GET", path="/").reply)
    assert index["model"] == "fake"
    assert ("GET /ui" in index["routes"]) == page
    for route in index["routes"]:
        method, path = route.split()
        done = call(app, {}, method=method, path=path.replace("{id}", "fake"))
        assert done.status in (200, 400), route
