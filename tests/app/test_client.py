"""The fake engine keeps the promises of the EngineClient protocol."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from app.client import EngineClient
from app.fake_engine import FakeEngineClient, spell
from engine.types import (
    DRAFTERS,
    InvalidRequest,
    Output,
    Overloaded,
    Request,
    RequestRecord,
    SamplingParams,
)

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


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("k", [None, 0, 1, 2, 3, 8])
def test_the_script_and_its_record_agree(k: int | None, max_tokens: int) -> None:
    asked = replace(request("a", (97, 98, 99)), params=SamplingParams(max_tokens=max_tokens), k=k)
    outputs = list(spell(asked))
    record = outputs[-1].record
    assert record is not None
    assert len(record.rounds) == len(outputs)
    assert record.column("drafted") == [len(output.drafts) for output in outputs]
    assert record.column("accepted") == [output.accepted for output in outputs]
    assert record.column("emitted") == [len(output.token_ids) for output in outputs]
    assert record.output_tokens == sum(record.column("emitted")) == max_tokens
    assert [code >= 0 for code in record.column("proposer")] == [drafted > 0 for drafted in record.column("drafted")]
    assert (record.first_token is None) == (max_tokens == 0)
    for output in outputs:
        kept = min(output.accepted, len(output.token_ids))
        assert output.drafts[:kept] == output.token_ids[:kept]
        assert len(output.token_ids) <= output.accepted + 1
        if output.accepted < min(len(output.drafts), len(output.token_ids)):
            assert output.drafts[output.accepted] != output.token_ids[output.accepted]
    ends = [(part.began_us, part.began_us + part.step_us) for part in record.rounds if part.overhead_us > 0]
    assert len(ends) == len(outputs)
    assert all(end <= began for (_, end), (began, _) in pairwise(ends))


def test_the_script_drafts_as_the_request_says() -> None:
    asked = Request("a", (97, 98), SamplingParams(max_tokens=4), drafter="lookup", max_k=2)
    record = list(spell(asked))[-1].record
    assert record is not None
    assert (record.k_max, record.column("drafted")) == (2, [2, 2])
    assert {DRAFTERS[code] for code in record.column("proposer")} == {"lookup"}


def last_told(asked: Request, read: int, *, cancel: bool) -> RequestRecord:
    """Return the record of a request that is cancelled, or runs out of time, after `read` of its outputs were read."""
    told: list[Output] = []

    async def scenario() -> None:
        client = FakeEngineClient(lambda it: list(spell(it))[:2])
        client.watch(lambda steps: None, told.append)
        (outputs,) = client.submit([asked])
        for _ in range(read):
            await anext(outputs)
        if cancel:
            client.cancel(asked.id)
        assert [output.finish_reason async for output in outputs] == ["cancelled" if cancel else "error"]

    asyncio.run(asyncio.wait_for(scenario(), 30))
    (output,) = told
    assert output.record is not None
    return output.record


@pytest.mark.parametrize(
    ("read", "options"), [(0, {"cancel": True}), (1, {"cancel": True}), (2, {"cancel": True}), (2, {"cancel": False})]
)
def test_a_request_that_ends_early_has_a_record_of_what_was_read(read: int, options: dict[str, Any]) -> None:
    asked = replace(request("a"), params=SamplingParams(max_tokens=50), deadline_s=0.5, max_k=3)
    record = last_told(asked, read, **options)
    assert (record.column("drafted"), record.column("emitted")) == ([3] * read, [3] * read)
    assert (record.output_tokens, record.first_token is None) == (3 * read, read == 0)
    assert record.finished is not None
