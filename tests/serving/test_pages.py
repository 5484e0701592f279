"""The live page through Serve's proxy: its files, its data and its feed."""

import json
import re
import time

import httpx
import pytest

from tests.serving.conftest import Served

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_the_page_and_all_that_it_loads_come_through(served: Served) -> None:
    page = httpx.get(f"{served.url}/ui").raise_for_status()
    assert "default-src 'none'" in page.headers["content-security-policy"]
    links = re.findall(r'(?:src|href)="(ui/[^"]+)"', page.text)
    assert len(links) == 4
    for link in links:
        reply = httpx.get(f"{served.url}/{link}").raise_for_status()
        assert reply.headers["x-content-type-options"] == "nosniff"


def test_a_request_is_found_with_its_rounds(served: Served) -> None:
    speculation = {"mode": "fixed", "k": 3}
    asked = {"model": "demo", "prompt": "def f(x):", "max_tokens": 24, "speculation": speculation}
    reply = httpx.post(f"{served.url}/v1/completions", json=asked, timeout=60).raise_for_status().json()
    said = reply["metrics"]["speculative_decoding"]
    for _ in range(50):  # another replica may answer, which does not know it
        found = httpx.get(f"{served.url}/ui/api/requests/{reply['id']}")
        if found.is_success:
            break
    (choice,) = found.raise_for_status().json()["choices"]
    rounds = choice["rounds"]
    assert (sum(rounds["drafted"]), sum(rounds["accepted"])) == (
        said["num_draft_tokens"],
        said["num_accepted_draft_tokens"],
    )
    assert sum(rounds["emitted"]) == reply["usage"]["completion_tokens"]


def test_the_feed_streams(served: Served) -> None:
    with httpx.stream("GET", f"{served.url}/ui/events", timeout=30) as reply:
        lines = (line for line in reply.iter_lines() if line.startswith("data: "))
        events = [json.loads(next(lines)[6:]) for _ in range(3)]
    assert events[0]["state"]["now"]["t"] < events[2]["now"]["t"]
    assert [set(event) for event in events] == [{"state"}, {"now", "series"}, {"now", "series"}]


def test_the_console_tells_the_start_by_its_stages_and_one_line_per_request(served: Served) -> None:
    asked = {"model": "demo", "prompt": "def secret_name(x):", "max_tokens": 3, "ignore_eos": True}
    reply = httpx.post(f"{served.url}/v1/completions", json=asked, timeout=60).raise_for_status().json()
    assert httpx.get(f"{served.url}/v1/nothing").status_code == 404
    lines = (f"foretoken: {reply['id']} length: 7 + 3 tokens, ", " 404 GET /v1/nothing: not_found")
    limit = time.monotonic() + 30  # Ray brings a replica's lines some tenths of a second later
    while not all(line in (log := served.log.read_text("utf-8", "replace")) for line in lines):
        assert time.monotonic() < limit, log[-2000:]
        time.sleep(0.1)
    assert "secret_name" not in log
    stages = (
        *("starting ", "settings, files and tokenizers are valid", "Ray and Serve run", "loading target "),
        *("configurations and tokenizers are read", "weights as_is", "memory:", " profiled ("),
    )
    starts = [log.index(stage) for stage in (*stages, f"foretoken: ready: {served.url}/ui (")]
    assert starts == sorted(starts)
    # Another process says "ready", and Ray may bring the replica's last line after it.
    assert starts[-2] < log.index("policy: ")
