"""What the live page shows: the latest exchanges and the last five minutes of steps, kept in bounded memory.

Listening only adds numbers up; what is made of them here is made when a viewer asks.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

from app.client import EngineClient
from app.page.recent_requests import Ring
from app.page.step_window import Counts, StepWindow, batches, decisions, ended, positions, series, speedup, why_none
from app.telemetry.exchange import Exchange
from engine.types import EngineStats, StepStats

RATE_S = 2.0  # over which tokens per second are counted
STATE_S = 10.0  # in which speculation must have drafted to be called on
REPEAT_S = 2.0  # of the series that every event tells again: a viewer that was slow misses nothing

WHY = {
    "policy": "the policy gives no drafts now",
    "user": "the requests asked for no drafts",
    "cap": "nothing is left to draft: texts are about to end, or the drafters offer nothing",
    "cache": "there is no memory for drafts",
    "acceptance": "drafts would be rejected too often to pay",
    "load": "drafts do not pay beside so many sequences",
    "probe": "",  # a probe drafts
}


class Live:
    """A Listener. `version` grows with everything that it was told."""

    def __init__(self, client: EngineClient, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic seconds, as the engine's steps tell them."""
        self.client = client
        self.version = 0
        self.ring = Ring()
        self.open: set[str] = set()  # ids of exchanges that began and have not ended
        self._window = StepWindow()
        self._clock = clock
        self._latencies: tuple[int, dict[str, Any]] = (-1, {})  # of the ring when it had taken so many

    def began(self, exchange: Exchange) -> None:
        self.version += 1
        self.open.add(exchange.id)

    def ended(self, exchange: Exchange) -> None:
        self.version += 1
        self.open.discard(exchange.id)
        self.ring.add(exchange, self.client.model.name)

    def stepped(self, steps: Sequence[StepStats]) -> None:
        self.version += 1
        self._window.add(steps, self._clock())

    @property
    def _epoch(self) -> float:
        """From monotonic to Unix seconds, as the wall clock goes now."""
        return time.time() - time.monotonic()

    def state(self) -> dict[str, Any]:
        """All that a page needs to begin: what the server is, how it does now, and the series of the whole window."""
        card = self.client.model
        model = {
            "name": card.name,
            "max_model_len": card.max_model_len,
            "max_spec_length": card.max_spec_length,
            "drafters": list(card.drafters),
            "drafter": card.drafter,
            "verifier": card.verifier,
        }
        return {"model": model, "now": self._now(), "series": self._series(float("inf"))}

    def event(self) -> dict[str, Any]:
        """What has changed: how it does now, and the latest ends of the series."""
        return {"now": self._now(), "series": self._series(REPEAT_S)}

    def _series(self, seconds: float) -> dict[str, list[Any]]:
        """Without the quarter of a second that has not ended."""
        now = self._clock()
        return series(ended(self._window.recent(now, min(seconds, now)), now), self._epoch)

    def _now(self) -> dict[str, Any]:
        """Rates are of the last RATE_S; latencies of the exchanges that are kept; the rest is of the whole window."""
        now, stats = self._clock(), self.client.stats()
        totals = self._window.totals(now)
        return {
            "t": round(now + self._epoch, 2),
            **_load(stats),
            "requests": self.ring.taken,
            "tokens_per_s": self._sum(now, RATE_S)["emitted", 0] / RATE_S,
            "acceptance": _share(totals["accepted", 0], totals["drafted", 0]),
            "accepted_per_round": _share(totals["accepted", 0], totals["drafting", 0]),
            "speedup": speedup(totals),
            "faults": totals["faults", 0],
            **self._percentiles(),
            "policy": dict(self.client.policy_status()),
            "speculation": self._speculation(totals, self._sum(now, STATE_S)),
            "positions": positions(totals),
            "batches": batches(totals),
            "decisions": decisions(totals),
        }

    def _sum(self, now: float, seconds: float) -> Counts:
        """Without the quarter of a second that has not ended."""
        found: Counts = Counter()
        for entry in ended(self._window.recent(now, seconds), now):
            found.update(entry.counts)
        return found

    def _percentiles(self) -> dict[str, Any]:
        """Of the exchanges that are kept; worked out again only once there is another."""
        if self._latencies[0] != self.ring.taken:
            kept = list(self.ring.latest())
            ttfts = [entry.row["ttft_ms"] for entry in kept if entry.row["ttft_ms"] is not None]
            tpots = [tpot for entry in kept for tpot in entry.tpot_ms]
            found = {"ttft_ms": percentiles(ttfts), "tpot_ms": percentiles(tpots)}
            self._latencies = (self.ring.taken, found)
        return self._latencies[1]

    def _speculation(self, totals: Counts, lately: Counts) -> dict[str, Any]:
        """state: on, paused (rounds run, none with drafts but probes), ready (nothing runs), off or none; why; and
        whether requests that do not ask for drafts can get some."""
        state, why = self._drafting(lately if lately["sequences", 0] else totals)
        card = self.client.model
        return {"state": state, "why": why, "unasked": card.policy != "off" and card.drafter is not None}

    def _drafting(self, seen: Counts) -> tuple[str, str]:
        card = self.client.model
        if not card.drafters:
            return "none", "this server has no drafter"
        if seen["meant", 0]:
            return "on", ""
        if card.policy == "off":
            return "off", "the policy is off: only requests that ask for drafts get them"
        if seen["sequences", 0]:
            reason = why_none(seen)
            return "paused", WHY[reason] if reason is not None else "the drafters offer nothing"
        if card.drafter is None:
            return "off", "no drafter serves requests that do not name one"
        return "ready", "no rounds in the last five minutes"


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Nearest rank, of at least one value."""
    if not values:
        return None
    ordered = sorted(values)
    return {name: round(ordered[ceil(share * len(ordered)) - 1], 3) for name, share in (("p50", 0.5), ("p95", 0.95))}


def _load(stats: EngineStats) -> dict[str, Any]:
    return {
        "healthy": stats.healthy,
        "reason": stats.reason,
        "running": stats.running,
        "waiting": stats.waiting,
        "max_running": stats.max_running,
        "kv_used": round(stats.kv_used, 4),
    }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
