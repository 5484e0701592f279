"""The seam between the HTTP edge and an engine: the EngineClient protocol, and a fake to test and show the edge."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from app.fake_engine import MAX_K, POLICY, Script, blank, note, spell
from engine.types import (
    DRAFTERS,
    DrafterName,
    EngineStats,
    InvalidRequest,
    Output,
    Overloaded,
    Request,
    RequestRecord,
    StepStats,
    Verifier,
)

__all__ = ["EngineClient", "FakeEngineClient", "ModelCard", "Script", "Token", "spell"]


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


def _nobody(told: object) -> None:
    pass


class FakeEngineClient:
    """An engine that replays a script: each request's outputs come from `script(request)`, one per event-loop turn.

    Shipped with the protocol so that the edge can be tested, and shown, without a model. Its tokens are bytes. A
    request whose script ends without a finish_reason stays open, as one that still runs, until it is cancelled or its
    deadline has passed; its last output then carries a record of the outputs that were read.
    """

    def __init__(
        self,
        script: Script = spell,
        *,
        name: str = "fake",
        max_model_len: int = 256,
        max_open: int = 64,
        max_choices: int = 64,
        max_prompt_tokens: int = 131_072,
    ) -> None:
        self.model = ModelCard(
            name=name,
            max_model_len=max_model_len,
            policy=POLICY,
            max_spec_length=MAX_K,
            drafters=DRAFTERS,
            drafter="model",
            verifier="match",
            max_choices=max_choices,
            max_prompt_tokens=max_prompt_tokens,
            longest_token=1,
            created=1_700_000_000,
        )
        self.script = script
        self.max_open = max_open
        self.unhealthy = ""  # set it to the reason to be unhealthy for
        self.refused: str | None = None  # set it to why a policy was not taken
        self.submitted: list[Request] = []
        self.tokenized: list[tuple[str, str]] = []  # (field, text)
        self.open: dict[str, asyncio.Event] = {}  # running requests; the event is set when one is cancelled
        self.cancelled: list[str] = []  # those cancelled while they ran
        self._records: dict[str, RequestRecord] = {}  # of running requests
        self.stepped: Callable[[Sequence[StepStats]], None] = _nobody  # call it to play the engine's steps
        self._ended: Callable[[Output], None] = _nobody

    async def tokenize(self, text: str, field: Literal["prompt", "prediction"] = "prompt") -> list[int]:
        await asyncio.sleep(0)
        self.tokenized.append((field, text))
        return list(text.encode())

    def detokenize(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def token(self, token_id: int) -> Token:
        return Token.of(bytes([token_id]))

    def submit(self, requests: Sequence[Request]) -> list[AsyncIterator[Output]]:
        if any(token > 255 for request in requests for token in request.prompt_ids):
            raise InvalidRequest("prompt holds a token id outside 0..255", "prompt")
        if len(self.open) + len(requests) > self.max_open:
            raise Overloaded(f"{len(self.open)} requests are running or waiting", retry_after=2)
        self.submitted += requests
        self.open |= {request.id: asyncio.Event() for request in requests}
        self._records |= {request.id: blank(request) for request in requests}
        now = time.monotonic()
        return [
            self._replay(request, self.open[request.id], now + (request.deadline_s or math.inf)) for request in requests
        ]

    async def _replay(self, request: Request, cancelled: asyncio.Event, deadline: float) -> AsyncIterator[Output]:
        for output in self.script(request):
            await asyncio.sleep(0)
            if cancelled.is_set() or time.monotonic() >= deadline:
                break
            if output.token_ids:
                note(self._records[request.id], len(output.drafts), output.accepted, len(output.token_ids))
            if output.finish_reason is not None:
                self._close(request.id)
                self._ended(output)
            yield output
            if output.finish_reason is not None:
                return
        try:
            async with asyncio.timeout(None if deadline == math.inf else deadline - time.monotonic()):
                await cancelled.wait()
        except TimeoutError:
            message = f"the deadline of {request.deadline_s} s has passed"
            record = self._close(request.id)
            last = Output(request.id, (), "", "error", message, "deadline_exceeded", record)
            self._ended(last)
            yield last
        else:
            yield Output(request.id, (), "", "cancelled")

    def cancel(self, request_id: str) -> None:
        event = self.open.get(request_id)
        if event is not None:
            event.set()
            self.cancelled.append(request_id)
            self._ended(Output(request_id, (), "", "cancelled", record=self._close(request_id)))

    def _close(self, request_id: str) -> RequestRecord | None:
        """It does not run any more; returns the record of what was read of it."""
        self.open.pop(request_id, None)
        record = self._records.pop(request_id, None)
        if record is not None:
            record.finished = time.monotonic()
        return record

    def watch(self, stepped: Callable[[Sequence[StepStats]], None], ended: Callable[[Output], None]) -> None:
        self.stepped, self._ended = stepped, ended

    def stats(self) -> EngineStats:
        return EngineStats(
            healthy=not self.unhealthy,
            reason=self.unhealthy,
            steps=len(self.submitted),
            running=len(self.open),
            waiting=0,
            max_running=self.max_open,
            free_slots=self.max_open - len(self.open),
            heartbeat_age_s=0.0,
            policy=self.model.policy,
        )

    def policy_status(self) -> Mapping[str, Any]:
        return {"name": self.model.policy, "k": 5, "refused": self.refused}
