"""An EngineClient over an engine thread of this process: the bridge between the event loop and the engine."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

from app.client import ModelCard, Token
from engine.config import PolicyConfig
from engine.engine import Engine
from engine.types import EngineStats, InvalidRequest, Output, Request, StepStats
from engine.worker import EngineWorker

TELL_EVERY_S = 0.25  # of steps, at most: as often as the live page shows them
TOKENIZE_INLINE = 4_000  # characters; longer prompts are tokenized off the event loop


class LocalClient:
    """One wake-up of the event loop per engine step, whatever the number of requests in it."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        longest_token = max(map(len, engine.tokenizer.vocab))
        can = engine.intake.capabilities
        self._card = ModelCard(
            name=model_name,
            max_model_len=engine.max_model_len,
            policy=_name(engine.policy),
            max_spec_length=can.max_spec_length,
            drafters=can.drafters,
            drafter=can.drafter,
            verifier=can.verifier,
            max_choices=engine.config.max_running + engine.config.max_waiting,
            max_prompt_tokens=engine.config.max_prompt_tokens,
            longest_token=longest_token,
            created=int(time.time()),
        )
        self._tokenizer = engine.tokenizer
        # Longer texts never fit: a token stands for no more characters than the longest token string has. (A tokenizer
        # that drops characters could fit such a text; it is refused all the same.)
        self._max_characters = engine.max_model_len * longest_token
        self._tokens: dict[int, Token] = {}  # of the vocabulary, as they come up: a prompt may name 20 for each token
        self._refused: str | None = None  # why the last policy that was sent is not in force
        self._queues: dict[str, asyncio.Queue[Output]] = {}  # touched by the event loop only
        self._loop: asyncio.AbstractEventLoop | None = None
        self._steps: list[
            StepStats
        ] = []  # that nobody was told of yet; touched by the event loop only, as the next two
        self._stepped: Callable[[Sequence[StepStats]], None] | None = None
        self._ended: Callable[[Output], None] | None = None
        self.worker = EngineWorker(engine, self._deliver)
        self.worker.start()

    @property
    def model(self) -> ModelCard:
        return replace(self._card, policy=_name(self.worker.engine.policy))

    async def tokenize(self, text: str, field: Literal["prompt", "prediction"] = "prompt") -> list[int]:
        special = field == "prompt"
        if len(text) <= TOKENIZE_INLINE:
            return self._tokenizer.encode(text, special=special)
        if len(text) > self._max_characters:
            limit = self.model.max_model_len
            raise InvalidRequest(
                f"this model's context is {limit} tokens; no {field} of {len(text)} characters fits it",
                field,
                "context_length_exceeded",
            )
        return await asyncio.to_thread(self._tokenizer.encode_long, text, special=special)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def token(self, token_id: int) -> Token:
        """Special tokens are shown by their names, and ids that only the model's tables have by their numbers."""
        token = self._tokens.get(token_id)
        if token is None:
            data = self._tokenizer.data(token_id)
            name = self._tokenizer.name(token_id) if not data else None
            token = Token.of(data) if data else Token(name or f"token_id:{token_id}", b"")
            self._tokens[token_id] = token
        return token

    def submit(self, requests: Sequence[Request]) -> list[AsyncIterator[Output]]:
        self._loop = asyncio.get_running_loop()
        self.worker.submit(*requests)
        queues: dict[str, asyncio.Queue[Output]] = {request.id: asyncio.Queue() for request in requests}
        self._queues |= queues
        return [_until_finish(queue) for queue in queues.values()]

    def cancel(self, request_id: str) -> None:
        queue = self._queues.pop(request_id, None)
        if queue is not None:
            self.worker.cancel(request_id)
            queue.put_nowait(Output(request_id, (), "", "cancelled"))

    def stats(self) -> EngineStats:
        return self.worker.stats()

    def watch(self, stepped: Callable[[Sequence[StepStats]], None], ended: Callable[[Output], None]) -> None:
        self._stepped, self._ended = stepped, ended

    def configure(self, policy: PolicyConfig) -> None:
        """Let another policy choose k from the engine's next round on; nothing that runs is disturbed.

        Raises ConfigError for one that the engine cannot have; the old one then stays.
        """
        self.worker.configure(policy)
        self._refused = None

    def refuse(self, reason: str) -> None:
        """Remember why a policy that was sent is not in force, until one is taken."""
        self._refused = reason

    def policy_status(self) -> Mapping[str, Any]:
        return asdict(self.worker.engine.policy) | {"refused": self._refused}

    def close(self) -> None:
        """End the engine thread; what runs ends as cancelled."""
        self.worker.stop()

    def _deliver(self, outputs: list[Output], stats: StepStats | None) -> None:
        """On the engine thread."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        try:
            loop.call_soon_threadsafe(self._dispatch, outputs, stats)
        except RuntimeError:  # closed between the check and the call: nobody is left to read
            return

    def _dispatch(self, outputs: list[Output], stats: StepStats | None) -> None:
        """Whoever watches is told after the streams have what they wait for."""
        loop = asyncio.get_running_loop()
        for output in outputs:
            queue = self._queues.get(output.request_id)
            if queue is not None:
                queue.put_nowait(output)
            if output.finish_reason:
                self._queues.pop(output.request_id, None)
                if self._ended is not None:
                    loop.call_soon(self._ended, output)
        if stats is not None and self._stepped is not None:
            if not self._steps:
                loop.call_later(TELL_EVERY_S, self._tell)
            self._steps.append(stats)

    def _tell(self) -> None:
        """Of all steps since the first that nobody was told of."""
        steps, self._steps = self._steps, []
        if self._stepped is not None:
            self._stepped(steps)


async def _until_finish(queue: asyncio.Queue[Output]) -> AsyncIterator[Output]:
    while True:
        output = await queue.get()
        yield output
        if output.finish_reason:
            return


def _name(policy: PolicyConfig) -> str:
    """What the edge goes by: a policy that never drafts by itself is off."""
    return policy.name if policy.drafts else "off"
