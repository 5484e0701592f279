"""The bodies of /v1/completions replies: text completions, stream chunks, usage and per-request metrics.

Shapes follow OpenAI's completions API; `metrics` follows vLLM's per-request metrics, so that tools which read those
(AIPerf, llama-swap) read ours. `seed` is ours: with it and the same request anybody can repeat the text.
"""

import json
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from deployments.engine.types import FinishReason, RequestRecord

# JSON leaves these raw, and many stream readers take them for ends of lines.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def encode_json(value: Any) -> bytes:
    """One line of JSON in UTF-8, whatever the strings hold: a lone surrogate, not sayable in UTF-8, stays an escape."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_LINE_ENDS).encode("utf-8", "backslashreplace")


class JSON(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every reply to one request has in common; makes the whole body, or its chunks."""

    id: str
    created: int  # Unix seconds
    model: str

    def whole(self, text: str, reason: FinishReason, record: RequestRecord) -> dict[str, Any]:
        return self._body([_choice(text, reason)]) | closing(record)

    def chunk(self, text: str, reason: FinishReason | None) -> dict[str, Any]:
        return self._body([_choice(text, reason)])

    def usage_chunk(self, record: RequestRecord) -> dict[str, Any]:
        return self._body([]) | closing(record)

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        identity = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        return identity | {"choices": choices}


def _choice(text: str, reason: FinishReason | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}


def closing(record: RequestRecord) -> dict[str, Any]:
    """What is known only at the end: usage, metrics and the seed that was used."""
    prompt, output = record.prompt_tokens, record.output_tokens
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return {"usage": usage, "metrics": metrics(record), "seed": record.seed}


def metrics(record: RequestRecord) -> dict[str, Any]:
    """Times in milliseconds. generation_time_ms runs from arrival to the last token, and tokens_per_second is over it.

    A value that this request does not define (a gap between tokens, when there is one token) is null.
    """
    total = _ms(record.arrived, record.finished)
    decode = _ms(record.first_token, record.finished)
    gaps = record.output_tokens - 1
    return {
        "time_to_first_token_ms": _ms(record.arrived, record.first_token),
        "generation_time_ms": total,
        "queue_time_ms": _ms(record.arrived, record.admitted),
        "mean_itl_ms": round(decode / gaps, 3) if decode is not None and gaps > 0 else None,
        "tokens_per_second": round(1000 * record.output_tokens / total, 3) if total else None,
        "speculative_decoding": _speculative_decoding(record) if record.k_max else None,
    }


def _speculative_decoding(record: RequestRecord) -> dict[str, Any]:
    """Rounds that verified at least one draft; null in `metrics` when the request ran without speculation."""
    rounds, drafted, accepted = record.rounds, sum(record.drafted), sum(record.accepted)
    return {
        "mean_acceptance_length": 1 + accepted / rounds if rounds else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": record.histogram(),
        "num_spec_steps": rounds,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": record.k_max,
    }


def _ms(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(1000 * (end - start), 3)
