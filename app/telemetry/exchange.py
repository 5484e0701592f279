"""Reports finished requests and engine steps to listeners: traces, metrics and the live page.

Listeners run on the event loop, between the events of requests and never inside the engine. An exception of a listener
is logged and ends only that call; requests are not affected.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from app.client import EngineClient
from app.errors import error_body
from app.openai.forms import COMPLETIONS, ApiForm
from app.openai.request import GenerationRequest
from engine.types import Output, Request, RequestRecord, StepStats

CLIENT_DISCONNECT = "client_disconnect"  # a failure that is not the server's error

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Exchange:
    """One request to /v1/completions or /v1/chat/completions and its reply. Times are monotonic seconds."""

    id: str  # of the reply
    headers: Headers  # of the request
    form: ApiForm = COMPLETIONS
    began: float = field(default_factory=time.monotonic)
    request_body: GenerationRequest | None = None  # None: the body was refused
    requests: Sequence[Request] = ()  # the engine's requests, one per choice; (): the engine accepted none
    last_outputs: dict[str, Output] = field(default_factory=dict)  # by the engine request's id
    error: Exception | None = None  # the error that ended it; ClientDisconnect: the client left
    finished: float | None = None  # when the last byte was sent or the client left
    trace_id: str | None = None  # 32 hexadecimal digits; None: it is not traced
    texts: list[str] | None = None  # each choice's text so far; None: no listener wants texts

    @property
    def body(self) -> GenerationRequest:
        """The request's body, once it was accepted."""
        assert self.request_body is not None, "the body was refused or has not been read yet"
        return self.request_body

    @property
    def request_id(self) -> str:
        """As in the server's log."""
        return self.id.removeprefix(self.form.id_prefix)

    @property
    def complete(self) -> bool:
        """Whether the reply has ended and every engine request has its last output."""
        return self.finished is not None and len(self.last_outputs) == len(self.requests)

    def fail(self, error: Exception) -> None:
        """Note the error, also for a reply whose status was sent already."""
        self.error = error

    @property
    def failure(self) -> str | None:
        """Why a complete exchange failed: an error's code or client_disconnect. None: it did not fail."""
        if isinstance(self.error, ClientDisconnect):
            return CLIENT_DISCONNECT
        if self.error is None:
            return None
        error_object = error_body(self.error)[1]["error"]
        return str(error_object["code"] or error_object["type"])

    async def keep_texts(self, outputs: AsyncGenerator[tuple[int, Output]]) -> AsyncGenerator[tuple[int, Output]]:
        """Yield the same (choice index, output) and collect their texts if a listener wants them."""
        async with aclosing(outputs):
            async for index, output in outputs:
                if self.texts is not None:
                    self.texts[index] += output.text
                yield index, output

    @property
    def outputs(self) -> list[Output]:
        """The last output of every choice of a complete exchange, in the order of the choices."""
        return [self.last_outputs[request.id] for request in self.requests]

    @property
    def records(self) -> list[RequestRecord]:
        """The records of the choices that have one. A choice that the engine dropped at shutdown has none."""
        return [output.record for output in self.outputs if output.record is not None]


class Listener(Protocol):
    def began(self, exchange: Exchange) -> None:
        """The exchange begins; its body has not been read yet."""
        ...

    def ended(self, exchange: Exchange) -> None:
        """The exchange is complete. Called once for each exchange that began, refused ones included."""
        ...

    def stepped(self, steps: Sequence[StepStats]) -> None:
        """Receive the engine's steps since the last call. Called about four times a second at most."""
        ...


class Telemetry:
    """Follows every exchange until it is complete. A cancelled one is complete when the engine has dropped it."""

    def __init__(self, client: EngineClient, listeners: Sequence[Listener] = ()) -> None:
        self._listeners = tuple(listeners)
        self._open: dict[str, Exchange] = {}  # by the engine request's id
        client.watch(self._stepped, self._ended)

    @contextmanager
    def exchange(self, scope: Scope, form: ApiForm) -> Iterator[Exchange]:
        """Follow the request of this scope. Notes an exception of the block and raises it again.

        A cancelled task counts as a client that left. When a client leaves, Serve's proxy sends `http.disconnect` and
        cancels the task, and either can arrive first.
        """
        exchange = Exchange(form.id_prefix + scope["state"]["request_id"], Headers(scope=scope), form)
        self._notify(lambda listener: listener.began(exchange))
        try:
            yield exchange
        except asyncio.CancelledError:
            exchange.fail(ClientDisconnect())
            raise
        except Exception as error:
            exchange.fail(error)
            raise
        finally:
            exchange.finished = time.monotonic()
            self._close(exchange)

    def submitted(self, exchange: Exchange, requests: Sequence[Request]) -> None:
        """The engine accepted these requests. Call it in the same turn of the event loop as `submit`."""
        exchange.requests = tuple(requests)
        exchange.texts = None if exchange.texts is None else [""] * len(requests)
        self._open |= {request.id: exchange for request in requests}

    def _ended(self, output: Output) -> None:
        exchange = self._open.pop(output.request_id, None)
        if exchange is not None:
            # Without log-probabilities, which may be millions: the exchange lives until its last choice has ended.
            exchange.last_outputs[output.request_id] = output._replace(logprobs=(), prompt_logprobs=())
            self._close(exchange)

    def _close(self, exchange: Exchange) -> None:
        if exchange.complete:
            self._notify(lambda listener: listener.ended(exchange))

    def _stepped(self, steps: Sequence[StepStats]) -> None:
        self._notify(lambda listener: listener.stepped(steps))

    def _notify(self, call: Callable[[Listener], Any]) -> None:
        for listener in self._listeners:
            try:
                call(listener)
            except Exception:
                log.exception("the listener %s failed", type(listener).__name__)
