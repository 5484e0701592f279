"""Who runs, and with how many tokens: continuous batching with chunked prefill under one token budget per pass."""

from collections import deque
from dataclasses import dataclass

from deployments.engine.runner import Runner
from deployments.engine.sequence import Sequence, State


@dataclass(frozen=True, slots=True)
class Slice:
    """One sequence's part of a round: feed `committed` tokens; if it `emits`, verify up to k drafts after them."""

    sequence: Sequence
    committed: int
    k: int
    emits: bool  # False: a prefill chunk that leaves more of the prompt to come


@dataclass(frozen=True, slots=True)
class Plan:
    slices: tuple[Slice, ...]  # by cache slot: neighbours in memory are neighbours in the pass

    @property
    def prefill_tokens(self) -> int:
        return sum(s.committed for s in self.slices if s.committed > 1 or not s.emits)


class Scheduler:
    """First come, first served. Decoding goes before prefill: a long prompt delays a stream by one chunk per step."""

    def __init__(self, target: Runner, max_running: int, max_step_tokens: int) -> None:
        self._target = target
        self._max_running = max_running
        self._max_step_tokens = max_step_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Start waiting sequences while there are slots; returns those that started."""
        started = []
        while self.waiting and len(self.running) < self._max_running:
            sequence = self.waiting.popleft()
            sequence.start()
            self._target.cache.allocate(sequence.handle)
            self.running.append(sequence)
            started.append(sequence)
        return started

    def plan(self) -> Plan:
        """Every decoding sequence gets its token and its drafts; prefill shares what the budget has left."""
        budget = self._max_step_tokens
        slices: list[Slice] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            if self._target.uncached(sequence) > 1:
                prefilling.append(sequence)
                continue
            k = min(sequence.k, sequence.remaining - 1)
            slices.append(Slice(sequence, 1, k, emits=True))
            budget -= 1 + k
        for sequence in prefilling:
            uncached = self._target.uncached(sequence)
            chunk = min(uncached, budget)
            if chunk > 0:
                slices.append(Slice(sequence, chunk, 0, emits=chunk == uncached))
                budget -= chunk
        slices.sort(key=lambda s: self._target.cache.slot(s.sequence.handle))
        return Plan(tuple(slices))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out wherever it is and free its slot."""
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
        self._target.cache.release(sequence.handle)
