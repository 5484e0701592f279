"""Whether to take more requests, and what to tell a client that is turned away. Standard library only."""

import math
from dataclasses import dataclass

MEMORY = 0.9  # weight of the past in the mean duration of a request
LONGEST_WAIT_S = 60


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why requests are not taken, in words for the client, and in how many seconds they should be: 1 … 60."""

    retry_after: int
    reason: str


@dataclass(slots=True)
class Admission:
    """Admit up to max_running + max_waiting requests that may need up to max_demand × kv_tokens tokens of KV memory.

    A request's tokens are those of its prompt and the most that it may generate. Requests end sooner than that, and
    share what their prompts have in common, so max_demand is above 1; it bounds how long the last of them waits, and
    how often memory is taken back and computed again. Callers serialise access.
    """

    max_running: int
    max_waiting: int
    kv_tokens: int  # that the cache has room for
    max_demand: float
    mean_duration_s: float = 0.0  # of whole requests, waiting included, exponentially weighted; 0: none yet

    @property
    def places(self) -> int:
        return self.max_running + self.max_waiting

    @property
    def most_tokens(self) -> float:
        """That requests which are open at the same time may come to need."""
        return self.max_demand * self.kv_tokens

    def refusal(self, open_requests: int, open_tokens: int, more: int, more_tokens: int) -> Refusal | None:
        """None: take `more` requests of `more_tokens` together. Of two limits in the way, the slower is told.

        Never for memory when nothing is open: one after another they do fit, by the engine's check of each.
        """
        refusals = []
        if open_requests + more > self.places:
            refusals.append(self._no_place(open_requests, more))
        if open_requests and open_tokens + more_tokens > self.most_tokens:
            refusals.append(self._no_memory(open_tokens, more_tokens))
        return max(refusals, key=lambda refusal: refusal.retry_after, default=None)

    def _no_place(self, open_requests: int, more: int) -> Refusal:
        # Little's law: each open request stays for mean_duration, so one ends every mean_duration / open_requests.
        wait = self._until(open_requests + more - self.places, open_requests)
        return Refusal(wait, f"{open_requests} requests are running or waiting; {more} more exceed {self.places}")

    def _no_memory(self, open_tokens: int, more_tokens: int) -> Refusal:
        # The same of tokens: all that are open now leave within mean_duration.
        wait = self._until(open_tokens + more_tokens - self.most_tokens, open_tokens)
        return Refusal(
            wait,
            f"admitted requests may need {open_tokens:,} tokens of KV memory; {more_tokens:,} more exceed "
            f"{self.max_demand:g} × {self.kv_tokens:,}",
        )

    def _until(self, missing: float, there: int) -> int:
        """Whole seconds until `missing` of what is `there` has left, each part staying for mean_duration."""
        return min(LONGEST_WAIT_S, max(1, math.ceil(missing * self.mean_duration_s / max(1, there))))

    def finished(self, duration_s: float) -> None:
        """A request reached its own end that took this long, from its arrival. Leave out those that were cut short."""
        past = self.mean_duration_s or duration_s
        self.mean_duration_s = MEMORY * past + (1 - MEMORY) * duration_s
