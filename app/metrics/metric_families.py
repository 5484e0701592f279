"""Every metric family of a replica: its name, what it counts, its labels and its buckets. A label has few values and
never names a request.

Ray's exporter (deployments/ray_metrics.py) and GET /metrics (exposition.py) tell the same families.
"""

from app.metrics.metric_instruments import Maker

# The first buckets are below a millisecond because a small target on a GPU takes no longer for a token.
ROUND_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024)
# The buckets of OpenTelemetry's GenAI conventions, finer at the low end.
DURATION_S = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
TOKEN_S = (
    0.0005, 0.001, 0.002, 0.004, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip
# Between whole numbers: Ray refuses a bucket of 0.
ACCEPTED = (0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 8.5, 12.5, 16.5, 32.5)
RATE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
LENGTH = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0, 17.0)
BATCH = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class Rounds:
    """Metrics of rounds with at least one draft, per sequence. Only `emitted` counts the tokens of all rounds.

    Label drafter: the drafter that proposed, or "none". Label position: of a draft in its round, from 1.
    """

    def __init__(self, make: Maker) -> None:
        self.rounds = make.count("specdec_rounds_total", "Rounds with drafts, one per sequence", "drafter")
        self.drafted = make.count("specdec_drafted_tokens_total", "Drafts verified", "drafter")
        self.accepted = make.count("specdec_accepted_tokens_total", "Drafts accepted", "drafter")
        self.rolled_back = make.count("specdec_rolled_back_tokens_total", "Drafts not accepted", "drafter")
        self.emitted = make.count("specdec_emitted_tokens_total", "Tokens that reached a client", "drafter")
        self.drafted_at = make.count(
            "specdec_drafted_tokens_per_pos_total", "Rounds with a draft at this position", "position"
        )
        self.accepted_at = make.count(
            "specdec_accepted_tokens_per_pos_total", "Rounds in which at least so many were accepted", "position"
        )
        self.tried_rank = make.count(
            "specdec_tree_tried_tokens_total", "Drafts of trees that were verified, by rank", "position", "rank"
        )
        self.accepted_rank = make.count(
            "specdec_tree_accepted_tokens_total", "Accepted drafts of trees by rank among siblings", "position", "rank"
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
    two. Label drafts: yes or no. plain_seconds is estimated (engine/baseline.py). The speedup is plain_seconds over
    decode_seconds.
    """

    def __init__(self, make: Maker) -> None:
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

    def __init__(self, make: Maker) -> None:
        self.requests = make.count("specdec_requests_total", "Requests by how they ended", "outcome")
        self.choices = make.count("specdec_choices_total", "Choices by how they ended", "finish_reason")
        self.prompt_tokens = make.count(
            "specdec_choice_prompt_tokens_total", "Prompt tokens of choices that emitted a token"
        )
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

    def __init__(self, make: Maker) -> None:
        self.running = make.gauge("specdec_requests_running", "Sequences that hold memory")
        self.waiting = make.gauge("specdec_requests_waiting", "Sequences that wait for it")
        self.kv_used = make.gauge("specdec_kv_cache_usage_ratio", "Share of the target's KV memory that is held")
        self.heartbeat = make.gauge("specdec_engine_heartbeat_age_seconds", "Seconds since the engine made progress")
        self.refused = make.gauge(
            "specdec_user_config_refused", "1 while the last policy or draft that was sent is not in force, else 0"
        )
        self.dropped = make.count("specdec_telemetry_dropped_total", "Telemetry that was made and lost", "kind")
