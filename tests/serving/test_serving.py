"""A real Serve application, real HTTP, the embedded pair."""

import asyncio
import copy
import gc
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from engine.llm import LLM
from engine.types import SamplingParams
from tests.serving.conftest import ARGS, AUTOSCALING, OPTIONS, ROOT, Served

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PROMPTS = ["def main(argv=None):\n", "class Queue:\n    def put(self, item):\n", "import os\n", "x = [", "é = '日本"]


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": prompt, "max_tokens": 24, **fields}


async def events(response: httpx.Response) -> AsyncIterator[Any]:
    """Parsed SSE events; the closing [DONE] as that string."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


async def stream(client: httpx.AsyncClient, request: dict[str, Any]) -> tuple[str, list[Any]]:
    async with client.stream("POST", "/v1/completions", json=request | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        parsed = [event async for event in events(response)]
    return "".join(e["choices"][0]["text"] for e in parsed if e != "[DONE]" and e["choices"]), parsed


def connect(served: Served, **options: Any) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=served.url, timeout=120, limits=limits, **options)


def test_served_text_is_what_the_target_alone_says(served: Served) -> None:
    """Drafts over HTTP, as the policy likes and four a round; none in process; greedy and seeded; streamed and whole.

    fp64: identical, no excuses.
    """
    llm = LLM("models/demo/target", dtype="float64", max_model_len=ARGS["max_model_len"])
    cases = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 7}, {"temperature": 1.0, "top_p": 0.9, "seed": 8}]

    async def ask(client: httpx.AsyncClient, prompt: str, case: dict[str, Any]) -> tuple[str, str, int]:
        streamed, parsed = await stream(client, body(prompt, **case))
        assert parsed[-1] == "[DONE]"
        drafted = body(prompt, **case, speculation={"k": 4})
        whole = (await client.post("/v1/completions", json=drafted)).json()
        accepted = whole["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
        return streamed, whole["choices"][0]["text"], accepted

    async def everybody() -> list[tuple[str, str, int]]:
        async with connect(served) as client:
            return await asyncio.gather(*(ask(client, prompt, case) for prompt, case in asked))

    asked = [(prompt, case) for prompt in PROMPTS for case in cases]
    answers = asyncio.run(everybody())
    params = [SamplingParams(max_tokens=24, **case) for _, case in asked]  # type: ignore[arg-type]
    expected = [answer.text for answer in llm.generate([prompt for prompt, _ in asked], params, k=0)]
    assert [a[0] for a in answers] == expected
    assert [a[1] for a in answers] == expected
    assert sum(a[2] for a in answers) > 0, "no draft was ever accepted: speculation did not run"


def test_curl_without_a_json_content_type_streams_several_tokens_per_event(served: Served) -> None:
    request = json.dumps(body(PROMPTS[0], stream=True, max_tokens=48, temperature=0, speculation={"k": 4}))
    headers = {"content-type": "application/x-www-form-urlencoded"}
    reply = httpx.post(f"{served.url}/v1/completions", content=request, headers=headers, timeout=60)
    assert len(reply.headers.get_list("x-request-id")) == 1  # Serve's proxy sets one: a second would spoil it
    data = [json.loads(x[6:]) for x in reply.text.splitlines() if x.startswith("data: {")]
    assert data[-1]["usage"]["completion_tokens"] == 48
    assert len(data) < 48
    assert data[-1]["choices"][0]["finish_reason"] == "length"
    chat = {"model": "demo", "messages": [{"role": "user", "content": "Read a file."}], "max_tokens": 8}
    reply = httpx.post(f"{served.url}/v1/chat/completions", json=chat, timeout=60)
    assert reply.json()["choices"][0]["message"]["content"]
    assert reply.json()["usage"]["completion_tokens"] <= 8


def test_a_reply_of_more_than_four_megabytes_arrives_whole(served: Served) -> None:
    """The proxy asks replicas by gRPC, whose own limit is 4 MiB per message."""
    token = "\u010a" + 40 * "\u0120"  # a line end and 40 spaces, as the vocabulary writes them
    vocabulary = json.loads((ROOT / "models/demo/target/tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    tokens = [vocabulary[token]] * 131_000
    reply = httpx.post(f"{served.url}/detokenize", json={"tokens": tokens}, timeout=60)
    assert reply.json() == {"prompt": ("\n" + 40 * " ") * len(tokens)}


# httpx leaves sockets open that are cancelled while they connect: the client's leak, and the point of the test.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_hundreds_of_requests_with_cancels_and_disconnects_leak_nothing(served: Served) -> None:
    """Every request that is read to its end gets exactly one finish; the rest vanish without a trace."""
    rng = random.Random(0)
    outcomes: Counter[str] = Counter()

    async def one(client: httpx.AsyncClient) -> str:
        request = body(
            rng.choice(PROMPTS) * rng.choice([1, 1, 1, 6]),
            max_tokens=rng.choice([1, 3, 17, 40]),
            temperature=rng.choice([0, 0.8]),
            stream=rng.random() < 0.7,
            speculation=rng.choice([{"mode": "off"}, {"mode": "auto"}, {"max_k": 2}, {"k": 8}]),
        )
        try:
            async with asyncio.timeout(rng.choice([None, None, None, 0.0, 0.03, 0.3])):
                async with client.stream("POST", "/v1/completions", json=request) as response:
                    return await read_to_the_end(response, streamed=request["stream"])
        except TimeoutError:
            return "left"

    async def read_to_the_end(response: httpx.Response, *, streamed: bool) -> str:
        if response.status_code == 429:
            assert json.loads(await response.aread())["error"]["type"] == "rate_limit_error"
            await asyncio.sleep(int(response.headers["retry-after"]) / 10)
            return "refused"
        assert response.status_code == 200, await response.aread()
        if streamed:
            choices = [e["choices"][0] async for e in events(response) if e != "[DONE]"]
        else:
            choices = json.loads(await response.aread())["choices"]
        assert choices[-1]["finish_reason"] in ("length", "stop")
        assert all(c["finish_reason"] is None for c in choices[:-1])
        return "finished"

    async def all_of_them() -> None:
        turns = asyncio.Semaphore(36)  # a little above max_running + max_waiting
        async with connect(served) as client:

            async def turn() -> None:
                async with turns:
                    outcomes[await one(client)] += 1

            await asyncio.gather(*(turn() for _ in range(200)))

    asyncio.run(all_of_them())
    gc.collect()  # such sockets are reported here, and not in the next test
    assert sum(outcomes.values()) == 200
    assert outcomes["finished"] > 20, outcomes  # how many of each is a matter of the machine's speed
    assert outcomes["left"] > 20, outcomes
    _wait_until_idle(served)


def _wait_until_idle(served: Served) -> None:
    """All replicas idle and healthy: an idle engine audits its caches, and ends if a slot is missing (then: 503)."""
    limit = time.monotonic() + 30
    while True:
        replies = [httpx.get(f"{served.url}/health", timeout=10) for _ in range(8)]  # Serve picks a replica each time
        assert {r.status_code for r in replies} == {200}, [r.text for r in replies]
        loads = [r.json() for r in replies]
        if all(x["running"] == x["waiting"] == 0 and x["free_slots"] == ARGS["max_running"] for x in loads):
            return
        assert time.monotonic() < limit, f"requests are still held: {loads}"
        time.sleep(0.2)


def test_scales_from_one_replica_to_two_and_back_and_no_stream_breaks(served: Served) -> None:
    """Many users until a second replica runs, then two, which stream on until it has gone: each stream is whole.

    What decides when to scale changes in place.
    """
    assert len(served.deploy(_scaling(served, target_ongoing_requests=6))) == 1

    async def user(client: httpx.AsyncClient, leave: asyncio.Event) -> int:
        done = 0
        while not leave.is_set():
            _, parsed = await stream(client, body(PROMPTS[0], max_tokens=200, ignore_eos=True))
            assert parsed[-1] == "[DONE]"
            assert parsed[-2]["usage"]["completion_tokens"] == 200
            done += 1
        return done

    async def until_replicas(count: int, users: list["asyncio.Task[int]"]) -> None:
        """Or until a user has given up, which whoever awaits it learns."""
        limit = time.monotonic() + 120
        while await asyncio.to_thread(served.replicas) != count and not any(u.done() for u in users):
            assert time.monotonic() < limit, f"never {count} replicas"

    async def load() -> tuple[list[int], list[int]]:
        many, few = asyncio.Event(), asyncio.Event()
        async with connect(served) as client:
            crowd = [asyncio.create_task(user(client, many)) for _ in range(6)]
            pair = [asyncio.create_task(user(client, few)) for _ in range(2)]  # fewer than target_ongoing_requests
            await until_replicas(2, crowd + pair)
            many.set()
            crowd_done = await asyncio.gather(*crowd)
            await until_replicas(1, pair)
            few.set()
            return crowd_done, await asyncio.gather(*pair)

    crowd_done, pair_done = asyncio.run(load())
    assert min(crowd_done) >= 1
    assert min(pair_done) >= 2
    served.deploy(served.config)


def _scaling(served: Served, **changes: Any) -> dict[str, Any]:
    """The configuration with another way to scale."""
    config = copy.deepcopy(served.config)
    (deployment,) = config["applications"][0]["deployments"]
    deployment["autoscaling_config"] |= changes
    return config


def test_the_yaml_goes_before_the_builders_defaults_and_leaves_the_others(served: Served) -> None:
    config = served.deployment_config()
    assert config["graceful_shutdown_timeout_s"] == OPTIONS["graceful_shutdown_timeout_s"]
    assert config["max_ongoing_requests"] > 1000
    assert (config["health_check_period_s"], config["health_check_timeout_s"]) == (2, 30)
    assert config["autoscaling_config"]["max_replicas"] == AUTOSCALING["max_replicas"]
