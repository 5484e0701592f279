"""What /v1/completions refuses, each with the status, the field's name and the reason, before the engine sees it."""

import json
from typing import Any

import pytest

from app.fake_engine import FakeEngineClient
from app.main import create_app
from app.openai.request import INERT, NEUTRAL, Body, parse
from tests.app.harness import PROMPT, call

CARD = FakeEngineClient().model

GUESS = {"type": "content", "content": "abc"}
REJECTION = {"speculation": {"verifier": "rejection"}}

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"model": None}, "model", "model is required"),
    ({"model": 3}, "model", "valid string"),
    ({"prompt": None}, "prompt", "prompt is required"),
    ({"prompt": 3}, "prompt", "must be a string"),
    ({"prompt": {"text": "a"}}, "prompt", "must be a string"),
    ({"prompt": ["a", [1]]}, "prompt", "must be a string"),
    ({"prompt": [[1], 2]}, "prompt", "must be a string"),
    ({"prompt": ["a", "\ud800"]}, "prompt", "lone surrogate"),
    ({"prompt": ["a", ""]}, "prompt", "at least one token"),
    ({"prompt": ["a"] * 65}, "prompt", "at most 64 choices"),
    ({"prompt": ["a"] * 13, "n": 5}, "n", "13 × n = 5 make 65"),
    ({"n": 65}, "n", "at most 64 choices"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": True}, "n", "valid integer"),
    ({"n": 2.0}, "n", "valid integer"),
    ({"echo": 1}, "echo", "valid boolean"),
    ({"logprobs": -1}, "logprobs", "between 0 and 20"),
    ({"logprobs": 21}, "logprobs", "between 0 and 20"),
    ({"logprobs": True}, "logprobs", "valid integer"),
    ({"presence_penalty": 2.1}, "presence_penalty", "between -2 and 2"),
    ({"presence_penalty": False}, "presence_penalty", "valid number"),
    ({"presence_penalty": float("nan")}, "presence_penalty", "finite"),
    ({"frequency_penalty": -2.1}, "frequency_penalty", "between -2 and 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "between 0.01 and 10"),
    ({"logit_bias": [[5, 1]]}, "logit_bias", "must be an object"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "'a', which is not a token id"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "not a token id"),
    ({"logit_bias": {"1.0": 1}}, "logit_bias", "not a token id"),
    ({"logit_bias": {"²": 1}}, "logit_bias", "not a token id"),
    ({"logit_bias": {"٣": 1}}, "logit_bias", "not a token id"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "not a token id"),
    ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias", "a token twice"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "between -100 and 100"),
    ({"logit_bias": {"5": 10**400}}, "logit_bias", "between -100 and 100"),
    ({"logit_bias": {"5": float("nan")}}, "logit_bias", "between -100 and 100"),
    ({"logit_bias": {"5": "1"}}, "logit_bias", "must be a number"),
    ({"logit_bias": {"5": True}}, "logit_bias", "must be a number"),
    ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias", "at most 1024"),
    ({"stop_token_ids": 5}, "stop_token_ids", "list of token ids"),
    ({"stop_token_ids": [1, True]}, "stop_token_ids", "list of token ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "list of token ids"),
    ({"stop_token_ids": list(range(65))}, "stop_token_ids", "at most 64"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output", "valid boolean"),
    ({"prompt": [1, "a"]}, "prompt", "must be a string"),
    ({"prompt": [1, True]}, "prompt", "must be a string"),
    ({"prompt": [1, 2.0]}, "prompt", "must be a string"),
    ({"prompt": [-1]}, "prompt", "integers from 0"),
    ({"prompt": [["a"]]}, "prompt", "must be a string"),
    ({"prompt": "\ud800"}, "prompt", "lone surrogate"),
    ({"max_tokens": -1}, "max_tokens", "must not be negative"),
    ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
    ({"max_tokens": "16"}, "max_tokens", "valid integer"),
    ({"max_tokens": True}, "max_tokens", "valid integer"),
    ({"min_tokens": -1}, "min_tokens", "between 0 and max_tokens"),
    ({"min_tokens": 17}, "min_tokens", "between 0 and max_tokens"),
    ({"temperature": -0.1}, "temperature", "between 0 and 2"),
    ({"temperature": 2.1}, "temperature", "between 0 and 2"),
    ({"temperature": "0"}, "temperature", "valid number"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"temperature": float("nan")}, "temperature", "finite"),
    ({"temperature": float("inf")}, "temperature", "finite"),
    ({"temperature": 10**400}, "temperature", "valid number"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"top_p": 1.01}, "top_p", "at most 1"),
    ({"top_k": -2}, "top_k", "between 0 (every token) and"),
    ({"top_k": 10**400}, "top_k", "between 0 (every token) and"),
    ({"min_p": 1.5}, "min_p", "between 0 and 1"),
    ({"seed": 2**63}, "seed", "within ±"),
    ({"seed": 1.0}, "seed", "valid integer"),
    ({"stop": 3}, "stop", "must be a string or a list of strings"),
    ({"stop": ["a", 3]}, "stop", "must be a string or a list of strings"),
    ({"stop": [""]}, "stop", "empty string"),
    ({"stop": list("abcde")}, "stop", "at most 4"),
    ({"stop": "\udc00"}, "stop", "lone surrogate"),
    ({"ignore_eos": 1}, "ignore_eos", "valid boolean"),
    ({"stream": "true"}, "stream", "valid boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ({"stream": True, "stream_options": []}, "stream_options", "dictionary"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown field"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "valid boolean"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "not sup",
    ),
    ({"stream": True, "stream_options": {"include_obfuscation": 0}}, "stream_options.include_obfuscation", "boolean"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options", "needs include_usage"),
    ({"best_of": 0}, "best_of", "greater than or equal to 1"),
    ({"best_of": True}, "best_of", "valid integer"),
    ({"n": 3, "best_of": 2}, "best_of", "at least n"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least one token"),
    ({"allowed_token_ids": 5}, "allowed_token_ids", "list of token ids"),
    ({"allowed_token_ids": [5, -1]}, "allowed_token_ids", "integers from 0"),
    ({"bad_words": "a"}, "bad_words", "must be a list of strings"),
    ({"bad_words": ["a", 3]}, "bad_words", "must be a list of strings"),
    ({"bad_words": ["a", " "]}, "bad_words", "empty word"),
    ({"bad_words": ["\ud800"]}, "bad_words", "surrogate"),
    ({"bad_words": ["a"] * 65}, "bad_words", "at most 64 words"),
    ({"bad_words": ["a" * 129]}, "bad_words", "at most 128 tokens"),
    ({"skip_special_tokens": 0}, "skip_special_tokens", "valid boolean"),
    ({"return_token_ids": 1}, "return_token_ids", "valid boolean"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater than or equal to -1"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "between 1 and the context of 256"),
    ({"truncate_prompt_tokens": 257}, "truncate_prompt_tokens", "between 1 and the context of 256"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "mean the same"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "must not be negative"),
    ({"max_completion_tokens": 300}, "max_completion_tokens", "max_completion_tokens 300 make 303"),
    ({"speculation": 3}, "speculation", "dictionary"),
    ({"speculation": {"mode": "off", "k": 3}}, "speculation", "cannot be off and draft"),
    ({"speculation": {"mode": "fast"}}, "speculation.mode", "'auto', 'off' or 'fixed'"),
    ({"speculation": {"mode": False}}, "speculation.mode", "'auto', 'off' or 'fixed'"),
    ({"speculation": {"mode": "fixed"}}, "speculation.k", "needs k"),
    ({"speculation": {"mode": "fixed", "drafter": "lookup"}}, "speculation.k", "needs k"),
    ({"speculation": {"mode": "auto", "k": 3}}, "speculation.k", "the policy chooses k"),
    ({"speculation": {"mode": "auto", "k": 0}}, "speculation.k", "the policy chooses k"),
    ({"speculation": {"mode": "auto", "k": 3, "max_k": 3}}, "speculation.k", "the policy chooses k"),
    ({"speculation": {"mode": "auto", "max_k": 9}}, "speculation.max_k", "maximum, 8"),
    ({"speculation": {"max_k": 9}}, "speculation.max_k", "maximum, 8"),
    ({"speculation": {"max_k": 0}}, "speculation.max_k", "greater than or equal to 1"),
    ({"speculation": {"max_k": True}}, "speculation.max_k", "valid integer"),
    ({"speculation": {"max_k": "4"}}, "speculation.max_k", "valid integer"),
    ({"speculation": {"k": 3, "max_k": 4}}, "speculation.max_k", "no effect"),
    ({"speculation": {"mode": "fixed", "k": 3, "max_k": 4}}, "speculation.max_k", "no effect"),
    ({"speculation": {"mode": "off", "max_k": 4}}, "speculation.max_k", "no effect"),
    ({"speculation": {"k": 0, "max_k": 4}}, "speculation.max_k", "no effect"),
    ({"speculation": {"k": -1}}, "speculation.k", "greater than or equal to 0"),
    ({"speculation": {"k": 9}}, "speculation.k", "maximum, 8"),
    ({"speculation": {"k": 1.0}}, "speculation.k", "valid integer"),
    ({"speculation": {"depth": 1}}, "speculation.depth", "unknown field"),
    ({"speculation": {"drafter": "medusa"}}, "speculation.drafter", "'model', 'ngram'"),
    ({"speculation": {"drafter": "prediction"}}, "speculation.drafter", "needs a prediction"),
    ({"speculation": {"mode": "off", "drafter": "lookup"}}, "speculation.drafter", "no effect"),
    ({"speculation": {"verifier": "typical"}}, "speculation.verifier", "'match', 'rejection'"),
    ({"speculation": {"k": 0, "verifier": "block"}}, "speculation.verifier", "no effect"),
    ({"prediction": "abc"}, "prediction", "dictionary"),
    ({"prediction": {"content": "abc"}}, "prediction.type", "required"),
    ({"prediction": {"type": "text", "content": "abc"}}, "prediction.type", "'content'"),
    ({"prediction": {"type": "content"}}, "prediction.content", "required"),
    ({"prediction": {"type": "content", "content": 3}}, "prediction.content", "must be a string"),
    ({"prediction": {"type": "content", "content": "\ud800"}}, "prediction.content", "surrogate"),
    ({"prediction": {"type": "content", "content": ["abc"]}}, "prediction.content", "must be a string"),
    ({"prediction": {"type": "content", "content": [{"type": "image", "text": "a"}]}}, "prediction.content", "must be"),
    (
        {"prediction": {"type": "content", "content": [{"type": "text", "text": "a", "more": 1}]}},
        "prediction.content",
        "must be",
    ),
    (
        {"prediction": {"type": "content", "content": [{"type": "text", "text": "\ud800"}]}},
        "prediction.content",
        "surrogate",
    ),
    ({"prediction": {"type": "content", "content": ""}}, "prediction", "at least one token"),
    ({"prediction": {"type": "content", "content": "a" * 257}}, "prediction", "the prediction has 257: shorten it"),
    ({"prediction": GUESS, "speculation": {"mode": "off"}}, "prediction", "no effect"),
    ({"prediction": GUESS, "speculation": {"k": 0}}, "prediction", "no effect"),
    ({"prediction": GUESS, "speculation": {"drafter": "lookup"}}, "prediction", "would not look at"),
    ({"lossy": 0.5}, "lossy", "dictionary"),
    ({"lossy": {}}, "lossy", "lenience"),
    ({"lossy": {"lenience": 0}} | REJECTION, "lossy.lenience", "greater than 0"),
    ({"lossy": {"lenience": 1}} | REJECTION, "lossy.lenience", "less than 1"),
    ({"lossy": {"lenience": float("nan")}} | REJECTION, "lossy.lenience", "finite"),
    ({"lossy": {"lenience": 0.5, "tolerance": 1}} | REJECTION, "lossy.tolerance", "unknown field"),
    ({"lossy": {"lenience": 0.5}}, "lossy", "this request's is 'match'"),
    ({"lossy": {"lenience": 0.5}, "speculation": {"verifier": "block"}}, "lossy", "'block'"),
    ({"lossy": {"lenience": 0.5}, "temperature": 0} | REJECTION, "lossy", "temperature above 0"),
    ({"lossy": {"lenience": 0.5}, "speculation": {"mode": "off"}}, "lossy", "no effect"),
    ({"cache_salt": ""}, "cache_salt", "at least 1 character"),
    ({"cache_salt": "a" * 257}, "cache_salt", "at most 256 characters"),
    ({"cache_salt": 3}, "cache_salt", "valid string"),
    ({"cache_salt": ["a"]}, "cache_salt", "valid string"),
    ({"cache_salt": "\ud800"}, "cache_salt", "unicode"),
    ({"deadline_s": 0}, "deadline_s", "greater than 0"),
    ({"deadline_s": -1}, "deadline_s", "greater than 0"),
    ({"deadline_s": "1"}, "deadline_s", "valid number"),
    ({"deadline_s": True}, "deadline_s", "valid number"),
    ({"deadline_s": [1]}, "deadline_s", "valid number"),
    ({"deadline_s": float("nan")}, "deadline_s", "finite"),
    ({"deadline_s": float("inf")}, "deadline_s", "finite"),
    ({"deadline_s": 10**400}, "deadline_s", "valid number"),
    ({"speculatoin": {"k": 1}}, "speculatoin", "unknown field 'speculatoin'"),
    ({"messages": []}, "messages", "unknown field"),
    ({"\ud800": 1}, "\ud800", "unknown field"),
    ({"prompt": [300]}, "prompt", "token id"),
]


def fault(fields: dict[str, Any], raw: bytes | None = None, **options: Any) -> tuple[int, dict[str, Any]]:
    """Status and error of a request that must not get through to the engine."""
    client = FakeEngineClient(**options)
    done = call(create_app(client), fields) if raw is None else call(create_app(client), chunks=[raw])
    assert client.submitted == []
    body = json.loads(done.reply)
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert done.finished
    return done.status, body["error"]


@pytest.mark.parametrize(("fields", "param", "reason"), REFUSED, ids=[f"{fields}"[:60] for fields, *_ in REFUSED])
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_field_is_a_400_that_names_it(fields: dict[str, Any], param: str, reason: str, stream: bool) -> None:
    base = PROMPT | ({"stream": True} if stream and "stream_options" not in fields else {})
    status, error = fault({name: value for name, value in (base | fields).items() if value is not None})
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert reason in error["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_beam_search", True),
        ("length_penalty", 0.5),
        ("spaces_between_special_tokens", False),
        ("return_tokens_as_token_ids", True),
        ("priority", 1),
        ("prompt_logprobs", 1),
        ("suffix", "end"),
        ("response_format", {"type": "json_object"}),
    ],
)
def test_a_field_that_does_not_work_yet_is_refused_by_name(name: str, value: Any) -> None:
    status, error = fault(PROMPT | {name: value})
    assert (status, error["param"], error["code"]) == (400, name, "unsupported_field")
    assert error["message"] == f"{name} is not supported yet"


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_a_field_that_does_not_work_yet_may_ask_for_nothing(name: str) -> None:
    for value in (NEUTRAL[name], None):
        assert parse(json.dumps(PROMPT | {name: value}).encode(), CARD).model == "fake"


@pytest.mark.parametrize("name", sorted(INERT))
@pytest.mark.parametrize("value", [None, "x", True, {"a": "b"}])
def test_an_inert_field_changes_nothing(name: str, value: Any) -> None:
    assert parse(json.dumps(PROMPT | {name: value}).encode(), CARD) == parse(json.dumps(PROMPT).encode(), CARD)


def test_stream_options_may_ask_for_nothing() -> None:
    plain = PROMPT | {"stream": True}
    for value in (False, None):
        options = {"include_obfuscation": value, "continuous_usage_stats": value}
        assert parse(json.dumps(plain | {"stream_options": options}).encode(), CARD) == parse(
            json.dumps(plain).encode(), CARD
        )


def test_a_top_k_of_minus_one_is_every_token() -> None:
    assert parse(json.dumps(PROMPT | {"top_k": -1}).encode(), CARD).params.top_k == 0


def test_every_field_is_of_one_kind_only() -> None:
    assert not INERT & NEUTRAL.keys()
    assert not Body.model_fields.keys() & (INERT | NEUTRAL.keys())


def test_more_candidates_than_the_engine_holds_are_refused() -> None:
    status, error = fault(PROMPT | {"prompt": ["a"] * 13, "best_of": 5})
    assert (status, error["param"]) == (400, "best_of")
    assert "13 × best_of = 5 make 65" in error["message"]


def test_best_of_above_n_is_not_streamed_and_equal_to_n_is() -> None:
    status, error = fault(PROMPT | {"best_of": 2, "stream": True})
    assert (status, error["param"]) == (400, "best_of")
    assert "cannot be streamed" in error["message"]
    assert call(create_app(FakeEngineClient()), PROMPT | {"n": 2, "best_of": 2, "stream": True}).status == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"prompt=abc",
        b"\xff\xfe\xfa",
        b"[" * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
        b"[]",
        b'"a"',
        b"null",
    ],
    ids=["empty", "cut", "form", "not unicode", "deep", "long number", "array", "string", "null"],
)
def test_a_body_that_is_not_a_json_object_is_a_400(raw: bytes) -> None:
    status, error = fault({}, raw)
    assert (status, error["param"], error["code"]) == (400, None, "invalid_json")


def test_another_model_is_a_404() -> None:
    status, error = fault(PROMPT | {"model": "gpt"})
    assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert "'gpt'" in error["message"]
    assert "'fake'" in error["message"]


@pytest.mark.parametrize("prompt", ["", [], [""], [[]]])
def test_an_empty_prompt_is_a_400(prompt: Any) -> None:
    status, error = fault(PROMPT | {"prompt": prompt})
    assert (status, error["param"]) == (400, "prompt")
    assert "at least one token" in error["message"]


@pytest.mark.parametrize(
    ("length", "max_tokens", "param"),
    [(24, 9, "max_tokens"), (32, 1, "prompt"), (40, 1, "prompt"), (1, 32, "max_tokens")],
)
def test_what_exceeds_the_context_is_a_400_with_the_numbers(length: int, max_tokens: int, param: str) -> None:
    fields = PROMPT | {"prompt": "a" * length, "max_tokens": max_tokens}
    status, error = fault(fields, max_model_len=32)
    assert (status, error["param"], error["code"]) == (400, param, "context_length_exceeded")
    for number in (32, length, max_tokens, length + max_tokens):
        assert str(number) in error["message"]


def test_what_just_fits_the_context_is_served() -> None:
    done = call(create_app(FakeEngineClient(max_model_len=32)), PROMPT | {"prompt": "a" * 24, "max_tokens": 8})
    assert done.status == 200


@pytest.mark.parametrize(
    ("prompt", "has"),
    [
        ([[1] * 40, [2] * 21], "these 2 have 61"),
        (["a" * 40, "b" * 21], "these 2 have at least 61"),
        ([1] * 61, "these 1 have 61"),
    ],
)
def test_more_prompt_tokens_than_a_request_may_have_are_refused_before_any_work(prompt: Any, has: str) -> None:
    client = FakeEngineClient(max_prompt_tokens=60)
    done = call(create_app(client), PROMPT | {"prompt": prompt, "n": 3})
    error = json.loads(done.reply)["error"]
    assert (done.status, error["param"], error["code"]) == (400, "prompt", "too_many_prompt_tokens")
    assert error["message"] == f"the prompts of one request may have 60 tokens together; {has}"
    assert client.tokenized == []
    assert client.submitted == []


def test_texts_are_tokenized_only_until_they_are_too_many() -> None:
    """é is two of the fake's tokens: only tokenizing shows that 20 of them are more than 30."""
    client = FakeEngineClient(max_prompt_tokens=30)
    done = call(create_app(client), PROMPT | {"prompt": ["é" * 10, "é" * 6, "é", "é"]})
    error = json.loads(done.reply)["error"]
    assert (done.status, error["code"]) == (400, "too_many_prompt_tokens")
    assert [text for _, text in client.tokenized] == ["é" * 10, "é" * 6]
    assert client.submitted == []


@pytest.mark.parametrize("n", [1, 3])
def test_choices_of_one_prompt_share_its_reading(n: int) -> None:
    """The limit counts each prompt once, whatever n is."""
    done = call(create_app(FakeEngineClient(max_prompt_tokens=60)), PROMPT | {"prompt": ["a" * 40, "b" * 20], "n": n})
    assert done.status == 200
