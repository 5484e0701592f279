"""GET /metrics: this replica's families in Prometheus' text format, and in vLLM's names where they mean the same.

Tools for vLLM read these names: `vllm bench serve` and AIPerf print their tables of speculation from them. Only these
series and specdec_info carry the model's name: it is the same for all series of a replica and would double the reply.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import accumulate

from starlette.requests import Request
from starlette.responses import Response

from app.metrics.meter import Meter
from app.metrics.metric_instruments import CounterMetric, GaugeMetric, Histogram, HistogramMetric, Values
from app.telemetry.names import VERSION

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# vLLM's name of a finish reason of ours. It has none for an error.
FINISHED = {"stop": "stop", "length": "length", "cancelled": "abort"}

MODEL = ("model_name",)
KEPT_SERIES = 2048  # of one replica; the busiest one has 200


async def metrics(meter: Meter, request: Request) -> Response:
    meter.beat()
    return Response(exposition(meter), headers={"content-type": CONTENT_TYPE})


def exposition(meter: Meter) -> str:
    about = "The served model and the version"
    lines = [*_samples("specdec_info", about, "gauge", ("model_name", "version"), {(meter.model_name, VERSION): 1})]
    for instrument in meter.instruments:
        lines += _family(instrument)
    return "\n".join((*lines, *_vllm(meter))) + "\n"


def _family(instrument: CounterMetric | HistogramMetric | GaugeMetric) -> Iterator[str]:
    name, about, labels = instrument.name, instrument.about, instrument.labels
    if isinstance(instrument, HistogramMetric):
        return _histogram(name, about, instrument.bounds, labels, instrument.series)
    if isinstance(instrument, CounterMetric):
        return _samples(name, about, "counter", labels, instrument.totals)
    return _samples(name, about, "gauge", labels, instrument.values)


def _vllm(meter: Meter) -> Iterator[str]:
    rounds, steps, requests, state = meter.rounds, meter.steps, meter.requests, meter.state
    model = (meter.model_name,)
    counters = {
        "spec_decode_num_drafts_total": rounds.rounds,
        "spec_decode_num_draft_tokens_total": rounds.drafted,
        "spec_decode_num_accepted_tokens_total": rounds.accepted,
        "generation_tokens_total": rounds.emitted,
        "prompt_tokens_total": requests.prompt_tokens,
        "num_preemptions_total": steps.preemptions,
    }
    for name, count in counters.items():
        yield from _samples(f"vllm:{name}", None, "counter", MODEL, {model: sum(count.totals.values())})
    # vLLM counts positions from 0.
    at: dict[Values, float] = {(*model, str(int(p) - 1)): value for (p,), value in rounds.accepted_at.totals.items()}
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    yield from _samples(name, None, "counter", (*MODEL, "position"), at)
    ended = requests.choices.totals
    finished: dict[Values, float] = {(*model, reason): ended.get((ours,), 0) for ours, reason in FINISHED.items()}
    yield from _samples("vllm:request_success_total", None, "counter", (*MODEL, "finished_reason"), finished)
    gauges = {
        "num_requests_running": state.running,
        "num_requests_waiting": state.waiting,
        "kv_cache_usage_perc": state.kv_used,
    }
    for name, level in gauges.items():
        yield from _samples(f"vllm:{name}", None, "gauge", MODEL, {model: level.values[()]})
    first = requests.first_token
    series = {(*model, *values): histogram for values, histogram in first.series.items()}
    yield from _histogram("vllm:time_to_first_token_seconds", None, first.bounds, MODEL, series)


def _samples(name: str, about: str | None, kind: str, labels: Values, values: Mapping[Values, float]) -> Iterator[str]:
    yield from _head(name, about, kind)
    for series, value in values.items():
        yield f"{_beginning(name, labels, series)}{_number(value)}"


def _histogram(
    name: str, about: str | None, bounds: tuple[float, ...], labels: Values, histograms: Mapping[Values, Histogram]
) -> Iterator[str]:
    yield from _head(name, about, "histogram")
    for series, histogram in histograms.items():
        totals = list(accumulate(histogram.counts))
        for beginning, total in zip(_buckets(name, bounds, labels, series), totals, strict=True):
            yield f"{beginning}{total}"
        yield f"{_beginning(name + '_sum', labels, series)}{_number(histogram.sum)}"
        yield f"{_beginning(name + '_count', labels, series)}{totals[-1]}"


def _head(name: str, about: str | None, kind: str) -> Iterator[str]:
    if about is not None:
        yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"


@lru_cache(KEPT_SERIES)
def _buckets(name: str, bounds: tuple[float, ...], labels: Values, series: Values) -> tuple[str, ...]:
    """What stands before the number of each bucket of a series."""
    edges = (*map(_number, bounds), "+Inf")
    return tuple(_beginning(f"{name}_bucket", (*labels, "le"), (*series, edge)) for edge in edges)


@lru_cache(KEPT_SERIES)
def _beginning(name: str, labels: Values, series: Values) -> str:
    """What stands before a series' number. Kept, because writing it takes most of a reply's time."""
    pairs = ",".join(f'{label}="{_escaped(value)}"' for label, value in zip(labels, series, strict=True))
    return f"{name}{{{pairs}}} " if pairs else f"{name} "


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
