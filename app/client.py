"""The seam between the HTTP edge and an engine: the EngineClient protocol and the values it speaks in."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from engine.speculation import Capabilities
from engine.types import DrafterName, EngineStats, Output, Request, StepStats, Verifier


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the edge needs to know of the served model."""

    name: str
    max_model_len: int
    policy: str  # in force now; it chooses k for requests that do not fix their own; "off": they get no drafts
    max_spec_length: int  # 0 when there is no drafter
    drafters: tuple[DrafterName, ...]  # those that a request may name
    drafter: DrafterName | None  # for requests that do not say; None: they get no drafts
    verifier: Verifier  # for requests that do not say
    max_choices: int  # that the engine can hold at once, running and waiting
    max_prompt_tokens: int  # of one request, all its prompts together
    longest_token: int  # characters: a text of c characters has at least c / longest_token tokens
    created: int  # Unix seconds

    @property
    def capabilities(self) -> Capabilities:
        """As `resolve` wants them."""
        return Capabilities(self.drafters, self.drafter, self.verifier, self.max_spec_length, self.policy != "off")


@dataclass(frozen=True, slots=True)
class Token:
    """One entry of the vocabulary, as replies show it."""

    text: str
    data: bytes  # what it adds to a text, maybe not whole characters; empty for a special token

    @classmethod
    def of(cls, data: bytes) -> "Token":
        """A token that stands for these bytes: shown as text if they are text, else as OpenAI shows them."""
        try:
            return cls(data.decode(), data)
        except UnicodeDecodeError:
            return cls("bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data)


class EngineClient(Protocol):
    """All that the edge may ask of an engine. Every method is safe to call from the event loop and returns at once."""

    @property
    def model(self) -> ModelCard:
        """As it is now: the policy can change while the server runs."""
        ...

    async def tokenize(self, text: str, field: Literal["prompt", "prediction"] = "prompt") -> list[int]:
        """Token ids of that field's text: a prompt's with the special tokens that the model's tokenizer adds, a
        prediction's, which goes on where a prompt ends, without.

        Raises InvalidRequest, naming the field, for a text so long that no tokenization of it fits the context.
        """
        ...

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids that `submit` took, without special tokens."""
        ...

    def token(self, token_id: int) -> Token: ...

    def submit(self, requests: Sequence[Request]) -> list[AsyncIterator[Output]]:
        """Admit all requests now, or none; each one's iterator of outputs ends after the one with finish_reason.

        Raises InvalidRequest, Overloaded or EngineStopped before anything is queued.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Free what the request holds within one round. Idempotent; unknown ids are ignored."""
        ...

    def stats(self) -> EngineStats: ...

    def watch(self, stepped: Callable[[Sequence[StepStats]], None], ended: Callable[[Output], None]) -> None:
        """From now on call, on the event loop: `stepped` with the engine's steps, some at once; `ended` with the last
        output of every request that was submitted, also if nobody reads it any more. At most one may watch.
        """
        ...

    def policy_status(self) -> Mapping[str, Any]:
        """The policy in force by name and parameters, as JSON; `refused`: why the last one that was sent is not in
        force, None if it is.
        """
        ...
