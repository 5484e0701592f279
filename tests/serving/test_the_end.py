"""What clients see when a part of the server dies, or when all of it is asked to end; and who can reach it at all.

The tests run in this order, after all others of the shared server (hence the file's name): the last one ends it.
"""

import asyncio
import json
import os
import signal
import threading
import time
from typing import Any

import httpx
import pytest

from tests.serving.conftest import Served
from tests.serving.processes import descendants, listening, named, wait_for_another

pytestmark = [pytest.mark.integration, pytest.mark.slow]

BACK_LIMIT_S = 120
LONG = {"model": "demo", "prompt": "import os\n", "max_tokens": 480, "ignore_eos": True, "speculation": {"mode": "off"}}
STRANGE = [b"x-request-id", b"x-request-timeout-seconds", b"x-request-disconnect-disabled", b"traceparent"]
Events = list[Any]


@pytest.fixture(scope="module")
def launched(served: Served) -> Served:
    """The server that all tests share, once it has one replica."""
    limit = time.monotonic() + BACK_LIMIT_S
    while served.replicas() > 1:
        assert time.monotonic() < limit, "a second replica stays without load"
    return served


async def follow(client: httpx.AsyncClient, began: asyncio.Event) -> Events:
    """The events of a long stream; `began` is set at the first."""
    events: Events = []
    async with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                events.append(data if data == "[DONE]" else json.loads(data))
                began.set()
    return events


def wait_until_back(served: Served) -> None:
    """Until a request is served again: refused connections and errors are allowed before."""
    limit = time.monotonic() + BACK_LIMIT_S
    while time.monotonic() < limit:
        try:
            short = LONG | {"max_tokens": 1}
            if httpx.post(f"{served.url}/v1/completions", json=short, timeout=30).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    pytest.fail(f"nobody is served after {BACK_LIMIT_S} s:\n{served.log.read_text('utf-8', 'replace')[-4000:]}")


def test_nothing_listens_beyond_this_machine(launched: Served) -> None:
    sockets = listening(descendants(launched.process.pid))
    assert any(address.endswith(launched.url.rpartition(":")[2]) for address in sockets), "our own port was looked at"
    outside = {a: who for a, who in sockets.items() if not a.startswith(("127.", "::1:", "::ffff:127."))}
    assert outside == {}


@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_header_is_no_fault_of_the_server(launched: Served, name: bytes) -> None:
    reply = httpx.get(f"{launched.url}/health", headers=[(name, b"\xff")], timeout=30)
    refused = name in (b"x-request-timeout-seconds", b"x-request-disconnect-disabled")
    assert reply.status_code == (400 if refused else 200)
    assert reply.headers["x-request-id"].isascii()
    if refused:
        assert reply.json()["error"]["param"] == name.decode()


def test_serves_own_paths_are_closed_but_for_its_health(launched: Served) -> None:
    assert [httpx.get(f"{launched.url}/-/{path}", timeout=30).status_code for path in ("routes", "healthz")] == [
        404,
        200,
    ]


def test_a_replicas_death_is_told_in_openais_shape_and_another_serves(launched: Served) -> None:
    async def scenario() -> tuple[Events, httpx.Response]:
        began = asyncio.Event()
        async with httpx.AsyncClient(base_url=launched.url, timeout=60) as client:
            stream = asyncio.create_task(follow(client, began))
            await began.wait()
            whole = asyncio.create_task(client.post("/v1/completions", json=LONG))
            await asyncio.sleep(0.1)  # for it to reach the replica; if it does not, it is served by the next one
            (replica,) = named(launched.process.pid, "ray::ServeReplica")
            os.kill(replica, signal.SIGKILL)
            return await stream, await whole

    events, whole = asyncio.run(asyncio.wait_for(scenario(), BACK_LIMIT_S))
    assert "choices" in events[0]
    assert events[-1]["error"]["code"] == "stream_broken"
    assert whole.status_code in (200, 500)
    if whole.status_code == 500:
        assert whole.json()["error"]["code"] == "replica_lost"
    wait_until_back(launched)


def test_a_proxy_that_dies_is_replaced(launched: Served) -> None:
    (proxy,) = named(launched.process.pid, "ray::ProxyActor")
    os.kill(proxy, signal.SIGKILL)
    wait_for_another(launched.process.pid, "ray::ProxyActor", proxy, BACK_LIMIT_S)
    wait_until_back(launched)


def test_streams_run_on_while_the_controller_is_replaced(launched: Served) -> None:
    async def scenario() -> Events:
        began = asyncio.Event()
        async with httpx.AsyncClient(base_url=launched.url, timeout=60) as client:
            stream = asyncio.create_task(follow(client, began))
            await began.wait()
            (controller,) = named(launched.process.pid, "ray::ServeController")
            os.kill(controller, signal.SIGKILL)
            reply = await client.post("/v1/completions", json=LONG | {"max_tokens": 1})
            assert reply.status_code == 200
            await asyncio.to_thread(
                wait_for_another, launched.process.pid, "ray::ServeController", controller, BACK_LIMIT_S
            )
            return await stream

    assert asyncio.run(asyncio.wait_for(scenario(), BACK_LIMIT_S))[-1] == "[DONE]"


def test_sigterm_lets_streams_end_refuses_new_ones_and_is_status_0(launched: Served) -> None:
    async def scenario() -> tuple[list[Events], list[httpx.Response]]:
        began = [asyncio.Event() for _ in range(3)]
        async with httpx.AsyncClient(base_url=launched.url, timeout=60) as client:
            streams = [asyncio.create_task(follow(client, event)) for event in began]
            for event in began:
                await event.wait()
            launched.process.send_signal(signal.SIGTERM)
            refused: list[httpx.Response] = []
            while not refused and not all(stream.done() for stream in streams):
                reply = await client.get("/health")
                refused = [reply] if reply.status_code != 200 else []
            refused.append(await client.post("/v1/completions", json=LONG))
            return [await stream for stream in streams], refused

    streams, refused = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert [events[-1] for events in streams] == ["[DONE]"] * 3
    assert [events[-2]["usage"]["completion_tokens"] for events in streams] == [480] * 3
    for reply in refused:
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "shutting_down"
        assert 1 <= int(reply.headers["retry-after"]) <= 30
    ended = threading.Timer(BACK_LIMIT_S, launched.process.kill)
    ended.start()
    assert launched.process.wait() == 0
    ended.cancel()
    log = launched.log.read_text("utf-8", "replace")
    about_the_end = log[log.index("foretoken: ending") :]
    for word in ("Traceback", "SIGTERM received", "Fatal"):
        assert word not in about_the_end
    assert descendants(launched.process.pid) == []
