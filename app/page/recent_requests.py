"""The latest exchanges, as numbers: when each round of a request ran, what was drafted and accepted, and why k was k.

Nothing here is text of anybody's: no prompt, no output, no name that a client made up.
"""

import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from app.round_columns import public_columns, raw_columns
from app.telemetry.exchange import CLIENT_DISCONNECT, Exchange
from engine.types import Output, RequestRecord, acceptance_of

KEPT = 200  # exchanges
ROUNDS = 100_000  # of all of them together; each takes some 120 bytes

Columns = dict[str, "array[int]"]  # array takes no parameter while the program runs


@dataclass(frozen=True, slots=True)
class Kept:
    """One exchange. ttft_ms and tpot_ms are what percentiles are made of; one tpot per choice that has one."""

    row: dict[str, Any]
    facts: tuple[dict[str, Any], ...]  # of each choice
    totals: tuple[dict[str, int], ...]  # of each choice's rounds
    columns: tuple[Columns, ...]  # of each choice
    tpot_ms: tuple[float, ...]

    @property
    def rounds(self) -> int:
        return sum(len(columns["step"]) for columns in self.columns)

    def summary(self) -> dict[str, Any]:
        """With each choice's facts and totals, without its rounds."""
        choices = [facts | totals for facts, totals in zip(self.facts, self.totals, strict=True)]
        return self.row | {"choices": choices}

    def whole(self) -> dict[str, Any]:
        choices = zip(self.facts, self.columns, strict=True)
        return self.row | {"choices": [facts | {"rounds": public_columns(columns)} for facts, columns in choices]}


class Ring:
    """Memory: KEPT exchanges and ROUNDS rounds, or the latest exchange alone if it has more."""

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}  # by id, oldest first
        self._rounds = 0
        self.taken = 0  # exchanges so far

    def add(self, exchange: Exchange, model: str) -> None:
        self._rounds += (kept := keep(exchange, model)).rounds
        self._kept[exchange.id] = kept
        self.taken += 1
        while len(self._kept) > KEPT or (self._rounds > ROUNDS and len(self._kept) > 1):
            self._rounds -= self._kept.pop(next(iter(self._kept))).rounds

    def get(self, name: str) -> Kept | None:
        """By the reply's id, or by that of the request, which x-request-id tells."""
        return self._kept.get(name) or self._kept.get(f"cmpl-{name}")

    def latest(self) -> Iterator[Kept]:
        """Newest first."""
        return reversed(self._kept.values())


def keep(exchange: Exchange, model: str) -> Kept:
    """queue_ms and ttft_ms run from the first choice's arrival in the engine, total_ms from the request's to the last
    byte."""
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
    }
    facts = tuple(_facts(index, output, record) for index, output, record in choices)
    tpots = [_tpot_ms(record) for record in records]
    columns, totals = tuple(map(_columns, records)), tuple(map(_totals, records))
    return Kept(row, facts, totals, columns, tuple(t for t in tpots if t is not None))


def outcome(exchange: Exchange) -> tuple[str, str | None]:
    """(status, error)."""
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


def _prompt_tokens(exchange: Exchange) -> int:
    """Those of a prompt once for all its choices."""
    n = exchange.asked.n if exchange.asked is not None else 1
    return sum(len(request.prompt_ids) for request in exchange.requests[::n])


def _tpot_ms(record: RequestRecord) -> float | None:
    """Milliseconds per token after the first; None with fewer than two."""
    span = _ms(record.first_token, record.finished)
    return span / (record.output_tokens - 1) if span is not None and record.output_tokens > 1 else None


def _first(times: list[float | None]) -> float | None:
    return min((t for t in times if t is not None), default=None)


def _ms(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(1000 * (end - start), 3)
