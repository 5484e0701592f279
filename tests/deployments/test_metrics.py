"""The metrics: every family, its exact values for a scripted engine, and the identities between them."""

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest

from app.fake_engine import FakeEngineClient, Script, spell
from app.main import create_app
from app.metrics import meter as metrics
from app.metrics.meter import OUTCOMES, Meter
from app.page.live import LivePage
from app.telemetry.exchange import Exchange as Followed
from app.telemetry.export import DroppedSpans
from deployments import ray_metrics
from deployments.ray_metrics import RayMetrics
from engine.types import DRAFTERS, REASONS, EngineStats, FinishReason, Output, Request, RoundRecord, StepStats
from tests.app.harness import PROMPT, Exchange, call
from tests.app.telemetry.tracing import Traced
from tests.deployments import recording
from tests.deployments.recording import Instrument, Told

COUNTERS = {
    "specdec_rounds_total": ("drafter",),
    "specdec_drafted_tokens_total": ("drafter",),
    "specdec_accepted_tokens_total": ("drafter",),
    "specdec_rolled_back_tokens_total": ("drafter",),
    "specdec_emitted_tokens_total": ("drafter",),
    "specdec_drafted_tokens_per_pos_total": ("position",),
    "specdec_accepted_tokens_per_pos_total": ("position",),
    "specdec_tree_accepted_tokens_total": ("position", "rank"),
    "specdec_tree_tried_tokens_total": ("position", "rank"),
    "specdec_policy_decisions_total": ("policy", "reason"),
    "specdec_steps_total": (),
    "specdec_step_seconds_total": (),
    "specdec_draft_seconds_total": (),
    "specdec_verify_seconds_total": (),
    "specdec_policy_seconds_total": (),
    "specdec_prompt_tokens_total": ("source",),
    "specdec_preemptions_total": (),
    "specdec_draft_faults_total": (),
    "specdec_failed_steps_total": (),
    "specdec_decode_seconds_total": ("batch", "drafts"),
    "specdec_decode_tokens_total": ("batch", "drafts"),
    "specdec_plain_seconds_total": ("batch", "drafts"),
    "specdec_requests_total": ("outcome",),
    "specdec_choices_total": ("finish_reason",),
    "specdec_choice_prompt_tokens_total": (),
    "specdec_prediction_tokens_total": ("result",),
    "specdec_telemetry_dropped_total": ("kind",),
}
HISTOGRAMS = {
    "specdec_round_accepted_tokens": (),
    "specdec_round_duration_seconds": ("phase",),
    "specdec_step_batch_size": (),
    "specdec_request_acceptance_rate": (),
    "specdec_request_acceptance_length": (),
    "specdec_request_queue_seconds": (),
    "gen_ai_server_request_duration_seconds": ("outcome",),
    "gen_ai_server_time_to_first_token_seconds": (),
    "gen_ai_server_time_per_output_token_seconds": (),
}
GAUGES = {
    "specdec_requests_running": (),
    "specdec_requests_waiting": (),
    "specdec_kv_cache_usage_ratio": (),
    "specdec_engine_heartbeat_age_seconds": (),
    "specdec_user_config_refused": (),
    "specdec_alpha_estimate": ("drafter",),
    "specdec_k_current": ("drafter",),
}
FAMILIES = {"counter": COUNTERS, "histogram": HISTOGRAMS, "gauge": GAUGES}
MODEL, NGRAM = DRAFTERS.index("model"), DRAFTERS.index("ngram")
LOAD, BY_USER, CAP = REASONS.index("load"), REASONS.index("user"), REASONS.index("cap")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    monkeypatch.setattr(ray_metrics, "metrics", recording)
    monkeypatch.setattr(Instrument, "made", {})
    monkeypatch.setattr(metrics, "ONE_IN", 1)
    return Told()


def play(meter: Meter, steps: Sequence[StepStats]) -> None:
    meter.stepped(steps)
    meter.beat()


def step(*parts: RoundRecord, **fields: Any) -> StepStats:
    """A step over these sequences, 10 ms long: 2 proposing, 7 in the target's pass."""
    plain = StepStats(
        step=1,
        sequences=len(parts),
        prefill_tokens=0,
        drafted=sum(part.drafted for part in parts),
        accepted=sum(part.accepted for part in parts),
        emitted=sum(part.emitted for part in parts),
        draft_us=2_000,
        draft_steps=max((part.drafted for part in parts), default=0),
        draft_tokens=sum(part.drafted for part in parts),
        score_us=7_000,
        target_forward_us=6_000,
        draft_forward_us=1_500,
        step_us=10_000,
        running=len(parts),
        waiting=0,
        policy_us=100,
        parts=parts,
    )
    made = replace(plain, **fields)
    estimate = made.step_us if not made.drafted else 12_000
    return replace(made, plain_us=fields.get("plain_us", estimate if made.decode_only else 0))


def part(
    drafted: int, accepted: int, proposer: int = MODEL, *, reason: int = LOAD, alpha: int = 600, k: int | None = None
) -> RoundRecord:
    who = proposer if drafted else -1
    return RoundRecord(drafted if k is None else k, reason, alpha, drafted, accepted, accepted + 1, who)


FIRST = RoundRecord(0, -1, 0, 0, 0, 1, -1)  # the pass that ended a prompt
STEPS = (
    step(FIRST, prefill_tokens=20, cached_tokens=32, draft_us=0),
    step(part(4, 2), part(2, 2), part(3, 0, NGRAM, reason=BY_USER)),
    step(part(0, 0, k=1, reason=CAP), part(1, 1, alpha=800), draft_faults=1, preempted=2),
    step(part(0, 0, alpha=200), draft_us=0, score_us=9_000),
    step(sequences=1, failed=True, draft_us=0, score_us=0),
)


def approx(**values: float) -> Any:
    return pytest.approx(values)


def test_every_family_and_no_other_with_its_labels(told: Told) -> None:
    Meter(FakeEngineClient(), RayMetrics("demo"))
    made = {kind: {i.name: i.keys for i in Instrument.made.values() if i.kind == kind} for kind in FAMILIES}
    labelled = {kind: {name: ("model_name", *keys) for name, keys in of.items()} for kind, of in FAMILIES.items()}
    assert made == labelled
    assert all(instrument.default == {"model_name": "demo"} for instrument in Instrument.made.values())


def test_a_tree_counts_at_its_depths_and_by_rank(told: Told) -> None:
    part = RoundRecord(6, 0, 500, 6, 2, 3, 0, tree=(-1, 0, 0, -1, 3, 3), path=(3, 4))
    play(Meter(FakeEngineClient(), RayMetrics("demo")), [replace(STEPS[0], parts=(part,))])
    assert told["specdec_drafted_tokens_total"] == {"model": 6}
    assert told["specdec_drafted_tokens_per_pos_total"] == {"1": 1, "2": 1}
    assert told["specdec_accepted_tokens_per_pos_total"] == {"1": 1, "2": 1}
    assert told["specdec_tree_accepted_tokens_total"] == {"1 2": 1, "2 1": 1}
    assert told["specdec_tree_tried_tokens_total"] == {"1 1": 1, "1 2": 1, "2 1": 1}
    series = [Instrument.made[f"specdec_tree_{name}_tokens_total"].told.keys() for name in ("accepted", "tried")]
    assert series[0] == series[1], "a rank of which nothing is accepted has the rate 0, not none"


def test_what_rounds_add(told: Told) -> None:
    play(Meter(FakeEngineClient(), RayMetrics("demo")), STEPS)
    assert told["specdec_rounds_total"] == {"model": 3, "ngram": 1}
    assert told["specdec_drafted_tokens_total"] == {"model": 7, "ngram": 3}
    assert told["specdec_accepted_tokens_total"] == {"model": 5}
    assert told["specdec_rolled_back_tokens_total"] == {"model": 2, "ngram": 3}
    assert told["specdec_emitted_tokens_total"] == {"model": 8, "ngram": 1, "none": 3}
    assert told["specdec_drafted_tokens_per_pos_total"] == {"1": 4, "2": 3, "3": 2, "4": 1}
    assert told["specdec_accepted_tokens_per_pos_total"] == {"1": 3, "2": 2}
    assert told["specdec_policy_decisions_total"] == {"goodput load": 4, "goodput user": 1, "goodput cap": 1}
    assert told.values("specdec_round_accepted_tokens") == {"": [2, 2, 0, 1]}


def test_the_policy_s_view_leaves_out_what_requests_fixed(told: Told) -> None:
    """A sequence without drafts counts for the server's default drafter and lowers its mean."""
    play(Meter(FakeEngineClient(), RayMetrics("demo")), STEPS)
    assert told["specdec_k_current"] == approx(model=(4 + 2 + 1 + 1 + 0) / 5)
    assert told["specdec_alpha_estimate"] == approx(model=(0.6 * 3 + 0.8 + 0.2) / 5)


def test_what_steps_add(told: Told) -> None:
    play(Meter(FakeEngineClient(), RayMetrics("demo")), STEPS)
    assert told["specdec_steps_total"] == {"": 5}
    assert told.total("specdec_step_seconds_total") == pytest.approx(0.050)
    assert told.total("specdec_draft_seconds_total") == pytest.approx(0.004)
    assert told.total("specdec_verify_seconds_total") == pytest.approx(0.030)
    assert told.total("specdec_policy_seconds_total") == pytest.approx(0.0005)
    assert told["specdec_prompt_tokens_total"] == {"computed": 20, "cached": 32}
    assert told["specdec_preemptions_total"] == {"": 2}
    assert told["specdec_draft_faults_total"] == {"": 1}
    assert told["specdec_failed_steps_total"] == {"": 1}
    assert told.values("specdec_step_batch_size") == {"": [1, 3, 2, 1, 1]}
    phases = told.values("specdec_round_duration_seconds")
    assert phases["draft"] == [0.002, 0.002], "steps without drafts would look like quick ones"
    assert phases["verify"] == [0.007, 0.007, 0.007, 0.009, 0.0]
    assert phases["other"] == pytest.approx([0.003, 0.001, 0.001, 0.001, 0.010])


def test_histograms_see_one_step_in_so_many_that_ran(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "ONE_IN", 3)
    meter = Meter(FakeEngineClient(), RayMetrics("demo"))
    steps = [step(*[part(1, 1)] * batch) for batch in range(1, 11)]
    for few in (steps[:2], steps[2:3], [step()], steps[3:]):
        play(meter, few)
    assert told.values("specdec_step_batch_size") == {"": [1, 4, 7, 10]}
    assert len(told.values("specdec_round_duration_seconds")["verify"]) == 4
    assert len(told.values("specdec_round_accepted_tokens")[""]) == 1 + 4 + 7 + 10
    assert told["specdec_rounds_total"] == {"model": 55}


def test_decoding_is_counted_by_batch_and_without_steps_that_read_prompts(told: Told) -> None:
    play(Meter(FakeEngineClient(), RayMetrics("demo")), STEPS)
    seconds = told["specdec_decode_seconds_total"]
    assert seconds == pytest.approx({"4 yes": 0.010, "2 yes": 0.010, "1 no": 0.010})
    assert told["specdec_decode_tokens_total"] == {"4 yes": 7, "2 yes": 3, "1 no": 1}
    plain = told["specdec_plain_seconds_total"]
    assert plain.keys() == seconds.keys()
    assert plain["1 no"] == seconds["1 no"]


def test_the_page_and_the_metrics_tell_one_speedup(told: Told) -> None:
    client = FakeEngineClient()
    meter, live = Meter(client, RayMetrics("demo")), LivePage(client)
    fast = [step(*[part(3, 3)] * 2, plain_us=25_000, began=time.monotonic())] * 7
    slow = [step(part(0, 0), draft_us=50_000, step_us=60_000, plain_us=10_000, draft_faults=1)] * 2
    steps = [*STEPS, *fast, *slow, step(part(2, 1), prefill_tokens=50, step_us=90_000)]
    meter.stepped(steps)
    live.stepped(steps)
    meter.beat()
    shown = live.state()["now"]["speedup"]
    plain, real = (told.total(f"specdec_{name}_seconds_total") for name in ("plain", "decode"))
    assert shown == pytest.approx(plain / real, abs=5e-4)
    assert plain == pytest.approx(0.012 * 2 + 0.010 + 7 * 0.025 + 2 * 0.010)


def test_reply_span_page_and_metrics_tell_one_acceptance(told: Told) -> None:
    traced = Traced(spell)
    meter, live = Meter(traced.client, RayMetrics("demo")), LivePage(traced.client)
    app = create_app(traced.client, [meter, traced.tracer], live_page=live)
    reply = json.loads(call(app, PROMPT | {"max_tokens": 8, "speculation": {"k": 3}}).reply)
    said, span = reply["metrics"]["speculative_decoding"], traced.attributes()
    (choice,) = next(live.recent.latest()).summary()["choices"]
    drafted, accepted = said["num_draft_tokens"], said["num_accepted_draft_tokens"]
    assert 0 < accepted < drafted
    assert (span["specdec.tokens.drafted"], span["specdec.tokens.accepted"]) == (drafted, accepted)
    assert (choice["drafted"], choice["accepted"]) == (drafted, accepted)
    rate, length = said["draft_acceptance_rate"], said["mean_acceptance_length"]
    assert (span["specdec.acceptance.rate"], span["specdec.acceptance.length"]) == (rate, length)
    assert told.values("specdec_request_acceptance_rate") == {"": [rate]}
    assert told.values("specdec_request_acceptance_length") == {"": [length]}


def random_step(draw: random.Random) -> StepStats:
    parts = []
    for _ in range(draw.randint(0, 6)):
        drafted = draw.choice((0, 0, 1, 2, 4, 8))
        reason = draw.randrange(-1, len(REASONS))
        parts.append(part(drafted, draw.randint(0, drafted), draw.randrange(len(DRAFTERS)), reason=reason))
    return step(*parts, prefill_tokens=draw.choice((0, 0, 16)), step_us=draw.randint(9_000, 20_000))


@pytest.mark.parametrize("seed", range(5))
def test_the_identities_between_families(told: Told, seed: int) -> None:
    draw = random.Random(seed)
    meter = Meter(FakeEngineClient(), RayMetrics("demo"))
    steps = [random_step(draw) for _ in range(60)]
    for first in range(0, 60, 12):
        play(meter, steps[first : first + 12])
    drafted, accepted = told["specdec_drafted_tokens_total"], told["specdec_accepted_tokens_total"]
    rolled_back = told["specdec_rolled_back_tokens_total"]
    for drafter, count in drafted.items():
        assert count == accepted.get(drafter, 0) + rolled_back.get(drafter, 0)
    assert sum(drafted.values()) == told.total("specdec_drafted_tokens_per_pos_total") == sum(s.drafted for s in steps)
    assert sum(accepted.values()) == told.total("specdec_accepted_tokens_per_pos_total")
    assert told.total("specdec_emitted_tokens_total") == sum(s.emitted for s in steps)
    rounds = told.total("specdec_rounds_total")
    values = told.values("specdec_round_accepted_tokens")[""]
    assert (len(values), sum(values)) == (rounds, sum(accepted.values()))
    assert told["specdec_drafted_tokens_per_pos_total"]["1"] == rounds
    for family in ("specdec_drafted_tokens_per_pos_total", "specdec_accepted_tokens_per_pos_total"):
        survival = [told[family].get(f"{position}", 0) for position in range(1, 9)]
        assert survival == sorted(survival, reverse=True)
    pure = [s for s in steps if s.parts and not s.prefill_tokens]
    assert told.total("specdec_decode_seconds_total") == pytest.approx(sum(s.step_us for s in pure) / 1e6)
    assert told.total("specdec_policy_decisions_total") == sum(p.reason >= 0 for s in steps for p in s.parts)


def test_series_that_can_be_foreseen_begin_at_nothing_and_leave_no_trace(told: Told) -> None:
    """Ray's counters refuse 0. Without a first sample, Prometheus' `increase` misses the first growth."""
    meter = Meter(FakeEngineClient(), RayMetrics("demo"), dropped=DroppedSpans())
    empty = {name for name in COUNTERS if not Instrument.made[name].told}
    unforeseen = ("decode_seconds", "decode_tokens", "plain_seconds", "tree_accepted_tokens", "tree_tried_tokens")
    assert empty == {f"specdec_{name}_total" for name in unforeseen}
    assert all(told.total(name) == 0 for name in COUNTERS)
    assert len(Instrument.made["specdec_requests_total"].told) == len(OUTCOMES)
    play(meter, STEPS)
    (tokens,) = (
        sum(t) for tags, t in Instrument.made["specdec_emitted_tokens_total"].told.items() if "ngram" in str(tags)
    )
    assert tokens == 1.0


def test_a_request_that_ends_well(told: Told) -> None:
    client = FakeEngineClient()
    meter = Meter(client, RayMetrics("demo"))
    prediction = {"type": "content", "content": "abX"}
    reply = call(create_app(client, [meter]), PROMPT | {"max_tokens": 7, "prediction": prediction})
    assert reply.status == 200
    meter.beat()
    assert told["specdec_requests_total"] == {"completed": 1}
    assert told["specdec_prediction_tokens_total"] == {"accepted": 2, "rejected": 1}
    assert told.values("specdec_request_acceptance_rate")[""] == [pytest.approx(2 / 3)]
    assert told.values("specdec_request_acceptance_length")[""] == [pytest.approx(1 + 6 / 3)]
    for name in HISTOGRAMS:
        if name.startswith(("gen_ai", "specdec_request_queue")):
            (values,) = told.values(name).values()
            assert len(values) == 1
            assert 0 <= values[0] < 60
    assert list(told["gen_ai_server_request_duration_seconds"]) == ["completed"]


def test_times_are_the_record_s(told: Told) -> None:
    client = FakeEngineClient()
    meter = Meter(client, RayMetrics("demo"))
    exchange = Followed("cmpl-1", {}, began=100.0)  # type: ignore[arg-type]  # nobody reads its headers
    request = Request("r", (1, 2))
    exchange.requests = (request,)
    output = list(spell(replace(request, params=replace(request.params, max_tokens=6))))[-1]
    assert output.record is not None
    times: dict[str, Any] = {
        "arrived": 100.25,
        "admitted": 100.75,
        "first_token": 101.0,
        "finished": 103.0,
        "output_tokens": 6,
    }
    exchange.last_outputs = {"r": output._replace(record=replace(output.record, **times))}
    exchange.finished = 104.0
    meter.ended(exchange)
    assert told.values("specdec_request_queue_seconds") == {"": [0.5]}
    assert told.values("gen_ai_server_time_to_first_token_seconds") == {"": [1.0]}
    assert told.values("gen_ai_server_time_per_output_token_seconds") == {"": [2.0 / 5]}
    assert told.values("gen_ai_server_request_duration_seconds") == {"completed": [4.0]}


def silent(request: Request) -> Iterator[Output]:
    return iter(())


def broken(code: Any) -> Script:
    def script(request: Request) -> Iterator[Output]:
        *first, last = spell(request)
        yield from first
        yield last._replace(finish_reason="error", error="no", error_code=code)

    return script


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("outcome", "client", "fields"),
    [
        ("completed", FakeEngineClient(), {}),
        ("refused", FakeEngineClient(), {"temperature": 7}),
        ("refused", FakeEngineClient(), {"model": "other"}),
        ("refused", FakeEngineClient(), {"max_tokens": 10_000}),
        ("overloaded", FakeEngineClient(max_open=0), {}),
        ("failed", FakeEngineClient(broken("engine_error")), {}),
        ("deadline", FakeEngineClient(broken("deadline_exceeded")), {}),
        ("failed", FakeEngineClient(lambda r: [Output(r.id, (), "", "cancelled")]), {}),
    ],
)
def test_how_requests_end(told: Told, outcome: str, client: FakeEngineClient, fields: Any, stream: bool) -> None:
    """An error within a stream cannot change the status any more."""
    call(create_app(client, [meter := Meter(client, RayMetrics("demo"))]), PROMPT | fields | {"stream": stream})
    meter.beat()
    served = outcome not in ("refused", "overloaded")
    assert told["specdec_requests_total"] == {outcome: 1}
    assert bool(told["gen_ai_server_request_duration_seconds"]) == served
    assert bool(told["gen_ai_server_time_to_first_token_seconds"]) == (outcome == "completed")
    assert bool(told["gen_ai_server_time_per_output_token_seconds"]) == (outcome == "completed")


@pytest.mark.parametrize("cancels", [False, True])
def test_a_request_that_nobody_waits_for_any_more(told: Told, cancels: bool) -> None:
    """Serve tells the app that the client left, or cancels the task first."""
    client = FakeEngineClient(silent)
    app = create_app(client, [meter := Meter(client, RayMetrics("demo"))])

    async def leave() -> None:
        exchange = Exchange(app, b'{"model": "fake", "prompt": "abc"}')
        running = asyncio.ensure_future(exchange.run())
        while not client.open:  # noqa: ASYNC110  # as long as the app takes
            await asyncio.sleep(0)
        running.cancel() if cancels else exchange.leave()
        await asyncio.wait([running], timeout=30)
        assert running.done()

    asyncio.run(leave())
    meter.beat()
    assert told["specdec_requests_total"] == {"disconnected": 1}
    assert told["gen_ai_server_request_duration_seconds"] == {"disconnected": 1}


def test_gauges_tell_of_an_engine_that_stands_still(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeEngineClient()
    meter = Meter(client, RayMetrics("demo"))
    assert told["specdec_engine_heartbeat_age_seconds"] == {"": 0.0}, "from the start"
    stats = EngineStats(
        healthy=False, reason="", steps=9, running=3, waiting=5, max_running=4, free_slots=1, heartbeat_age_s=12.5,
        kv_used=0.75,
    )  # fmt: skip
    monkeypatch.setattr(client, "stats", lambda: stats)
    meter.beat()
    assert told["specdec_requests_running"] == {"": 3}
    assert told["specdec_requests_waiting"] == {"": 5}
    assert told["specdec_kv_cache_usage_ratio"] == {"": 0.75}
    assert told["specdec_engine_heartbeat_age_seconds"] == {"": 12.5}


def test_a_gauge_tells_of_a_policy_or_draft_that_is_refused(told: Told) -> None:
    client = FakeEngineClient()
    meter = Meter(client, RayMetrics("demo"))
    assert told["specdec_user_config_refused"] == {"": 0}
    for reason, value in (("there is no directory /x", 1), (None, 0)):
        client.refused = reason
        meter.beat()
        assert told["specdec_user_config_refused"] == {"": value}


def test_while_the_engine_works_counters_are_told_without_a_beat(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values go to Ray at most once a second, because a report costs more than counting."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    meter = Meter(FakeEngineClient(), RayMetrics("demo"))
    meter.stepped(STEPS)
    assert told["specdec_steps_total"] == {}
    now += 1.5
    meter.stepped(STEPS)
    assert told["specdec_steps_total"] == {"": 2 * len(STEPS)}


def test_telemetry_that_is_lost_is_counted_once(told: Told) -> None:
    lost = DroppedSpans()
    lost.add("queue_full", 3)
    meter = Meter(FakeEngineClient(), RayMetrics("demo"), dropped=lost)
    assert told["specdec_telemetry_dropped_total"] == {"queue_full": 3}
    lost.add("queue_full", 2)
    lost.add("export_failed", 1)
    play(meter, STEPS)
    meter.beat()
    assert told["specdec_telemetry_dropped_total"] == {"queue_full": 5, "export_failed": 1}


def test_series_do_not_grow_with_requests_and_name_none(told: Told) -> None:
    client = FakeEngineClient()
    app = create_app(client, [meter := Meter(client, RayMetrics("demo"))])

    def serve(count: int) -> int:
        for i in range(count):
            call(app, PROMPT | {"max_tokens": i % 4 + 2, "n": 2, "user": f"user-{i}"})
        play(meter, STEPS)
        return told.series

    assert serve(4) == serve(20)
    values = {value for i in Instrument.made.values() for tags in i.told for _, value in tags}
    vocabulary = {*DRAFTERS, *REASONS, *OUTCOMES, "none", "goodput", "yes", "no", "draft", "verify", "other"}
    vocabulary |= {
        "computed",
        "cached",
        "accepted",
        "rejected",
        *get_args(FinishReason),
        "queue_full",
        "export_failed",
        "shutdown",
        *map(str, range(1, 9)),
    }
    assert values <= vocabulary


def test_ray_takes_these_instruments() -> None:
    """Its own classes, in a process without a cluster: names, buckets and labels as they are, without a warning."""
    client = FakeEngineClient()
    meter = Meter(client, RayMetrics("demo"))
    play(meter, STEPS)
    assert call(create_app(client, [meter]), PROMPT).status == 200
