"""The names of spans and their attributes. `gen_ai.*` are OpenTelemetry's, `specdec.*` are ours, and the others are
OpenInference's, which stand beside OpenTelemetry's because some viewers read only these.

No other module spells these names. Durations are whole microseconds (`_us`), counts are integers. OpenTelemetry's names
for generative AI are still in development; these follow its page on inference spans
(opentelemetry.io/docs/specs/semconv/gen-ai).
"""

SCOPE = "foretoken"
VERSION = "0.1.0"  # as in pyproject.toml
SCOPE_ATTRIBUTES = {"specdec.schema.version": 1}
OPERATIONS = {"text_completion": "text_completion", "chat.completion": "chat"}  # by the reply's object

# Names of spans. The request span is named after the operation and the model.
QUEUE = "specdec.queue"  # from the request's arrival at the engine to its first pass
PREFILL = "specdec.prefill"  # from the first pass to the first token
DECODE = "specdec.decode"  # from the first token to the last
ROUND = "specdec.round"
ENGINE_STEP = "specdec.engine_step"  # the root of its own trace, with links to the requests that it served

# OpenInference's name for what a span is (arize-ai.github.io/openinference/spec). Phoenix and Langfuse read it.
SPAN_KIND = "openinference.span.kind"
KIND_LLM = "LLM"  # a request
KIND_CHAIN = "CHAIN"  # a part of a request, or an engine step
PROJECT = "openinference.project.name"  # in the resource: Phoenix shows the traces under it, else under "default"
OUTPUT = "output.value"  # viewers show it first. A decode span's has the rounds: no such span has text
OUTPUT_TYPE = "output.mime_type"
PLAIN_TEXT = "text/plain"

# Attributes of the request span: the request.
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_CHOICES = "gen_ai.request.choice.count"  # unless it is 1
REQUEST_STREAM = "gen_ai.request.stream"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"  # unless the context is the limit
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"  # unless it allows every token
REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
REQUEST_SEED = "gen_ai.request.seed"  # if the client sent one

# Attributes of the request span: the reply.
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE = "error.type"

# OpenInference's names for the same facts.
LLM_MODEL = "llm.model_name"
LLM_INPUT_TOKENS = "llm.token_count.prompt"
LLM_OUTPUT_TOKENS = "llm.token_count.completion"
LLM_TOTAL_TOKENS = "llm.token_count.total"
LLM_CACHED_TOKENS = "llm.token_count.prompt_details.cache_read"

# Attributes of the request span that hold text: only if the operator turned them on.
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
REQUEST_STOPS = "gen_ai.request.stop_sequences"

CHOICES_OMITTED = "specdec.choices.omitted"  # number of choices without spans of their own, if there are any

# Attributes of the request span: speculation, over all choices.
REQUEST_ID = "specdec.request.id"  # as in the server's log
ENABLED = "specdec.enabled"
DISABLED_REASON = "specdec.disabled_reason"  # user, no_drafter or policy (off)
POLICY = "specdec.policy"  # the policy that chose k
FIXED_K = "specdec.k.fixed"  # if the request fixed k
MAX_K = "specdec.k.max"
DRAFTER = "specdec.drafter"
VERIFIER = "specdec.verifier"
LENIENCE = "specdec.lenience"  # only for a lossy request, like the next two
TYPICAL_EPSILON = "specdec.typical.epsilon"
TYPICAL_DELTA = "specdec.typical.delta"
SEED = "specdec.seed"  # the seed that the text was drawn with
ROUNDS = "specdec.rounds.count"  # rounds that verified at least one draft
PLAIN_STEPS = "specdec.steps.plain"  # rounds without drafts, one token each; the first of each choice is one
DRAFTED = "specdec.tokens.drafted"
ACCEPTED = "specdec.tokens.accepted"
ROLLED_BACK = "specdec.tokens.rolled_back"  # drafted and not accepted
RECOVERED = "specdec.tokens.recovered"  # the target's tokens after a rejection
BONUS = "specdec.tokens.bonus"  # the target's tokens after a full acceptance
EMITTED = "specdec.tokens.emitted"
TRUNCATED = "specdec.tokens.truncated"  # verified, then cut by a stop or a limit
ACCEPTANCE_RATE = "specdec.acceptance.rate"  # accepted / drafted
ACCEPTANCE_LENGTH = "specdec.acceptance.length"  # 1 + accepted / rounds
ACCEPTANCE_HISTOGRAM = "specdec.acceptance.histogram"  # rounds by accepted drafts: 0 … k_max
PREEMPTIONS = "specdec.preemptions"
PREDICTION_TOKENS = "specdec.prediction.tokens"  # tokens of the client's predicted output
PREDICTION_ACCEPTED = "specdec.prediction.accepted"
PREDICTION_REJECTED = "specdec.prediction.rejected"
QUEUE_US = "specdec.time.queue_us"  # over all choices; each choice's spans have its own times
PREFILL_US = "specdec.time.prefill_us"
DECODE_US = "specdec.time.decode_us"
ROUNDS_TABLE = "specdec.rounds.table"  # the first choice's rounds as text: rounds_table.py
DRAFT_US = "specdec.time.draft_us"  # of all engine steps that served the request; they served others too
VERIFY_US = "specdec.time.verify_us"

# Attributes of one choice's spans.
CHOICE = "specdec.choice.index"
QUEUE_AHEAD = "specdec.queue.ahead"  # requests that waited when this one arrived
PREFILL_TOKENS = "specdec.prefill.tokens"
PREFILL_CACHED = "specdec.prefill.cached_tokens"  # prefill tokens that were found in the cache
PREFILL_PASSES = "specdec.prefill.passes"  # passes that read a part of the prompt; more after a preemption

# Attributes of the decode span: columns of integers, one entry per round. The first round ends the prompt.
DRAFTERS = "specdec.drafters"  # values of the column `drafter` are indices into this list
REASONS = "specdec.reasons"  # values of the column `reason` are indices into this list
NOBODY = "none"  # first entry of both lists: index 0 is shorter on the wire than −1, which takes ten bytes
ROUNDS_TOTAL = "specdec.rounds.total"  # number of rounds; if the columns hold fewer, the column `index` names them
ROUNDS_INDEX = "specdec.rounds.index"
ROUNDS_STRIP = "specdec.rounds.strip"  # one character per round: accepted drafts in base 36; a dot: no drafts
ROUNDS_OMITTED = "specdec.rounds.spans_omitted"  # rounds without a span, at the level with spans for rounds
COLUMN_STEP = "specdec.rounds.step"  # the engine's step, as specdec.step.index
COLUMN_K = "specdec.rounds.k"
COLUMN_REASON = "specdec.rounds.reason"  # why k was not larger
COLUMN_ALPHA = "specdec.rounds.alpha_permille"  # estimated probability that the first draft is accepted, in permille
COLUMN_DRAFTED = "specdec.rounds.drafted"
COLUMN_ACCEPTED = "specdec.rounds.accepted"
COLUMN_DRAFTER = "specdec.rounds.drafter"
COLUMN_BATCH = "specdec.rounds.batch_size"
COLUMN_BEGAN_US = "specdec.rounds.began_us"  # since the queue span began
COLUMN_DRAFT_US = "specdec.rounds.draft_us"
COLUMN_VERIFY_US = "specdec.rounds.verify_us"
COLUMN_OVERHEAD_US = "specdec.rounds.overhead_us"  # the rest of the step

# Attributes of a round span.
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
ROUND_TREE = "specdec.round.tree.parents"  # by draft, −1 for the committed text; absent for a chain
ROUND_PATH = "specdec.round.tree.accepted"  # the accepted drafts of a tree

# Attributes of an engine step's span. A round's span has STEP_INDEX too.
STEP_INDEX = "specdec.step.index"
STEP_BATCH = "specdec.step.batch_size"
STEP_PREFILL_TOKENS = "specdec.step.prefill_tokens"
STEP_DRAFTED = "specdec.step.drafted"
STEP_ACCEPTED = "specdec.step.accepted"
STEP_EMITTED = "specdec.step.emitted"
STEP_DRAFT_US = "specdec.step.draft_us"
STEP_VERIFY_US = "specdec.step.verify_us"
STEP_POLICY_US = "specdec.step.policy_us"
STEP_PREDICTED_US = "specdec.step.predicted_us"  # duration that the cost model predicted, if it made a prediction
STEP_PREDICTED_TOKENS = "specdec.step.predicted_tokens"  # emitted tokens that the estimator predicted
STEP_RUNNING = "specdec.step.running"
STEP_WAITING = "specdec.step.waiting"
STEP_PREEMPTED = "specdec.step.preempted"
STEP_FAILED = "specdec.step.failed"
STEP_TRACES = "specdec.step.trace_ids"  # trace ids of the links, because some viewers drop links
