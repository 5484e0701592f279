"""The attributes of a request's span, made from a complete exchange.

Only `text_attributes` holds text, and only an operator who asked for text gets it.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from app.openai.request import GenerationRequest
from app.telemetry import names as name
from app.telemetry.exchange import Exchange
from app.telemetry.rounds_table import rounds_table
from app.telemetry.spans import Attributes
from engine.types import Acceptance, RequestRecord, acceptance_of, leading_record

MAX_MODEL_NAME = 128  # characters of the model's name that a client sent
MAX_INT = 2**63 - 1  # that a collector can be told


def request_attributes(exchange: Exchange, model: str) -> Attributes:
    """Return the attributes that are known: a refused body has none. model: the name of the served model."""
    attributes: Attributes = {
        name.SPAN_KIND: name.KIND_LLM,
        name.LLM_MODEL: model,
        name.OPERATION: name.OPERATIONS[exchange.form.object],
        name.PROVIDER: name.SCOPE,
        name.RESPONSE_MODEL: model,
        name.RESPONSE_ID: exchange.id,
        name.REQUEST_ID: exchange.request_id,
    }
    if exchange.request_body is not None:
        attributes |= _asked(exchange.request_body)
    if exchange.requests:
        attributes |= _used(exchange)
    if exchange.records:
        attributes |= _speculated(exchange, exchange.records)
    return attributes if exchange.failure is None else attributes | {name.ERROR_TYPE: exchange.failure}


def text_attributes(exchange: Exchange, texts: Sequence[str], detokenize: Callable[[Sequence[int]], str]) -> Attributes:
    """Return prompts and outputs in the shape of OpenTelemetry's messages. texts: one per choice.

    A prompt of ids is included only after the engine has accepted it, because the engine checks that the ids exist.
    """
    if exchange.request_body is None:
        return {}
    attributes: Attributes = {}
    messages = _input_messages(exchange, exchange.request_body, detokenize)
    if messages:
        attributes[name.INPUT_MESSAGES] = _json(messages)
    if exchange.request_body.params.stop:
        attributes[name.REQUEST_STOPS] = exchange.request_body.params.stop
    if exchange.requests:
        reasons = [output.finish_reason for output in exchange.outputs]
        said = [
            _message("assistant", text) | {"finish_reason": reason} for text, reason in zip(texts, reasons, strict=True)
        ]
        attributes[name.OUTPUT_MESSAGES] = _json(said)
    return attributes


def _input_messages(
    exchange: Exchange, body: GenerationRequest, detokenize: Callable[[Sequence[int]], str]
) -> list[dict[str, Any]]:
    if body.chat is not None:
        return [_message(message["role"], _text(message["content"])) for message in body.chat.messages]
    taken = {request.prompt_index: request.prompt_ids for request in exchange.requests}
    prompts = [
        prompt if isinstance(prompt, str) else detokenize(taken[index])
        for index, prompt in enumerate(body.prompts)
        if isinstance(prompt, str) or index in taken
    ]
    return [_message("user", prompt) for prompt in prompts]


def _text(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def _json(value: list[dict[str, Any]]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _model_name(asked: str) -> str:
    """Make the client's model name encodable: JSON can hold half a surrogate pair, UTF-8 and OTLP cannot."""
    return asked[:MAX_MODEL_NAME].encode("utf-8", "replace").decode("utf-8")


def _asked(asked: GenerationRequest) -> Attributes:
    params = asked.params
    attributes: Attributes = {
        name.REQUEST_MODEL: _model_name(asked.model),
        name.REQUEST_STREAM: asked.stream,
        name.REQUEST_TEMPERATURE: params.temperature,  # 0 too: it is the one value that `if temperature` would lose
        name.REQUEST_TOP_P: params.top_p,
        name.REQUEST_FREQUENCY_PENALTY: params.frequency_penalty,
        name.REQUEST_PRESENCE_PENALTY: params.presence_penalty,
    }
    if not asked.fills_context:
        attributes[name.REQUEST_MAX_TOKENS] = min(params.max_tokens, MAX_INT)
    if (choices := max(1, len(asked.prompts)) * asked.n) != 1:
        attributes[name.REQUEST_CHOICES] = choices
    if params.top_k:
        attributes[name.REQUEST_TOP_K] = params.top_k
    if params.seed is not None:
        attributes[name.REQUEST_SEED] = params.seed
    return attributes


def _used(exchange: Exchange) -> Attributes:
    """Count a prompt's tokens once for all its choices. Cached tokens are those that its first choice found."""
    prompts = {request.prompt_index: len(request.prompt_ids) for request in exchange.requests}
    firsts = [exchange.last_outputs[request.id].record for request in exchange.requests if request.choice_index == 0]
    input_tokens = sum(prompts.values())
    output_tokens = sum(record.output_tokens for record in exchange.records)
    cached_tokens = sum(record.cached_tokens for record in firsts if record is not None)
    return {
        name.FINISH_REASONS: [str(output.finish_reason) for output in exchange.outputs],
        name.INPUT_TOKENS: input_tokens,
        name.OUTPUT_TOKENS: output_tokens,
        name.CACHED_TOKENS: cached_tokens,
        name.LLM_INPUT_TOKENS: input_tokens,
        name.LLM_OUTPUT_TOKENS: output_tokens,
        name.LLM_TOTAL_TOKENS: input_tokens + output_tokens,
        name.LLM_CACHED_TOKENS: cached_tokens,
    }


def _speculated(exchange: Exchange, records: Sequence[RequestRecord]) -> Attributes:
    """Return the options, which all choices share, and the sums over all choices."""
    first, lead = records[0], leading_record(*records)
    attributes: Attributes = {
        name.POLICY: lead.policy,
        name.MAX_K: lead.k_max,
        name.VERIFIER: lead.verifier,
        name.SEED: first.seed,
        name.PREEMPTIONS: sum(record.preemptions for record in records),
    }
    for key, value in ((name.DRAFTER, lead.drafter), (name.FIXED_K, lead.fixed_k), (name.LENIENCE, lead.lenience)):
        if value is not None:
            attributes[key] = value
    if first.typical is not None:
        attributes[name.TYPICAL_EPSILON], attributes[name.TYPICAL_DELTA] = first.typical
    acceptance = acceptance_of(*records)
    disabled = _disabled(exchange, lead, acceptance)
    attributes[name.ENABLED] = disabled is None
    if first.rounds:
        attributes[name.ROUNDS_TABLE] = rounds_table(first.rounds)
    if disabled is not None:
        attributes[name.DISABLED_REASON] = disabled
    return attributes | _tokens(acceptance) | _acceptance(acceptance) | _prediction(records) | _times(records)


def _disabled(exchange: Exchange, lead: RequestRecord, acceptance: Acceptance) -> str | None:
    """Return why no draft was possible; None: drafts were possible."""
    if exchange.request_body is not None and exchange.request_body.drafting.fields.k == 0:
        return "user"
    if lead.k_max == 0:
        return "no_drafter"
    idle = lead.policy == "off" and lead.fixed_k is None and not acceptance.rounds
    return "policy" if idle else None


def _tokens(acceptance: Acceptance) -> Attributes:
    """emitted + truncated = rounds + plain steps + accepted: each round adds a token of the target's own."""
    return {
        name.ROUNDS: acceptance.rounds,
        name.PLAIN_STEPS: acceptance.plain_rounds,
        name.DRAFTED: acceptance.drafted,
        name.ACCEPTED: acceptance.accepted,
        name.ROLLED_BACK: acceptance.drafted - acceptance.accepted,
        name.RECOVERED: acceptance.rounds - acceptance.full_rounds,
        name.BONUS: acceptance.full_rounds,
        name.EMITTED: acceptance.emitted,
        name.TRUNCATED: acceptance.rounds + acceptance.plain_rounds + acceptance.accepted - acceptance.emitted,
    }


def _acceptance(acceptance: Acceptance) -> Attributes:
    """Return nothing if no draft was verified: a rate of no drafts does not exist."""
    if acceptance.rate is None or acceptance.mean_length is None:
        return {}
    return {
        name.ACCEPTANCE_RATE: acceptance.rate,
        name.ACCEPTANCE_LENGTH: acceptance.mean_length,
        name.ACCEPTANCE_HISTOGRAM: acceptance.histogram,
    }


def _prediction(records: Sequence[RequestRecord]) -> Attributes:
    tokens = sum(record.prediction_tokens for record in records)
    accepted = sum(record.prediction_accepted for record in records)
    if not tokens:
        return {}
    return {
        name.PREDICTION_TOKENS: tokens,
        name.PREDICTION_ACCEPTED: accepted,
        name.PREDICTION_REJECTED: tokens - accepted,
    }


def _times(records: Sequence[RequestRecord]) -> Attributes:
    """Queue, prefill and decode follow each other, and end with the first choice to get so far, decode with the last.

    A step counts once, whatever the number of choices in it.
    """
    marks = [
        min(record.arrived for record in records),
        min((r.admitted for r in records if r.admitted is not None), default=None),
        min((r.first_token for r in records if r.first_token is not None), default=None),
        max((r.finished for r in records if r.finished is not None), default=None),
    ]
    spans = zip((name.QUEUE_US, name.PREFILL_US, name.DECODE_US), marks, marks[1:], strict=False)
    attributes: Attributes = {
        key: round(1e6 * (end - begin)) for key, begin, end in spans if begin is not None and end is not None
    }
    steps = {part.step: part for record in records for part in record.rounds}.values()
    return attributes | {
        name.DRAFT_US: sum(part.draft_us for part in steps),
        name.VERIFY_US: sum(part.score_us for part in steps),
    }
