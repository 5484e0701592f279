"""The tokenizer's endpoints, as vLLM has them: /tokenize, /detokenize and /tokenizer_info."""

import asyncio
from typing import Annotated, Any

from pydantic import AfterValidator, PlainValidator
from starlette.requests import Request
from starlette.responses import Response

from app.client import EngineClient, ModelCard
from app.errors import require_model
from app.openai import fields
from app.openai.chat import ChatFields
from app.openai.fields import Strict
from app.openai.prompts import prompt_ids
from app.openai.replies import JSON
from app.openai.request import check_prompt_tokens, load_object, validated
from engine.types import InvalidRequest

INLINE = 4_000  # ids that are decoded on the event loop

# Unsupported fields with their neutral value. Only this value and null are accepted.
NEUTRAL: dict[str, Any] = {"return_token_strs": False, "mm_processor_kwargs": None, "tools": [], "chat_template": None}


class TokenizeText(Strict):
    model: str | None = None  # None: the one that this server has
    prompt: Annotated[str, AfterValidator(fields.text)]
    add_special_tokens: bool = True


class TokenizeChat(ChatFields):
    model: str | None = None


class Detokenize(Strict):
    model: str | None = None
    tokens: Annotated[tuple[int, ...], PlainValidator(fields.token_ids, list[fields.TokenId])]


async def tokenize(client: EngineClient, request: Request) -> Response:
    """Return the ids of a text, or of the prompt that the chat template makes of messages."""
    card, given = client.model, load_object(await request.body())
    if "messages" in given:
        chat = validated(TokenizeChat, given, neutral=NEUTRAL)
        require_model(chat.model, card)
        rendered = await client.render_chat(chat.chat())
        special = rendered.add_special_tokens if chat.add_special_tokens is None else chat.add_special_tokens
        ids = await prompt_ids(client, rendered.text, "messages", special=special)
    else:
        body = validated(TokenizeText, given, neutral=NEUTRAL)
        require_model(body.model, card)
        check_prompt_tokens([body.prompt], card)
        ids = tuple(await client.tokenize(body.prompt, add_special_tokens=body.add_special_tokens, any_length=True))
    return JSON({"count": len(ids), "max_model_len": card.max_model_len, "tokens": ids, "token_strs": None})


async def detokenize(client: EngineClient, request: Request) -> Response:
    """Return the text of token ids, with special tokens."""
    body = validated(Detokenize, load_object(await request.body()))
    require_model(body.model, client.model)
    _check_ids(body.tokens, client.model)
    if len(body.tokens) <= INLINE:
        return JSON({"prompt": client.detokenize(body.tokens, skip_special_tokens=False)})
    return JSON({"prompt": await asyncio.to_thread(client.detokenize, body.tokens, skip_special_tokens=False)})


def _check_ids(ids: tuple[int, ...], card: ModelCard) -> None:
    if len(ids) > card.max_prompt_tokens:
        raise InvalidRequest(f"tokens takes at most {card.max_prompt_tokens:,} ids, not {len(ids):,}", "tokens")
    if any(token >= card.vocab_size for token in ids):
        last = card.vocab_size - 1
        raise InvalidRequest(f"tokens names a token outside the vocabulary: give ids from 0 to {last}", "tokens")


async def tokenizer_info(client: EngineClient, request: Request) -> Response:
    """Return what a client needs to use this tokenizer from afar, with the names of tokenizer_config.json."""
    card = client.model
    known = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # transformers' class for a tokenizer.json as it is
        "model_max_length": card.max_model_len,
        "vocab_size": card.vocab_size,
    }
    return JSON(known | dict(client.tokenizer_info()))
