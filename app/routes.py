"""The endpoints of the server. Only `Generate` submits requests to the engine and cancels them."""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.client import EngineClient, ModelCard
from app.errors import require_model
from app.openai.choices import ReplyChoice, best, engine_requests, merged
from app.openai.fields import ParsedPrompt
from app.openai.forms import ApiForm
from app.openai.prompts import bad_word_ids, prompt_ids
from app.openai.reasoning import ReasoningSplit
from app.openai.replies import JSON, Envelope, encode_choice
from app.openai.request import GenerationRequest, check_prompt_tokens, defaults_in_force
from app.openai.stream import HEADERS, completion_events, oserror_to_disconnect, unless_disconnected
from app.telemetry.exchange import Exchange, Telemetry
from app.telemetry.names import VERSION
from app.tenants import cache_salt
from engine import types
from engine.types import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    InvalidRequest,
    Output,
)

DECODED_INLINE = 1_000  # ids; the text of longer prompts is decoded off the event loop
MAX_JOINED_BYTES = 2**16  # a longer reply is sent in parts, without a copy into one piece

PAGE = {"GET /ui": "the live page for a browser: origins of tokens, rounds of recent requests, charts"}


async def index(client: EngineClient, routes: Mapping[str, str], request: Request) -> Response:
    """routes: what each path is for."""
    return JSON({"model": client.model.name, "routes": dict(routes)})


async def list_models(client: EngineClient, request: Request) -> Response:
    return JSON({"object": "list", "data": [_model(client.model)]})


async def version(request: Request) -> Response:
    return JSON({"version": VERSION})


async def get_model(client: EngineClient, request: Request) -> Response:
    require_model(request.path_params["id"], client.model)
    return JSON(_model(client.model))


def _model(card: ModelCard) -> dict[str, Any]:
    """Return OpenAI's model object with vLLM's max_model_len, in tokens, and our limits and defaults."""
    identity = {"id": card.name, "object": "model", "created": card.created, "owned_by": "foretoken"}
    limits = {
        "choices": card.max_choices,
        "prompt_tokens": card.max_prompt_tokens,
        "spec_length": card.max_spec_length,
        "logprobs": MAX_LOGPROBS,
        "stop": MAX_STOP_STRINGS,
        "stop_token_ids": MAX_STOP_TOKENS,
        "logit_bias": MAX_LOGIT_BIAS,
        "bad_words": MAX_BAD_WORDS,
    }
    speculation = {
        "policy": card.policy,
        "drafters": card.drafters,
        "drafter": card.drafter,
        "verifier": card.verifier,
    }
    return identity | {
        "max_model_len": card.max_model_len,
        "vocab_size": card.vocab_size,
        "limits": limits,
        "sampling_defaults": defaults_in_force(card),
        "speculation_defaults": speculation,
    }


class Generate:
    """POST to /v1/completions or to /v1/chat/completions. A bare ASGI application, so that one `finally` encloses
    everything after `submit`.

    A response object with a body generator is not safe: a generator that never started never runs its `finally`.
    """

    def __init__(self, client: EngineClient, telemetry: Telemetry, form: ApiForm) -> None:
        self.client = client
        self.telemetry = telemetry
        self.form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.telemetry.exchange(scope, self.form) as exchange:
            await self._serve(exchange, scope, receive, send)

    async def _serve(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        http_request = Request(scope, receive)
        exchange.request_body = body = self.form.parse(await http_request.body(), self.client.model)
        require_model(body.model, self.client.model)
        salt = cache_salt(http_request.headers.get("authorization"), body.cache_salt)
        requests: list[types.Request] = []
        try:
            answer = self._answer(exchange, scope["state"]["request_id"], salt, requests, oserror_to_disconnect(send))
            await unless_disconnected(receive, answer)
        except ClientDisconnect as disconnect:
            exchange.fail(disconnect)
        finally:
            for request in requests:
                self.client.cancel(request.id)

    async def _answer(
        self, exchange: Exchange, request_id: str, salt: str, requests: list[types.Request], send: Send
    ) -> None:
        """Fill `requests` and submit them. Send what the engine makes of them."""
        body = await self._with_prompts(exchange.body)
        exchange.request_body = body
        requests += await self._requests(body, request_id, salt)
        streams = self.client.submit(requests)
        self.telemetry.submitted(exchange, requests)
        echoes = await self._echoes(body, requests) if body.echo else None
        outputs = merged(streams) if exchange.texts is None else exchange.keep_texts(merged(streams))
        await self._reply(exchange, body, requests, echoes, outputs, send)

    def _reply(
        self,
        exchange: Exchange,
        body: GenerationRequest,
        requests: list[types.Request],
        echoes: Sequence[str] | None,
        outputs: AsyncGenerator[tuple[int, Output]],
        send: Send,
    ) -> Coroutine[Any, Any, None]:
        reply_object = self.form.chunk_object if body.stream else self.form.object
        now = int(time.time())
        prompts = [request.prompt_ids for request in requests[:: body.candidates]]
        tells_ids = body.tell_ids and not self.form.prompt_ids_in_choices
        envelope = Envelope(
            exchange.id,
            reply_object,
            now,
            self.client.model.name,
            body.candidates,
            body.tell_steps,
            prompt_tokens=sum(map(len, prompts)),
            prompt_token_ids=prompts[0] if tells_ids else None,
        )
        choices = [
            ReplyChoice(
                index,
                request,
                self.client.token,
                self.form,
                body=body,
                echo=None if echoes is None else echoes[request.prompt_index],
                split=self._split(body),
            )
            for index, request in enumerate(requests)
        ]
        if body.stream:
            return send_stream(completion_events(outputs, choices, envelope, body, exchange.fail), send)
        return send_whole(outputs, choices, envelope, body, send)

    def _split(self, body: GenerationRequest) -> ReasoningSplit | None:
        tags = self.client.model.reasoning_tags
        if body.chat is None or tags is None:
            return None
        (prompt,) = body.prompts
        return ReasoningSplit(tags, inside=isinstance(prompt, str) and prompt.rstrip().endswith(tags[0]))

    async def _with_prompts(self, body: GenerationRequest) -> GenerationRequest:
        """Return the request with the prompt that the chat template writes, if it is a chat."""
        if body.chat is None:
            return body
        rendered = await self.client.render_chat(body.chat)
        special = rendered.add_special_tokens if body.add_special_tokens is None else body.add_special_tokens
        return replace(body, prompts=(rendered.text,), add_special_tokens=special)

    async def _requests(self, body: GenerationRequest, request_id: str, salt: str) -> list[types.Request]:
        """Return the engine's requests, one per choice. Raises InvalidRequest for too many tokens."""
        prompts: list[tuple[int, ...]] = []
        for index, prompt in enumerate(body.prompts):
            prompts.append(await self._prompt_ids(prompt, body))
            check_prompt_tokens(
                [*prompts, *body.prompts[index + 1 :]],
                self.client.model,
                body.text_field,
                truncated_to=body.truncate_prompt_tokens,
            )
        prediction = await self._prediction_ids(body.drafting.prediction)
        if body.bad_words:
            words = await bad_word_ids(self.client, body.bad_words)
            body = replace(body, params=replace(body.params, bad_word_ids=words))
        if body.fills_context:
            room = self.client.model.max_model_len - max(map(len, prompts))
            body = replace(body, params=replace(body.params, max_tokens=room))
        return engine_requests(body, request_id, prompts, prediction, salt)

    async def _prompt_ids(self, prompt: ParsedPrompt, body: GenerationRequest) -> tuple[int, ...]:
        """Raises InvalidRequest unless the prompt and max_tokens together fit the model's context."""
        field, limit = body.text_field, self.client.model.max_model_len
        max_tokens = 1 if body.fills_context else body.params.max_tokens
        kept = body.truncate_prompt_tokens
        room = max(1, limit - max_tokens) if kept == -1 else kept
        ids = await prompt_ids(self.client, prompt, field, special=body.add_special_tokens is not False, most=room)
        if not ids:
            raise InvalidRequest(f"{field} must hold at least one token", field)
        if len(ids) + max_tokens > limit:
            raise InvalidRequest(
                # litellm knows a too long request by these words of OpenAI's.
                f"this model's maximum context length is {limit} tokens; {len(ids)} in the prompt and "
                f"{body.limit_field} {max_tokens} make {len(ids) + max_tokens}",
                field if len(ids) >= limit else body.limit_field,
                "context_length_exceeded",
            )
        return tuple(ids)

    async def _prediction_ids(self, text: str | None) -> tuple[int, ...]:
        if text is None:
            return ()
        ids = await self.client.tokenize(text, "prediction")
        limit = self.client.model.max_model_len
        if not ids:
            raise InvalidRequest("prediction must hold at least one token", "prediction")
        if len(ids) > limit:
            message = (
                f"this model's maximum context length is {limit} tokens; the prediction has {len(ids)}: shorten it"
            )
            raise InvalidRequest(message, "prediction", "context_length_exceeded")
        return tuple(ids)

    async def _echoes(self, body: GenerationRequest, requests: Sequence[types.Request]) -> list[str]:
        """Return the text of each prompt. Call it after `submit`: the engine has then checked the ids."""
        return [await self._echo(body, index, r.prompt_ids) for index, r in enumerate(requests[:: body.candidates])]

    async def _echo(self, body: GenerationRequest, index: int, ids: tuple[int, ...]) -> str:
        prompt, most = body.prompts[index], body.truncate_prompt_tokens
        if isinstance(prompt, str) and (most is None or len(ids) < most):
            return prompt
        decode = partial(self.client.detokenize, ids, skip_special_tokens=body.params.skip_special_tokens)
        return decode() if len(ids) <= DECODED_INLINE else await asyncio.to_thread(decode)


async def send_whole(
    outputs: AsyncGenerator[tuple[int, Output]],
    choices: Sequence[ReplyChoice],
    envelope: Envelope,
    body: GenerationRequest,
    send: Send,
) -> None:
    """Send the whole reply at the end. Each choice is encoded as soon as it finishes, unless only the best are sent."""
    encoded = [b""] * len(choices)
    selects = body.candidates > body.n
    async with aclosing(outputs):
        async for index, output in outputs:
            await choices[index].add(output)
            if output.finish_reason is not None and not selects:
                encoded[index] = await encode_choice(choices[index].take())
    records = [choice.record for choice in choices if choice.record is not None]
    assert len(records) == len(choices), "the output that finishes a choice carries its record"
    returned = best(choices, body.n, body.candidates) if selects else choices
    if selects:
        encoded = [await encode_choice(choice.take()) for choice in returned]
    returned_records = [choice.record for choice in returned if choice.record is not None]
    parts = envelope.body(encoded, envelope.first_fields() | envelope.final_fields(records, returned_records))
    length = sum(map(len, parts))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(length).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if length <= MAX_JOINED_BYTES:
        parts = [b"".join(parts)]
    for part in parts[:-1]:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": parts[-1], "more_body": False})


async def send_stream(events: AsyncGenerator[bytes], send: Send) -> None:
    """Send the events as they come. The reply starts with the first event: an earlier error still sets the status."""
    started = False
    async with aclosing(events):
        async for data in events:
            if not started:
                await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                started = True
            await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
