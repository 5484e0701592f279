"""The choices of one request: each has an engine request and a part of the reply, which grows with its outputs."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from app.client import Token
from app.errors import DeadlineExceeded, EngineFailure
from app.openai.forms import ApiForm
from app.openai.origins import TokenOrigins
from app.openai.prompts import IdTuple
from app.openai.reasoning import ReasoningSplit
from app.openai.request import GenerationRequest
from engine.types import SEED_RANGE, EngineStopped, FinishReason, Output, Request, RequestRecord


def engine_requests(
    body: GenerationRequest, request_id: str, prompts: Sequence[IdTuple], prediction: IdTuple, salt: str
) -> list[Request]:
    """Return one engine request per choice. The choices of one prompt stand next to each other.

    All of them share one seed, which the reply names. Their indices give each choice its own noise.
    """
    several = len(prompts) * body.candidates > 1
    params, speculation = body.params, body.drafting.fields
    if body.candidates > body.n and params.logprobs is None:
        params = replace(params, logprobs=0)  # they tell which candidates are best
    if several and params.seed is None:
        params = replace(params, seed=secrets.randbelow(SEED_RANGE))
    return [
        Request(
            id=f"{request_id}-{prompt_index * body.candidates + choice_index}" if several else request_id,
            prompt_ids=ids,
            params=params,
            k=speculation.k,
            max_k=speculation.max_k,
            prompt_index=prompt_index,
            choice_index=choice_index,
            verifier=speculation.verifier,
            drafter=speculation.drafter,
            prediction_ids=prediction,
            lenience=speculation.lenience,
            typical=speculation.typical,
            tree=speculation.tree,
            cache_salt=salt,
            deadline_s=body.deadline_s,
            group=request_id,
        )
        for prompt_index, ids in enumerate(prompts)
        for choice_index in range(body.candidates)
    ]


class ReplyChoice:
    """One choice of the reply. `add` takes the engine's outputs; `take` returns what can be shown of them."""

    def __init__(
        self,
        index: int,
        request: Request,
        token: Callable[[int], Token],
        form: ApiForm,
        *,
        body: GenerationRequest,
        echo: str | None = None,
        split: ReasoningSplit | None = None,
    ) -> None:
        """body: the request, which says what the reply tells. echo: the prompt's text; None: the reply has it not.

        split: finds the reasoning; None: all text is the answer.
        """
        self.index = index
        self.num_tokens = 0  # emitted so far
        self.record: RequestRecord | None = None  # filled by the output that finishes the choice
        self._form = form
        self._streams = body.stream
        self._taken = False  # whether a part was taken
        self._prompt_ids = request.prompt_ids
        self._echo = echo  # None once it is written
        if not body.params.skip_special_tokens:
            token = partial(_shown, token)
        self._logprobs = None if body.params.logprobs is None else form.logprobs(token)
        self._total_logprob = 0.0
        keeps_end = body.params.include_stop_str_in_output
        self._origins = TokenOrigins(token, keeps_end=keeps_end) if body.tell_tokens else None
        self._ids: list[int] | None = [] if body.tell_ids else None  # since the last `take`
        self._split = split
        self._reasoning = ""
        self._text = ""
        self._reason: FinishReason | None = None

    async def add(self, output: Output) -> None:
        if self._echo is not None:
            self._text = self._echo
            if self._logprobs is not None:
                await self._logprobs.add_prompt(self._prompt_ids, output.prompt_logprobs, self._text)
            self._echo = None
        reasoning, text = "", output.text
        if self._split is not None:
            reasoning, text = self._split.feed(text, ended=output.finish_reason is not None)
        self._reasoning += reasoning
        self._text += text
        self.num_tokens += len(output.token_ids)
        self._total_logprob += sum(logprob.logprob for logprob in output.logprobs)
        if self._ids is not None:
            self._ids += output.token_ids
        if self._logprobs is not None:
            self._logprobs.add(output.logprobs)
        if self._origins is not None:
            self._origins.add(output)
        self._reason, self.record = output.finish_reason, output.record

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of the tokens so far, if the engine tells log-probabilities; 0 without tokens."""
        return self._total_logprob / self.num_tokens if self.num_tokens else 0.0

    @property
    def due(self) -> bool:
        """Whether there is something to show. Half a character or a possible stop string is held back."""
        return bool(self._text or self._reasoning) or self._reason is not None

    def take(self) -> dict[str, Any]:
        """Return what came since the last `take`, in OpenAI's shape. Our own field is `speculation` (origins.py)."""
        text, self._text = self._text, ""
        reasoning, self._reasoning = self._reasoning, ""
        first, self._taken = not self._taken, True
        said = self._form.part(text, reasoning, first) if self._streams else self._form.whole(text, reasoning)
        logprobs = None if self._logprobs is None else self._logprobs.take()
        own_fields: dict[str, Any] = {} if self._origins is None else {"speculation": {"rounds": self._origins.take()}}
        if self._ids is not None:
            own_fields |= {"token_ids": self._ids} | self._prompt_ids_field(first)
            self._ids = []
        return {"index": self.index} | said | {"logprobs": logprobs, "finish_reason": self._reason} | own_fields

    def _prompt_ids_field(self, first: bool) -> dict[str, Any]:
        """Return the prompt's ids, where the form's choices have them: in the first part only."""
        return {"prompt_token_ids": self._prompt_ids if first else None} if self._form.prompt_ids_in_choices else {}


def _shown(token: Callable[[int], Token], token_id: int) -> Token:
    """The token as a text with special tokens shows it."""
    found = token(token_id)
    return Token(found.text, found.text.encode()) if found.special else found


def best(choices: Sequence[ReplyChoice], n: int, candidates: int) -> list[ReplyChoice]:
    """Return the n choices of each prompt's candidates whose tokens have the highest mean log-probability.

    The best comes first, and of equals the one that was made first. The choices get new indices.
    """
    chosen: list[ReplyChoice] = []
    for start in range(0, len(choices), candidates):
        chosen += sorted(choices[start : start + candidates], key=lambda choice: -choice.mean_logprob)[:n]
    for index, choice in enumerate(chosen):
        choice.index = index
    return chosen


async def until_finish(outputs: AsyncIterator[Output]) -> AsyncGenerator[Output]:
    """Yield the outputs up to and including the one that finishes the request.

    Raises DeadlineExceeded if the request's time is over, EngineStopped if the engine cancelled the request, and
    EngineFailure for any other error or for outputs that end too early.
    """
    try:
        async for output in outputs:
            if output.finish_reason == "error":
                failure = DeadlineExceeded if output.error_code == "deadline_exceeded" else EngineFailure
                raise failure(output.error or "the engine could not finish this request")
            if output.finish_reason == "cancelled":
                raise EngineStopped("the engine is shutting down; the request did not finish")
            yield output
            if output.finish_reason is not None:
                return
    finally:
        # Otherwise the garbage collector closes an unfinished generator, in a task of its own and at any time.
        if isinstance(outputs, AsyncGenerator):
            await outputs.aclose()
    raise EngineFailure("the engine ended the stream before the text was complete")


async def merged(streams: Sequence[AsyncIterator[Output]]) -> AsyncGenerator[tuple[int, Output]]:
    """Yield (choice index, output) of all streams as they come, until all have finished.

    Raises what `until_finish` raises for the first stream that fails. No task outlives the generator.
    """
    if len(streams) == 1:
        async with aclosing(until_finish(streams[0])) as outputs:
            async for output in outputs:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, Output | Exception]] = asyncio.Queue(maxsize=len(streams))
    tasks = [asyncio.create_task(_pump(index, stream, queue)) for index, stream in enumerate(streams)]
    try:
        unfinished = len(streams)
        while unfinished:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            unfinished -= item.finish_reason is not None
            yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int, stream: AsyncIterator[Output], queue: asyncio.Queue[tuple[int, Output | Exception]]
) -> None:
    try:
        async with aclosing(until_finish(stream)) as outputs:
            async for output in outputs:
                await queue.put((index, output))
    except Exception as error:  # `merged` raises it; in this task nobody would see it in time
        await queue.put((index, error))
