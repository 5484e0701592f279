"""The seam between the HTTP edge and an engine: the EngineClient protocol, and a fake to test and show the edge."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from deployments.engine.types import EngineStats, InvalidRequest, Output, Overloaded, Request, RequestRecord


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the edge needs to know of the served model."""

    name: str
    max_model_len: int
    max_spec_length: int  # 0 when there is no drafter
    created: int  # Unix seconds


class EngineClient(Protocol):
    """All that the edge may ask of an engine. Every method is safe to call from the event loop and returns at once."""

    @property
    def model(self) -> ModelCard: ...

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of a prompt, special tokens added as the model's tokenizer does.

        Raises InvalidRequest for a text so long that no tokenization of it fits the context.
        """
        ...

    def submit(self, request: Request) -> AsyncIterator[Output]:
        """Admit the request now and return the iterator of its outputs, which ends after the one with finish_reason.

        Raises InvalidRequest, Overloaded or EngineStopped before anything is queued.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Free what the request holds within one round. Idempotent; unknown ids are ignored."""
        ...

    def stats(self) -> EngineStats: ...


Script = Callable[[Request], Iterable[Output]]


def spell(request: Request) -> Iterator[Output]:
    """The default script: the prompt's ids again as text, three tokens a round (k = 3, two drafts accepted)."""
    ids = [request.prompt_ids[i % len(request.prompt_ids)] for i in range(request.params.max_tokens)]
    now = time.monotonic()
    record = RequestRecord(request.id, request.params.seed or 0, len(request.prompt_ids), 3, now, now, now)
    for start in range(0, len(ids), 3):
        part = tuple(ids[start : start + 3])
        record.drafted.append(3)
        record.accepted.append(2)
        record.emitted.append(len(part))
        record.output_tokens += len(part)
        last = record.output_tokens == len(ids)
        record.finished = time.monotonic() if last else None
        yield Output(request.id, part, bytes(part).decode("latin-1"), *(("length", None, record) if last else ()))


class FakeEngineClient:
    """An engine that replays a script: each request's outputs come from `script(request)`, one per event-loop turn.

    Shipped with the protocol so that the edge can be tested, and shown, without a model. Its tokens are bytes. A
    request whose script ends without a finish_reason stays open, as one that still runs, until it is cancelled.
    """

    def __init__(
        self, script: Script = spell, *, name: str = "fake", max_model_len: int = 256, max_open: int = 64
    ) -> None:
        self.model = ModelCard(name=name, max_model_len=max_model_len, max_spec_length=8, created=1_700_000_000)
        self.script = script
        self.max_open = max_open
        self.unhealthy = ""  # set it to the reason to be unhealthy for
        self.submitted: list[Request] = []
        self.open: dict[str, asyncio.Event] = {}  # running requests; the event is set when one is cancelled
        self.cancelled: list[str] = []  # those cancelled while they ran

    async def tokenize(self, text: str) -> list[int]:
        await asyncio.sleep(0)
        return list(text.encode())

    def submit(self, request: Request) -> AsyncIterator[Output]:
        if any(token > 255 for token in request.prompt_ids):
            raise InvalidRequest("prompt holds a token id outside 0..255", "prompt")
        if len(self.open) >= self.max_open:
            raise Overloaded(f"{len(self.open)} requests are running or waiting", retry_after=2)
        self.submitted.append(request)
        self.open[request.id] = asyncio.Event()
        return self._replay(request, self.open[request.id])

    async def _replay(self, request: Request, cancelled: asyncio.Event) -> AsyncIterator[Output]:
        for output in self.script(request):
            await asyncio.sleep(0)
            if cancelled.is_set():
                break
            if output.finish_reason is not None:
                self.open.pop(request.id, None)
            yield output
            if output.finish_reason is not None:
                return
        await cancelled.wait()
        yield Output(request.id, (), "", "cancelled")

    def cancel(self, request_id: str) -> None:
        event = self.open.pop(request_id, None)
        if event is not None:
            event.set()
            self.cancelled.append(request_id)

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
        )
