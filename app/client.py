"""The seam between the HTTP edge and an engine: the EngineClient protocol and the values it speaks in."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from engine.speculation import Capabilities
from engine.types import DrafterName, EngineStats, Output, Request, StepStats, Verifier

TextField = Literal["prompt", "messages", "prediction", "bad_words"]  # fields of requests whose text is tokenized


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the edge needs to know about the served model."""

    name: str
    max_model_len: int
    vocab_size: int  # token ids are smaller
    policy: str  # in force; it chooses k for requests that do not fix their own; "off": they get no drafts
    max_spec_length: int  # 0 when there is no drafter
    drafters: tuple[DrafterName, ...]  # a request may name these
    drafter: DrafterName | None  # for requests that name none; None: they get no drafts
    verifier: Verifier  # for requests that name none
    max_choices: int  # the most that the engine holds at once, running and waiting
    max_prompt_tokens: int  # the most in one request, all its prompts together
    longest_token: int  # characters: a text of c characters has at least c / longest_token tokens
    created: int  # Unix seconds
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)  # the checkpoint's, for fields left out
    reasoning_tags: tuple[str, str] | None = None  # around the model's reasoning in a chat; None: not told apart
    has_chat_template: bool = False  # the checkpoint's or the operator's; else chats are written as transcripts
    trees: bool = True  # whether a request may ask for trees of drafts

    @property
    def capabilities(self) -> Capabilities:
        """The part of the card that `resolve` needs."""
        policy_drafts = self.policy != "off"
        return Capabilities(self.drafters, self.drafter, self.verifier, self.max_spec_length, policy_drafts, self.trees)


@dataclass(frozen=True, slots=True)
class Token:
    """One entry of the vocabulary, as replies show it."""

    text: str
    data: bytes  # its bytes, perhaps not whole characters; empty for a special token
    special: bool = False  # whether texts leave it out; `text` is then its name

    @classmethod
    def of(cls, data: bytes) -> "Token":
        """Make the token of these bytes. Bytes that are not text are shown as OpenAI shows them."""
        try:
            return cls(data.decode(), data)
        except UnicodeDecodeError:
            return cls("bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data)


@dataclass(frozen=True, slots=True)
class Chat:
    """What a request says to the chat template."""

    messages: tuple[Mapping[str, Any], ...]  # role, content (a text or text parts) and what else a template may read
    add_generation_prompt: bool = True  # whether the prompt ends with the beginning of an answer
    continue_final_message: bool = False  # whether the prompt ends within the last message
    variables: Mapping[str, Any] = field(default_factory=dict)  # further names for the template


@dataclass(frozen=True, slots=True)
class RenderedChat:
    text: str
    add_special_tokens: bool  # False: the template has written BOS and the like, where the model wants them


class EngineClient(Protocol):
    """All that the edge asks of an engine. Every method is called on the event loop and returns at once."""

    @property
    def model(self) -> ModelCard:
        """The card at present: the policy can change while the server runs."""
        ...

    async def tokenize(
        self, text: str, field: TextField = "prompt", *, add_special_tokens: bool = True, any_length: bool = False
    ) -> list[int]:
        """Return the token ids of a field's text.

        With add_special_tokens a prompt or a chat gets the special tokens that the checkpoint puts around a text, such
        as BOS. A prediction gets none.

        Raises InvalidRequest, with the field's name, for a text so long that no tokenization of it fits the context,
        unless any_length.
        """
        ...

    async def render_chat(self, chat: Chat) -> RenderedChat:
        """Return the prompt that the model's chat template makes of a chat. Cancelling the call ends the template.

        Raises InvalidRequest for messages that the template refuses and for a template that takes too long, Overloaded
        while too many chats are rendered, and EngineStopped once the server shuts down.
        """
        ...

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids of the vocabulary, without special tokens unless asked for. Any thread may call
        it."""
        ...

    def token(self, token_id: int) -> Token: ...

    def tokenizer_info(self) -> Mapping[str, str]:
        """Return the special tokens by their roles, such as bos_token, and the chat template, as Jinja."""
        ...

    def submit(self, requests: Sequence[Request]) -> list[AsyncIterator[Output]]:
        """Admit all requests or none. Each request's iterator ends after the output with a finish_reason.

        Raises InvalidRequest, Overloaded or EngineStopped before anything is queued.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """End the request and free its memory within one round. Idempotent; unknown ids are ignored."""
        ...

    def stats(self) -> EngineStats: ...

    def watch(self, stepped: Callable[[Sequence[StepStats]], None], ended: Callable[[Output], None]) -> None:
        """Call `stepped` with the engine's steps, several at once, and `ended` with the last output of every request,
        also if nobody reads it. Both run on the event loop. There is at most one watcher.
        """
        ...

    def policy_status(self) -> Mapping[str, Any]:
        """Return the policy in force, name and parameters, as JSON. refused: why the last policy that was sent is not
        in force; None: it is.
        """
        ...
