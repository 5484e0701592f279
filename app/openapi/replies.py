"""The shapes of replies, for /openapi.json. They describe what app/openai and app/routes.py write; nothing is validated
with them while serving. A test checks that real replies have these shapes and no other field.
"""

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from engine.types import DrafterName, Verifier

closed = with_config(ConfigDict(extra="forbid"))


@closed
class ErrorObject(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


@closed
class ErrorReply(TypedDict):
    error: ErrorObject


@closed
class CachedTokens(TypedDict):
    cached_tokens: int


@closed
class PredictionTokens(TypedDict):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


@closed
class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: NotRequired[PredictionTokens]


@closed
class TreeOfDrafts(TypedDict):
    parents: list[int]  # by draft; −1: the committed text
    accepted: list[int]  # drafts on the accepted path


class Steps(TypedDict):
    """The rounds of one choice, if speculation.steps asked for them."""

    per_step_accepted: NotRequired[list[int]]
    per_step_drafted: NotRequired[list[int]]
    rounds: NotRequired[dict[str, list[Any]]]
    trees: NotRequired[list[TreeOfDrafts | None]]  # by round; null: a chain


@closed
class ChoiceSteps(Steps):
    index: int


@closed
class SpeculativeDecoding(Steps):
    mode: Literal["auto", "fixed", "off"]
    policy: str
    drafter: DrafterName | None
    verifier: Verifier
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    draft_length_histogram: list[int]
    decisions: dict[str, int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    choices: NotRequired[list[ChoiceSteps]]


@closed
class RequestMetrics(TypedDict):
    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    queue_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None
    preemptions: int
    speculative_decoding: SpeculativeDecoding | None


@closed
class TypicalLabel(TypedDict):
    epsilon: float
    delta: float


@closed
class LossyLabel(TypedDict):
    lenience: NotRequired[float]
    typical: NotRequired[TypicalLabel]


@closed
class TokenOrigin(TypedDict):
    text: str
    source: Literal["draft", "recovered", "bonus", "plain"]


@closed
class RoundOrigins(TypedDict):
    round: int
    drafted: int
    accepted: int
    tokens: list[TokenOrigin]
    rejected: list[str]


@closed
class Origins(TypedDict):
    rounds: list[RoundOrigins]


class ChoiceFields(TypedDict):
    index: int
    finish_reason: Literal["stop", "length"]
    speculation: NotRequired[Origins]
    token_ids: NotRequired[list[int]]


@closed
class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@closed
class CompletionChoice(ChoiceFields):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: NotRequired[list[int]]


@closed
class ScoredToken(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


@closed
class ScoredChatToken(ScoredToken):
    top_logprobs: list[ScoredToken]


@closed
class ChatLogprobs(TypedDict):
    content: list[ScoredChatToken]
    refusal: None


@closed
class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None
    reasoning_content: NotRequired[str]


@closed
class ChatChoice(ChoiceFields):
    message: AnswerMessage
    logprobs: ChatLogprobs | None


class ReplyFields(TypedDict):
    id: str
    created: int
    model: str
    usage: Usage
    metrics: RequestMetrics
    seed: int
    lossy: NotRequired[LossyLabel]


@closed
class TextCompletion(ReplyFields):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


@closed
class ChatCompletion(ReplyFields):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: NotRequired[list[int]]


@closed
class ChunkUsage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[CachedTokens]
    completion_tokens_details: NotRequired[PredictionTokens]


class PartFields(TypedDict):
    index: int
    finish_reason: Literal["stop", "length"] | None
    speculation: NotRequired[Origins]
    token_ids: NotRequired[list[int]]


@closed
class CompletionPart(PartFields):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: NotRequired[list[int] | None]


@closed
class Delta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    refusal: NotRequired[None]
    reasoning_content: NotRequired[str]


@closed
class ChatPart(PartFields):
    delta: Delta
    logprobs: ChatLogprobs | None


class ChunkFields(TypedDict):
    """The last chunk has what is known only at the end."""

    id: str
    created: int
    model: str
    usage: NotRequired[ChunkUsage | None]
    metrics: NotRequired[RequestMetrics]
    seed: NotRequired[int]
    lossy: NotRequired[LossyLabel]


@closed
class CompletionChunk(ChunkFields):
    object: Literal["text_completion"]
    choices: list[CompletionPart]


@closed
class ChatChunk(ChunkFields):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatPart]
    prompt_token_ids: NotRequired[list[int]]


@closed
class ModelObject(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    vocab_size: int
    limits: dict[str, int]
    sampling_defaults: dict[str, float]
    speculation_defaults: dict[str, Any]


@closed
class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelObject]


@closed
class Health(TypedDict):
    status: Literal["ok", "unhealthy"]
    reason: NotRequired[str]
    running: int
    waiting: int
    free_slots: int
    kv_used: float
    steps: int
    policy: dict[str, Any]


@closed
class PathIndex(TypedDict):
    model: str
    routes: dict[str, str]


@closed
class TokenIds(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: None


@closed
class DetokenizedText(TypedDict):
    prompt: str


class TokenizerInfo(TypedDict):
    """Also the special tokens by their roles, such as eos_token."""

    tokenizer_class: str
    model_max_length: int
    vocab_size: int
    chat_template: str


@closed
class Version(TypedDict):
    version: str
