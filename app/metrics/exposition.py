"""GET /metrics: this replica's families in Prometheus' text format, and in vLLM's names where they mean the same.

Tools for vLLM read these names: `vllm bench serve` and AIPerf print their tables of speculation from them. Only these
series and specdec_info carry the model's name: it is the same for all series of a replica and would double the reply.
"""

from collections.abc import Iterable, Iterator

from starlette.requests import Request
from starlette.responses import Response

from app.metrics.instruments import Count, Histogram, Level, Spread
from app.metrics.meter import Meter
from app.telemetry.names import VERSION

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# vLLM's name of a finish reason of ours. It has none for an error.
FINISHED = {"stop": "stop", "length": "length", "cancelled": "abort"}

Labels = dict[str, str]


async def metrics(meter: Meter, request: Request) -> Response:
    meter.beat()
    return Response(exposition(meter), headers={"content-type": CONTENT_TYPE})


def exposition(meter: Meter) -> str:
    model = {"model_name": meter.model_name}
    info = _samples("specdec_info", "The served model and the version", "gauge", [(model | {"version": VERSION}, 1)])
    lines = [*info, *(line for instrument in meter.instruments for line in _family(instrument))]
    return "\n".join((*lines, *_vllm(meter, model))) + "\n"


def _family(instrument: Count | Spread | Level) -> Iterator[str]:
    named = {values: dict(zip(instrument.labels, values, strict=True)) for values in _series(instrument)}
    if isinstance(instrument, Spread):
        series = [(named[values], histogram) for values, histogram in instrument.series.items()]
        yield from _histogram(instrument.name, instrument.about, instrument.bounds, series)
    else:
        kind = "counter" if isinstance(instrument, Count) else "gauge"
        values = instrument.totals if isinstance(instrument, Count) else instrument.values
        samples = [(named[labels], value) for labels, value in values.items()]
        yield from _samples(instrument.name, instrument.about, kind, samples)


def _series(instrument: Count | Spread | Level) -> Iterable[tuple[str, ...]]:
    if isinstance(instrument, Count):
        return instrument.totals
    return instrument.values if isinstance(instrument, Level) else instrument.series


def _vllm(meter: Meter, model: Labels) -> Iterator[str]:
    rounds, steps, requests, state = meter.rounds, meter.steps, meter.requests, meter.state
    counters = {
        "spec_decode_num_drafts_total": rounds.rounds,
        "spec_decode_num_draft_tokens_total": rounds.drafted,
        "spec_decode_num_accepted_tokens_total": rounds.accepted,
        "generation_tokens_total": rounds.emitted,
        "prompt_tokens_total": requests.prompt_tokens,
        "num_preemptions_total": steps.preemptions,
    }
    for name, count in counters.items():
        yield from _samples(f"vllm:{name}", None, "counter", [(model, sum(count.totals.values()))])
    # vLLM counts positions from 0.
    at = [(model | {"position": str(int(p) - 1)}, value) for (p,), value in rounds.accepted_at.totals.items()]
    yield from _samples("vllm:spec_decode_num_accepted_tokens_per_pos_total", None, "counter", at)
    ended = requests.choices.totals
    finished = [(model | {"finished_reason": name}, ended.get((ours,), 0)) for ours, name in FINISHED.items()]
    yield from _samples("vllm:request_success_total", None, "counter", finished)
    gauges = {
        "num_requests_running": state.running,
        "num_requests_waiting": state.waiting,
        "kv_cache_usage_perc": state.kv_used,
    }
    for name, level in gauges.items():
        yield from _samples(f"vllm:{name}", None, "gauge", [(model, level.values[()])])
    first = requests.first_token
    series = [(model, histogram) for histogram in first.series.values()]
    yield from _histogram("vllm:time_to_first_token_seconds", None, first.bounds, series)


def _samples(name: str, about: str | None, kind: str, samples: Iterable[tuple[Labels, float]]) -> Iterator[str]:
    yield from _head(name, about, kind)
    for labels, value in samples:
        yield f"{name}{_labels(labels)} {_number(value)}"


def _histogram(
    name: str, about: str | None, bounds: tuple[float, ...], series: Iterable[tuple[Labels, Histogram]]
) -> Iterator[str]:
    yield from _head(name, about, "histogram")
    edges = (*map(_number, bounds), "+Inf")
    for labels, histogram in series:
        total, written = 0, _labels(labels)
        begun = f"{written[:-1]}," if written else "{"
        for edge, count in zip(edges, histogram.counts, strict=True):
            total += count
            yield f'{name}_bucket{begun}le="{edge}"}} {total}'
        yield f"{name}_sum{written} {_number(histogram.sum)}"
        yield f"{name}_count{written} {total}"


def _head(name: str, about: str | None, kind: str) -> Iterator[str]:
    if about is not None:
        yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
