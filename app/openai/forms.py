"""The two forms of OpenAI's API, completions and chats: how a request is read and how a reply looks.

Everything else, from the engine's requests to the bytes of a stream, is the same for both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.client import ModelCard, Token
from app.openai.chat import parse_chat
from app.openai.logprobs import LogprobColumns, LogprobObjects, Logprobs
from app.openai.request import GenerationRequest, parse


@dataclass(frozen=True, slots=True)
class ApiForm:
    id_prefix: str
    object: str  # of a whole reply
    chunk_object: str
    parse: Callable[[bytes, ModelCard], GenerationRequest]
    logprobs: Callable[[Callable[[int], Token]], Logprobs]
    whole: Callable[[str, str], dict[str, Any]]  # (text, reasoning) → the field of a choice that holds them
    part: Callable[[str, str, bool], dict[str, Any]]  # the same for a chunk; the last argument: whether it is the first
    prompt_ids_in_choices: bool  # where a reply tells the prompt's ids: in each choice, or beside the choices


def _message(text: str, reasoning: str) -> dict[str, Any]:
    said = {"role": "assistant", "content": text, "refusal": None}
    return {"message": said | {"reasoning_content": reasoning} if reasoning else said}


def _delta(text: str, reasoning: str, first: bool) -> dict[str, Any]:
    """Return what changed. The first chunk names the role and has a content, even an empty one, as OpenAI's has."""
    delta = {"role": "assistant", "content": text, "refusal": None} if first else {"content": text} if text else {}
    return {"delta": delta | {"reasoning_content": reasoning} if reasoning else delta}


COMPLETIONS = ApiForm(
    id_prefix="cmpl-",
    object="text_completion",
    chunk_object="text_completion",
    parse=parse,
    logprobs=LogprobColumns,
    whole=lambda text, reasoning: {"text": text},
    part=lambda text, reasoning, first: {"text": text},
    prompt_ids_in_choices=True,
)

CHAT = ApiForm(
    id_prefix="chatcmpl-",
    object="chat.completion",
    chunk_object="chat.completion.chunk",
    parse=parse_chat,
    logprobs=LogprobObjects,
    whole=_message,
    part=_delta,
    prompt_ids_in_choices=False,
)

ID_PREFIXES = ("", COMPLETIONS.id_prefix, CHAT.id_prefix)  # a request may be named without the prefix
