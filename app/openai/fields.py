"""Checks of field values that a type alone cannot express."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, with_config
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from engine.types import MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKENS

ParsedPrompt = str | tuple[int, ...]


MAX_ID_DIGITS = 10  # of a token id written as a string; int() refuses to read thousands of digits


def documented(**schema: float) -> Any:
    """Add limits to a field in /openapi.json that SamplingParams checks, not pydantic."""
    return Field(json_schema_extra=dict(schema))


# What the validators below accept, for /openapi.json.
TokenId = Annotated[int, Field(ge=0)]
PromptField = str | list[TokenId] | Annotated[list[str] | list[list[TokenId]], Field(min_length=1)]
SomeIds = Annotated[list[TokenId], Field(min_length=1)]
StopIds = Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)]
Stop = Annotated[str, Field(min_length=1)]
Stops = Stop | Annotated[list[Stop], Field(max_length=MAX_STOP_STRINGS)]
BadWords = Annotated[list[Annotated[str, Field(pattern=r"\S")]], Field(max_length=MAX_BAD_WORDS)]
BiasedToken = Annotated[str, Field(pattern=rf"^[0-9]{{1,{MAX_ID_DIGITS}}}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[
    dict[BiasedToken, Bias], Field(max_length=MAX_LOGIT_BIAS, json_schema_extra={"additionalProperties": False})
]


@with_config(ConfigDict(extra="forbid"))
class TextPart(TypedDict):
    type: Literal["text"]
    text: str


class Strict(BaseModel):
    """No unknown fields, no conversions (true is not 1, "1" is not 1), no NaN and no infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


def refuse(message: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{message}", {"message": message})


def text(value: str) -> str:
    """Refuse half of a surrogate pair: JSON can escape it, no tokenizer takes it."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise refuse("holds a lone surrogate, which is not text") from None
    return value


def prompts(value: Any) -> tuple[ParsedPrompt, ...]:
    """Read one prompt, as text or as token ids, or a list of prompts of one kind."""
    if isinstance(value, str):
        return (text(value),)
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return tuple(text(item) for item in value)
    if isinstance(value, list) and value and all(_are_ids(item) for item in value):
        return tuple(tuple(item) for item in value)
    if _are_ids(value):
        return (tuple(value),)
    raise refuse("must be a string, a list of token ids (integers from 0), or a list of several of one of these")


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def token_ids(value: Any) -> tuple[int, ...]:
    if not _are_ids(value):
        raise refuse("must be a list of token ids (integers from 0)")
    return tuple(value)


def stops(value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise refuse("must be a string or a list of strings")
    if len(items) > MAX_STOP_STRINGS:
        raise refuse(f"takes at most {MAX_STOP_STRINGS} strings, not {len(items)}")
    return tuple(text(item) for item in items)


def bad_words(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise refuse("must be a list of strings")
    if len(value) > MAX_BAD_WORDS:
        raise refuse(f"takes at most {MAX_BAD_WORDS} words, not {len(value)}")
    if not all(item.strip() for item in value):
        raise refuse("must not contain an empty word")
    return tuple(text(item) for item in value)


def logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Read OpenAI's object of token ids, as strings, and biases. SamplingParams checks the range of the biases."""
    if not isinstance(value, dict):
        raise refuse("must be an object of token ids and their biases")
    return tuple((_token_id(key), _bias(key, bias)) for key, bias in value.items())


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= MAX_ID_DIGITS):
        raise refuse(f"has the key {key[:40]!r}, which is not a token id")
    return int(key)


def _bias(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise refuse(f"of token {key} must be a number")
    try:
        return float(value)
    except OverflowError:  # an integer beyond every float
        raise refuse(f"of token {key} must lie between -100 and 100") from None


def prediction_text(value: Any) -> str:
    """Read the content of OpenAI's prediction: a text, or a list of text parts."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, list) and all(_is_text_part(part) for part in value):
        return text("".join(part["text"] for part in value))
    raise refuse('must be a string, or a list of {"type": "text", "text": …}')


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.keys() == {"type", "text"}
        and part["type"] == "text"
        and isinstance(part["text"], str)
    )


def without_nulls(value: Any) -> Any:
    """Drop nulls: OpenAI's clients send null for fields that are not set."""
    return {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else value


def _only_false(value: bool) -> bool:
    if value:
        raise refuse("is not supported yet")
    return value


OnlyFalse = Annotated[bool, AfterValidator(_only_false)]
