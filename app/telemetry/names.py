"""The names of what our spans say. `gen_ai.*` are OpenTelemetry's, `specdec.*` are ours; no name is written elsewhere.

Durations are whole microseconds (`_us`), counts are integers. OpenTelemetry's names for generative AI are in
development; those here are of its page on inference spans (opentelemetry.io/docs/specs/semconv/gen-ai).
"""

SCOPE = "foretoken"
VERSION = "0.1.0"  # as in pyproject.toml
SCOPE_ATTRIBUTES = {"specdec.schema.version": 1}
OPERATION_NAME = "text_completion"

# Spans. The first is named after the operation and the model.
QUEUE = "specdec.queue"  # from the request's arrival at the engine to its first pass
PREFILL = "specdec.prefill"  # from there to its first token
DECODE = "specdec.decode"  # from there to its last
ROUND = "specdec.round"
ENGINE_STEP = "specdec.engine_step"  # a root of its own, linked to the request spans that it served

# Of the request span: what was asked.
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_CHOICES = "gen_ai.request.choice.count"  # unless it is 1
REQUEST_STREAM = "gen_ai.request.stream"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"  # unless it is every token
REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
REQUEST_SEED = "gen_ai.request.seed"  # if one was asked for

# Of the request span: what was answered.
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE = "error.type"

# Of the request span, and text: only where that was asked for.
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
REQUEST_STOPS = "gen_ai.request.stop_sequences"

CHOICES_OMITTED = "specdec.choices.omitted"  # that have no spans of their own, where some have none

# Of the request span: how it was speculated, over all choices.
REQUEST_ID = "specdec.request.id"  # as our logs name it
ENABLED = "specdec.enabled"
DISABLED_REASON = "specdec.disabled_reason"  # user, no_drafter or policy (off)
POLICY = "specdec.policy"  # that chose k
FIXED_K = "specdec.k.fixed"  # where the request chose it
MAX_K = "specdec.k.max"
DRAFTER = "specdec.drafter"
VERIFIER = "specdec.verifier"
LENIENCE = "specdec.lenience"  # of a lossy request
SEED = "specdec.seed"  # that the text was drawn with
ROUNDS = "specdec.rounds.count"  # that verified at least one draft
PLAIN_STEPS = "specdec.steps.plain"  # the other ones: a token each, the first of each choice among them
DRAFTED = "specdec.tokens.drafted"
ACCEPTED = "specdec.tokens.accepted"
ROLLED_BACK = "specdec.tokens.rolled_back"  # drafted and not accepted
RECOVERED = "specdec.tokens.recovered"  # the target's tokens after a rejection
BONUS = "specdec.tokens.bonus"  # the target's tokens after a full acceptance
EMITTED = "specdec.tokens.emitted"
TRUNCATED = "specdec.tokens.truncated"  # verified, and cut by a stop or a limit
ACCEPTANCE_RATE = "specdec.acceptance.rate"  # accepted / drafted
ACCEPTANCE_LENGTH = "specdec.acceptance.length"  # 1 + accepted / rounds
ACCEPTANCE_HISTOGRAM = "specdec.acceptance.histogram"  # rounds by accepted drafts: 0 … k_max
PREEMPTIONS = "specdec.preemptions"
PREDICTION_TOKENS = "specdec.prediction.tokens"  # of the client's guess of the output
PREDICTION_ACCEPTED = "specdec.prediction.accepted"
PREDICTION_REJECTED = "specdec.prediction.rejected"
QUEUE_US = "specdec.time.queue_us"  # of all choices together: the spans below have each one's own
PREFILL_US = "specdec.time.prefill_us"
DECODE_US = "specdec.time.decode_us"
DRAFT_US = "specdec.time.draft_us"  # of the engine's steps that served it, which served others too
VERIFY_US = "specdec.time.verify_us"

# Of the spans of one choice.
CHOICE = "specdec.choice.index"
QUEUE_AHEAD = "specdec.queue.ahead"  # requests that waited when it came
PREFILL_TOKENS = "specdec.prefill.tokens"
PREFILL_CACHED = "specdec.prefill.cached_tokens"  # of these, found in the cache
PREFILL_PASSES = "specdec.prefill.passes"  # that read part of it, again after a preemption

# Of the decode span: columns of integers, one entry per round, the pass that ended the prompt first.
DRAFTERS = "specdec.drafters"  # what the column `drafter` indexes
REASONS = "specdec.reasons"  # what the column `reason` indexes
NOBODY = "none"  # first entry of both: a negative integer takes ten bytes on the wire
ROUNDS_TOTAL = "specdec.rounds.total"  # rounds there were; with more than the columns hold, `index` says which they are
ROUNDS_INDEX = "specdec.rounds.index"
ROUNDS_STRIP = "specdec.rounds.strip"  # the same for eyes: accepted drafts in base 36, a dot where none was drafted
ROUNDS_OMITTED = "specdec.rounds.spans_omitted"  # where rounds have spans: those that have none
COLUMN_STEP = "specdec.rounds.step"  # the engine's step, as specdec.step.index
COLUMN_K = "specdec.rounds.k"
COLUMN_REASON = "specdec.rounds.reason"  # why k was that and no more
COLUMN_ALPHA = "specdec.rounds.alpha_permille"  # chance of the first draft, as estimated before the round
COLUMN_DRAFTED = "specdec.rounds.drafted"
COLUMN_ACCEPTED = "specdec.rounds.accepted"
COLUMN_DRAFTER = "specdec.rounds.drafter"
COLUMN_BATCH = "specdec.rounds.batch_size"
COLUMN_BEGAN_US = "specdec.rounds.began_us"  # after the queue span began
COLUMN_DRAFT_US = "specdec.rounds.draft_us"
COLUMN_VERIFY_US = "specdec.rounds.verify_us"
COLUMN_OVERHEAD_US = "specdec.rounds.overhead_us"  # the rest of the step

# Of a round span.
ROUND_INDEX = "specdec.round.index"
ROUND_K = "specdec.round.k"
ROUND_DRAFTED = "specdec.round.drafted"
ROUND_ACCEPTED = "specdec.round.accepted"
ROUND_EMITTED = "specdec.round.emitted"
ROUND_DRAFT_US = "specdec.round.draft_us"
ROUND_VERIFY_US = "specdec.round.verify_us"
ROUND_DRAFTER = "specdec.drafter.name"
ROUND_REASON = "specdec.policy.reason"
ROUND_ALPHA = "specdec.alpha.estimate"
ROUND_BATCH = "specdec.batch.size"

# Of an engine step's span (the first also of a round's).
STEP_INDEX = "specdec.step.index"
STEP_BATCH = "specdec.step.batch_size"
STEP_PREFILL_TOKENS = "specdec.step.prefill_tokens"
STEP_DRAFTED = "specdec.step.drafted"
STEP_ACCEPTED = "specdec.step.accepted"
STEP_EMITTED = "specdec.step.emitted"
STEP_DRAFT_US = "specdec.step.draft_us"
STEP_VERIFY_US = "specdec.step.verify_us"
STEP_POLICY_US = "specdec.step.policy_us"
STEP_PREDICTED_US = "specdec.step.predicted_us"  # what the cost model expected of it, if it was asked
STEP_PREDICTED_TOKENS = "specdec.step.predicted_tokens"  # what the estimator expected it to emit
STEP_RUNNING = "specdec.step.running"
STEP_WAITING = "specdec.step.waiting"
STEP_PREEMPTED = "specdec.step.preempted"
STEP_FAILED = "specdec.step.failed"
STEP_TRACES = "specdec.step.trace_ids"  # of the links: some viewers drop links
