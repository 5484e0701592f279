"""Whether to take one more request, and what to tell a client that is turned away. Standard library only."""

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

    def refusal(self, open_requests: int) -> int | None:
        """None: take it. Otherwise the seconds after which a place should be free, for Retry-After (1 … 60)."""
        if open_requests < self.max_running + self.max_waiting:
            return None
        # Little's law: each open request stays for mean_duration, so one ends every mean_duration / open_requests.
        return min(LONGEST_WAIT_S, max(1, math.ceil(self.mean_duration_s / open_requests)))

    def finished(self, duration_s: float) -> None:
        """A request reached its own end that took this long, from its arrival. Leave out those that were cut short."""
        past = self.mean_duration_s or duration_s
        self.mean_duration_s = MEMORY * past + (1 - MEMORY) * duration_s
