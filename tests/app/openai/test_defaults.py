"""Fields that a request leaves out: the checkpoint's defaults hold, and a request's own value always wins. And whether
a prompt gets special tokens."""

import json
from dataclasses import replace
from typing import Any

import pytest

from app.fake_engine import FakeEngineClient
from app.main import create_app
from engine.types import SamplingParams
from tests.app.harness import call

TUNED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
OWN = {"temperature": 1.5, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


def tuned_client(**defaults: float) -> FakeEngineClient:
    client = FakeEngineClient()
    client.model = replace(client.model, sampling_defaults=defaults)
    return client


def params(client: FakeEngineClient, **fields: Any) -> SamplingParams:
    done = call(create_app(client), {"model": "fake", "prompt": "ab", **fields})
    assert done.status == 200, done.reply
    return client.submitted[-1].params


def of(params: SamplingParams) -> dict[str, float]:
    return {name: getattr(params, name) for name in TUNED}


def test_the_checkpoints_defaults_hold_where_a_request_says_nothing() -> None:
    assert of(params(tuned_client(**TUNED))) == TUNED
    assert of(params(tuned_client(**TUNED), **dict.fromkeys(TUNED))) == TUNED  # null is nothing
    assert of(params(tuned_client())) == {**OWN, "temperature": 1.0, "top_k": 0}


@pytest.mark.parametrize("name", OWN)
def test_a_requests_own_value_wins(name: str) -> None:
    """Also the value that is OpenAI's default."""
    said = of(params(tuned_client(**TUNED), **{name: OWN[name]}))
    assert said == {**TUNED, name: 0 if name == "top_k" else OWN[name]}


def test_fields_are_checked_against_the_defaults_in_force() -> None:
    """A lossy request needs a temperature above 0."""
    lossy = {"model": "fake", "prompt": "ab", "lossy": {"lenience": 0.5}, "speculation": {"verifier": "rejection"}}
    assert call(create_app(tuned_client()), lossy).status == 200
    done = call(create_app(tuned_client(temperature=0)), lossy)
    assert (done.status, json.loads(done.reply)["error"]["param"]) == (400, "lossy")


def test_the_model_object_tells_the_defaults_in_force() -> None:
    def told(client: FakeEngineClient) -> Any:
        return json.loads(call(create_app(client), method="GET", path="/v1/models/fake").reply)["sampling_defaults"]

    openai = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert told(tuned_client()) == openai
    assert told(tuned_client(top_k=20)) == openai | {"top_k": 20}
    for client in (tuned_client(), tuned_client(**TUNED)):
        assert told(client) == of(params(client))


def ids(**fields: Any) -> tuple[int, ...]:
    """The engine's prompt, with a tokenizer that puts token 2 before a text."""
    client = FakeEngineClient()
    client.bos = (2,)
    done = call(create_app(client), {"model": "fake", "prompt": "ab", **fields})
    assert done.status == 200, done.reply
    return client.submitted[-1].prompt_ids


def test_special_tokens_are_added_to_texts_unless_the_request_says_no() -> None:
    assert ids() == ids(add_special_tokens=True) == ids(add_special_tokens=None) == (2, 97, 98)
    assert ids(add_special_tokens=False) == (97, 98)
    assert ids(prompt=["ab", "cd"], add_special_tokens=False) == (99, 100)


@pytest.mark.parametrize("add", [True, False, None])
def test_token_ids_are_taken_as_they_are(add: bool | None) -> None:
    assert ids(prompt=[97, 98], add_special_tokens=add) == (97, 98)


@pytest.mark.parametrize("add", [True, False])
def test_a_prediction_gets_no_special_tokens(add: bool) -> None:
    client = FakeEngineClient()
    client.bos = (2,)
    prediction = {"type": "content", "content": "cd"}
    call(create_app(client), {"model": "fake", "prompt": "ab", "prediction": prediction, "add_special_tokens": add})
    assert client.submitted[-1].prediction_ids == (99, 100)


def test_an_empty_text_without_special_tokens_is_no_prompt() -> None:
    client = FakeEngineClient()
    client.bos = (2,)
    empty = {"model": "fake", "prompt": "", "max_tokens": 1}
    assert call(create_app(client), empty).status == 200
    assert call(create_app(client), empty | {"add_special_tokens": False}).status == 400


@pytest.mark.parametrize("value", [1, "false", [True]])
def test_add_special_tokens_is_true_or_false(value: Any) -> None:
    done = call(create_app(FakeEngineClient()), {"model": "fake", "prompt": "ab", "add_special_tokens": value})
    assert (done.status, json.loads(done.reply)["error"]["param"]) == (400, "add_special_tokens")
