"""The bridge between the event loop and the engine thread: an EngineClient for an engine in this process."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from app.client import Chat, ModelCard, RenderedChat, TextField, Token
from deployments.chats import ChatRenderer
from deployments.settings import DEFAULT_CHAT, ChatConfig
from engine.config import PolicyConfig
from engine.engine import Engine
from engine.loading.hub_id import parse_hub_id
from engine.models.chat_template import ChatTemplate, open_template, template_source
from engine.types import EngineStats, InvalidRequest, Output, Request, StepStats
from engine.worker import EngineWorker

REPORT_EVERY_S = 0.25  # shortest time between two reports of steps; the live page updates as often
TOKENIZE_INLINE = 4_000  # characters; longer prompts are tokenized off the event loop


class LocalClient:
    """Wakes the event loop once per engine step, however many requests the step served."""

    def __init__(self, engine: Engine, model_name: str, chat: ChatConfig = DEFAULT_CHAT) -> None:
        """Raises ConfigError for a chat template that does not exist or cannot be compiled."""
        longest_token = max(map(len, engine.tokenizer.vocab))
        can = engine.intake.capabilities
        self._card = ModelCard(
            name=model_name,
            max_model_len=engine.max_model_len,
            vocab_size=engine.target.vocab_size,
            policy=_policy_name(engine.policy),
            max_spec_length=can.max_spec_length,
            drafters=can.drafters,
            drafter=can.drafter,
            verifier=can.verifier,
            max_choices=engine.config.max_running + engine.config.max_waiting,
            max_prompt_tokens=engine.config.max_prompt_tokens,
            longest_token=longest_token,
            created=int(time.time()),
            sampling_defaults=engine.sampling_defaults,
            reasoning_tags=chat.reasoning_tags,
            has_chat_template=chat.template is not None or "default" in engine.tokenizer.chat_templates,
            trees=can.trees,
        )
        self._tokenizer = engine.tokenizer
        templates, special_tokens = engine.tokenizer.chat_templates, engine.tokenizer.special_tokens
        source = template_source(chat.template, templates)
        self._tokenizer_info = {**special_tokens, "chat_template": source}
        self._chats = ChatRenderer(
            partial(open_template, chat.template, templates, special_tokens), self._card.max_choices
        )
        if chat.template is not None:  # the operator's: the start ends if it cannot be compiled
            self.prepare_chats().result()
        # A longer text never fits: a token stands for at most as many characters as the longest token string has. (A
        # tokenizer that drops characters could make such a text fit; it is refused all the same.)
        self._max_characters = engine.max_model_len * longest_token
        self._tokens: dict[int, Token] = {}  # a cache: log-probabilities may name 20 tokens for each token of a prompt
        self._refusal: str | None = None  # why the last policy or draft that was sent is not in force
        # Only the event loop touches these four.
        self._queues: dict[str, asyncio.Queue[Output]] = {}  # by request id
        self._unreported: list[StepStats] = []
        self._stepped: Callable[[Sequence[StepStats]], None] | None = None
        self._ended: Callable[[Output], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.worker = EngineWorker(engine, self._deliver)
        self.worker.start()

    @property
    def model(self) -> ModelCard:
        engine = self.worker.engine
        can, policy = engine.intake.capabilities, _policy_name(engine.policy)
        return replace(self._card, policy=policy, drafters=can.drafters, drafter=can.drafter)

    async def tokenize(
        self, text: str, field: TextField = "prompt", *, add_special_tokens: bool = True, any_length: bool = False
    ) -> list[int]:
        special = field != "prediction" and add_special_tokens
        if len(text) <= TOKENIZE_INLINE:
            return self._tokenizer.encode(text, special=special)
        if len(text) > self._max_characters and not any_length:
            limit = self.model.max_model_len
            raise InvalidRequest(
                f"this model's maximum context length is {limit} tokens; {len(text)} characters of {field} cannot fit",
                field,
                "context_length_exceeded",
            )
        return await asyncio.to_thread(self._tokenizer.encode_long, text, special=special)

    def prepare_chats(self) -> Future[ChatTemplate]:
        """Compile the chat template on a thread, unless that has begun. A chat waits for it.

        It imports transformers, which takes a second of processor time. So a start calls it last.
        """
        return self._chats.prepare()

    async def render_chat(self, chat: Chat) -> RenderedChat:
        return await self._chats.render(chat)

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> Token:
        """Return the token as replies show it: a special token by its name, an id without a token by its number."""
        token = self._tokens.get(token_id)
        if token is None:
            data = self._tokenizer.data(token_id)
            name = self._tokenizer.name(token_id) if not data else None
            special = token_id in self._tokenizer.special_ids
            token = Token.of(data) if data else Token(name or f"token_id:{token_id}", b"", special)
            self._tokens[token_id] = token
        return token

    def tokenizer_info(self) -> Mapping[str, str]:
        return self._tokenizer_info

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
        """Let this policy choose k from the engine's next round on. Running requests go on.

        Raises ConfigError for a policy that the engine cannot use; the old policy then stays.
        """
        self.worker.configure(policy)
        self._refusal = None

    def change_draft(self, draft: str | None) -> Future[None]:
        """Let this draft, or none, propose as soon as it is loaded. Running requests go on.

        The future ends then; it has the error if the draft cannot serve, and is cancelled if another one is wanted
        before. Raises ConfigError for a draft that conflicts with the configuration.
        """
        return self.worker.change_draft(draft)

    def refuse(self, reason: str) -> None:
        """Remember why the last policy or draft was refused, until `configure` accepts one."""
        self._refusal = reason

    def policy_status(self) -> Mapping[str, Any]:
        loading = _name(self.worker.loading_draft)  # looked at first: a draft that arrives now is then shown in force
        draft = _name(self.worker.engine.config.draft)
        return asdict(self.worker.engine.policy) | {"draft": draft, "loading": loading, "refused": self._refusal}

    def close(self) -> None:
        """End the engine thread. Running requests end as cancelled."""
        self.worker.stop()
        self._chats.close()

    def _deliver(self, outputs: list[Output], stats: StepStats | None) -> None:
        """Hand a step's outputs to the event loop. Runs on the engine thread."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        try:
            loop.call_soon_threadsafe(self._dispatch, outputs, stats)
        except RuntimeError:  # the loop closed between the check and the call, so nobody reads
            return

    def _dispatch(self, outputs: list[Output], stats: StepStats | None) -> None:
        """Hand the outputs to their streams first, then to the watcher. Runs on the event loop."""
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
            if not self._unreported:
                loop.call_later(REPORT_EVERY_S, self._report_steps)
            self._unreported.append(stats)

    def _report_steps(self) -> None:
        steps, self._unreported = self._unreported, []
        if self._stepped is not None:
            self._stepped(steps)


async def _until_finish(queue: asyncio.Queue[Output]) -> AsyncIterator[Output]:
    while True:
        output = await queue.get()
        yield output
        if output.finish_reason:
            return


def _name(draft: str | None) -> str | None:
    """Return a draft's hub id or the name of its directory: paths are nobody's business at the edge."""
    return draft if draft is None or parse_hub_id(draft) is not None else Path(draft).name


def _policy_name(policy: PolicyConfig) -> str:
    """Return the policy's name for the edge: a policy that never drafts by itself is "off"."""
    return policy.name if policy.drafts else "off"
