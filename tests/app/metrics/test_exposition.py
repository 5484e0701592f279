"""GET /metrics: Prometheus' text format, our families and vLLM's names, as vLLM's own benchmark reads them."""

import contextlib
from collections.abc import Mapping
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

import app.metrics.meter as meter_module
from app.fake_engine import FakeEngineClient, spell
from app.keys import ApiKeys
from app.main import create_app
from app.metrics.meter import Meter
from app.metrics.metric_instruments import CounterMetric, GaugeMetric, HistogramMetric
from app.telemetry.names import VERSION
from engine.types import DRAFTERS, REASONS, RoundRecord, StepStats
from tests.app.harness import PROMPT, call

MODEL, LOAD = DRAFTERS.index("model"), REASONS.index("load")
KINDS = {CounterMetric: "counter", HistogramMetric: "histogram", GaugeMetric: "gauge"}


def step(*fates: tuple[int, int], **fields: Any) -> StepStats:
    """A step of 10 ms whose sequences drafted and accepted so many tokens."""
    parts = tuple(RoundRecord(d, LOAD, 600, d, a, a + 1, MODEL if d else -1) for d, a in fates)
    sums = {"drafted": sum(d for d, _ in fates), "accepted": sum(a for _, a in fates)}
    times = {"draft_us": 2_000, "score_us": 7_000, "step_us": 10_000, "target_forward_us": 0, "draft_forward_us": 0}
    counts = {"draft_steps": 0, "draft_tokens": 0, "running": len(parts), "waiting": 0, "prefill_tokens": 0}
    emitted = sum(a + 1 for _, a in fates)
    return StepStats(
        **{**sums, **times, **counts, "step": 1, "sequences": len(parts), "emitted": emitted, "parts": parts, **fields}
    )


def scrape(app: Any) -> str:
    done = call(app, method="GET", path="/metrics")
    assert (done.status, done.reply_headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    return done.reply.decode()


def families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(text: str, sample: str, labels: Mapping[str, str] = {}) -> float:
    (found,) = (
        one.value
        for family in families(text).values()
        for one in family.samples
        if one.name == sample and one.labels.items() >= labels.items()
    )
    return float(found)


@pytest.fixture
def served() -> tuple[Any, Meter]:
    client = FakeEngineClient()
    meter = Meter(client)
    return create_app(client, meter=meter), meter


def test_every_instrument_is_there_with_its_kind(served: tuple[Any, Meter]) -> None:
    app, meter = served
    assert call(app, PROMPT | {"max_tokens": 7}).status == 200
    meter.stepped([step((3, 2), (2, 2))])
    found = families(scrape(app))
    for instrument in meter.instruments:
        family = found[instrument.name.removesuffix("_total")]
        kind = KINDS[type(instrument)]
        assert (family.type, family.documentation) == (kind, instrument.about)
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == {*instrument.labels}
    assert value(scrape(app), "specdec_info", {"model_name": "fake", "version": VERSION}) == 1


def test_a_histogram_is_cumulative_and_ends_with_everything(served: tuple[Any, Meter]) -> None:
    app, meter = served
    for seconds in (0.0005, 0.001, 0.003, 99.0):
        meter.requests.queue.observe(seconds)
    text = scrape(app)
    at = {
        bound: value(text, "specdec_request_queue_seconds_bucket", {"le": bound})
        for bound in ("0.0025", "0.005", "+Inf")
    }
    assert at == {"0.0025": 2, "0.005": 3, "+Inf": 4}
    assert value(text, "specdec_request_queue_seconds_count") == 4
    assert value(text, "specdec_request_queue_seconds_sum") == pytest.approx(99.0045)


def speculation_of_vllm_bench(text: str) -> dict[str, Any]:
    """As `vllm bench serve` reads the reply: by substrings of lines, the number last (vllm/benchmarks/serve.py)."""
    found: dict[str, Any] = {"drafts": 0, "draft_tokens": 0, "accepted": 0, "per_pos": {}}
    for line in text.split("\n"):
        parts = line.strip().split()
        if not line.startswith("vllm:spec_decode"):
            continue
        with contextlib.suppress(ValueError):
            number = int(float(parts[-1]))
            if "num_drafts" in line:
                found["drafts"] += number
            elif "num_draft_tokens" in line:
                found["draft_tokens"] += number
            elif "num_accepted_tokens_per_pos" in line:
                start = line.index('position="') + len('position="')
                position = int(line[start : line.index('"', start)])
                found["per_pos"][position] = found["per_pos"].get(position, 0) + number
            elif "num_accepted_tokens" in line:
                found["accepted"] += number
    return found


def test_vllms_benchmark_reads_its_table(served: tuple[Any, Meter]) -> None:
    app, meter = served
    meter.stepped([step((3, 2), (2, 2), (0, 0)), step((4, 0))])
    assert speculation_of_vllm_bench(scrape(app)) == {
        "drafts": 3,
        "draft_tokens": 9,
        "accepted": 4,
        "per_pos": {0: 2, 1: 2, **dict.fromkeys(range(2, 8), 0)},
    }


def test_vllms_names_tell_what_ours_tell(served: tuple[Any, Meter]) -> None:
    app, meter = served
    for fields in ({}, {"n": 2}, {"temperature": 9}):
        call(app, PROMPT | {"max_tokens": 7} | fields)
    meter.stepped([step((3, 2), preempted=2)])
    text = scrape(app)
    told = {
        "vllm:prompt_tokens_total": 9,
        "vllm:generation_tokens_total": 3,
        "vllm:num_preemptions_total": 2,
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
        "vllm:time_to_first_token_seconds_count": 2,
    }
    assert {name: value(text, name, {"model_name": "fake"}) for name in told} == told
    for reason, count in (("length", 3), ("stop", 0), ("abort", 0)):
        assert value(text, "vllm:request_success_total", {"finished_reason": reason}) == count


def test_a_busy_replicas_metrics_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """All drafters and batch sizes, and requests that ended in every way but by a fault of the server."""
    monkeypatch.setattr(meter_module, "ONE_IN", 1)
    client = FakeEngineClient(name="organisation/a-model-with-a-long-name-7B-instruct")
    meter = Meter(client)
    app = create_app(client, meter=meter)
    for fields in ({}, {"temperature": 9}, {"deadline_s": 1e-9}, {"prediction": {"type": "content", "content": "ab"}}):
        call(app, {**PROMPT, "model": client.model.name, **fields})
    for batch in (1, 2, 4, 8, 16):
        meter.stepped([step(*[(8, 5)] * batch), step(*[(0, 0)] * batch)])
    text = scrape(app)
    assert len(text.encode()) <= 30_000


def test_labels_escape_what_would_end_them() -> None:
    client = FakeEngineClient(name='a"b\\c\nd')
    text = scrape(create_app(client, meter=Meter(client)))
    assert value(text, "vllm:num_requests_running", {"model_name": 'a"b\\c\nd'}) == 0


def test_metrics_need_a_key_where_others_do_and_a_meter() -> None:
    client = FakeEngineClient(spell)
    app = create_app(client, meter=Meter(client), keys=ApiKeys.from_strings(["k"]))
    assert call(app, method="GET", path="/metrics").status == 401
    assert call(app, method="GET", path="/metrics", headers={"authorization": "Bearer k"}).status == 200
    assert call(create_app(FakeEngineClient()), method="GET", path="/metrics").status == 404
