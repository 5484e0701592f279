"""What is told of requests and steps once they are over, and to whom: traces, metrics, the live page.

Listeners run on the event loop, between requests' events and never inside the engine. What one of them raises is logged
and costs that one call; no request notices.
"""

import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from app.client import EngineClient
from app.errors import error_body
from app.openai.request import CompletionRequest
from engine.types import Output, Request, RequestRecord, StepStats

CLIENT_DISCONNECT, CANCELLED = "client_disconnect", "cancelled"  # failures that are no errors of ours

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Exchange:
    """One request to /v1/completions. Complete once `finished` is set and every engine request has its last output."""

    id: str  # of the reply
    headers: Headers  # of the request
    began: float = field(default_factory=time.monotonic)
    request_body: CompletionRequest | None = None  # None: the body was refused
    requests: Sequence[Request] = ()  # that the engine took, one per choice; (): it took none
    last_outputs: dict[str, Output] = field(default_factory=dict)  # last output of each, by the engine request's id
    error: Exception | None = None  # that ended it; ClientDisconnect: the client left
    finished: float | None = None  # monotonic seconds: the last byte, or the disconnect
    trace_id: str | None = None  # 32 hexadecimal digits; None: it is not traced
    texts: list[str] | None = None  # of every choice, as far as it came; None: no listener set it, so nobody keeps any

    @property
    def complete(self) -> bool:
        return self.finished is not None and len(self.last_outputs) == len(self.requests)

    def fail(self, error: Exception) -> None:
        """Of a reply that had begun, too: its status was sent before."""
        self.error = error

    @property
    def failure(self) -> str | None:
        """Why it failed, in a word: an error's code, client_disconnect, or cancelled (Serve ended its task); None: it
        did not. Of an exchange that is complete."""
        if isinstance(self.error, ClientDisconnect):
            return CLIENT_DISCONNECT
        if self.error is not None:
            told = error_body(self.error)[1]["error"]
            return str(told["code"] or told["type"])
        let_go = not self.requests or any(output.finish_reason == "cancelled" for output in self.outputs)
        return CANCELLED if let_go else None

    async def keep_texts(self, outputs: AsyncGenerator[tuple[int, Output]]) -> AsyncGenerator[tuple[int, Output]]:
        """The same (choice, output), with their texts kept where a listener asked for that."""
        async with aclosing(outputs) as live:
            async for index, output in live:
                if self.texts is not None:
                    self.texts[index] += output.text
                yield index, output

    @property
    def outputs(self) -> list[Output]:
        """The last output of every choice, in the order of the choices; of a complete exchange."""
        return [self.last_outputs[request.id] for request in self.requests]

    @property
    def records(self) -> list[RequestRecord]:
        """Those of the choices that have one: not of one that the engine let go of when it ended."""
        return [output.record for output in self.outputs if output.record is not None]


class Listener(Protocol):
    def began(self, exchange: Exchange) -> None:
        """Its body has not been read yet."""
        ...

    def ended(self, exchange: Exchange) -> None:
        """It is complete. Called once for each that began, also for those that were refused."""
        ...

    def stepped(self, steps: Sequence[StepStats]) -> None:
        """The engine's steps since the last call, at most some four calls a second."""
        ...


class Telemetry:
    """Follows every exchange to its end, which for a cancelled one is when the engine has let go of it."""

    def __init__(self, client: EngineClient, listeners: Sequence[Listener] = ()) -> None:
        self._listeners = tuple(listeners)
        self._open: dict[str, Exchange] = {}  # by engine request's id
        client.watch(self._stepped, self._ended)

    @contextmanager
    def exchange(self, scope: Scope) -> Iterator[Exchange]:
        """Follow the request of this scope; what the block raises goes through, and is noted."""
        exchange = Exchange(f"cmpl-{scope['state']['request_id']}", Headers(scope=scope))
        self._tell(lambda listener: listener.began(exchange))
        try:
            yield exchange
        except BaseException as error:
            if isinstance(error, Exception):
                exchange.fail(error)
            raise
        finally:
            exchange.finished = time.monotonic()
            self._close(exchange)

    def submitted(self, exchange: Exchange, requests: Sequence[Request]) -> None:
        """The engine took these just now, in this turn of the event loop."""
        exchange.requests = tuple(requests)
        exchange.texts = None if exchange.texts is None else [""] * len(requests)
        self._open |= {request.id: exchange for request in requests}

    def _ended(self, output: Output) -> None:
        exchange = self._open.pop(output.request_id, None)
        if exchange is not None:
            exchange.last_outputs[output.request_id] = replace(
                output, logprobs=(), prompt_logprobs=()
            )  # they may be millions
            self._close(exchange)

    def _close(self, exchange: Exchange) -> None:
        if exchange.complete:
            self._tell(lambda listener: listener.ended(exchange))

    def _stepped(self, steps: Sequence[StepStats]) -> None:
        self._tell(lambda listener: listener.stepped(steps))

    def _tell(self, call: Callable[[Listener], Any]) -> None:
        for listener in self._listeners:
            try:
                call(listener)
            except Exception:
                log.exception("%s failed to take what it was told", type(listener).__name__)
