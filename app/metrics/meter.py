"""Adds requests and engine steps to the metric families (metric_families.py)."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TypeVar, get_args

from app.client import EngineClient
from app.errors import error_body
from app.metrics.metric_families import ReplicaMetrics, Requests, Rounds, StepMetrics
from app.metrics.metric_instruments import CounterMetric, Exporter, GaugeMetric, HistogramMetric, Maker
from app.telemetry.exchange import CLIENT_DISCONNECT, Exchange
from app.telemetry.export import DROPPED_SPANS, DroppedSpans, Loss
from engine.trees import depths, ranks, tried
from engine.types import DRAFTERS, REASONS, FinishReason, RequestRecord, RoundRecord, StepStats, acceptance_of

OUTCOMES = ("completed", "refused", "overloaded", "deadline", "failed", "disconnected")
BEAT_S = 1.0
OUTCOME_OF_FAILURE = {
    CLIENT_DISCONNECT: "disconnected",
    "engine_overloaded": "overloaded",
    "deadline_exceeded": "deadline",
}
ONE_IN = 8  # one of this many steps goes into the histograms, because every value costs 2 µs
NOBODY = "none"
USER = REASONS.index("user")
DRAFTS = ("no", "yes")

K = TypeVar("K")
V = TypeVar("V")


class Meter:
    """A listener (app/telemetry/exchange.py). It starts all series with known labels at 0.

    Counters and the gauges of the replica's state go to the exporter once a second while the engine works, and in
    `beat`. Ray reports them every 10 s. The replica's health check calls `beat` every few seconds: only so do the last
    values arrive, and an engine that makes no progress is seen.
    """

    def __init__(
        self,
        client: EngineClient,
        exporter: Exporter | None = None,
        *,
        dropped: DroppedSpans = DROPPED_SPANS,
    ) -> None:
        """exporter: gets the values too. dropped: counts the spans that were lost."""
        self._maker = make = Maker(exporter)
        self.rounds, self.requests = Rounds(make), Requests(make)
        self.steps, self.state = StepMetrics(make), ReplicaMetrics(make)
        self._client = client
        self._dropped = dropped
        self._lost = Counter[Loss]()  # spans whose loss is reported already
        self._next = 0  # number of steps before the next one that goes into the histograms
        self._begin_series()
        self.beat()

    @property
    def instruments(self) -> Sequence[CounterMetric | HistogramMetric | GaugeMetric]:
        return self._maker.made

    @property
    def model_name(self) -> str:
        return self._client.model.name

    def began(self, exchange: Exchange) -> None:
        pass

    def ended(self, exchange: Exchange) -> None:
        outcome = outcome_of(exchange)
        self.requests.requests.add(1, outcome)
        if not exchange.requests:
            return
        assert exchange.finished is not None, "listeners get complete exchanges only"
        self.requests.duration.observe(exchange.finished - exchange.began, outcome)
        if outcome == "completed":
            self._latencies(exchange)
        for output in exchange.outputs:
            self.requests.choices.add(1, str(output.finish_reason))
        for record in exchange.records:
            self._choice(record)

    def stepped(self, steps: Sequence[StepStats]) -> None:
        parts = [part for step in steps for part in step.parts]
        self._add_rounds(parts)
        self._set_choices(parts)
        self._add_steps(steps)
        ran = [step for step in steps if step.sequences]
        for step in ran[self._next :: ONE_IN]:
            self._observe(step)
        self._next = (self._next - len(ran)) % ONE_IN
        self._add_decoding([step for step in steps if step.decode_only])
        if time.monotonic() >= self._due:
            self.beat()

    def beat(self) -> None:
        self._due = time.monotonic() + BEAT_S
        stats = self._client.stats()
        self.state.running.set(stats.running)
        self.state.waiting.set(stats.waiting)
        self.state.kv_used.set(stats.kv_used)
        self.state.heartbeat.set(stats.heartbeat_age_s)
        self.state.refused.set(int(self._client.policy_status()["refused"] is not None))
        for kind, count in self._dropped.counts().items():
            self.state.dropped.add(count - self._lost[kind], kind)
            self._lost[kind] = count
        self._maker.tell()

    def _begin_series(self) -> None:
        model, rounds, steps = self._client.model, self.rounds, self.steps
        for count in (steps.steps, steps.seconds, steps.draft_seconds, steps.verify_seconds, steps.policy_seconds):
            count.add(0)
        for count in (steps.preemptions, steps.draft_faults, steps.failed):
            count.add(0)
        _begin(steps.prompt_tokens, ("computed", "cached"))
        _begin(self.state.dropped, get_args(Loss))
        _begin(self.requests.requests, OUTCOMES)
        _begin(self.requests.choices, get_args(FinishReason))
        self.requests.prompt_tokens.add(0)
        _begin(self.requests.prediction, ("accepted", "rejected"))
        for count in (rounds.rounds, rounds.drafted, rounds.accepted, rounds.rolled_back):
            _begin(count, model.drafters)
        _begin(rounds.emitted, (*model.drafters, NOBODY))
        for count in (rounds.drafted_at, rounds.accepted_at):
            _begin(count, (str(position) for position in range(1, model.max_spec_length + 1)))
        for reason in REASONS:
            rounds.decisions.add(0, self._client.stats().policy, reason)

    def _choice(self, record: RequestRecord) -> None:
        acceptance = acceptance_of(record)
        if acceptance.rate is not None and acceptance.mean_length is not None:
            self.requests.rate.observe(acceptance.rate)
            self.requests.length.observe(acceptance.mean_length)
        if record.prediction_tokens:
            self.requests.prediction.add(record.prediction_accepted, "accepted")
            self.requests.prediction.add(record.prediction_tokens - record.prediction_accepted, "rejected")
        if record.first_token is not None:
            self.requests.prompt_tokens.add(record.prompt_tokens)
        if record.admitted is not None:
            self.requests.queue.observe(record.admitted - record.arrived)

    def _latencies(self, exchange: Exchange) -> None:
        """Observe the tokens' latencies. OpenTelemetry defines them for successful requests only."""
        firsts = [record.first_token for record in exchange.records if record.first_token is not None]
        if firsts:
            self.requests.first_token.observe(min(firsts) - exchange.began)
        for record in exchange.records:
            if record.finished is not None and record.first_token is not None and record.output_tokens > 1:
                seconds = record.finished - record.first_token
                self.requests.per_token.observe(seconds / (record.output_tokens - 1))

    def _add_rounds(self, parts: Sequence[RoundRecord]) -> None:
        rounds = self.rounds
        alike = Counter((part.proposer, part.drafted, part.accepted, part.emitted) for part in parts)
        for (proposer, drafted, accepted, emitted), count in alike.items():
            drafter = _name(proposer, NOBODY)
            rounds.emitted.add(count * emitted, drafter)
            if drafted:
                rounds.rounds.add(count, drafter)
                rounds.drafted.add(count * drafted, drafter)
                rounds.accepted.add(count * accepted, drafter)
                rounds.rolled_back.add(count * (drafted - accepted), drafter)
        _add_at(rounds.drafted_at, [part.depth for part in parts])
        _add_at(rounds.accepted_at, [part.accepted for part in parts])
        for part in parts:
            if part.tree:
                tree_depths, tree_ranks = depths(part.tree), ranks(part.tree)
                for node in tried(part.tree, part.path):
                    place = str(tree_depths[node]), str(tree_ranks[node] + 1)
                    rounds.tried_rank.add(1, *place)
                    rounds.accepted_rank.add(node in part.path, *place)
        policy = self._client.stats().policy
        for code, count in Counter(part.reason for part in parts).items():
            if code >= 0:
                rounds.decisions.add(count, policy, REASONS[code])

    def _set_choices(self, parts: Sequence[RoundRecord]) -> None:
        """Set k and alpha by drafter. A sequence without drafts counts for the default drafter: its own is unknown."""
        default = self._client.model.drafter or NOBODY
        free = [part for part in parts if part.reason >= 0 and part.reason != USER]
        for drafter, of in _grouped(free, lambda part: _name(part.proposer, default)).items():
            _set_mean(self.rounds.k, [part.k for part in of], drafter)
            _set_mean(self.rounds.alpha, [part.alpha / 1000 for part in of], drafter)

    def _add_steps(self, steps: Sequence[StepStats]) -> None:
        metrics = self.steps
        metrics.steps.add(len(steps))
        metrics.seconds.add(sum(step.step_us for step in steps) / 1e6)
        metrics.draft_seconds.add(sum(step.draft_us for step in steps) / 1e6)
        metrics.verify_seconds.add(sum(step.score_us for step in steps) / 1e6)
        metrics.policy_seconds.add(sum(step.policy_us for step in steps) / 1e6)
        metrics.prompt_tokens.add(sum(step.prefill_tokens for step in steps), "computed")
        metrics.prompt_tokens.add(sum(step.cached_tokens for step in steps), "cached")
        metrics.preemptions.add(sum(step.preempted for step in steps))
        metrics.draft_faults.add(sum(step.draft_faults for step in steps))
        metrics.failed.add(sum(step.failed for step in steps))

    def _observe(self, step: StepStats) -> None:
        metrics = self.steps
        metrics.batch_size.observe(step.sequences)
        if step.drafted:
            metrics.phases.observe(step.draft_us / 1e6, "draft")
        metrics.phases.observe(step.score_us / 1e6, "verify")
        metrics.phases.observe(max(0, step.step_us - step.draft_us - step.score_us) / 1e6, "other")
        for part in step.parts:
            if part.drafted:
                self.rounds.round_accepted.observe(part.accepted)

    def _add_decoding(self, steps: Sequence[StepStats]) -> None:
        metrics = self.steps
        for (batch, drafts), of in _grouped(steps, _kind).items():
            metrics.decode_seconds.add(sum(step.step_us for step in of) / 1e6, batch, drafts)
            metrics.decode_tokens.add(sum(step.emitted for step in of), batch, drafts)
            metrics.plain_seconds.add(sum(step.plain_us for step in of) / 1e6, batch, drafts)


def outcome_of(exchange: Exchange) -> str:
    """Return one of OUTCOMES."""
    failure = exchange.failure
    if failure is None:
        return "completed"
    if failure in OUTCOME_OF_FAILURE:
        return OUTCOME_OF_FAILURE[failure]
    assert exchange.error is not None, "all other failures are errors"
    return "refused" if error_body(exchange.error)[0] < 500 else "failed"


def _begin(count: CounterMetric, labels: Iterable[str]) -> None:
    for label in labels:
        count.add(0, label)


def _add_at(count: CounterMetric, lengths: Iterable[int]) -> None:
    """Add, for each position from 1 on, how many of the lengths reach it."""
    counts = Counter(lengths)
    positions = range(max(counts, default=0), 0, -1)
    for position, reached in zip(positions, accumulate(counts[position] for position in positions), strict=True):
        count.add(reached, str(position))


def _set_mean(level: GaugeMetric, values: Sequence[float], *labels: str) -> None:
    level.set(sum(values) / len(values), *labels)


def _name(proposer: int, otherwise: str) -> str:
    return otherwise if proposer < 0 else DRAFTERS[proposer]


def _kind(step: StepStats) -> tuple[str, str]:
    """Return the labels batch and drafts."""
    batch = len(step.parts)
    return str(1 << (batch - 1).bit_length()), DRAFTS[step.drafted > 0 or step.draft_faults > 0]


def _grouped(items: Iterable[V], key: Callable[[V], K]) -> dict[K, list[V]]:
    groups: dict[K, list[V]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
