"""The request body of /v1/completions. Every accepted field takes effect or is listed here as inert. Any other field is
refused by name, so that no client gets another text than it asked for without notice.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, ValidationError
from pydantic_core import ErrorDetails

from app.client import ModelCard
from app.openai import fields
from app.openai.fields import OnlyFalse, Prompt, Strict, without_nulls
from app.openai.speculation import Drafting, Lossy, Prediction, SpeculationOptions, settle
from engine.generation_config import SAMPLING_FIELDS, TOP_K_OFF
from engine.types import InvalidRequest, SamplingParams

# OpenAI fields that concern its service and not the text: accepted with any value, and without effect.
INERT = frozenset({"user", "metadata", "store"})

# Unsupported fields with their neutral value. Only this value and null are accepted.
NEUTRAL: dict[str, Any] = {
    "best_of": 1,
    "prompt_logprobs": None,
    "suffix": "",
    "response_format": {"type": "text"},
    "skip_special_tokens": True,
    "return_token_ids": False,
}

MAX_SALT = 256  # characters of a cache_salt


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: OnlyFalse = False
    continuous_usage_stats: OnlyFalse = False


class Body(Strict):
    """The fields that take effect. SamplingParams checks the ranges of the sampling fields."""

    model: str
    prompt: Annotated[tuple[Prompt, ...], PlainValidator(fields.prompts)]
    n: Annotated[int, Field(ge=1)] = 1
    echo: bool = False
    add_special_tokens: bool = True  # token ids are taken as they are
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Annotated[tuple[tuple[int, float], ...], PlainValidator(fields.logit_bias)] = ()
    logprobs: int | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(fields.stops)] = ()
    stop_token_ids: Annotated[tuple[int, ...], PlainValidator(fields.token_ids)] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    stream: bool = False
    stream_options: Annotated[StreamOptions, BeforeValidator(without_nulls)] | None = None
    speculation: Annotated[SpeculationOptions, BeforeValidator(without_nulls)] | None = None
    prediction: Prediction | None = None
    lossy: Lossy | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None = None
    deadline_s: Annotated[float, Field(gt=0)] | None = None

    def sampling_params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k == TOP_K_OFF else self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            logit_bias=self.logit_bias,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One validated request for completions: n of each prompt."""

    model: str
    prompts: tuple[Prompt, ...]
    n: int
    echo: bool
    add_special_tokens: bool  # whether a text gets BOS and the like, as the checkpoint says
    params: SamplingParams
    drafting: Drafting
    stream: bool
    include_usage: bool
    cache_salt: str | None  # as the client sent it; the engine's salt also depends on the API key
    deadline_s: float | None
    tell_steps: bool = False  # in the metrics, every round
    tell_tokens: bool = False  # in the choices, where every token came from


def parse(raw: bytes, card: ModelCard) -> CompletionRequest:
    """Read a request's body, whatever its content type says. Raises InvalidRequest, naming the field at fault."""
    body = _validate({**card.sampling_defaults, **_acting_fields(_load(raw))})
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", "stream_options")
    _check_capacity(len(body.prompt), body.n, card.max_choices)
    check_prompt_tokens(body.prompt, card)
    return CompletionRequest(
        model=body.model,
        prompts=body.prompt,
        n=body.n,
        echo=body.echo,
        add_special_tokens=body.add_special_tokens,
        params=body.sampling_params(),
        drafting=settle(card, body.speculation, body.prediction, body.lossy, body.temperature),
        stream=body.stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        cache_salt=body.cache_salt,
        deadline_s=body.deadline_s,
        tell_steps=body.speculation is not None and body.speculation.steps,
        tell_tokens=body.speculation is not None and body.speculation.tokens,
    )


def defaults_in_force(card: ModelCard) -> dict[str, float]:
    """Return the sampling parameters of a request that leaves them out."""
    return {name: Body.model_fields[name].default for name in SAMPLING_FIELDS} | dict(card.sampling_defaults)


def _check_capacity(prompts: int, n: int, limit: int) -> None:
    """Refuse more choices than the engine can ever hold: as an overload they would be tried again for ever."""
    if prompts * n > limit:
        message = f"this server makes at most {limit} choices at once; {prompts} × n = {n} make {prompts * n}"
        raise InvalidRequest(message, "prompt" if n == 1 else "n")


def check_prompt_tokens(prompts: Sequence[Prompt], card: ModelCard) -> None:
    """Raise InvalidRequest for more prompt tokens than one request may have.

    The n choices of a prompt share its tokens. A text counts with the smallest number of tokens that it can have.
    """
    least = sum(math.ceil(len(p) / card.longest_token) if isinstance(p, str) else len(p) for p in prompts)
    if least > card.max_prompt_tokens:
        exact = "" if all(isinstance(p, tuple) for p in prompts) else "at least "
        raise InvalidRequest(
            f"the prompts of one request may have {card.max_prompt_tokens:,} tokens together; these {len(prompts)} "
            f"have {exact}{least:,}",
            "prompt",
            "too_many_prompt_tokens",
        )


def _load(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        raise InvalidRequest("the body is not valid JSON", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    return value


def _acting_fields(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that take effect: without nulls, inert fields and neutral values."""
    acting = {}
    for name, value in given.items():
        if name not in Body.model_fields and name not in INERT and name not in NEUTRAL:
            raise InvalidRequest(f"unknown field {name!r}", name, "unknown_field")
        if name in NEUTRAL and not _is_neutral(value, NEUTRAL[name]):
            raise InvalidRequest(f"{name} is not supported yet", name, "unsupported_field")
        if name in Body.model_fields and value is not None:
            acting[name] = value
    return acting


def _is_neutral(value: Any, neutral: Any) -> bool:
    """Whether the value is null or the neutral one. True is not 1 here, unlike in Python."""
    return value is None or (value == neutral and isinstance(value, bool) == isinstance(neutral, bool))


def _validate(given: dict[str, Any]) -> Body:
    try:
        return Body.model_validate(given)
    except ValidationError as error:
        raise _as_invalid_request(error.errors(include_input=False, include_url=False)[0]) from None


def _as_invalid_request(error: ErrorDetails) -> InvalidRequest:
    param = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return InvalidRequest(f"{param} is required", param)
    if error["type"] == "extra_forbidden":
        return InvalidRequest(f"unknown field {param!r}", param, "unknown_field")
    return InvalidRequest(f"{param}: {error['msg']}", param)
