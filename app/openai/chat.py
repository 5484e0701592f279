"""The request body of /v1/chat/completions: messages, and the fields that only chats have."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from app.client import Chat, ModelCard
from app.openai import fields
from app.openai.fields import Strict, refuse
from app.openai.request import INERT as SHARED_INERT
from app.openai.request import SHARED_NEUTRAL, GenerationRequest, SharedBody, checked, read_body
from engine.types import MAX_LOGPROBS, InvalidRequest

INERT = SHARED_INERT | {"parallel_tool_calls"}  # without tools it says nothing

# Unsupported fields with their neutral value. Only this value and null are accepted.
NEUTRAL: dict[str, Any] = SHARED_NEUTRAL | {
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "function_call": "none",
    "modalities": ["text"],
    "audio": None,
    "web_search_options": None,
    "reasoning_effort": None,
    "verbosity": None,
    "documents": [],
    "chat_template": None,  # a program: only the operator chooses it
    "echo": False,
    "best_of": 1,
}

ValidText = Annotated[str, AfterValidator(fields.text)]


def message_content(value: Any) -> str | list[dict[str, str]]:
    """Read a message's content: a text, or a list of text parts. Names a part of another type."""
    if isinstance(value, str):
        return fields.text(value)
    if not isinstance(value, list) or not value:
        raise refuse('must be a string, or a list of {"type": "text", "text": …} with at least one part')
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise refuse(f"part {index} is of type {kind[:40]!r}: this model reads texts only")
    return [{"type": "text", "text": fields.text(fields.prediction_text([part]))} for part in value]


class ToolFunction(Strict):
    name: ValidText
    arguments: ValidText  # JSON


class ToolCall(Strict):
    """A call that an earlier answer made, perhaps on another server. This server makes none."""

    id: ValidText
    type: Literal["function"] = "function"
    function: ToolFunction

    def for_template(self) -> dict[str, Any]:
        """Return the call as templates expect it: arguments as an object, if they are one."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            arguments = None
        shown = arguments if isinstance(arguments, dict) else self.function.arguments
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": shown}}


Content = str | Annotated[list[fields.TextPart], Field(min_length=1)] | None  # what message_content accepts


SAYS_SOMETHING: dict[str, Any] = {
    "anyOf": [
        {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
        {"required": ["tool_calls"], "properties": {"role": {"const": "assistant"}, "tool_calls": {"type": "array"}}},
    ]
}


class Message(Strict):
    model_config = ConfigDict(json_schema_extra=SAYS_SOMETHING)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | list[dict[str, str]] | None,
        PlainValidator(message_content, Content),
    ] = None
    name: ValidText | None = None
    tool_call_id: ValidText | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1)] | None = None
    reasoning_content: ValidText | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.tool_calls is not None and self.role != "assistant":
            raise refuse("only messages of role assistant have tool_calls")
        if self.content is None and self.tool_calls is None:
            raise refuse("content is required")
        return self

    def for_template(self) -> dict[str, Any]:
        optional = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": None if self.tool_calls is None else [call.for_template() for call in self.tool_calls],
            "reasoning_content": self.reasoning_content,
        }
        given = {name: value for name, value in optional.items() if value is not None}
        return {"role": self.role, "content": "" if self.content is None else self.content} | given


def _without_empty(value: Any) -> Any:
    """Drop nulls and empty lists: clients send replies back as messages, with every field that they know."""
    if not isinstance(value, dict):
        return value
    return {name: item for name, item in value.items() if item is not None and (name == "content" or item != [])}


class ChatFields(Strict):
    """What a request says to the chat template."""

    messages: Annotated[list[Annotated[Message, BeforeValidator(_without_empty)]], Field(min_length=1)]
    add_generation_prompt: bool | None = None  # None: unless the last message is continued
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_special_tokens: bool | None = None  # None: the chat template writes them

    def chat(self) -> Chat:
        """Raises InvalidRequest for an answer that shall both begin and continue."""
        begins = not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
        if begins and self.continue_final_message:
            message = "an answer cannot both begin and continue the last message: leave out add_generation_prompt"
            raise InvalidRequest(message, "continue_final_message")
        messages = tuple(message.for_template() for message in self.messages)
        return Chat(messages, begins, self.continue_final_message, self.chat_template_kwargs)


class ChatBody(SharedBody, ChatFields):
    """The fields of /v1/chat/completions that take effect."""

    logprobs: bool = False
    top_logprobs: Annotated[int | None, fields.documented(minimum=0, maximum=MAX_LOGPROBS)] = None
    renamed: ClassVar[Mapping[str, str]] = {"logprobs": "top_logprobs"}

    def alternatives(self) -> int | None:
        """Return how many log-probabilities each token comes with beside its own; None: no log-probabilities."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


def parse_chat(raw: bytes, card: ModelCard) -> GenerationRequest:
    """Read a request for a chat's next message. Raises InvalidRequest, naming the field at fault."""
    body = read_body(raw, card, ChatBody, INERT, NEUTRAL)
    limit = body.limit()
    return checked(
        card,
        body,
        body.sampling_params(card.max_model_len if limit is None else limit, body.alternatives()),
        (),
        add_special_tokens=body.add_special_tokens,
        chat=body.chat(),
        fills_context=limit is None,
    )
