"""The data of the live page: the latest exchanges and the engine steps of the last five minutes, in bounded memory.

Listening only adds up numbers. Everything else is computed when a viewer asks for it.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

from app.client import EngineClient
from app.page.recent_requests import RecentRequests, keep
from app.page.request_speedups import RequestSpeedups
from app.page.step_window import Counts, StepWindow, batches, decisions, ended, positions, series, speedup, why_none
from app.telemetry.exchange import Exchange
from engine.types import EngineStats, StepStats

RATE_S = 2.0  # window over which tokens per second are counted
STATE_S = 10.0  # speculation is "on" if it drafted within this window
REPEAT_S = 2.0  # every event repeats this much of the series, so that a slow viewer misses nothing

# Reason for k = 0 → what the page says.
REASON_TEXTS = {
    "policy": "the policy gives no drafts now",
    "user": "the requests asked for no drafts",
    "cap": "nothing is left to draft: texts are about to end, or the drafters offer nothing",
    "cache": "there is no memory for drafts",
    "acceptance": "drafts would be rejected too often to pay",
    "load": "drafts do not pay beside so many sequences",
    "probe": "",  # a probe drafts
}


class LivePage:
    """A Listener that collects the page's data. `version` grows with every event that it receives."""

    def __init__(
        self,
        client: EngineClient,
        *,
        trace_viewer_url: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """trace_viewer_url: where a trace can be looked at, with {trace_id} in place of its id; None: nowhere.

        clock: returns monotonic seconds, on the same clock as the times of engine steps.
        """
        self.client = client
        self._trace_viewer_url = trace_viewer_url
        self.version = 0
        self.recent = RecentRequests()
        self.open: set[str] = set()  # ids of exchanges that have begun and not ended
        self._window = StepWindow()
        self._speedups = RequestSpeedups()
        self._clock = clock
        self._latencies: tuple[int, dict[str, Any]] = (-1, {})  # (recent.taken when computed, percentiles)

    def began(self, exchange: Exchange) -> None:
        self.version += 1
        self.open.add(exchange.id)

    def ended(self, exchange: Exchange) -> None:
        self.version += 1
        self.open.discard(exchange.id)
        kept = keep(exchange, self.client.model.name)
        self.recent.add(kept)
        self._speedups.add(kept)

    def stepped(self, steps: Sequence[StepStats]) -> None:
        self.version += 1
        self._window.add(steps, self._clock())
        self._speedups.stepped(steps)

    @property
    def _epoch(self) -> float:
        """Unix seconds minus monotonic seconds, by the wall clock as it is now."""
        return time.time() - time.monotonic()

    def state(self) -> dict[str, Any]:
        """Return all that a page needs to start: the model, the current figures, and the series of the whole window."""
        card = self.client.model
        model = {
            "name": card.name,
            "max_model_len": card.max_model_len,
            "max_spec_length": card.max_spec_length,
            "drafters": list(card.drafters),
            "drafter": card.drafter,
            "verifier": card.verifier,
            "chat": card.has_chat_template,
        }
        fixed = {"model": model, "trace_viewer_url": self._trace_viewer_url}
        return {**fixed, "now": self._now(), "series": self._series(float("inf"))}

    def event(self) -> dict[str, Any]:
        """Return what changes: the current figures and the last REPEAT_S of the series."""
        return {"now": self._now(), "series": self._series(REPEAT_S)}

    def _series(self, seconds: float) -> dict[str, list[Any]]:
        """Return the series of the last seconds, without the quarter of a second that has not ended."""
        now = self._clock()
        return series(ended(self._window.recent(now, min(seconds, now)), now), self._epoch)

    def _now(self) -> dict[str, Any]:
        """Return the current figures: rates over RATE_S, latencies of the kept exchanges, the rest over the window."""
        now, stats = self._clock(), self.client.stats()
        totals = self._window.totals(now)
        return {
            "t": round(now + self._epoch, 2),
            **_load(stats),
            "requests": self.recent.taken,
            "speedups": self._speedups.settled,
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
        """Add up the counts of the last seconds, without the quarter of a second that has not ended."""
        counts: Counts = Counter()
        for entry in ended(self._window.recent(now, seconds), now):
            counts.update(entry.counts)
        return counts

    def _percentiles(self) -> dict[str, Any]:
        """Return latency percentiles of the kept exchanges. Computes them again only after another exchange."""
        if self._latencies[0] != self.recent.taken:
            kept = list(self.recent.latest())
            ttfts = [entry.row["ttft_ms"] for entry in kept if entry.row["ttft_ms"] is not None]
            tpots = [tpot for entry in kept for tpot in entry.tpot_ms]
            self._latencies = (self.recent.taken, {"ttft_ms": percentiles(ttfts), "tpot_ms": percentiles(tpots)})
        return self._latencies[1]

    def _speculation(self, totals: Counts, lately: Counts) -> dict[str, Any]:
        """Return the state of speculation, the reason, and whether requests get drafts that they did not ask for.

        state: "on"; "paused": rounds run without drafts, apart from probes; "ready": nothing runs; "off"; or "none": no
        drafter.
        """
        state, why = self._drafting(lately if lately["sequences", 0] else totals)
        card = self.client.model
        return {"state": state, "why": why, "unasked": card.policy != "off" and card.drafter is not None}

    def _drafting(self, counts: Counts) -> tuple[str, str]:
        """Return (state, reason)."""
        card = self.client.model
        if not card.drafters:
            return "none", "this server has no drafter"
        if counts["meant", 0]:
            return "on", ""
        if card.policy == "off":
            return "off", "the policy is off: only requests that ask for drafts get them"
        if counts["sequences", 0]:
            reason = why_none(counts)
            return "paused", REASON_TEXTS[reason] if reason is not None else "the drafters offer nothing"
        if card.drafter is None:
            return "off", "no drafter serves requests that do not name one"
        return "ready", "no rounds in the last five minutes"


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return p50 and p95 by nearest rank, or None for no values."""
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
