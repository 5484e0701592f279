"""The request body of /v1/completions, and the fields that it shares with /v1/chat/completions (chat.py).

Every accepted field takes effect or is listed as inert. Any other field is refused by name, so that no client gets
another text than it asked for without notice.
"""

import json
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BeforeValidator, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import ErrorDetails

from app.client import Chat, ModelCard, TextField
from app.openai import fields
from app.openai.fields import OnlyFalse, ParsedPrompt, Strict, documented, refuse, without_nulls
from app.openai.speculation import Drafting, Lossy, Prediction, SpeculationOptions, settle
from engine.loading.generation_config import SAMPLING_FIELDS, TOP_K_OFF
from engine.types import MAX_LOGPROBS, MAX_SEED, MAX_TOP_K, InvalidRequest, SamplingParams

# OpenAI fields that concern its service and not the text: accepted with any value, and without effect.
INERT = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
)

# Unsupported fields of both endpoints with their neutral value. Only this value and null are accepted.
SHARED_NEUTRAL: dict[str, Any] = {
    "prompt_logprobs": None,
    "response_format": {"type": "text"},
    "use_beam_search": False,
    "length_penalty": 1.0,
    "spaces_between_special_tokens": True,
    "return_tokens_as_token_ids": False,
    "priority": 0,
}
NEUTRAL: dict[str, Any] = SHARED_NEUTRAL | {"suffix": ""}

MAX_SALT = 256  # characters of a cache_salt
NOTHING: Mapping[str, Any] = MappingProxyType({})
DEFAULT_MAX_TOKENS = 16  # of a completion, as in OpenAI's API


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: OnlyFalse = False
    continuous_usage_stats: bool = False

    @model_validator(mode="after")
    def _tells_usage(self) -> Self:
        if self.continuous_usage_stats and not self.include_usage:
            raise refuse("continuous_usage_stats needs include_usage: true")
        return self


class SharedBody(Strict):
    """The fields of both endpoints. SamplingParams checks the ranges that are only documented here."""

    model: str
    n: Annotated[int, Field(ge=1)] = 1
    max_tokens: Annotated[int | None, documented(minimum=0)] = None
    max_completion_tokens: Annotated[int | None, documented(minimum=0)] = None  # OpenAI's newer name
    min_tokens: Annotated[int, documented(minimum=0)] = 0
    temperature: Annotated[float, documented(minimum=0, maximum=2)] = 1.0
    top_p: Annotated[float, documented(exclusiveMinimum=0, maximum=1)] = 1.0
    top_k: Annotated[int, documented(minimum=TOP_K_OFF, maximum=MAX_TOP_K)] = 0
    min_p: Annotated[float, documented(minimum=0, maximum=1)] = 0.0
    seed: Annotated[int | None, documented(minimum=-MAX_SEED, maximum=MAX_SEED)] = None
    presence_penalty: Annotated[float, documented(minimum=-2, maximum=2)] = 0.0
    frequency_penalty: Annotated[float, documented(minimum=-2, maximum=2)] = 0.0
    repetition_penalty: Annotated[float, documented(minimum=0.01, maximum=10)] = 1.0
    logit_bias: Annotated[tuple[tuple[int, float], ...], PlainValidator(fields.logit_bias, fields.Biases)] = ()
    allowed_token_ids: Annotated[tuple[int, ...] | None, PlainValidator(fields.token_ids, fields.SomeIds)] = None
    bad_words: Annotated[tuple[str, ...], PlainValidator(fields.bad_words, fields.BadWords)] = ()
    stop: Annotated[tuple[str, ...], PlainValidator(fields.stops, fields.Stops)] = ()
    stop_token_ids: Annotated[tuple[int, ...], PlainValidator(fields.token_ids, fields.StopIds)] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None  # -1: what the context leaves
    stream: bool = False
    stream_options: Annotated[StreamOptions, BeforeValidator(without_nulls)] | None = None
    speculation: Annotated[SpeculationOptions, BeforeValidator(without_nulls)] | None = None
    prediction: Prediction | None = None
    lossy: Lossy | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None = None
    deadline_s: Annotated[float, Field(gt=0)] | None = None

    # The names of SamplingParams that this body has under another name.
    renamed: ClassVar[Mapping[str, str]] = {}

    @property
    def limit_field(self) -> str:
        """The name under which the most tokens of an answer were given."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def limit(self) -> int | None:
        """Return the most tokens of an answer; None: the request does not say."""
        both = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(both) > 1:
            message = "max_tokens and max_completion_tokens mean the same: send one of them"
            raise InvalidRequest(message, "max_completion_tokens")
        return next(iter(both), None)

    def sampling_params(
        self, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> SamplingParams:
        """Raises InvalidRequest with the names that the body's fields have."""
        try:
            return self._sampling_params(max_tokens, logprobs, prompt_logprobs)
        except InvalidRequest as error:
            name = {"max_tokens": self.limit_field, **self.renamed}.get(error.param or "")
            if name is None:
                raise
            raise InvalidRequest(str(error).replace(str(error.param), name), name, error.code) from None

    def _sampling_params(self, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k == TOP_K_OFF else self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            logit_bias=self.logit_bias,
            allowed_token_ids=self.allowed_token_ids,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


class Body(SharedBody):
    """The fields of /v1/completions that take effect."""

    prompt: Annotated[tuple[ParsedPrompt, ...], PlainValidator(fields.prompts, fields.PromptField)]
    echo: bool = False
    add_special_tokens: bool = True  # token ids are taken as they are
    best_of: Annotated[int, Field(ge=1)] | None = None  # None: n
    logprobs: Annotated[int | None, documented(minimum=0, maximum=MAX_LOGPROBS)] = None

    def candidates(self) -> int:
        """Return how many texts of each prompt are written; the n best of them are returned."""
        if self.best_of is None or self.best_of == self.n:
            return self.n
        if self.best_of < self.n:
            raise InvalidRequest(f"best_of must be at least n: {self.best_of} texts have no {self.n} best", "best_of")
        if self.stream:
            message = "best_of above n cannot be streamed: the best text is known only at the end"
            raise InvalidRequest(message, "best_of")
        return self.best_of


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One validated request: n choices of each prompt, or of a chat's one prompt."""

    model: str
    prompts: tuple[ParsedPrompt, ...]  # (): the chat template writes it
    n: int
    candidates: int  # choices of each prompt that the engine makes; the reply has the n best of them
    echo: bool
    add_special_tokens: bool | None  # whether a text gets BOS and the like; None: the chat template says so
    params: SamplingParams
    bad_words: tuple[str, ...]  # params does not hold their tokens yet
    truncate_prompt_tokens: int | None  # the most tokens of a prompt, which keeps its end; -1: what the context leaves
    drafting: Drafting
    stream: bool
    include_usage: bool
    continuous_usage: bool  # every chunk of a stream tells the usage so far
    cache_salt: str | None  # as the client sent it; the engine's salt also depends on the API key
    deadline_s: float | None
    tell_steps: bool  # in the metrics, every round
    tell_tokens: bool  # in the choices, where every token came from
    tell_ids: bool  # the token ids of prompts and choices
    chat: Chat | None = None
    fills_context: bool = False  # params.max_tokens is only a bound: the prompt leaves fewer
    limit_field: str = "max_tokens"  # the field that params.max_tokens comes from

    @property
    def text_field(self) -> TextField:
        """The field that the prompts come from."""
        return "prompt" if self.chat is None else "messages"


AnyBody = TypeVar("AnyBody", bound=Strict)
BodyType = TypeVar("BodyType", bound=SharedBody)


def parse(raw: bytes, card: ModelCard) -> GenerationRequest:
    """Read a request for completions, whatever its content type says. Raises InvalidRequest, naming the field at
    fault."""
    body = read_body(raw, card, Body, INERT, NEUTRAL)
    check_prompt_tokens(body.prompt, card, truncated_to=body.truncate_prompt_tokens)
    limit = body.limit()
    max_tokens = DEFAULT_MAX_TOKENS if limit is None else limit
    params = body.sampling_params(max_tokens, body.logprobs, body.logprobs if body.echo else None)
    return checked(
        card,
        body,
        params,
        body.prompt,
        candidates=body.candidates(),
        echo=body.echo,
        add_special_tokens=body.add_special_tokens,
    )


def read_body(
    raw: bytes, card: ModelCard, body_type: type[BodyType], inert: Set[str], neutral: Mapping[str, Any]
) -> BodyType:
    """Return the fields that take effect, with the server's defaults. Raises InvalidRequest, naming the field at
    fault."""
    body = validated(body_type, load_object(raw), inert, neutral, card.sampling_defaults)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", "stream_options")
    return body


def validated(
    body_type: type[AnyBody],
    given: dict[str, Any],
    inert: Set[str] = frozenset(),
    neutral: Mapping[str, Any] = NOTHING,
    defaults: Mapping[str, Any] = NOTHING,
) -> AnyBody:
    """Return the fields that take effect, over the defaults. Raises InvalidRequest, naming the field at fault."""
    try:
        return body_type.model_validate({**defaults, **_acting_fields(given, body_type, inert, neutral)})
    except ValidationError as error:
        raise _as_invalid_request(error.errors(include_input=False, include_url=False)[0]) from None


def checked(
    card: ModelCard,
    body: SharedBody,
    params: SamplingParams,
    prompts: tuple[ParsedPrompt, ...],
    *,
    candidates: int | None = None,
    echo: bool = False,
    add_special_tokens: bool | None = None,
    chat: Chat | None = None,
    fills_context: bool = False,
) -> GenerationRequest:
    """Return the request of a body. candidates: None: n. Raises InvalidRequest for more choices, longer prompts or
    other drafts than this server makes."""
    candidates = body.n if candidates is None else candidates
    _check_capacity(max(1, len(prompts)), candidates, card.max_choices, "n" if candidates == body.n else "best_of")
    _check_truncation(body.truncate_prompt_tokens, card.max_model_len)
    return GenerationRequest(
        model=body.model,
        prompts=prompts,
        n=body.n,
        candidates=candidates,
        echo=echo,
        add_special_tokens=add_special_tokens,
        params=params,
        bad_words=body.bad_words,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        drafting=settle(card, body.speculation, body.prediction, body.lossy, body.temperature),
        stream=body.stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        continuous_usage=body.stream_options is not None and body.stream_options.continuous_usage_stats,
        cache_salt=body.cache_salt,
        deadline_s=body.deadline_s,
        tell_steps=body.speculation is not None and body.speculation.steps,
        tell_tokens=body.speculation is not None and body.speculation.tokens,
        tell_ids=body.return_token_ids,
        chat=chat,
        fills_context=fills_context,
        limit_field=body.limit_field,
    )


def defaults_in_force(card: ModelCard) -> dict[str, float]:
    """Return the sampling parameters of a request that leaves them out."""
    return {name: Body.model_fields[name].default for name in SAMPLING_FIELDS} | dict(card.sampling_defaults)


def _check_capacity(prompts: int, choices: int, limit: int, field: str) -> None:
    """Refuse more choices than the engine can ever hold: as an overload they would be tried again for ever."""
    if prompts * choices > limit:
        made = f"{prompts} × {field} = {choices} make {prompts * choices}"
        message = f"this server makes at most {limit} choices at once; {made}"
        raise InvalidRequest(message, "prompt" if choices == 1 else field)


def _check_truncation(tokens: int | None, limit: int) -> None:
    if tokens == 0 or (tokens or 0) > limit:
        message = f"truncate_prompt_tokens must be -1 or lie between 1 and the context of {limit} tokens"
        raise InvalidRequest(message, "truncate_prompt_tokens")


def check_prompt_tokens(
    prompts: Sequence[ParsedPrompt], card: ModelCard, field: TextField = "prompt", *, truncated_to: int | None = None
) -> None:
    """Raise InvalidRequest for more prompt tokens than one request may have.

    The n choices of a prompt share its tokens. A text counts with the smallest number of tokens that it can have.
    truncated_to: the most tokens that are kept of each prompt; None: all.
    """
    most = card.max_model_len if truncated_to == -1 else truncated_to
    counts = (math.ceil(len(p) / card.longest_token) if isinstance(p, str) else len(p) for p in prompts)
    least = sum(counts) if most is None else sum(min(count, most) for count in counts)
    if least > card.max_prompt_tokens:
        exact = "" if all(isinstance(p, tuple) for p in prompts) else "at least "
        raise InvalidRequest(
            f"the prompts of one request may have {card.max_prompt_tokens:,} tokens together; these {len(prompts)} "
            f"have {exact}{least:,}",
            field,
            "too_many_prompt_tokens",
        )


def load_object(raw: bytes) -> dict[str, Any]:
    """Raises InvalidRequest for a body that is not a JSON object."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        raise InvalidRequest("the body is not valid JSON", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    return value


def _acting_fields(
    given: dict[str, Any], body_type: type[Strict], inert: Set[str], neutral: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields that take effect: without nulls, inert fields and neutral values."""
    acting = {}
    for name, value in given.items():
        if name not in body_type.model_fields and name not in inert and name not in neutral:
            raise InvalidRequest(f"unknown field {name!r}", name, "unknown_field")
        if name in neutral and not _is_neutral(value, neutral[name]):
            raise InvalidRequest(f"{name} is not supported yet", name, "unsupported_field")
        if name in body_type.model_fields and value is not None:
            acting[name] = value
    return acting


def _is_neutral(value: Any, neutral: Any) -> bool:
    """Whether the value is null or the neutral one. True is not 1 here, unlike in Python."""
    return value is None or (value == neutral and isinstance(value, bool) == isinstance(neutral, bool))


def _as_invalid_request(error: ErrorDetails) -> InvalidRequest:
    param = ".".join(part for part in map(str, error["loc"]) if not part.startswith("["))
    if error["type"] == "missing":
        return InvalidRequest(f"{param} is required", param)
    if error["type"] == "extra_forbidden":
        return InvalidRequest(f"unknown field {param!r}", param, "unknown_field")
    return InvalidRequest(f"{param}: {error['msg']}", param)
