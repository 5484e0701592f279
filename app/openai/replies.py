"""The bodies of replies to completions and chats: whole ones, stream chunks, usage and per-request metrics.

Shapes follow OpenAI's API. `metrics` follows vLLM's per-request metrics, so that tools for vLLM (AIPerf,
llama-swap) can read it. Our own fields:
- `seed`: the same request with this seed repeats the text (verifiers other than `match` also need a fixed k).
- `metrics.preemptions`: how often a choice lost its memory and had to be computed again.
- `metrics.speculative_decoding`: drafter, verifier, mode, policy, draft_length_histogram, decisions, rounds, choices.

For n > 1 vLLM reports nothing about speculation. We report the sums over all choices, and each choice's per-step lists
in `choices`.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from starlette.responses import Response

from app.openai.pauses import PIECE_TOKENS, Pauses
from app.round_columns import public_columns, public_trees, raw_columns
from engine.types import RequestRecord, acceptance_of, leading_record

# JSON does not escape these characters, but many stream readers take them for ends of lines.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def encode_json(value: Any) -> bytes:
    """Encode the value as one line of JSON in UTF-8. A lone surrogate, which UTF-8 cannot hold, becomes an escape."""
    text = _encode(value)
    if text.isascii():
        return text.encode()
    return text.translate(_LINE_ENDS).encode("utf-8", "backslashreplace")


async def encode_choice(choice: dict[str, Any]) -> bytes:
    """Encode a choice as encode_json does. Many log-probabilities are encoded in pieces with pauses."""
    logprobs = choice["logprobs"]
    if logprobs is None or len(next(iter(logprobs.values()))) <= PIECE_TOKENS:
        return encode_json(choice)
    pauses, columns = Pauses(), []
    for name, values in logprobs.items():
        if values is None:
            columns.append(encode_json(name) + b":null")
            continue
        pieces = []
        for first in range(0, len(values), PIECE_TOKENS):
            pieces.append(encode_json(values[first : first + PIECE_TOKENS])[1:-1])
            await pauses.rest()
        columns.append(encode_json(name) + b":[" + b",".join(pieces) + b"]")
    rest = encode_json({name: value for name, value in choice.items() if name != "logprobs"})
    return rest[:-1] + b',"logprobs":{' + b",".join(columns) + b"}}"


class JSON(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that all parts of one reply share. Builds the whole body, or its chunks."""

    id: str
    object: str
    created: int  # Unix seconds
    model: str
    candidates: int = 1  # choices per prompt that the engine makes
    tell_steps: bool = False  # whether the metrics list every round of every choice
    prompt_tokens: int = 0  # a prompt counts once for all its choices
    prompt_token_ids: tuple[int, ...] | None = None  # None: the reply does not tell them here

    def body(self, choices: Sequence[bytes], extra_fields: dict[str, Any]) -> list[bytes]:
        """Return the body around encoded choices, in parts that join to one line of JSON: each choice is a part."""
        parts = [choice if index == 0 else b"," + choice for index, choice in enumerate(choices)]
        end = b"," + encode_json(extra_fields)[1:] if extra_fields else b"}"
        return [_head(self.id, self.object, self.created, self.model), *parts, b"]" + end]

    def first_fields(self) -> dict[str, Any]:
        """Return the fields of a whole reply, or of a stream's first chunk, that no later chunk repeats."""
        return {} if self.prompt_token_ids is None else {"prompt_token_ids": self.prompt_token_ids}

    def usage_so_far(self, completion_tokens: int) -> dict[str, Any]:
        return _counts(self.prompt_tokens, completion_tokens)

    def final_fields(
        self, records: Sequence[RequestRecord], returned: Sequence[RequestRecord] | None = None
    ) -> dict[str, Any]:
        """Return the fields that are known only at the end: usage, metrics, seed, and the label of a lossy reply.

        returned: the choices that the reply has, in its order; None: all.
        """
        label = _lossy_label(records[0])
        request_metrics = metrics(records, steps_of=(returned or records) if self.tell_steps else ())
        return {"usage": usage(records, self.candidates), "metrics": request_metrics, "seed": records[0].seed} | label


def _lossy_label(record: RequestRecord) -> dict[str, Any]:
    """How a lossy reply says so."""
    if record.typical is not None:
        return {"lossy": {"typical": record.typical._asdict()}}
    return {} if record.lenience is None else {"lossy": {"lenience": record.lenience}}


@lru_cache(maxsize=256)  # a stream asks for its own once per event
def _head(id: str, object: str, created: int, model: str) -> bytes:
    """Encode the beginning of a body, up to its choices."""
    return encode_json({"id": id, "object": object, "created": created, "model": model})[:-1] + b',"choices":['


def _counts(prompt: int, output: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def usage(records: Sequence[RequestRecord], n: int) -> dict[str, Any]:
    """Return OpenAI's usage object. A prompt counts once for all its n choices.

    cached_tokens: prompt tokens that the prompt's first choice found in the cache. With a prediction, also its accepted
    and rejected tokens.
    """
    prompt = sum(record.prompt_tokens for record in records[::n])
    output = sum(record.output_tokens for record in records)
    counts = _counts(prompt, output)
    counts["prompt_tokens_details"] = {"cached_tokens": sum(record.cached_tokens for record in records[::n])}
    if predicted := sum(record.prediction_tokens for record in records):
        accepted = sum(record.prediction_accepted for record in records)
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": predicted - accepted}
        counts["completion_tokens_details"] = details
    return counts


def metrics(records: Sequence[RequestRecord], *, steps_of: Sequence[RequestRecord] = ()) -> dict[str, Any]:
    """Return vLLM's per-request metrics. Times are milliseconds since the first arrival. steps_of: whose rounds are
    listed.

    generation_time_ms ends with the last token of all choices; tokens_per_second refers to it. mean_itl_ms is the mean
    gap between two tokens of one choice. A value that is not defined is null, such as the gap for one token.
    """
    arrived, lead = min(record.arrived for record in records), leading_record(*records)
    total = _ms(arrived, max((r.finished for r in records if r.finished is not None), default=None))
    output = sum(record.output_tokens for record in records)
    return {
        "time_to_first_token_ms": _ms(arrived, _first(record.first_token for record in records)),
        "generation_time_ms": total,
        "queue_time_ms": _ms(arrived, _first(record.admitted for record in records)),
        "mean_itl_ms": _mean_gap(records),
        "tokens_per_second": round(1000 * output / total, 3) if total else None,
        "preemptions": sum(record.preemptions for record in records),
        "speculative_decoding": _speculative_decoding(records, steps_of) if lead.k_max or steps_of else None,
    }


def _first(times: Iterable[float | None]) -> float | None:
    return min((t for t in times if t is not None), default=None)


def _mean_gap(records: Sequence[RequestRecord]) -> float | None:
    spans = [(_ms(r.first_token, r.finished), r.output_tokens - 1) for r in records]
    gaps = sum(n for ms, n in spans if ms is not None and n > 0)
    return round(sum(ms for ms, n in spans if ms is not None and n > 0) / gaps, 3) if gaps else None


def _speculative_decoding(records: Sequence[RequestRecord], steps_of: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the sums over all choices. `metrics` has null instead if speculation was off and no rounds are listed.

    num_spec_steps and acceptance_histogram count the rounds that verified at least one draft. draft_length_histogram
    (by k, from 0) and decisions (by the reason for k) count every round in which k was chosen.
    """
    acceptance, lead = acceptance_of(*records), leading_record(*records)
    return {
        "mode": _mode(lead),
        "policy": lead.policy,  # in force when the request came
        "drafter": lead.drafter,
        "verifier": lead.verifier,
        "mean_acceptance_length": acceptance.mean_length or 1.0,
        "draft_acceptance_rate": acceptance.rate or 0.0,
        "acceptance_histogram": list(acceptance.histogram),
        "draft_length_histogram": _lengths(records),
        "decisions": acceptance.decisions,
        "num_spec_steps": acceptance.rounds,
        "num_accepted_draft_tokens": acceptance.accepted,
        "num_draft_tokens": acceptance.drafted,
        "num_spec_tokens": lead.k_max,
    } | (_steps(steps_of) if steps_of else {})


def _mode(record: RequestRecord) -> str:
    if not record.k_max:
        return "off"
    return "auto" if record.fixed_k is None else "fixed"


def _steps(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return vLLM's lists, one entry per round that verified at least one draft, and the columns of all rounds."""
    if len(records) > 1:
        return {"choices": [{"index": index} | _steps([record]) for index, record in enumerate(records)]}
    (record,) = records
    verified = [part for part in record.rounds if part.drafted]
    steps: dict[str, Any] = {
        "per_step_accepted": [part.accepted for part in verified],
        "per_step_drafted": [part.drafted for part in verified],
        "rounds": public_columns(raw_columns(record.rounds)),
    }
    if any(part.tree for part in record.rounds):
        steps["trees"] = public_trees((part.tree, part.path) for part in record.rounds)
    return steps


def _lengths(records: Sequence[RequestRecord]) -> list[int]:
    """Count the rounds in which k was chosen, by k: 1 + largest k_max entries. Their sum is the number of decisions."""
    counts = [0] * (leading_record(*records).k_max + 1)
    for record in records:
        for part in record.rounds:
            if part.reason >= 0:
                counts[part.k] += 1
    return counts


def _ms(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(1000 * (end - start), 3)
