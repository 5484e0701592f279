"""Origins of a real engine's tokens: the replies agree with the text and with the metrics."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.main import create_app
from deployments.bridge import LocalClient
from engine.config import EngineConfig
from engine.engine import Engine
from policies.config import PolicyConfig

CONFIG = EngineConfig(
    "models/demo/target",
    "models/demo/draft",
    policy=PolicyConfig(name="fixed", k=4),  # goodput may draft nothing on a busy machine
    max_running=4,
    max_model_len=256,
    threads=1,
)

PROMPT = "import os\n\ndef f("
ASKED = {"model": "demo", "prompt": PROMPT, "max_tokens": 60, "temperature": 0.7, "seed": 5}


@pytest.fixture(scope="module")
def client() -> Iterator[LocalClient]:
    client = LocalClient(Engine.from_config(CONFIG), "demo")
    yield client
    client.close()


def post(client: LocalClient, fields: dict[str, Any], speculation: dict[str, Any]) -> bytes:
    async def go() -> bytes:
        transport = httpx.ASGITransport(app=create_app(client))
        body = ASKED | fields | {"speculation": speculation | {"tokens": True, "steps": True}}
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            reply = await http.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.content
            return reply.content

    return asyncio.run(asyncio.wait_for(go(), 60))


def completion(client: LocalClient, fields: dict[str, Any], **speculation: Any) -> Any:
    return json.loads(post(client, fields, speculation))


def streamed(client: LocalClient, fields: dict[str, Any], **speculation: Any) -> list[dict[str, Any]]:
    """The chunks."""
    lines = post(client, fields | {"stream": True}, speculation).decode().split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]


def told(choice: dict[str, Any]) -> list[dict[str, Any]]:
    return list(choice["speculation"]["rounds"])


def texts(choice: dict[str, Any]) -> list[str]:
    return [token["text"] for one in told(choice) for token in one["tokens"]]


def drafts(choice: dict[str, Any]) -> int:
    """Tokens of the text that were drafts."""
    return sum(token["source"] == "draft" for one in told(choice) for token in one["tokens"])


def assert_rounds_are_the_metrics(reply: Any) -> None:
    """Of a reply with one choice."""
    facts, rounds = reply["metrics"]["speculative_decoding"], told(reply["choices"][0])
    assert [one["round"] for one in rounds] == list(range(len(facts["rounds"]["step"])))
    for name in ("drafted", "accepted"):
        assert [one[name] for one in rounds] == facts["rounds"][name]
    assert sum(one["drafted"] for one in rounds) == facts["num_draft_tokens"]
    assert sum(one["accepted"] for one in rounds) == facts["num_accepted_draft_tokens"]
    assert [one["accepted"] for one in rounds if one["drafted"]] == facts["per_step_accepted"]
    assert [one["drafted"] for one in rounds if one["drafted"]] == facts["per_step_drafted"]
    assert all(len(one["rejected"]) == one["drafted"] - one["accepted"] for one in rounds)
    assert drafts(reply["choices"][0]) <= facts["num_accepted_draft_tokens"]


WAYS: list[dict[str, Any]] = [
    {"k": 4},
    {"mode": "off"},
    {"mode": "auto"},
    {"k": 7, "drafter": "lookup"},
    {"k": 3, "verifier": "block"},
    {"k": 3, "verifier": "rejection"},
]


@pytest.mark.parametrize(
    ("speculation", "temperature"),
    [
        pytest.param(way, temperature, marks=() if (n + m) % 3 == 0 else pytest.mark.proofs)
        for n, way in enumerate(WAYS)
        for m, temperature in enumerate((0.0, 1.6, 0.7))
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_tokens_join_to_the_text_and_counts_agree(
    client: LocalClient, speculation: dict[str, Any], temperature: float
) -> None:
    """At temperature 1.6 many tokens are not whole characters. The first token is plain; nothing cuts a round."""
    fields = {"temperature": temperature, "ignore_eos": True}
    reply = completion(client, fields, **speculation)
    (choice,) = reply["choices"]
    assert "".join(texts(choice)) == choice["text"]
    assert len(texts(choice)) == reply["usage"]["completion_tokens"] == 60
    assert told(choice)[0]["tokens"][0]["source"] == "plain"
    assert_rounds_are_the_metrics(reply)
    facts = reply["metrics"]["speculative_decoding"]
    assert drafts(choice) == facts["num_accepted_draft_tokens"]
    if speculation == {"mode": "off"}:
        assert facts["num_draft_tokens"] == 0
    elif temperature < 1:  # what is no text does not repeat itself either, so lookup may find nothing
        assert facts["num_draft_tokens"] > 0
    for one in told(choice):
        sources = [token["source"] for token in one["tokens"]]
        last = "plain" if not one["drafted"] else "bonus" if one["accepted"] == one["drafted"] else "recovered"
        assert sources == ["draft"] * one["accepted"] + [last]
    if speculation.get("verifier") is None:
        plain = completion(client, fields, mode="off")["choices"][0]
        assert (choice["text"], texts(choice)) == (plain["text"], texts(plain))


@pytest.mark.parametrize(
    "fields", [{}, {"n": 2, "echo": True, "logprobs": 1}, {"temperature": 1.6, "stop": ["\n", "="]}]
)
def test_a_stream_tells_what_a_whole_reply_tells(client: LocalClient, fields: dict[str, Any]) -> None:
    whole = completion(client, fields, k=4)["choices"]
    rounds: list[list[Any]] = [[] for _ in whole]
    for chunk in streamed(client, fields, k=4):
        for choice in chunk["choices"]:
            rounds[choice["index"]] += told(choice)
    assert len(rounds) == fields.get("n", 1)
    assert all(rounds)
    assert rounds == [told(choice) for choice in whole]


def test_choices_with_echo_and_logprobs(client: LocalClient) -> None:
    reply = completion(client, {"n": 3, "echo": True, "logprobs": 1}, k=4)
    lists = reply["metrics"]["speculative_decoding"]["choices"]
    for choice, facts in zip(reply["choices"], lists, strict=True):
        assert PROMPT + "".join(texts(choice)) == choice["text"]
        shown = choice["logprobs"]["tokens"][-len(texts(choice)) :]
        assert "".join(shown) == "".join(texts(choice))
        assert [one["accepted"] for one in told(choice) if one["drafted"]] == facts["per_step_accepted"]
        assert [one["accepted"] for one in told(choice)] == facts["rounds"]["accepted"]
    assert len({choice["text"] for choice in reply["choices"]}) == 3


@pytest.mark.parametrize("keeps_end", [False, True])
def test_stop_strings_wherever_they_cut(client: LocalClient, keeps_end: bool) -> None:
    text = completion(client, {}, mode="off")["choices"][0]["text"]
    stops = {text[at : at + 3] for at in range(4, len(text) - 3, 60)}
    cut = removed = 0
    for stop in sorted(stops):
        reply = completion(client, {"stop": stop, "include_stop_str_in_output": keeps_end}, k=4)
        (choice,) = reply["choices"]
        end = text.find(stop) + (len(stop) if keeps_end else 0)
        assert choice["finish_reason"] == "stop"
        assert "".join(texts(choice)) == choice["text"] == text[:end]
        assert_rounds_are_the_metrics(reply)
        cut += drafts(choice) < reply["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
        removed += len(texts(choice)) < reply["usage"]["completion_tokens"]
    assert cut
    assert (removed == 0) == keeps_end


@pytest.mark.parametrize(("keeps_end", "tokens"), [(False, []), (True, [""])])
def test_an_end_token_is_told_only_where_the_text_keeps_what_ended_it(
    client: LocalClient, keeps_end: bool, tokens: list[str]
) -> None:
    (end,) = client.worker.engine.intake.eos_ids
    fields = {"logit_bias": {str(end): 100}, "include_stop_str_in_output": keeps_end}
    reply = completion(client, fields, k=4)
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"], texts(choice)) == ("", "stop", tokens)
    assert (len(told(choice)), reply["usage"]["completion_tokens"]) == (1, 1)
