"""What a client may ask of /v1/completions. A field that is accepted acts, or is listed here as inert; all others are
refused by name, so that nobody gets text other than they asked for without knowing.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from app.client import ModelCard
from deployments.engine.types import MAX_STOP_STRINGS, InvalidRequest, SamplingParams

# OpenAI fields that concern its service and not the text: accepted with any value, and without effect.
INERT = frozenset({"user", "metadata", "store"})

# Fields that do not work yet, with the value that asks for nothing. Only that value, or null, is accepted.
NEUTRAL: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "logprobs": None,
    "prompt_logprobs": None,
    "suffix": None,
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "stop_token_ids": [],
    "prediction": None,
    "response_format": None,
}

TOP_K_OFF = -1  # vLLM's way to say every token; ours is 0


def _refuse(message: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{message}", {"message": message})


def _text(value: str) -> str:
    """JSON can escape half of a surrogate pair; no tokenizer takes it."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _refuse("holds a lone surrogate, which is not text") from None
    return value


def _one_prompt(value: Any) -> str | tuple[int, ...]:
    """The prompt as text or as token ids: given as such, or as the only item of a list."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > 1:
            raise _refuse(f"one prompt per request is supported, not a list of {len(value)}")
        value = value[0]
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    raise _refuse("must be a string, a list of token ids (integers from 0), or a list of one of these")


def _stops(value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise _refuse("must be a string or a list of strings")
    if len(items) > MAX_STOP_STRINGS:
        raise _refuse(f"takes at most {MAX_STOP_STRINGS} strings, not {len(items)}")
    return tuple(_text(item) for item in items)


def _without_nulls(value: Any) -> Any:
    """OpenAI's clients send null for 'not set'."""
    return {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else value


class Strict(BaseModel):
    """No unknown fields, no conversions (true is not 1, "1" is not 1), no NaN and no infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


def _only_false(value: bool) -> bool:
    if value:
        raise _refuse("is not supported yet")
    return value


OnlyFalse = Annotated[bool, AfterValidator(_only_false)]


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: OnlyFalse = False
    continuous_usage_stats: OnlyFalse = False


class Speculation(Strict):
    """How many tokens to draft per round: {"k": 3}, {"mode": "fixed", "k": 3} or {"mode": "off"}."""

    mode: Literal["off", "fixed"] = "fixed"
    k: Annotated[int, Field(ge=0)] | None = None

    def spec_length(self, maximum: int) -> int:
        """The k to use. Raises InvalidRequest if the fields contradict each other or exceed the maximum."""
        if self.mode == "off":
            if self.k:
                raise InvalidRequest(f"speculation cannot be off and draft k = {self.k} tokens", "speculation")
            return 0
        if self.k is None:
            raise InvalidRequest("speculation needs k, or mode 'off'", "speculation")
        if self.k > maximum:
            raise InvalidRequest(f"speculation.k {self.k} exceeds this server's maximum, {maximum}", "speculation.k")
        return self.k


class Body(Strict):
    """The fields that act. Ranges of the sampling fields are SamplingParams' to check."""

    model: str
    prompt: Annotated[str | tuple[int, ...], PlainValidator(_one_prompt)]
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_stops)] = ()
    ignore_eos: bool = False
    stream: bool = False
    stream_options: Annotated[StreamOptions, BeforeValidator(_without_nulls)] | None = None
    speculation: Annotated[Speculation, BeforeValidator(_without_nulls)] | None = None

    def sampling_params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k == TOP_K_OFF else self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """One validated request for a completion."""

    model: str
    prompt: str | tuple[int, ...]
    params: SamplingParams
    k: int | None  # None: the server's own
    stream: bool
    include_usage: bool


def parse(raw: bytes, card: ModelCard) -> Completion:
    """Read a request's body, whatever its content type says. Raises InvalidRequest, naming the field at fault."""
    body = _validate(_acting_fields(_load(raw)))
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", "stream_options")
    return Completion(
        model=body.model,
        prompt=body.prompt,
        params=body.sampling_params(),
        k=None if body.speculation is None else body.speculation.spec_length(card.max_spec_length),
        stream=body.stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
    )


def _load(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        raise InvalidRequest("the body is not valid JSON", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    return value


def _acting_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that ask for something: no nulls, no inert fields, none that are neutral."""
    acting = {}
    for name, value in fields.items():
        if name not in Body.model_fields and name not in INERT and name not in NEUTRAL:
            raise InvalidRequest(f"unknown field {name!r}", name, "unknown_field")
        if name in NEUTRAL and not _is_neutral(value, NEUTRAL[name]):
            raise InvalidRequest(f"{name} is not supported yet", name, "unsupported_field")
        if name in Body.model_fields and value is not None:
            acting[name] = value
    return acting


def _is_neutral(value: Any, neutral: Any) -> bool:
    """Null, or equal to the neutral value (to Python, but not here, true equals 1)."""
    return value is None or (value == neutral and isinstance(value, bool) == isinstance(neutral, bool))


def _validate(fields: dict[str, Any]) -> Body:
    try:
        return Body.model_validate(fields)
    except ValidationError as error:
        raise _as_invalid_request(error.errors(include_input=False, include_url=False)[0]) from None


def _as_invalid_request(error: ErrorDetails) -> InvalidRequest:
    param = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return InvalidRequest(f"{param} is required", param)
    if error["type"] == "extra_forbidden":
        return InvalidRequest(f"unknown field {param!r}", param, "unknown_field")
    return InvalidRequest(f"{param}: {error['msg']}", param)
