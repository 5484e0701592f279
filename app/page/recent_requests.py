"""Keeps numbers of the latest requests for the live page: per round its start, drafts, accepted drafts, reason for k.

Holds no text: no prompt, no output, no name that a client chose.
"""

import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from app.openai.forms import ID_PREFIXES
from app.round_columns import public_columns, public_trees, raw_columns
from app.telemetry.exchange import CLIENT_DISCONNECT, Exchange
from engine.trees import Parents
from engine.types import Output, RequestRecord, acceptance_of

MAX_REQUESTS = 200
MAX_ROUNDS = 100_000  # of all kept requests together; a round takes some 120 bytes, with a tree of 16 drafts some 450

Columns = dict[str, "array[int]"]  # at run time `array` takes no type parameter
Trees = tuple[tuple[Parents, tuple[int, ...]], ...]  # by round: parents, accepted path; (): every round has a chain


@dataclass(frozen=True, slots=True)
class KeptRequest:
    """The numbers of one request."""

    row: dict[str, Any]
    facts: tuple[dict[str, Any], ...]  # by choice
    totals: tuple[dict[str, int], ...]  # by choice: sums over its rounds
    columns: tuple[Columns, ...]  # by choice: its rounds
    trees: tuple[Trees, ...]  # by choice
    tpot_ms: tuple[float, ...]  # milliseconds per token, of the choices with at least two tokens

    @property
    def rounds(self) -> int:
        return sum(len(columns["step"]) for columns in self.columns)

    @property
    def last_step(self) -> int:
        """The engine's number of the last step that served it; -1 without rounds."""
        return max((columns["step"][-1] for columns in self.columns if columns["step"]), default=-1)

    def summary(self) -> dict[str, Any]:
        """Return the row with each choice's facts and totals, without its rounds."""
        choices = [facts | totals for facts, totals in zip(self.facts, self.totals, strict=True)]
        return self.row | {"choices": choices}

    def whole(self) -> dict[str, Any]:
        """Return the row with each choice's facts, rounds and, if there were any, trees."""
        choices = [
            facts | {"rounds": public_columns(columns)} | ({"trees": public_trees(trees)} if trees else {})
            for facts, columns, trees in zip(self.facts, self.columns, self.trees, strict=True)
        ]
        return self.row | {"choices": choices}


class RecentRequests:
    """Holds at most MAX_REQUESTS requests and MAX_ROUNDS rounds, or the latest request alone if it has more rounds."""

    def __init__(self) -> None:
        self._kept: dict[str, KeptRequest] = {}  # by the reply's id, oldest first
        self._rounds = 0
        self.taken = 0  # number of requests added so far

    def add(self, kept: KeptRequest) -> None:
        self._rounds += kept.rounds
        self._kept[kept.row["id"]] = kept
        self.taken += 1
        while len(self._kept) > MAX_REQUESTS or (self._rounds > MAX_ROUNDS and len(self._kept) > 1):
            self._rounds -= self._kept.pop(next(iter(self._kept))).rounds

    def get(self, name: str) -> KeptRequest | None:
        """Return the request with this id: the reply's, or the one in the header x-request-id."""
        return next((kept for prefix in ID_PREFIXES if (kept := self._kept.get(prefix + name))), None)

    def latest(self) -> Iterator[KeptRequest]:
        """Iterate over the kept requests, newest first."""
        return reversed(self._kept.values())


def keep(exchange: Exchange, model: str) -> KeptRequest:
    """Return the numbers of a complete exchange.

    queue_ms and ttft_ms begin with the arrival of the first choice in the engine, total_ms with the HTTP request.
    """
    assert exchange.finished is not None
    choices = [(i, output, output.record) for i, output in enumerate(exchange.outputs) if output.record is not None]
    records = [record for _, _, record in choices]
    arrived = min((record.arrived for record in records), default=None)
    status, error = outcome(exchange)
    row = {
        "id": exchange.id,
        "trace_id": exchange.trace_id,
        "began_unix_ms": round(1000 * (time.time() - time.monotonic() + exchange.began)),
        "status": status,
        "error": error,
        "model": model,
        "prompt_tokens": _prompt_tokens(exchange),
        "output_tokens": sum(record.output_tokens for record in records),
        "queue_ms": _ms(arrived, _first([record.admitted for record in records])),
        "ttft_ms": _ms(arrived, _first([record.first_token for record in records])),
        "total_ms": _ms(exchange.began, exchange.finished),
        "speedup": None,  # request_speedups.py fills it in
    }
    facts = tuple(_facts(index, output, record) for index, output, record in choices)
    tpots = [_tpot_ms(record) for record in records]
    totals, columns = tuple(map(_totals, records)), tuple(map(_columns, records))
    return KeptRequest(
        row, facts, totals, columns, tuple(map(_trees, records)), tuple(t for t in tpots if t is not None)
    )


def outcome(exchange: Exchange) -> tuple[str, str | None]:
    """Return (status, error)."""
    failure = exchange.failure
    if failure is None:
        return "ok", None
    return ("disconnected", None) if failure == CLIENT_DISCONNECT else ("error", failure)


def _facts(index: int, output: Output, record: RequestRecord) -> dict[str, Any]:
    return {
        "index": index,
        "finish_reason": output.finish_reason,
        "drafter": record.drafter,
        "verifier": record.verifier,
        "policy": record.policy,
        "fixed_k": record.fixed_k,
        "k_max": record.k_max,
    }


def _totals(record: RequestRecord) -> dict[str, int]:
    acceptance = acceptance_of(record)
    return {"rounds": len(record.rounds), "drafted": acceptance.drafted, "accepted": acceptance.accepted}


def _columns(record: RequestRecord) -> Columns:
    return {name: array("q", column) for name, column in raw_columns(record.rounds).items()}


def _trees(record: RequestRecord) -> Trees:
    drawn = any(part.tree for part in record.rounds)
    return tuple((part.tree, part.path) for part in record.rounds) if drawn else ()


def _prompt_tokens(exchange: Exchange) -> int:
    """Count each prompt once for all its choices."""
    n = exchange.request_body.candidates if exchange.request_body is not None else 1
    return sum(len(request.prompt_ids) for request in exchange.requests[::n])


def _tpot_ms(record: RequestRecord) -> float | None:
    """Return the milliseconds per token after the first; None with fewer than two tokens."""
    span = _ms(record.first_token, record.finished)
    return span / (record.output_tokens - 1) if span is not None and record.output_tokens > 1 else None


def _first(times: list[float | None]) -> float | None:
    return min((t for t in times if t is not None), default=None)


def _ms(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(1000 * (end - start), 3)
