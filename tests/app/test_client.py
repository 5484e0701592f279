"""The fake engine keeps the promises of the EngineClient protocol."""

import asyncio

import pytest

from app.client import EngineClient, FakeEngineClient
from deployments.engine.types import InvalidRequest, Overloaded, Request, SamplingParams

CLIENT: EngineClient = FakeEngineClient()  # mypy checks here that the fake is one


def request(name: str, ids: tuple[int, ...] = (97,)) -> Request:
    return Request(name, ids, SamplingParams(max_tokens=5))


async def finish(client: EngineClient, asked: Request) -> list[str | None]:
    return [output.finish_reason async for output in client.submit([asked])[0]]


def test_outputs_end_after_the_one_that_finishes() -> None:
    client = FakeEngineClient()
    assert asyncio.run(finish(client, request("a"))) == [None, "length"]
    assert client.stats().running == 0


def test_refusals_come_before_anything_is_queued() -> None:
    client = FakeEngineClient(max_open=1)
    with pytest.raises(InvalidRequest):
        client.submit([request("x"), request("a", (256,))])
    client.submit([request("b")])
    with pytest.raises(Overloaded):
        client.submit([request("c")])
    assert list(client.open) == ["b"]


def test_cancel_frees_at_once_is_idempotent_and_ignores_strangers() -> None:
    async def scenario() -> list[str | None]:
        client = FakeEngineClient(lambda asked: [], max_open=1)
        running = asyncio.create_task(finish(client, request("a")))
        await asyncio.sleep(0)
        for name in ("stranger", "a", "a"):
            client.cancel(name)
        assert client.cancelled == ["a"]
        assert client.stats().free_slots == 1
        return await running

    assert asyncio.run(scenario()) == ["cancelled"]
