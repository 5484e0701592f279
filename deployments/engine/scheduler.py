"""Who runs, and with how many tokens: continuous batching with chunked prefill under one token budget per pass."""

from collections import deque
from dataclasses import dataclass, replace

from deployments.engine.runner import Runner
from deployments.engine.sequence import Sequence
from policies.spec_length import Fixed


@dataclass(frozen=True, slots=True)
class Slice:
    """One sequence's part of a round: feed `committed` tokens; if it `emits`, verify up to k drafts after them."""

    sequence: Sequence
    committed: int
    k: int
    emits: bool  # False: a prefill chunk that leaves more of the prompt to come
    scored: int = 0  # tokens of the prompt whose log-probability this part tells


@dataclass(frozen=True, slots=True)
class Plan:
    slices: tuple[Slice, ...]  # by cache slot: neighbours in memory are neighbours in the pass

    @property
    def prefill_tokens(self) -> int:
        return sum(s.committed for s in self.slices if s.committed > 1 or not s.emits)

    def without_drafts(self) -> "Plan":
        return Plan(tuple(replace(s, k=0) for s in self.slices))


class Scheduler:
    """First come, first served. Decoding goes before prefill: a long prompt delays a stream by one chunk per step."""

    def __init__(self, target: Runner, policy: Fixed, max_running: int, max_step_tokens: int) -> None:
        self._target = target
        self._policy = policy
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
        uncached = {s.handle: self._target.uncached(s) for s in self.running}
        decoding = [s for s in self.running if uncached[s.handle] == 1]
        ks = self._policy.plan([s.k for s in decoding], [max(0, s.remaining - 1) for s in decoding])
        slices = [Slice(s, 1, k, emits=True) for s, k in zip(decoding, ks, strict=True)]
        budget = self._max_step_tokens - len(ks) - sum(ks)
        for sequence in self.running:
            left = uncached[sequence.handle]
            if left == 1:
                continue
            chunk = min(left, budget)
            if chunk > 0:
                scored = self._scored(sequence, chunk)
                slices.append(Slice(sequence, chunk, 0, emits=chunk == left, scored=scored))
                budget -= chunk
        slices.sort(key=lambda s: self._target.cache.slot(s.sequence.handle))
        return Plan(tuple(slices))

    def _scored(self, sequence: Sequence, chunk: int) -> int:
        """Rows of a chunk that precede another token of the prompt, where their log-probabilities were asked for."""
        if sequence.params.prompt_logprobs is None:
            return 0
        start = len(sequence.tokens) - self._target.uncached(sequence)
        return max(0, min(chunk, sequence.num_prompt - 1 - start))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out wherever it is and free its slot. Idempotent, so that every exit path may call it."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        self._target.cache.release(sequence.handle)
