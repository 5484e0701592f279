"""An engine without a model, to test and show the edge: it replays a script, with records of made-up figures."""

import asyncio
import codecs
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from app.client import Chat, ModelCard, RenderedChat, TextField, Token
from engine.types import (
    DRAFTERS,
    REASONS,
    DrafterName,
    EngineStats,
    InvalidRequest,
    Output,
    Overloaded,
    Request,
    RequestRecord,
    RoundRecord,
    StepStats,
    TokenLogprob,
)

Script = Callable[[Request], Iterable[Output]]

POLICY = "goodput"
MAX_K = 8  # largest k that the fake engine allows

# Microseconds of a step: proposing one draft, the target's pass, the rest.
DRAFT_US, SCORE_US, REST_US = 100, 600, 100


def spell(request: Request) -> Iterator[Output]:
    """The default script: repeats the prompt's ids as text.

    A round has up to three drafts. The first two are right and the third is wrong, so that it emits three tokens.
    max_tokens cuts the last round.
    """
    params, prompt = request.params, request.prompt_ids
    ids = [prompt[i % len(prompt)] for i in range(params.max_tokens + MAX_K)]
    record = blank(request, ids[: params.max_tokens])
    before = (
        tuple(_logprob(t, params.prompt_logprobs) for t in prompt[1:]) if params.prompt_logprobs is not None else ()
    )
    k = min(3, record.k_max) if params.max_tokens else 0
    accepted = min(2, k)
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    for start in range(0, max(1, params.max_tokens), accepted + 1):
        part = tuple(ids[start : min(start + accepted + 1, params.max_tokens)])
        note(record, k, accepted, len(part))
        last = record.output_tokens == params.max_tokens
        record.finished = time.monotonic() if last else None
        yield Output(
            request.id,
            part,
            utf8.decode(bytes(part), last),
            "length" if last else None,
            record=record if last else None,
            logprobs=tuple(_logprob(t, params.logprobs) for t in part) if params.logprobs is not None else (),
            prompt_logprobs=() if start else before,
            drafts=_drafts(ids[start:], k),
            accepted=accepted,
        )


def _drafts(right: Sequence[int], k: int) -> tuple[int, ...]:
    """Return k drafts. The third is wrong."""
    return tuple((token + (i == 2)) % 256 for i, token in enumerate(right[:k]))


def blank(request: Request, ids: Sequence[int] = ()) -> RequestRecord:
    """Make the record of a request that starts now, without rounds. ids: the tokens that it will emit."""
    now = time.monotonic()
    most = MAX_K if request.max_k is None else request.max_k
    k = most if request.k is None else request.k
    guess = request.prediction_ids
    return RequestRecord(
        request.id,
        request.params.seed or 0,
        len(request.prompt_ids),
        k,
        arrived=now,
        admitted=now,
        verifier=request.verifier or "match",
        drafter=(request.drafter or ("cascade" if guess else "model")) if k else None,
        lenience=request.lenience,
        typical=request.typical,
        policy=POLICY,
        fixed_k=request.k,
        prediction_tokens=len(guess),
        prediction_accepted=sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(guess, ids, strict=False))),
    )


def note(record: RequestRecord, k: int, accepted: int, emitted: int) -> None:
    """Add a round with k drafts and batch size 1."""
    part = RoundRecord(
        k=k,
        reason=REASONS.index("policy" if record.fixed_k is None else "user"),
        alpha=750,
        drafted=k,
        accepted=accepted,
        emitted=emitted,
        proposer=DRAFTERS.index(_proposer(record)) if k else -1,
        step=len(record.rounds),
        batch=1,
        began_us=sum(record.column("step_us")),
        draft_us=k * DRAFT_US,
        score_us=SCORE_US,
        step_us=k * DRAFT_US + SCORE_US + REST_US,
    )
    record.add(part)
    if record.first_token is None and emitted:
        record.first_token = time.monotonic()


def _proposer(record: RequestRecord) -> DrafterName:
    """Return the drafter of the chain that proposes."""
    return "model" if record.drafter in ("cascade", None) else record.drafter


def _logprob(token: int, count: int | None) -> TokenLogprob:
    """Every second token is the likeliest; the other tokens are not among the alternatives."""
    top = tuple(((token + rank + token % 2) % 256, -0.5 * (rank + 1)) for rank in range(count or 0))
    return TokenLogprob(token, -9.5 if token % 2 else -0.5, top)


def _nobody(_: object) -> None:
    pass


async def join_contents(chat: Chat) -> RenderedChat:
    """The default template."""
    await asyncio.sleep(0)
    contents = [message["content"] for message in chat.messages]
    texts = ["".join(part["text"] for part in c) if isinstance(c, list) else c for c in contents]
    return RenderedChat("".join(texts), add_special_tokens=False)


class FakeEngineClient:
    """An EngineClient that replays `outputs_of(request)` for each request, one output per turn of the event loop.

    Its tokens are bytes. A request whose outputs end without a finish_reason stays open until it is cancelled or its
    deadline has passed. Its last output then carries a record of the outputs that were read.
    """

    def __init__(
        self,
        outputs_of: Script = spell,
        *,
        name: str = "fake",
        max_model_len: int = 256,
        max_open: int = 64,
        max_choices: int = 64,
        max_prompt_tokens: int = 131_072,
        reasoning_tags: tuple[str, str] | None = None,
    ) -> None:
        self.model = ModelCard(
            name=name,
            max_model_len=max_model_len,
            vocab_size=256,
            policy=POLICY,
            max_spec_length=MAX_K,
            drafters=DRAFTERS,
            drafter="model",
            verifier="match",
            max_choices=max_choices,
            max_prompt_tokens=max_prompt_tokens,
            longest_token=1,
            created=1_700_000_000,
            reasoning_tags=reasoning_tags,
        )
        self.outputs_of = outputs_of
        self.max_open = max_open
        self.unhealthy = ""  # set a reason to make it unhealthy
        self.refused: str | None = None  # set why a policy was refused
        self.submitted: list[Request] = []
        self.tokenized: list[tuple[str, str]] = []  # (field, text)
        self.bos: tuple[int, ...] = ()  # set what a prompt begins with
        self.chats: list[Chat] = []
        self.template = join_contents  # set what makes a prompt of a chat
        self.open: dict[str, asyncio.Event] = {}  # running requests; cancelling one sets its event
        self.cancelled: list[str] = []  # ids of requests that were cancelled while they ran
        self._records: dict[str, RequestRecord] = {}  # of running requests
        self.stepped: Callable[[Sequence[StepStats]], None] = _nobody  # call it to report steps
        self._ended: Callable[[Output], None] = _nobody

    async def tokenize(
        self, text: str, field: TextField = "prompt", *, add_special_tokens: bool = True, any_length: bool = False
    ) -> list[int]:
        await asyncio.sleep(0)
        self.tokenized.append((field, text))
        special = self.bos if field != "prediction" and add_special_tokens else ()
        return [*special, *text.encode()]

    async def render_chat(self, chat: Chat) -> RenderedChat:
        self.chats.append(chat)
        return await self.template(chat)

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def token(self, token_id: int) -> Token:
        return Token.of(bytes([token_id]))

    def tokenizer_info(self) -> Mapping[str, str]:
        return {"eos_token": "\x00", "chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}"}

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
        for output in self.outputs_of(request):
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
        """End the request and return its record."""
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
