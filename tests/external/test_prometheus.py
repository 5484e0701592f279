"""What a real Prometheus makes of a real run: every query of the board, every alert, the names, the exact counts."""

import asyncio
import json
import math
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.deployments.boards import ALERTS, board_queries
from tests.deployments.test_metrics import COUNTERS, GAUGES, HISTOGRAMS
from tests.external.conftest import ROOT, program
from tests.serving.conftest import AUTOSCALING, Served, serving

pytestmark = [pytest.mark.external, pytest.mark.integration, pytest.mark.slow]

REPORT_S = 1  # how often Ray's workers report, here
LOAD_S = 12  # at least: rates are taken over a minute
LIMIT_S = 60  # for what was counted to arrive
PREFIXES = ("ray_specdec_", "ray_gen_ai_")
RAY_LABELS = re.compile(r'\b(Component|NodeAddress|SessionName|Version|WorkerId)="[^"]*",')
PROMPT = "def fibonacci(n):\n    "


@dataclass
class Scraped:
    """A run that is over, as the server told its clients of it and as Prometheus saw it."""

    api: str
    exporter: str  # URL of Ray's own endpoint
    replies: list[dict[str, Any]] = field(default_factory=list)
    refused: int = 0
    loaded: float = 0.0  # Unix seconds: the last moment of the load
    exported: str = ""  # by Ray, then: it forgets gauges that nobody sets

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """at: Unix seconds; None: now."""
        asked: dict[str, Any] = {"query": expression} | ({} if at is None else {"time": at})
        reply = httpx.get(f"{self.api}/query", params=asked, timeout=30).json()
        assert reply["status"] == "success", f"{expression}: {reply}"
        result: list[dict[str, Any]] = reply["data"]["result"]
        return result

    def value(self, expression: str) -> float:
        (sample,) = self.query(expression)
        return float(sample["value"][1])

    def choices(self) -> list[dict[str, Any]]:
        """What replies tell of their speculation, those that had any."""
        told = [reply["metrics"]["speculative_decoding"] for reply in self.replies]
        return [one for one in told if one is not None]


@pytest.fixture(scope="module")
def run(prometheus: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("prometheus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_metrics_report_interval_ms", str(1000 * REPORT_S))
        with (
            serving(folder, {"max_model_len": 512, "max_running": 4}, AUTOSCALING | {"max_replicas": 1}) as served,
            scraping(prometheus, folder, Path(served.environment["RAY_TMPDIR"])) as url,
        ):
            scraped = Scraped(f"{url}/api/v1", endpoint(Path(served.environment["RAY_TMPDIR"])))
            wait_until(lambda: scraped.query("ray_specdec_engine_heartbeat_age_seconds") != [])
            asyncio.run(load(served, scraped))
            scraped.loaded, scraped.exported = time.time(), httpx.get(scraped.exporter, timeout=30).text
            done = len(scraped.replies)
            wait_until(lambda: scraped.value('sum(ray_specdec_requests_total{outcome="completed"})') == done)
            time.sleep(5)  # the last steps are told of later: by the next check of the replica's health, then by Ray
            yield scraped


@contextmanager
def scraping(prometheus: str, folder: Path, ray: Path) -> Iterator[str]:
    """A Prometheus that finds Ray's endpoints where Ray says they are, with our alerts; its URL."""
    config = folder / "prometheus.yml"
    targets = {
        "job_name": "ray",
        "file_sd_configs": [{"files": [str(ray / "ray/prom_metrics_service_discovery.json")]}],
    }
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [targets],
    }
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    port = free_port()
    command = [
        prometheus,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with open(folder / "prometheus.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: answers(f"{url}/-/ready"))
            yield url
        finally:
            process.terminate()
            process.wait(30)


def endpoint(ray: Path) -> str:
    (group,) = json.loads((ray / "ray/prom_metrics_service_discovery.json").read_text("utf-8"))
    return f"http://{group['targets'][0]}/metrics"


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def wait_until(condition: Any) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit, "what was waited for did not come"
        time.sleep(0.3)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def load(served: Served, scraped: Scraped) -> None:
    """Requests of every kind, three at a time, for a while: with drafts, without, predicted, and refused."""
    kinds: list[dict[str, Any]] = [
        {"speculation": {"k": 4}},
        {"speculation": {"k": 3, "drafter": "ngram"}},
        {"speculation": {"tree": [3, 2]}},
        {"speculation": {"mode": "off"}},
        {"prediction": {"type": "content", "content": "if n < 2:\n        return n\n"}},
        {},
    ]
    began = time.monotonic()
    async with httpx.AsyncClient(base_url=served.url, timeout=120) as client:
        turn = 0
        while time.monotonic() < began + LOAD_S or turn < len(kinds):
            some = [kinds[(turn + i) % len(kinds)] for i in range(3)]
            posts = [post(client, seed=turn * 3 + i, **fields) for i, fields in enumerate(some)]
            for reply in await asyncio.gather(*posts):
                assert reply.status_code == 200, reply.text[:300]
                scraped.replies.append(reply.json())
            assert (await post(client, temperature=9)).status_code == 400
            scraped.refused += 1
            turn += 1


async def post(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    request = {"model": "demo", "prompt": PROMPT, "max_tokens": 48, "temperature": 0.7, "ignore_eos": True}
    return await client.post("/v1/completions", json=request | fields)


@pytest.mark.parametrize("query", board_queries(), ids=lambda query: query.id)
def test_every_query_of_the_board_has_data(run: Scraped, query: Any) -> None:
    samples = run.query(query.filled("1m"), run.loaded)
    assert any(math.isfinite(float(sample["value"][1])) for sample in samples), samples


def test_every_alert_evaluates_and_none_fires_on_a_healthy_run(run: Scraped) -> None:
    rules = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"][0]["rules"]
    for rule in rules:
        run.query(rule["expr"])
    groups = httpx.get(f"{run.api}/rules", timeout=30).json()["data"]["groups"]
    seen = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert seen.keys() == {rule["alert"] for rule in rules}
    assert {rule["health"] for rule in seen.values()} == {"ok"}
    assert not [name for name, rule in seen.items() if rule["state"] == "firing"]


def test_the_counts_are_what_clients_were_told(run: Scraped) -> None:
    told = run.choices()
    completed = sum(reply["usage"]["completion_tokens"] for reply in run.replies)
    assert run.value("sum(ray_specdec_emitted_tokens_total)") == completed
    assert run.value("sum(ray_specdec_drafted_tokens_total)") == sum(one["num_draft_tokens"] for one in told)
    assert run.value("sum(ray_specdec_accepted_tokens_total)") == sum(one["num_accepted_draft_tokens"] for one in told)
    assert run.value("sum(ray_specdec_rounds_total)") == sum(one["num_spec_steps"] for one in told)
    assert run.value('sum(ray_specdec_requests_total{outcome="refused"})') == run.refused
    assert run.value("sum(ray_specdec_requests_total)") == run.refused + len(run.replies)


def test_the_identities_hold_in_prometheus(run: Scraped) -> None:
    accepted = run.value("sum(ray_specdec_accepted_tokens_total)")
    drafted = run.value("sum(ray_specdec_drafted_tokens_total)")
    assert 0 < accepted < drafted
    assert run.value("sum(ray_specdec_accepted_tokens_per_pos_total)") == accepted
    assert accepted < run.value("sum(ray_specdec_drafted_tokens_per_pos_total)") < drafted  # siblings share a position
    of_trees = run.value("sum(ray_specdec_tree_accepted_tokens_total)")
    assert 0 < of_trees < accepted
    assert of_trees <= run.value("sum(ray_specdec_tree_tried_tokens_total)") < drafted
    assert run.value("sum(ray_specdec_rolled_back_tokens_total)") == drafted - accepted
    rounds = run.value("sum(ray_specdec_rounds_total)")
    assert 0 < run.value("sum(ray_specdec_round_accepted_tokens_count)") < rounds
    assert run.value('sum(ray_specdec_drafted_tokens_per_pos_total{position="1"})') == rounds
    assert run.value("sum(ray_gen_ai_server_request_duration_seconds_count)") == len(run.replies)


def test_every_family_is_exported_as_what_it_is_with_serve_s_labels(run: Scraped) -> None:
    types = (line.split()[2:] for line in run.exported.splitlines() if line.startswith("# TYPE"))
    ours = {name: kind for name, kind in types if name.startswith(PREFIXES)}
    kinds = {"counter": COUNTERS, "histogram": HISTOGRAMS, "gauge": GAUGES}
    assert ours == {f"ray_{name}": kind for kind, families in kinds.items() for name in families}
    for name in ours:
        series = run.query(f'{{__name__=~"{name}(_count)?"}}', run.loaded)
        assert series, name
        for sample in series:
            labels = sample["metric"]
            assert (labels["model_name"], labels["deployment"], labels["application"]) == (
                "demo",
                "Replica",
                "foretoken",
            )
            assert labels["replica"]


def test_promtool_finds_nothing_to_say_of_our_families(run: Scraped, promtool: str) -> None:
    """But for the labels that Ray adds to every series, which are in camel case."""
    text = RAY_LABELS.sub("", run.exported)
    lines = [line for line in text.splitlines() if of_ours(line)]
    assert len(lines) > 300
    checked = check_metrics(promtool, lines)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def of_ours(line: str) -> bool:
    return line.removeprefix("# HELP ").removeprefix("# TYPE ").startswith(PREFIXES)


def check_metrics(promtool: str, lines: list[str]) -> "subprocess.CompletedProcess[str]":
    text = "\n".join(lines) + "\n"
    return subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)


def test_promtool_would_say_what_is_wrong(promtool: str) -> None:
    lines = ["# HELP ray_specdec_rounds Rounds", "# TYPE ray_specdec_rounds counter", "ray_specdec_rounds 1"]
    checked = check_metrics(promtool, lines)
    assert checked.returncode != 0
    assert "_total" in checked.stdout + checked.stderr


@pytest.mark.parametrize(
    "check", [["check", "rules", str(ALERTS)], ["test", "rules", "tests/external/alerts_test.yaml"]]
)
def test_promtool_takes_the_alerts_and_each_fires_when_it_should(promtool: str, check: list[str]) -> None:
    done = subprocess.run([promtool, *check], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_to_fire_and_not_to() -> None:
    rules = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"][0]["rules"]
    cases = yaml.safe_load((ROOT / "tests/external/alerts_test.yaml").read_text("utf-8"))["tests"]
    checks = [check for case in cases for check in case["alert_rule_test"]]
    for fires in (True, False):
        tested = {check["alertname"] for check in checks if bool(check["exp_alerts"]) == fires}
        assert tested == {rule["alert"] for rule in rules}


def test_what_is_not_installed_is_skipped_with_the_reason() -> None:
    with pytest.raises(pytest.skip.Exception, match=r"no-such-program is not installed: `make test-external`"):
        program("no-such-program")
