"""Every metric family that a replica exports: its name, what it counts, its labels and its buckets. A label has few
values and never names a request.

Ray puts `ray_` before each name and adds labels of its own; Serve adds deployment, replica and application.
Three properties of Ray (2.60) shape this module. A counter refuses to grow by 0, so a counter that has not grown does
not exist, and `rate` and `increase` miss its first growth: Count starts each series with a number that vanishes in any
sum. A histogram's sum is computed from the middles of its buckets: use ratios of counters for means and histograms for
quantiles. A gauge that is not set for two reports (20 s) disappears until it is set again.
"""

from collections.abc import Sequence
from typing import Any

from ray.serve import metrics

BIRTH = 5e-324  # the smallest positive number: it vanishes in any sum

# The first buckets are below a millisecond because a small target on a GPU takes no longer for a token.
ROUND_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024)
# The buckets of OpenTelemetry's GenAI conventions, finer at the low end.
DURATION_S = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
TOKEN_S = (
    0.0005, 0.001, 0.002, 0.004, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip
ACCEPTED = (
    0.5,
    1.5,
    2.5,
    3.5,
    4.5,
    5.5,
    6.5,
    8.5,
    12.5,
    16.5,
    32.5,
)  # between whole numbers: Ray refuses a bucket of 0
RATE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
LENGTH = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0, 17.0)
BATCH = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class Rounds:
    """Metrics of rounds with at least one draft, per sequence. Only `emitted` counts the tokens of all rounds.

    Label drafter: the drafter that proposed, or "none". Label position: of a draft in its round, from 1.
    """

    def __init__(self, make: "Maker") -> None:
        self.rounds = make.count("specdec_rounds_total", "Rounds with drafts, one per sequence", "drafter")
        self.drafted = make.count("specdec_drafted_tokens_total", "Drafts verified", "drafter")
        self.accepted = make.count("specdec_accepted_tokens_total", "Drafts accepted", "drafter")
        self.rolled_back = make.count("specdec_rolled_back_tokens_total", "Drafts not accepted", "drafter")
        self.emitted = make.count("specdec_emitted_tokens_total", "Tokens that reached a client", "drafter")
        self.drafted_at = make.count(
            "specdec_drafted_tokens_per_pos_total", "Rounds with at least so many drafts", "position"
        )
        self.accepted_at = make.count(
            "specdec_accepted_tokens_per_pos_total", "Rounds in which at least so many were accepted", "position"
        )
        self.decisions = make.count(
            "specdec_policy_decisions_total", "Rounds by why their sequence got so many drafts", "policy", "reason"
        )
        self.round_accepted = make.histogram(
            "specdec_round_accepted_tokens", "Drafts accepted in a round, in every eighth step", ACCEPTED
        )
        self.alpha = make.gauge(
            "specdec_alpha_estimate", "Chance of a first draft to be accepted, mean of what ran last", "drafter"
        )
        self.k = make.gauge(
            "specdec_k_current", "Drafts that the policy gave a sequence, mean of what ran last", "drafter"
        )


class StepMetrics:
    """Metrics of engine steps, over all sequences.

    decode_* and plain_* count steps that read no prompt. Label batch: number of sequences, rounded up to a power of
    two. Label drafts: yes or no. plain_seconds is estimated (engine/baseline.py). The speed-up is plain_seconds over
    decode_seconds.
    """

    def __init__(self, make: "Maker") -> None:
        self.steps = make.count("specdec_steps_total", "Steps of the engine")
        self.seconds = make.count("specdec_step_seconds_total", "Seconds in the engine's steps")
        self.draft_seconds = make.count("specdec_draft_seconds_total", "Seconds of steps spent proposing drafts")
        self.verify_seconds = make.count(
            "specdec_verify_seconds_total", "Seconds of steps spent in the target's pass and in acceptance"
        )
        self.policy_seconds = make.count("specdec_policy_seconds_total", "Seconds of steps spent choosing k")
        self.prompt_tokens = make.count("specdec_prompt_tokens_total", "Tokens of prompts read, or cached", "source")
        self.preemptions = make.count("specdec_preemptions_total", "Sequences whose memory was taken back")
        self.draft_faults = make.count("specdec_draft_faults_total", "Failures that cost drafts and nothing else")
        self.failed = make.count("specdec_failed_steps_total", "Steps whose requests all ended with an error")
        self.phases = make.histogram(
            "specdec_round_duration_seconds", "Seconds of every eighth step by what they went to", ROUND_S, "phase"
        )
        self.batch_size = make.histogram("specdec_step_batch_size", "Sequences in every eighth step", BATCH)
        labels = ("batch", "drafts")
        self.decode_seconds = make.count("specdec_decode_seconds_total", "Seconds of steps without prompts", *labels)
        self.decode_tokens = make.count("specdec_decode_tokens_total", "Tokens that these emitted", *labels)
        self.plain_seconds = make.count(
            "specdec_plain_seconds_total", "Estimate of the seconds that these tokens take without drafts", *labels
        )


class Requests:
    """Metrics of HTTP requests and of their choices."""

    def __init__(self, make: "Maker") -> None:
        self.requests = make.count("specdec_requests_total", "Requests by how they ended", "outcome")
        self.prediction = make.count("specdec_prediction_tokens_total", "Tokens of clients' predictions", "result")
        self.rate = make.histogram("specdec_request_acceptance_rate", "Accepted share of a choice's drafts", RATE)
        self.length = make.histogram(
            "specdec_request_acceptance_length", "Mean of 1 + accepted over a choice's rounds with drafts", LENGTH
        )
        self.queue = make.histogram("specdec_request_queue_seconds", "Seconds that a choice waited", DURATION_S)
        self.duration = make.histogram(
            "gen_ai_server_request_duration_seconds", "Seconds of a request that the engine took", DURATION_S, "outcome"
        )
        self.first_token = make.histogram(
            "gen_ai_server_time_to_first_token_seconds", "Seconds to a request's first token", FIRST_S
        )
        self.per_token = make.histogram(
            "gen_ai_server_time_per_output_token_seconds", "Mean seconds of a choice's tokens after the first", TOKEN_S
        )


class ReplicaMetrics:
    """Metrics of the replica's present state."""

    def __init__(self, make: "Maker") -> None:
        self.running = make.gauge("specdec_requests_running", "Sequences that hold memory")
        self.waiting = make.gauge("specdec_requests_waiting", "Sequences that wait for it")
        self.kv_used = make.gauge("specdec_kv_cache_usage_ratio", "Share of the target's KV memory that is held")
        self.heartbeat = make.gauge("specdec_engine_heartbeat_age_seconds", "Seconds since the engine made progress")
        self.dropped = make.count("specdec_telemetry_dropped_total", "Telemetry that was made and lost", "kind")


class Maker:
    """Makes instruments that carry the model's name as a label."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._counts: list[Count] = []

    def count(self, name: str, about: str, *labels: str) -> "Count":
        counter = metrics.Counter(name, about, self._keys(labels))
        counter.set_default_tags({"model_name": self._model_name})
        self._counts.append(Count(counter, labels))
        return self._counts[-1]

    def histogram(self, name: str, about: str, bounds: Sequence[float], *labels: str) -> "Spread":
        histogram = metrics.Histogram(name, about, list(bounds), self._keys(labels))
        histogram.set_default_tags({"model_name": self._model_name})
        return Spread(histogram, labels)

    def gauge(self, name: str, about: str, *labels: str) -> "Level":
        gauge = metrics.Gauge(name, about, self._keys(labels))
        gauge.set_default_tags({"model_name": self._model_name})
        return Level(gauge, labels)

    def tell(self) -> None:
        """Report to Ray by how much the counters have grown."""
        for count in self._counts:
            count.tell()

    def _keys(self, labels: tuple[str, ...]) -> Any:
        """Return a tuple. The type is Any because Serve annotates it as a tuple of a single string."""
        return ("model_name", *labels)


class Labels:
    """Turns the values of an instrument's labels into Ray's dictionary."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._tags: dict[tuple[str, ...], dict[str, str]] = {}

    def __call__(self, values: tuple[str, ...]) -> dict[str, str]:
        tags = self._tags.get(values)
        if tags is None:
            tags = self._tags[values] = dict(zip(self._names, values, strict=True))
        return tags


class Count:
    """A counter that grows here, often and cheaply. `tell` reports the growth to Ray."""

    def __init__(self, counter: metrics.Counter, labels: Sequence[str]) -> None:
        self._counter, self._labels = counter, Labels(labels)
        self._grown: dict[tuple[str, ...], float] = {}
        self._born: set[tuple[str, ...]] = set()

    def add(self, value: float, *labels: str) -> None:
        """Add a value ≥ 0. A value of 0 starts the series."""
        self._grown[labels] = self._grown.get(labels, 0) + value

    def tell(self) -> None:
        grown, self._grown = self._grown, {}
        for labels, value in grown.items():
            if value or labels not in self._born:
                self._born.add(labels)
                self._counter.inc(value or BIRTH, self._labels(labels))


class Spread:
    """A histogram."""

    def __init__(self, histogram: metrics.Histogram, labels: Sequence[str]) -> None:
        self._observe, self._labels = histogram.observe, Labels(labels)

    def observe(self, value: float, *labels: str) -> None:
        self._observe(value, self._labels(labels))


class Level:
    """A gauge."""

    def __init__(self, gauge: metrics.Gauge, labels: Sequence[str]) -> None:
        self._gauge, self._labels = gauge, Labels(labels)

    def set(self, value: float, *labels: str) -> None:
        self._gauge.set(value, self._labels(labels))
