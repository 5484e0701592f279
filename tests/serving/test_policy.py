"""Policy and draft of a real Serve application change while it streams, by another user_config as of `serve deploy`."""

import asyncio
import copy
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.conftest import ARGS, ROOT, Served
from tests.serving.test_serving import body, connect, stream

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LONG = body("def main(argv=None):\n", max_tokens=480, temperature=0.8, seed=11, ignore_eos=True)
SHORT = body("import os\n", max_tokens=24, temperature=0, ignore_eos=True)


@dataclass
class Streams:
    """What somebody got who asked for the same text again and again."""

    texts: list[str] = field(default_factory=list)
    times: list[tuple[float, float]] = field(default_factory=list)  # begin and end of each

    async def go_on(self, client: httpx.AsyncClient, leave: asyncio.Event) -> None:
        while not leave.is_set():
            began = time.monotonic()
            text, parsed = await stream(client, LONG)
            assert parsed[-1] == "[DONE]"
            self.texts.append(text)
            self.times.append((began, time.monotonic()))


def with_user_config(config: dict[str, Any], user_config: Any) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    changed["applications"][0]["deployments"][0]["user_config"] = user_config
    return changed


async def until_shown(client: httpx.AsyncClient, **shown: Any) -> dict[str, Any]:
    """What /health says of the policy, once it says this; a string needs only to be part of what it says."""
    limit = time.monotonic() + 60
    while True:
        reply = await client.get("/health")
        assert reply.status_code == 200, reply.text
        policy: dict[str, Any] = reply.json()["policy"]
        if all(v in (policy[n] or "") if isinstance(v, str) else policy[n] == v for n, v in shown.items()):
            return policy
        assert time.monotonic() < limit, f"{policy} never became {shown}"
        await asyncio.sleep(0.1)


async def drafting(client: httpx.AsyncClient) -> dict[str, Any]:
    reply = await client.post("/v1/completions", json=SHORT)
    assert reply.status_code == 200, reply.text
    told: dict[str, Any] = reply.json()["metrics"]["speculative_decoding"]
    assert told["mode"] == "auto"
    assert sum(told["draft_length_histogram"]) == sum(told["decisions"].values()) > 0
    return told


def test_the_policy_changes_in_place_and_no_stream_notices(served: Served) -> None:
    """goodput → off → fixed → an invalid one → goodput: one process, streams all the while, always the same text."""
    users, switched = [Streams(), Streams()], []

    async def scenario(client: httpx.AsyncClient) -> str:
        undisturbed, _ = await stream(client, LONG)
        pids = await asyncio.to_thread(served.deploy, None)
        assert len(pids) == 1
        assert (await drafting(client))["policy"] == "goodput"
        leave = asyncio.Event()
        tasks = [asyncio.create_task(user.go_on(client, leave)) for user in users]

        async def switch(user_config: Any, **shown: Any) -> dict[str, Any]:
            await asyncio.to_thread(served.deploy, with_user_config(served.config, user_config))
            await until_shown(client, **shown)
            switched.append(time.monotonic())
            return await drafting(client)

        told = await switch({"policy": "off"}, name="off", refused=None)
        assert (told["policy"], told["num_draft_tokens"], told["decisions"].keys()) == ("off", 0, {"policy"})
        told = await switch({"policy": "fixed", "k": 2}, name="fixed", k=2, refused=None)
        assert told["policy"] == "fixed"
        assert told["draft_length_histogram"][2] > 0 == sum(told["draft_length_histogram"][3:])
        told = await switch({"policy": "fixed", "k": 99}, name="fixed", k=2, refused="max_spec_length")
        assert told["draft_length_histogram"][2] > 0 == sum(told["draft_length_histogram"][3:])
        told = await switch({"policy": "goodput"}, name="goodput", refused=None)
        assert told["policy"] == "goodput"
        leave.set()
        await asyncio.gather(*tasks)
        assert await asyncio.to_thread(served.deploy, served.config) == pids
        return undisturbed

    async def run() -> str:
        async with connect(served) as client:
            return await scenario(client)

    undisturbed = asyncio.run(run())
    assert len(undisturbed) > LONG["max_tokens"] > ARGS["max_model_len"] / 2
    assert {text for user in users for text in user.texts} == {undisturbed}
    for moment in switched:
        assert any(began < moment < ended for user in users for began, ended in user.times)


def test_the_draft_changes_in_place_and_no_stream_notices(served: Served, tmp_path: Path) -> None:
    """draft → another one → none → one that is not there → an invalid policy → draft: streams all the while, always the
    same text."""
    second = shutil.copytree(ROOT / "models/demo/draft", tmp_path / "second")
    users, switched = [Streams(), Streams()], []
    fixed = {"policy": "fixed", "k": 3}

    async def scenario(client: httpx.AsyncClient) -> str:
        undisturbed, _ = await stream(client, LONG)
        pids = await asyncio.to_thread(served.deploy, None)
        leave = asyncio.Event()
        tasks = [asyncio.create_task(user.go_on(client, leave)) for user in users]

        async def switch(user_config: Any, **shown: Any) -> None:
            await asyncio.to_thread(served.deploy, with_user_config(served.config, user_config))
            await until_shown(client, loading=None, **shown)
            switched.append(time.monotonic())

        async def drafters() -> Any:
            return (await client.get("/v1/models")).json()["data"][0]["speculation_defaults"]

        await switch(fixed | {"draft": str(second)}, draft="second", k=3, refused=None)
        assert (await drafting(client))["num_draft_tokens"] > 0
        await switch(fixed | {"draft": "none"}, draft=None, refused=None)
        told = await drafters()
        assert told["drafter"] is None
        assert "model" not in told["drafters"]
        reply = await client.post("/v1/completions", json=SHORT)
        assert reply.json()["metrics"]["speculative_decoding"] is None
        reply = await client.post("/v1/completions", json=SHORT | {"speculation": {"drafter": "model"}})
        assert reply.status_code == 400
        await switch(fixed | {"draft": str(tmp_path / "nothing")}, draft=None, refused="there is no directory")
        await switch({"policy": "fixed", "k": 99, "draft": str(second)}, draft=None, refused="max_spec_length")
        await switch({"policy": "goodput"}, draft="eagle", refused=None)
        assert (await drafters())["drafter"] == "model"
        reply = await client.post(
            "/v1/completions", json=SHORT | {"speculation": {"k": 2}}
        )  # goodput may draft nothing
        assert reply.json()["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
        leave.set()
        await asyncio.gather(*tasks)
        assert await asyncio.to_thread(served.deploy, served.config) == pids
        return undisturbed

    async def run() -> str:
        async with connect(served) as client:
            return await scenario(client)

    undisturbed = asyncio.run(run())
    assert {text for user in users for text in user.texts} == {undisturbed}
    for moment in switched:
        assert any(began < moment < ended for user in users for began, ended in user.times)
