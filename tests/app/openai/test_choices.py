"""Several choices in one reply: their requests, their order, their chunks, and that all are submitted or none."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from app.errors import EngineFailure
from app.fake_engine import FakeEngineClient, spell
from app.main import create_app
from app.openai.choices import merged
from app.openai.replies import metrics, usage
from engine.types import SEED_RANGE, Output, Request, RequestRecord, RoundRecord
from tests.app.harness import PROMPT, Exchange, call, events
from tests.app.test_disconnect import run


def post(client: FakeEngineClient, **fields: Any) -> Exchange:
    return call(create_app(client), PROMPT | fields)


def test_each_choice_is_a_request_of_its_own_prompt_by_prompt() -> None:
    client = FakeEngineClient()
    done = post(client, prompt=["ab", "c"], n=3, max_tokens=2)
    asked = client.submitted
    assert [(r.prompt_ids, r.prompt_index, r.choice_index) for r in asked] == [
        (ids, prompt, choice) for prompt, ids in enumerate([(97, 98), (99,)]) for choice in range(3)
    ]
    base = json.loads(done.reply)["id"].removeprefix("cmpl-")
    assert [r.id for r in asked] == [f"{base}-{i}" for i in range(6)]
    choices = json.loads(done.reply)["choices"]
    assert [(c["index"], c["text"]) for c in choices] == [
        *((i, "ab") for i in range(3)),
        *((i, "cc") for i in (3, 4, 5)),
    ]


def test_a_single_choice_keeps_the_requests_id_and_leaves_the_seed_to_the_engine() -> None:
    client = FakeEngineClient()
    done = post(client, n=1)
    (request,) = client.submitted
    assert json.loads(done.reply)["id"] == f"cmpl-{request.id}"
    assert request.params.seed is None


def test_choices_share_the_seed_that_the_reply_names() -> None:
    drawn = []
    for _ in range(2):
        client = FakeEngineClient()
        told = json.loads(post(client, n=2).reply)["seed"]
        assert {r.params.seed for r in client.submitted} == {told}
        assert 0 <= told < SEED_RANGE
        drawn.append(told)
    assert drawn[0] != drawn[1]  # by chance alike: once in 2^53
    for seed in (0, 7):
        client = FakeEngineClient()
        assert json.loads(post(client, n=2, seed=seed).reply)["seed"] == seed
        assert [r.params.seed for r in client.submitted] == [seed, seed]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("free", "status"), [(0, 429), (1, 429), (2, 429), (3, 200)])
def test_all_choices_are_submitted_or_none(free: int, status: int, stream: bool) -> None:
    client = FakeEngineClient(max_open=free)
    done = post(client, n=3, stream=stream)
    assert done.status == status
    assert len(client.submitted) == (3 if status == 200 else 0)
    assert client.open == {}
    assert client.cancelled == []
    if status == 429:
        assert done.reply_headers["retry-after"] == "2"


def test_no_choice_waits_for_another() -> None:
    """Each stream goes on only once the other has gone on: read one after the other, they would never end."""
    client = FakeEngineClient()
    said = [0, 0]

    def in_turns(request: Request) -> Iterator[Output]:
        mine = request.choice_index
        for output in spell(request):
            while said[mine] > said[1 - mine]:
                yield Output(request.id, (), "")
            said[mine] += 1
            yield output

    client.outputs_of = in_turns
    *chunks, _ = events(post(client, n=2, stream=True, max_tokens=9))
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert sorted(order) == [0, 0, 0, 1, 1, 1]
    assert order not in ([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0])


@pytest.mark.parametrize("include_usage", [False, True])
def test_each_choice_of_a_stream_finishes_and_the_usage_comes_once(include_usage: bool) -> None:
    client = FakeEngineClient(lambda request: list(spell(request))[request.choice_index :])  # of different lengths
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    *chunks, end = events(post(client, prompt=["ab", "cde"], n=2, max_tokens=6, stream=True, **options))
    assert end == "[DONE]"
    finished = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(finished) == [0, 1, 2, 3]
    assert [bool(chunk.get("usage")) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    usage = chunks[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 24, 29)
    assert (chunks[-1]["choices"] == []) == include_usage


def fails(request: Request, after: int) -> Iterator[Output]:
    for _ in range(after):
        yield Output(request.id, (1,), "a")
    if request.choice_index == 1:
        yield Output(request.id, (), "", "error", error="choice 1 broke")


@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_that_fails_first_is_the_status(stream: bool) -> None:
    client = FakeEngineClient(lambda request: fails(request, 0))
    done = post(client, n=3, stream=stream)
    assert (done.status, json.loads(done.reply)["error"]["message"]) == (500, "choice 1 broke")
    assert len(client.cancelled) == 2


def test_a_choice_that_fails_midway_ends_the_stream() -> None:
    client = FakeEngineClient(lambda request: fails(request, 2))
    done = post(client, n=3, stream=True)
    *chunks, error = events(done)
    assert chunks
    assert error["error"]["message"] == "choice 1 broke"
    assert len(client.cancelled) == 2
    assert client.open == {}


def test_merging_closes_every_stream_when_one_fails_and_leaves_no_task() -> None:
    closed: list[str] = []

    async def stream(name: str, *, breaks: bool) -> AsyncGenerator[Output]:
        try:
            while True:
                await asyncio.sleep(0)
                yield Output(name, (), "", "error" if breaks else None, error="gone")
        finally:
            closed.append(name)

    async def scenario() -> None:
        with pytest.raises(EngineFailure, match="gone"):
            async for _ in merged([stream("a", breaks=False), stream("b", breaks=True), stream("c", breaks=False)]):
                pass
        assert sorted(closed) == ["a", "b", "c"]

    run(scenario())


def record(arrived: float, first: float | None, finished: float, tokens: int, **facts: Any) -> RequestRecord:
    return RequestRecord(
        "r",
        seed=1,
        prompt_tokens=5,
        k_max=3,
        arrived=arrived,
        admitted=arrived + 0.01,
        first_token=first,
        finished=finished,
        output_tokens=tokens,
        drafter="lookup",
        verifier="block",
        policy="goodput",
        **facts,
    )


def rounds(*facts: tuple[int, int, int, int]) -> list[RoundRecord]:
    """facts: (k, reason, drafted, accepted)."""
    return [RoundRecord(k, reason, 0, drafted, accepted, accepted + 1, 0) for k, reason, drafted, accepted in facts]


def test_metrics_of_choices_span_and_sum_them() -> None:
    records = [
        record(1.0, 1.1, 1.4, 4, rounds=rounds((3, 0, 3, 2), (0, 4, 0, 0)), preemptions=1),
        record(1.02, 1.05, 1.45, 3, rounds=rounds((3, 0, 3, 0), (3, 0, 2, 2), (3, 2, 3, 3)), preemptions=2),
    ]
    told = metrics(records)
    assert told == {
        "time_to_first_token_ms": 50.0,
        "generation_time_ms": 450.0,
        "queue_time_ms": 10.0,
        "mean_itl_ms": 140.0,  # (300 + 400) / (3 + 2)
        "tokens_per_second": 15.556,
        "preemptions": 3,
        "speculative_decoding": {
            "mode": "auto",
            "policy": "goodput",
            "drafter": "lookup",
            "verifier": "block",
            "mean_acceptance_length": 1 + 7 / 4,
            "draft_acceptance_rate": 7 / 11,
            "acceptance_histogram": [1, 0, 2, 1],
            "draft_length_histogram": [1, 0, 0, 4],
            "decisions": {"policy": 3, "cap": 1, "acceptance": 1},
            "num_spec_steps": 4,
            "num_accepted_draft_tokens": 7,
            "num_draft_tokens": 11,
            "num_spec_tokens": 3,
        },
    }


def test_usage_counts_a_prompt_once_for_all_its_choices() -> None:
    records = [record(1.0, 1.1, 1.2, tokens) for tokens in (1, 2, 3, 4)]
    assert usage(records, 1)["prompt_tokens"] == 20
    assert usage(records, 2) == {
        "prompt_tokens": 10,
        "completion_tokens": 10,
        "total_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_cached_tokens_are_those_of_each_prompts_first_choice() -> None:
    """Only the first choice's cached tokens count: the others find what it has computed."""
    records = [record(1.0, 1.1, 1.2, 1, cached_tokens=cached) for cached in (1, 4, 2, 4)]
    assert usage(records, 1)["prompt_tokens_details"] == {"cached_tokens": 11}
    assert usage(records, 2)["prompt_tokens_details"] == {"cached_tokens": 3}


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_and_preemptions_are_told_once_for_all_choices(stream: bool) -> None:
    """The choices finish in reverse order. The reply still lists them in their own order."""

    def script(request: Request) -> Iterator[Output]:
        *outputs, last = spell(request)
        yield from outputs
        while any(r.id in client.open for r in client.submitted if r.choice_index > request.choice_index):
            yield Output(request.id, (), "")
        assert last.record is not None
        last.record.cached_tokens = 2 if request.choice_index == 0 else 3
        last.record.preemptions = 1 + request.prompt_index
        yield last

    client = FakeEngineClient(script)
    done = post(client, prompt=["abc", "xyz"], n=2, max_tokens=4, stream=stream)
    body = events(done)[-2] if stream else json.loads(done.reply)
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert body["metrics"]["preemptions"] == 6


def test_metrics_of_a_reply_without_tokens_are_null_where_undefined() -> None:
    told = metrics([record(1.0, None, 1.2, 0)])
    assert (told["time_to_first_token_ms"], told["mean_itl_ms"]) == (None, None)
    assert (told["generation_time_ms"], told["tokens_per_second"]) == (200.0, 0.0)


PREDICTED = {
    "prediction": {"type": "content", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "x"}]}
}


def test_a_prediction_reaches_the_engine_and_its_fate_the_usage() -> None:
    client = FakeEngineClient()
    body = json.loads(post(client, n=2, **PREDICTED).reply)
    assert [r.prediction_ids for r in client.submitted] == [tuple(b"abx")] * 2
    assert client.tokenized[-1] == ("prediction", "abx")  # without the special tokens of a prompt
    details = {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 2}
    assert body["usage"]["completion_tokens_details"] == details
    assert body["metrics"]["speculative_decoding"]["drafter"] == "cascade"
    assert "completion_tokens_details" not in json.loads(post(FakeEngineClient()).reply)["usage"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_lossy_reply_says_so(stream: bool) -> None:
    lossy = {"lossy": {"lenience": 0.5}, "speculation": {"verifier": "rejection"}}
    client = FakeEngineClient()
    done = post(client, stream=stream, **lossy)
    assert client.submitted[0].lenience == 0.5
    body = events(done)[-2] if stream else json.loads(done.reply)
    assert body["lossy"] == {"lenience": 0.5}
    assert b"lossy" not in post(FakeEngineClient(), stream=stream).reply
