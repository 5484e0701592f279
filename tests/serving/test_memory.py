"""KV memory as clients meet it: a real Serve application whose pool holds two requests of full length, real HTTP.

In fp64 each text must equal the one that the request has alone, whatever was shared, taken back and computed again.
"""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import httpx
import pytest

from engine.llm import LLM
from engine.types import SamplingParams
from tests.serving.conftest import Served

pytestmark = [pytest.mark.integration, pytest.mark.slow]

# A small target, whose steps take a tenth of the demo target's. With itself as its draft model each draft is accepted.
TARGET = "models/demo/draft"
LENGTH, POOL, DEMAND = 512, 1024, 4
ARGS: dict[str, Any] = {
    "model_name": "demo",
    "target": TARGET,
    "draft": TARGET,
    "dtype": "float64",
    "max_running": 4,
    "max_waiting": 16,
    "max_model_len": LENGTH,
    "kv_tokens": POOL,
    "max_demand": DEMAND,
    "num_cpus": 0.1,  # beside the replicas of the first application
}
SHORT = "x = ["
LONG = "".join(f"def function_{i}(argument, other={i}):\n    return argument + other\n\n" for i in range(14))


@pytest.fixture(scope="module")
def small(served: Served) -> Iterator[Served]:
    with served.beside(ARGS) as second:
        yield second
    target.cache_clear()  # its memory: other tests of this process count what is mapped


@cache
def target() -> LLM:
    """The target alone, with memory for more than it ever needs."""
    return LLM(TARGET, dtype="float64", max_model_len=LENGTH)


def alone(cases: Sequence[tuple[str, int]], count: int) -> list[str]:
    """What the target says to these (prompt, seed), without drafts."""
    params = [SamplingParams(max_tokens=count, temperature=1.0, seed=seed, ignore_eos=True) for _, seed in cases]
    texts = [answer.text for answer in target().generate([prompt for prompt, _ in cases], params, k=0)]
    assert not sum(step.preempted for step in target().steps)
    return texts


def tokens(text: str) -> int:
    return len(target().engine.tokenizer.encode(text))


def ask(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": prompt, "temperature": 1.0, "ignore_eos": True, **fields}


def whole(prompt: str, **fields: Any) -> dict[str, Any]:
    """A request that is as long as the context allows."""
    return ask(prompt, max_tokens=LENGTH - tokens(prompt), **fields)


def post(served: Served, request: dict[str, Any], key: str | None = None) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.post(f"{served.url}/v1/completions", json=request, headers=headers, timeout=120)


def told(reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text[:300]
    answer: dict[str, Any] = reply.json()
    return answer


def connect(served: Served) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=served.url, timeout=120, limits=httpx.Limits(max_connections=None))


class Stream:
    """A stream that is read event by event."""

    def __init__(self, client: httpx.AsyncClient, request: dict[str, Any]) -> None:
        self._context = client.stream("POST", "/v1/completions", json=request | {"stream": True})
        self.text = ""
        self.ended = False  # with [DONE]
        self.last: dict[str, Any] = {}

    async def begin(self) -> "Stream":
        """Until the first event."""
        response = await self._context.__aenter__()
        assert response.status_code == 200, await response.aread()
        self._lines = response.aiter_lines()
        await self.read(events=1)
        return self

    async def read(self, events: int | None = None) -> "Stream":
        """So many events more, or all that are left; what begins [DONE] is none."""
        async for line in self._lines:
            if not line:
                continue
            data = line.removeprefix("data: ")
            self.ended = data == "[DONE]"
            if not self.ended:
                self.last = json.loads(data)
                self.text += "".join(choice["text"] for choice in self.last.get("choices", ()))
                events = None if events is None else events - 1
            if events == 0:
                break
        return self

    async def leave(self) -> None:
        await self._context.__aexit__(None, None, None)


def load(served: Served) -> dict[str, Any]:
    reply = httpx.get(f"{served.url}/health", timeout=10)
    assert reply.status_code == 200, reply.text  # an idle engine audits its caches, and ends if anything is missing
    answer: dict[str, Any] = reply.json()
    return answer


def steps_until_idle(served: Served) -> int:
    """Engine steps so far, once nothing is running or waiting."""
    limit = time.monotonic() + 60
    while (now := load(served))["running"] or now["waiting"]:
        assert time.monotonic() < limit, f"requests are still held: {now}"
        time.sleep(0.02)
    return int(now["steps"])


def preemptions(served: Served, n: int) -> int:
    """Of n choices of full length at once that share nothing. Two fill the pool to its last block."""
    return int(told(post(served, whole(SHORT, n=n)))["metrics"]["preemptions"])


def test_two_whole_requests_fill_the_pool_and_a_third_does_not_fit(small: Served) -> None:
    """What the other tests go by: nothing is taken back from two as long as every block is free before."""
    assert preemptions(small, 2) == 0
    assert preemptions(small, 3) > 0


def test_cached_tokens_grow_with_what_was_read_and_stay_with_tenant_and_salt(small: Served) -> None:
    def cached(prompt: str, key: str | None = None, **fields: Any) -> int:
        answer = told(post(small, ask(prompt, max_tokens=8, seed=1, **fields), key))
        texts.add(answer["choices"][0]["text"])
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    texts: set[str] = set()
    first = "# whose prefix is this?\n" + LONG[: len(LONG) // 2]
    count = tokens(first)
    tenants: list[dict[str, str]] = [{"cache_salt": "a"}, {"key": "a"}, {"key": "b"}, {"key": "b", "cache_salt": "a"}]
    assert (1 + len(tenants)) * (count + 16) < POOL, "so that nobody's blocks are evicted"
    assert cached(first) == 0
    found = cached(first)
    assert count // 2 < found < count, "the last token's logits are wanted, so it is never found"
    assert [cached(first, **tenant) for tenant in tenants] == [0] * len(tenants)
    assert [cached(first, **tenant) for tenant in [{}, *tenants]] == [found] * (1 + len(tenants))
    assert len(texts) == 1, "what is found changes no text"
    assert cached(first + SHORT) >= found


def test_choices_of_a_long_prompt_share_its_memory(small: Served) -> None:
    """Four choices would need far more than the pool, each with the prompt for itself; one prompt for all fits."""
    n, more = 4, 24
    count = tokens(LONG)
    assert n * (count + more) > POOL > count + n * (more + 2 * 16), count
    answer = told(post(small, ask(LONG, n=n, max_tokens=more, seed=5)))
    assert answer["metrics"]["preemptions"] == 0
    assert answer["usage"]["prompt_tokens"] == count
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) == n
    assert texts[:1] == alone([(LONG, 5)], more)


def test_more_streams_than_memory_all_end_with_the_texts_they_have_alone(small: Served) -> None:
    """Ten streams for memory for three: what is taken back from one is computed again, and no client can tell."""
    count = 340
    prompts = [SHORT, "import os\n", "class Queue:\n    def put(self, item):\n", "é = '日本"]
    cases = [(prompts[i % 4], 100 + i) for i in range(10)]
    needed = sum(tokens(prompt) + count for prompt, _ in cases)
    assert 3 * POOL < needed <= DEMAND * POOL

    async def everybody() -> list[Stream]:
        async with connect(small) as client:
            streams = [Stream(client, ask(p, max_tokens=count, seed=seed)) for p, seed in cases]
            return await asyncio.gather(*(to_the_end(stream) for stream in streams))

    async def to_the_end(stream: Stream) -> Stream:
        return await (await stream.begin()).read()

    streams = asyncio.run(everybody())
    assert all(stream.ended for stream in streams)
    assert [stream.text for stream in streams] == alone(cases, count)
    assert sum(stream.last["metrics"]["preemptions"] for stream in streams) > 0


def test_demand_beyond_the_pool_is_refused_while_the_streams_go_on(small: Served) -> None:
    count = 480
    request = whole(SHORT, n=8)  # there are places, but beside four others its demand is above four times the pool

    async def crowd() -> tuple[httpx.Response, list[Stream], httpx.Response]:
        async with connect(small) as client:
            streams = [Stream(client, ask(SHORT, max_tokens=count)) for _ in range(4)]
            begun = await asyncio.gather(*(stream.begin() for stream in streams))
            refused = await client.post("/v1/completions", json=request)
            await asyncio.gather(*(stream.read() for stream in begun))
            return refused, begun, await client.post("/v1/completions", json=request | {"max_tokens": 1})

    refused, streams, later = asyncio.run(crowd())
    assert refused.status_code == 429, refused.text[:300]
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    error = refused.json()["error"]
    assert {"type": "rate_limit_error", "code": "engine_overloaded", "param": None}.items() <= error.items()
    assert "KV memory" in error["message"]
    assert f"{DEMAND} × {POOL:,}" in error["message"]
    assert [stream.last["usage"]["completion_tokens"] for stream in streams] == [count] * 4
    assert later.status_code == 200, "what asks for less is taken"


def test_at_its_deadline_a_request_ends_with_an_error_and_its_memory_is_free(small: Served) -> None:
    """Eight whole choices, two at a time in this memory, take some 2,000 steps; the deadline comes long before."""
    request = whole(SHORT, n=8, speculation={"mode": "off"})

    async def stream() -> Stream:
        async with connect(small) as client:
            return await (await Stream(client, request | {"deadline_s": 0.4}).begin()).read()

    before = steps_until_idle(small)
    late = asyncio.run(stream())
    assert late.last["error"] == {
        "message": "the request was not finished within 0.4 s",
        "type": "server_error",
        "param": None,
        "code": "deadline_exceeded",
    }
    assert not late.ended
    reply = post(small, request | {"deadline_s": 0.2})
    assert reply.status_code == 504, reply.text[:300]
    assert reply.json()["error"]["code"] == "deadline_exceeded"
    assert reply.headers["x-should-retry"] == "false"
    after = steps_until_idle(small)
    assert after - before < 2 * 8 * request["max_tokens"] / 2
    assert preemptions(small, 2) == 0
    assert told(post(small, whole(SHORT, deadline_s=100)))["choices"][0]["finish_reason"] == "length"


def test_clients_that_leave_under_pressure_give_their_memory_back(small: Served) -> None:
    count, clients, n = 480, 4, 2
    requests = [ask(SHORT, max_tokens=count, n=n, speculation={"mode": "off"}) for _ in range(clients)]
    before = steps_until_idle(small)

    async def leave() -> None:
        async with connect(small) as client:
            reading = [asyncio.create_task(Stream(client, request).begin()) for request in requests]
            done, waiting = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:  # also those that have not begun: they wait for memory
                task.cancel()
            await asyncio.wait(reading)
            for task in done:
                await task.result().leave()

    asyncio.run(leave())
    after = steps_until_idle(small)
    assert after - before < clients * n * count / ARGS["max_running"], "they were served to the end"
    assert preemptions(small, 2) == 0


@pytest.mark.proofs
def test_a_pool_that_cannot_hold_one_request_ends_the_start_with_the_arithmetic(served: Served) -> None:
    """As `serve status` shows it, given as the command line gives it: beside an application that serves on."""
    message = served.failure_of({"kv_tokens": "260", "max_model_len": "256", "num_cpus": "0.1"})
    assert "room for 256 tokens (8 blocks of 32: kv_tokens 260" in message
    assert "one request of max_model_len 256 needs 288" in message
    assert "raise kv_tokens, or lower max_model_len" in message
    assert load(served)["running"] == 0
