"""Whether to take more requests, and what to tell a client that is turned away. Standard library only."""

import math
from dataclasses import dataclass

MEMORY = 0.9  # weight of the past in the mean duration of a request
LONGEST_WAIT_S = 60


@dataclass(slots=True)
class Admission:
    """Admit up to max_running + max_waiting requests. Callers serialise access."""

    max_running: int
    max_waiting: int
    mean_duration_s: float = 0.0  # of whole requests, waiting included, exponentially weighted; 0: none yet

    @property
    def places(self) -> int:
        return self.max_running + self.max_waiting

    def refusal(self, open_requests: int, more: int = 1) -> int | None:
        """None: take `more`. Otherwise the seconds after which they should have places, for Retry-After (1 … 60)."""
        missing = open_requests + more - self.places
        if missing <= 0:
            return None
        # Little's law: each open request stays for mean_duration, so one ends every mean_duration / open_requests.
        wait = missing * self.mean_duration_s / max(1, open_requests)
        return min(LONGEST_WAIT_S, max(1, math.ceil(wait)))

    def finished(self, duration_s: float) -> None:
        """A request reached its own end that took this long, from its arrival. Leave out those that were cut short."""
        past = self.mean_duration_s or duration_s
        self.mean_duration_s = MEMORY * past + (1 - MEMORY) * duration_s
