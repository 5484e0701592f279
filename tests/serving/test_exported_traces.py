"""Traces of a real Serve application, as a real collector gets them over HTTP."""

import asyncio
import json
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.collector import Collector, Span, collecting
from tests.serving.conftest import ARGS, Served

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PROMPT = "class Zebrafinch:\n    def put(self, item):\n"
KEY = "a-key-of-ours"
CLIENT = "b7ad6b7169203331"  # the client's span
TOTALS = {
    "specdec.rounds.count": "num_spec_steps",
    "specdec.tokens.drafted": "num_draft_tokens",
    "specdec.tokens.accepted": "num_accepted_draft_tokens",
    "specdec.acceptance.histogram": "acceptance_histogram",
    "specdec.acceptance.rate": "draft_acceptance_rate",
    "specdec.acceptance.length": "mean_acceptance_length",
    "specdec.k.max": "num_spec_tokens",
}


def headers(trace: str, sampled: bool = True) -> dict[str, str]:
    return {"traceparent": f"00-{trace}-{CLIENT}-0{int(sampled)}", "authorization": f"Bearer {KEY}"}


@dataclass(frozen=True)
class Traced:
    served: Served
    collector: Collector

    def ask(self, sampled: bool = True, chat: bool = False, **fields: Any) -> tuple[str, httpx.Response]:
        """(trace that the client began, reply)."""
        trace = secrets.token_hex(16)
        asked = {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
        reply = httpx.post(
            f"{self.served.url}/v1/{'chat/' if chat else ''}completions",
            json={"model": "demo", "max_tokens": 24, **asked, **fields},
            headers=headers(trace, sampled),
            timeout=60,
        )
        return trace, reply

    def dropped(self) -> float:
        """Spans that the replica's metrics say were lost."""
        file = Path(self.served.environment["RAY_TMPDIR"]) / "ray/prom_metrics_service_discovery.json"
        (group,) = json.loads(file.read_text("utf-8"))
        text = httpx.get(f"http://{group['targets'][0]}/metrics", timeout=10).text
        return sum(map(float, re.findall(r"^ray_specdec_telemetry_dropped_total\{.*\} (\S+)$", text, re.MULTILINE)))


def variables(collector: Collector) -> dict[str, str]:
    """Spans go to this collector, soon. One that fails is given up soon."""
    return {
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
    }


def traced_settings(folder: Path) -> dict[str, Any]:
    """Everything is traced."""
    (folder / "keys").write_text(f"{KEY}\n", encoding="utf-8")
    return ARGS | {"trace_level": "rounds", "trace_steps": 1.0, "api_key_file": str(folder / "keys")}


@pytest.fixture(scope="module")
def traced(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    settings = traced_settings(tmp_path_factory.mktemp("traced")) | {"num_cpus": 0.1}  # beside the first application
    with collecting() as collector, served.beside(settings, variables(collector)) as second:
        yield Traced(second, collector)


def below(spans: list[Span], parent: Span) -> dict[str, list[Span]]:
    """By name, in the order of their beginnings."""
    children: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.begin):
        if span.parent == parent.id:
            children.setdefault(span.name, []).append(span)
    return children


def last_event(reply: httpx.Response) -> Any:
    return json.loads(re.findall(r"^data: (\{.*)$", reply.text, re.MULTILINE)[-1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_trace_that_says_what_its_reply_says(traced: Traced, stream: bool) -> None:
    trace, reply = traced.ask(stream=stream, temperature=0, speculation={"k": 4})
    told = last_event(reply) if stream else reply.json()
    request = traced.collector.request(trace)
    said = request.attributes
    assert (request.parent, request.kind, request.failed) == (CLIENT, "SERVER", False)
    assert said["gen_ai.response.id"] == told["id"]
    assert said["gen_ai.request.temperature"] == 0.0
    assert type(said["gen_ai.request.temperature"]) is float
    assert said["gen_ai.request.stream"] is stream
    assert said["gen_ai.usage.input_tokens"] == told["usage"]["prompt_tokens"]
    assert said["gen_ai.usage.output_tokens"] == told["usage"]["completion_tokens"] == 24
    assert said["gen_ai.response.finish_reasons"] == ["length"]
    speculative = told["metrics"]["speculative_decoding"]
    assert {name: said[name] for name in TOTALS} == {name: speculative[key] for name, key in TOTALS.items()}
    assert said["specdec.tokens.accepted"] > 0


@pytest.mark.parametrize(("chat", "operation"), [(False, "text_completion"), (True, "chat")])
def test_viewers_know_what_a_request_is(traced: Traced, chat: bool, operation: str) -> None:
    trace, reply = traced.ask(chat=chat, speculation={"k": 4, "steps": True})
    told = reply.raise_for_status().json()
    request = traced.collector.request(trace)
    said = request.attributes
    assert (request.name, said["gen_ai.operation.name"]) == (f"{operation} demo", operation)
    assert (said["openinference.span.kind"], said["llm.model_name"]) == ("LLM", "demo")
    assert said["llm.token_count.prompt"] == told["usage"]["prompt_tokens"]
    assert said["llm.token_count.completion"] == told["usage"]["completion_tokens"]
    assert said["llm.token_count.total"] == told["usage"]["total_tokens"]
    below_it = [span for span in traced.collector.of(trace) if span.id != request.id]
    assert {span.attributes["openinference.span.kind"] for span in below_it} == {"CHAIN"}
    rounds = told["metrics"]["speculative_decoding"]["rounds"]
    pairs = zip(rounds["accepted"], rounds["drafted"], strict=True)
    _, *rows = said["specdec.rounds.table"].splitlines()
    assert [row.split()[2] for row in rows] == [f"{accepted}/{drafted}" for accepted, drafted in pairs]


def test_the_spans_of_a_request(traced: Traced) -> None:
    trace, _ = traced.ask(seed=3, temperature=0.8)
    request = traced.collector.request(trace)
    spans = traced.collector.of(trace)
    children = below(spans, request)
    (queue,), (prefill,), (decode,) = (children.pop(f"specdec.{phase}") for phase in ("queue", "prefill", "decode"))
    assert children == {}
    assert request.begin <= queue.begin <= queue.end == prefill.begin <= prefill.end == decode.begin <= decode.end
    assert decode.end <= request.end
    head, rounds = below(spans, prefill)["specdec.round"], below(spans, decode)["specdec.round"]
    assert len(head) == 1
    assert len(spans) == 4 + len(head + rounds) == 4 + decode.attributes["specdec.rounds.total"]
    for phase, within in ((prefill, head), (decode, rounds)):
        assert all(phase.begin <= span.begin <= span.end <= phase.end for span in within)
    assert all(before.end <= after.begin for before, after in pairwise(head + rounds))
    assert {span.scope for span in spans} == {"foretoken"}
    column = {n.removeprefix("specdec.rounds."): c for n, c in decode.attributes.items() if isinstance(c, list)}
    indices = [span.attributes["specdec.round.index"] for span in head + rounds]
    assert indices == list(range(len(indices)))
    for key in ("drafted", "accepted", "k", "draft_us", "verify_us"):
        assert [span.attributes[f"specdec.round.{key}"] for span in head + rounds] == column[key]
    assert request.attributes["specdec.tokens.drafted"] == sum(column["drafted"])
    numbers = {key: c for key, c in column.items() if key not in ("specdec.drafters", "specdec.reasons")}
    assert len(numbers) == 12
    assert all(type(entry) is int for c in numbers.values() for entry in c)
    assert request.attributes["specdec.time.verify_us"] == sum(column["verify_us"]) > 0


def test_what_the_resource_says(traced: Traced) -> None:
    trace, _ = traced.ask()
    resource = traced.collector.request(trace).resource
    expected = {
        "service.name": "foretoken",
        "openinference.project.name": "foretoken",
        "service.version": "0.1.0",
        "ray.serve.application": "second",
        "ray.serve.deployment": "Replica",
    }
    assert resource.items() >= expected.items()
    assert resource["service.instance.id"]
    assert resource["host.name"]


def test_a_step_links_to_the_requests_in_it(traced: Traced) -> None:
    trace, _ = traced.ask(n=2, temperature=0)
    request = traced.collector.request(trace)
    decodes = below(traced.collector.of(trace), request)["specdec.decode"]
    numbers = {number for decode in decodes for number in decode.attributes["specdec.rounds.step"]}
    assert request.attributes["gen_ai.request.choice.count"] == 2
    assert [decode.attributes["specdec.choice.index"] for decode in decodes] == [0, 1]

    def steps() -> list[Span]:
        found = [span for span in list(traced.collector.spans) if (trace, request.id) in span.links]
        return found if numbers <= {span.attributes["specdec.step.index"] for span in found} else []

    for step in traced.collector.wait(steps):
        assert (step.name, step.parent) == ("specdec.engine_step", "")
        assert step.trace != trace
        assert step.attributes["specdec.step.trace_ids"] == [linked for linked, _ in step.links]


def test_a_request_that_is_refused(traced: Traced) -> None:
    trace, reply = traced.ask(max_tokens=4000)
    assert reply.status_code == 400
    request = traced.collector.request(trace)
    assert request.failed
    assert request.attributes["error.type"] == "context_length_exceeded"
    assert traced.collector.of(trace) == [request]


def test_a_client_that_leaves(traced: Traced) -> None:
    trace = secrets.token_hex(16)

    async def leave() -> None:
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 400, "stream": True, "ignore_eos": True}
        async with (
            httpx.AsyncClient(base_url=traced.served.url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=body, headers=headers(trace)) as response,
        ):
            async for line in response.aiter_lines():
                if line:
                    return

    asyncio.run(leave())
    request = traced.collector.request(trace)
    assert request.failed
    assert request.attributes["error.type"] == "client_disconnect"
    assert request.attributes["gen_ai.response.finish_reasons"] == ["cancelled"]
    assert "specdec.decode" in below(traced.collector.of(trace), request)


def test_a_client_that_says_not_to_trace(traced: Traced) -> None:
    unsampled, reply = traced.ask(sampled=False)
    assert reply.status_code == 200
    sampled, _ = traced.ask()
    request = traced.collector.request(sampled)
    traced.collector.wait(lambda: any((sampled, request.id) in span.links for span in traced.collector.spans))
    assert traced.collector.of(unsampled) == []
    assert all(unsampled != linked for span in traced.collector.spans for linked, _ in span.links)
    ids = {span.attributes.get("gen_ai.response.id") for span in traced.collector.spans}
    assert reply.json()["id"] not in ids


def test_who_has_no_key_is_neither_served_nor_traced(traced: Traced) -> None:
    trace = secrets.token_hex(16)
    without = {"traceparent": f"00-{trace}-{CLIENT}-01"}
    body = {"model": "demo", "prompt": PROMPT}
    reply = httpx.post(f"{traced.served.url}/v1/completions", json=body, headers=without, timeout=60)
    assert reply.status_code == 401
    assert httpx.get(f"{traced.served.url}/ui/api/requests", timeout=60).status_code == 401
    assert httpx.get(f"{traced.served.url}/health", timeout=60).status_code == 200
    traced.collector.request(traced.ask()[0])
    assert traced.collector.of(trace) == []


def test_no_word_leaves(traced: Traced) -> None:
    trace, reply = traced.ask(echo=True, stop=["\n\n\n"])
    traced.collector.request(trace)
    everything = json.dumps([span.attributes for span in traced.collector.spans])
    assert "Zebrafinch" not in everything
    assert KEY not in everything
    assert len(reply.json()["choices"][0]["text"]) > len(PROMPT)


@pytest.mark.parametrize(
    "way",
    [
        "slow",
        "dead",
        pytest.param("refusing", marks=pytest.mark.proofs),
        pytest.param("broken", marks=pytest.mark.proofs),
    ],
)
def test_a_collector_that_fails_changes_no_token_and_is_told_of(traced: Traced, way: str) -> None:
    """Slow: it answers no post until the test is over, and no reply waits for that."""
    collector, over, late = traced.collector, threading.Event(), list[bool]()

    def slow() -> int:
        late.append(over.wait(300))
        return 200

    ways: dict[str, Callable[[], int]] = {"slow": slow, "refusing": lambda: 400}
    fields: dict[str, Any] = {"seed": 11, "temperature": 0.9, "max_tokens": 40}
    trace, reply = traced.ask(**fields)
    collector.request(trace)
    before = traced.dropped()
    fine, collector.answer = collector.answer, ways.get(way, lambda: 503)
    if way == "dead":
        collector.close()
    try:
        answers = [traced.ask(**fields)[1] for _ in range(4)]
        assert {answer.json()["choices"][0]["text"] for answer in answers} == {reply.json()["choices"][0]["text"]}
        assert not late
        collector.wait(lambda: traced.dropped() > before)
    finally:
        over.set()
        collector.answer = fine
        if way == "dead":
            collector.open()
    trace, _ = traced.ask(**fields)
    collector.request(trace)  # it is served again
