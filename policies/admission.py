"""Whether to take more requests, and what to tell a client that is turned away.

Work is counted in the seconds that a full engine needs for it by its measurements at the start. Two ratios correct
this, and both are learned while serving.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace

from policies.cost import PASS_S
from policies.observation import Timing

LONGEST_WAIT_S = 60  # the longest advice to a client, in seconds: nobody knows the load beyond
MEMORY_S = 10.0  # seconds of work after which what was learned counts 1 / e: loads change within some ten seconds
DOUBT_S = 0.2  # seconds of work that the first guess, a ratio of 1, counts as: a few steps outweigh it


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Seconds per token while as many sequences decode as may run. Where nothing was measured, each is a pass."""

    read_s: float = PASS_S  # per token of a prompt
    decode_s: float = PASS_S  # per generated token

    @classmethod
    def measured(cls, timings: Sequence[Timing], most: int) -> "TokenCost":
        """From the passes over the largest batch that was measured: without drafts, and with the most drafts.

        The additional seconds per row of the longer pass are those of a prompt's token, and of each sequence from that
        batch up to `most`.
        """
        undrafted = max((t for t in timings if not t.drafts), key=lambda t: t.batch, default=None)
        if undrafted is None or undrafted.score_s <= 0:
            return cls()
        longest = max((t for t in timings if t.batch == undrafted.batch), key=lambda t: t.drafts)
        read_s = undrafted.score_s / undrafted.batch
        if longest.drafts and longest.score_s > undrafted.score_s:
            read_s = (longest.score_s - undrafted.score_s) / longest.drafts
        return cls(read_s, (undrafted.score_s + read_s * (most - undrafted.batch)) / most)

    def seconds(self, prompt_tokens: int, output_tokens: int) -> float:
        return prompt_tokens * self.read_s + output_tokens * self.decode_s


@dataclass(slots=True)
class Ratio:
    """A quotient of two sums in which recent work counts most."""

    part: float = DOUBT_S
    whole: float = DOUBT_S

    @property
    def value(self) -> float:
        return self.part / self.whole

    def add(self, part: float, whole: float) -> None:
        """whole: seconds of work."""
        keep = math.exp(-whole / MEMORY_S)
        self.part, self.whole = keep * self.part + part, keep * self.whole + whole


@dataclass(slots=True)
class Admission:
    """Admit up to max_running + max_waiting requests that may need up to max_demand × kv_tokens tokens of KV memory.

    A request may need memory for its prompt and for the most tokens that it may generate. Most requests need less, so
    max_demand is above 1. It bounds how long the last request waits, and how often memory is taken back and computed
    again. Callers serialise access.
    """

    max_running: int
    max_waiting: int
    kv_tokens: int  # tokens that the cache has room for
    max_demand: float
    # Seconds that a second of work takes. Only a full engine shows it: learned from steps during which requests wait.
    slowness: Ratio = field(default_factory=Ratio)
    # Work that a request needed over work that it asked for. Learned from requests that reach their own end.
    usage: Ratio = field(default_factory=Ratio)

    @property
    def most_tokens(self) -> float:
        """The most tokens that all open requests together may need."""
        return self.max_demand * self.kv_tokens

    def refusal(self, open_requests: int, open_tokens: int, more: int, more_tokens: int) -> str | None:
        """Why `more` requests of `more_tokens` together are not taken, in words for the client; None: take them.

        Without open requests memory is no reason: the engine has checked that each of them fits by itself.
        """
        places = self.max_running + self.max_waiting
        if open_requests + more > places:
            return f"{open_requests} requests are running or waiting; {more} more exceed {places}"
        if open_requests and open_tokens + more_tokens > self.most_tokens:
            return (
                f"admitted requests may need {open_tokens:,} tokens of KV memory; {more_tokens:,} more exceed "
                f"{self.max_demand:g} × {self.kv_tokens:,}"
            )
        return None

    def retry_after(self, running: Sequence[float], waiting: Sequence[float], slots: int) -> int:
        """Whole seconds, 1 to LONGEST_WAIT_S, after which a request that is admitted at this moment would run.

        running: remaining work of each request that runs; waiting: work of each request that waits, in their order;
        slots: requests that may run at once, or that there is memory for. Slots share the engine evenly, and the next
        request takes the first free slot.
        """
        slots = max(1, slots, len(running))
        ends = [*running, *[0.0] * (slots - len(running))]  # work of each slot until it is free
        heapify(ends)
        for work in waiting:
            heapreplace(ends, ends[0] + work)
        wait = ends[0] * slots * self.usage.value * self.slowness.value
        return min(LONGEST_WAIT_S, max(1, math.ceil(wait)))
