"""POST /v1/completions without errors: shapes, chunks, usage, metrics, and the engine's requests."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.fake_engine import FakeEngineClient
from app.main import create_app
from app.openai.request import Body
from engine.types import REASONS, Output, Request, RequestRecord, RoundRecord, SamplingParams
from tests.app.harness import PROMPT, Exchange, call, events

USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 6,
    "total_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 0},
}


def record(request: Request, **values: Any) -> RequestRecord:
    """A finished request: queued 10 ms, first token at 30 ms, last at 130 ms, three rounds (one of them plain)."""
    facts: dict[str, Any] = {
        "k_max": 4,
        "verifier": "block",
        "drafter": "lookup",
        "arrived": 1.0,
        "admitted": 1.01,
        "first_token": 1.03,
        "finished": 1.13,
        "output_tokens": 6,
        "policy": "goodput",
        "rounds": [
            RoundRecord(4, REASONS.index("cap"), 0, 4, 2, 3, 0),
            RoundRecord(0, REASONS.index("load"), 0, 0, 0, 1, -1),
            RoundRecord(4, REASONS.index("policy"), 0, 3, 1, 2, 0),
        ],
    }
    return RequestRecord(request.id, seed=42, prompt_tokens=len(request.prompt_ids), **facts | values)


def three_rounds(request: Request) -> Iterator[Output]:
    yield Output(request.id, (1, 2, 3), "on")
    yield Output(request.id, (4,), "")  # half a character: the detokeniser holds it back
    yield Output(request.id, (5, 6), "e\u2028é", "stop", record=record(request))


def post(client: FakeEngineClient, **fields: Any) -> Exchange:
    return call(create_app(client), PROMPT | fields)


def test_a_whole_completion_has_openais_shape() -> None:
    client = FakeEngineClient(three_rounds)
    done = post(client, stream=False)
    body = json.loads(done.reply)
    assert (done.status, done.reply_headers["content-type"]) == (200, "application/json")
    assert body["id"] == f"cmpl-{client.submitted[0].id}"
    assert (body["object"], body["model"], body["seed"]) == ("text_completion", "fake", 42)
    assert isinstance(body["created"], int)
    assert body["choices"] == [{"index": 0, "text": "one\u2028é", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == USAGE


def test_metrics_follow_from_the_record() -> None:
    metrics = json.loads(post(FakeEngineClient(three_rounds)).reply)["metrics"]
    assert metrics == {
        "time_to_first_token_ms": 30.0,
        "generation_time_ms": 130.0,
        "queue_time_ms": 10.0,
        "mean_itl_ms": 20.0,
        "tokens_per_second": 46.154,
        "preemptions": 0,
        "speculative_decoding": {
            "mode": "auto",
            "policy": "goodput",
            "drafter": "lookup",
            "verifier": "block",
            "mean_acceptance_length": 2.5,
            "draft_acceptance_rate": 3 / 7,
            "acceptance_histogram": [0, 1, 1, 0, 0],
            "draft_length_histogram": [1, 0, 0, 0, 2],
            "decisions": {"policy": 1, "cap": 1, "load": 1},
            "num_spec_steps": 2,
            "num_accepted_draft_tokens": 3,
            "num_draft_tokens": 7,
            "num_spec_tokens": 4,
        },
    }


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"k_max": 0, "rounds": [RoundRecord(0, 0, 0, 0, 0, 1, -1)] * 3}, None),
        (
            {"policy": "off", "rounds": [RoundRecord(0, reason, 0, 0, 0, 1, -1) for reason in (-1, 0, 0)]},
            {
                "mode": "auto",
                "policy": "off",
                "drafter": "lookup",
                "verifier": "block",
                "mean_acceptance_length": 1.0,
                "draft_acceptance_rate": 0.0,
                "acceptance_histogram": [0] * 5,
                "draft_length_histogram": [2, 0, 0, 0, 0],
                "decisions": {"policy": 2},
                "num_spec_steps": 0,
                "num_accepted_draft_tokens": 0,
                "num_draft_tokens": 0,
                "num_spec_tokens": 4,
            },
        ),
    ],
    ids=["speculation off", "no round drafted"],
)
def test_metrics_without_drafts(values: dict[str, Any], expected: Any) -> None:
    def script(request: Request) -> list[Output]:
        return [Output(request.id, (1,), "x", "stop", record=record(request, **values))]

    metrics = json.loads(post(FakeEngineClient(script)).reply)["metrics"]
    assert metrics["speculative_decoding"] == expected


@pytest.mark.parametrize("steps", [False, True])
def test_a_draft_that_came_while_some_choices_ran(steps: bool) -> None:
    """The first choice had finished without drafts, and the second one was adopted (Intake.adopt)."""
    early = {"k_max": 0, "drafter": None, "fixed_k": 0, "rounds": [RoundRecord(0, 0, 0, 0, 0, 1, -1)] * 3}

    def script(request: Request) -> list[Output]:
        facts = {} if request.choice_index else early
        return [Output(request.id, (1,), "x", "stop", record=record(request, **facts))]

    done = post(FakeEngineClient(script), n=2, speculation={"steps": steps})
    assert done.status == 200
    told = json.loads(done.reply)["metrics"]["speculative_decoding"]
    assert (told["mode"], told["drafter"], told["num_spec_tokens"]) == ("auto", "lookup", 4)
    assert told["draft_length_histogram"] == [4, 0, 0, 0, 2]
    assert sum(told["draft_length_histogram"]) == sum(told["decisions"].values())


def test_a_single_token_has_no_gap_between_tokens() -> None:
    def script(request: Request) -> list[Output]:
        return [Output(request.id, (1,), "x", "length", record=record(request, output_tokens=1))]

    assert json.loads(post(FakeEngineClient(script)).reply)["metrics"]["mean_itl_ms"] is None


def test_a_stream_sends_one_event_per_output_with_text_and_ends_with_usage() -> None:
    client = FakeEngineClient(three_rounds)
    done = post(client, stream=True)
    *chunks, end = events(done)
    assert done.status == 200
    assert done.reply_headers["content-type"].startswith("text/event-stream")
    assert done.reply_headers["cache-control"] == "no-cache"
    assert done.reply_headers["x-accel-buffering"] == "no"
    assert "content-length" not in done.reply_headers
    assert end == "[DONE]"
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["on", "e\u2028é"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "stop"]
    assert {(chunk["id"], chunk["object"], chunk["created"]) for chunk in chunks} == {
        (f"cmpl-{client.submitted[0].id}", "text_completion", chunks[0]["created"])
    }
    assert "usage" not in chunks[0]
    assert chunks[-1]["usage"] == USAGE
    assert chunks[-1]["metrics"]["speculative_decoding"]["num_spec_steps"] == 2
    assert chunks[-1]["seed"] == 42


def test_include_usage_gives_the_usage_a_chunk_of_its_own() -> None:
    done = post(FakeEngineClient(three_rounds), stream=True, stream_options={"include_usage": True})
    *chunks, last, end = events(done)
    assert end == "[DONE]"
    assert [chunk["usage"] for chunk in chunks] == [None, None]
    assert not any("metrics" in chunk for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 9
    assert last["metrics"]["queue_time_ms"] == 10.0


def test_a_stream_and_a_whole_reply_say_the_same() -> None:
    whole = json.loads(post(FakeEngineClient(), max_tokens=8).reply)
    *chunks, _ = events(post(FakeEngineClient(), max_tokens=8, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"] == "abcabcab"
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]


def test_no_raw_line_end_but_the_events_own_reaches_the_wire() -> None:
    """U+2028 is legal in JSON, but many readers of streams take it for the end of a line."""
    done = post(FakeEngineClient(three_rounds), stream=True)
    assert len(done.reply.decode().splitlines()) == done.reply.count(b"\n")


def test_every_sampling_field_reaches_the_engine() -> None:
    client = FakeEngineClient()
    fields = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "seed": -3,
        "stop": ["x", "yz"],
        "ignore_eos": True,
        "presence_penalty": 0.5,
        "frequency_penalty": -1,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 1, "17": -100.0},
        "stop_token_ids": [9, 8],
        "allowed_token_ids": [97, 98],
        "bad_words": ["b", "bc"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 4,
        "speculation": {"k": 3, "drafter": "lookup", "verifier": "block"},
    }
    assert post(client, **fields).status == 200
    (request,) = client.submitted
    assert request.params == SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        seed=-3,
        stop=("x", "yz"),
        ignore_eos=True,
        presence_penalty=0.5,
        frequency_penalty=-1.0,
        repetition_penalty=1.1,
        logit_bias=((5, 1.0), (17, -100.0)),
        stop_token_ids=(9, 8),
        allowed_token_ids=(97, 98),
        bad_word_ids=((98,), (98, 99)),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=4,
        prompt_logprobs=None,
    )
    assert (request.k, request.drafter, request.verifier) == (3, "lookup", "block")
    untouched = Body.model_fields.keys() - fields.keys() - {"model", "prompt", "n", "echo", "stream", "stream_options"}
    assert untouched == {
        "prediction",
        "lossy",
        "cache_salt",
        "deadline_s",
        "add_special_tokens",
        "best_of",
        "max_completion_tokens",
        "return_token_ids",
        "truncate_prompt_tokens",
    }  # which have tests of their own


def test_defaults_and_nulls_reach_the_engine_as_defaults() -> None:
    client = FakeEngineClient()
    names = Body.model_fields.keys() - PROMPT.keys()
    assert post(client, **dict.fromkeys(names)).status == 200
    (request,) = client.submitted
    assert request == Request(request.id, (97, 98, 99), group=request.id)


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [("hé", (104, 195, 169)), (["hi"], (104, 105)), ([1, 2], (1, 2)), ([[3]], (3,))],
)
def test_the_forms_of_a_prompt(prompt: Any, ids: tuple[int, ...]) -> None:
    client = FakeEngineClient()
    assert post(client, prompt=prompt).status == 200
    assert client.submitted[0].prompt_ids == ids


def test_stop_may_be_one_string() -> None:
    client = FakeEngineClient()
    assert post(client, stop="end").status == 200
    assert client.submitted[0].params.stop == ("end",)


def test_json_is_read_whatever_the_content_type_says() -> None:
    """curl -d labels its body as a form."""

    async def go() -> None:
        app = create_app(FakeEngineClient())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            for content_type in ("application/x-www-form-urlencoded", "text/plain", "application/json"):
                headers = {"content-type": content_type}
                reply = await http.post("/v1/completions", content=json.dumps(PROMPT), headers=headers)
                assert reply.status_code == 200
                assert reply.json()["choices"][0]["text"] == "abcabcabcabcabca"

    asyncio.run(go())


def test_a_finished_request_is_not_cancelled() -> None:
    client = FakeEngineClient()
    for stream in (False, True):
        post(client, stream=stream)
    assert (client.open, client.cancelled) == ({}, [])


def test_requests_run_side_by_side() -> None:
    """If the server ran one request at a time, two requests that wait for each other would never end."""
    client = FakeEngineClient()

    def both_open(request: Request) -> Iterator[Output]:
        while len(client.submitted) < 2:
            yield Output(request.id, (), "")
        yield Output(request.id, (1,), "x", "stop", record=record(request))

    client.outputs_of = both_open
    app = create_app(client)

    async def go() -> list[Exchange]:
        body = json.dumps(PROMPT).encode()
        return await asyncio.wait_for(asyncio.gather(*(Exchange(app, body).run() for _ in range(2))), 30)

    assert [done.status for done in asyncio.run(go())] == [200, 200]
