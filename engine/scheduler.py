"""Which sequences run in the next round, and how many tokens of each: continuous batching with chunked prefill."""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Container, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import islice
from math import ceil
from typing import NamedTuple

from cache.protocol import CacheFull
from engine.models.runner import Runner
from engine.sequence import Sequence, State
from engine.trees import Parents
from policies.config import Reason
from policies.held_choice import Decision
from policies.observation import Prefill

MIN_SHARED = 16  # tokens that two sequences must have in common for one to wait for, or share, the other's memory
HEADROOM = 16  # positions per running sequence that an admission must leave free, or a preemption would soon undo it
FEW_TOKENS = 8  # a sequence that may emit no more than these is gone before it matters to the others' drafts
MAX_PREFILL_GROUPS = 4  # whose prompts share a pass: with more, all of them would get their first token late
ChunkSize = Callable[[int], int]  # verified rows of a pass → prompt tokens allowed in the same pass
ChooseK = Callable[[Seq[Sequence], Prefill], Decision]  # decoding sequences, prompts read beside them → their k


class Slice(NamedTuple):
    """One sequence in a round: feed `committed` of its tokens and, if it `emits`, verify up to k drafts after them."""

    sequence: Sequence
    committed: int
    k: int
    emits: bool  # False: a prefill chunk that does not reach the end of the prompt
    prompt_rows: int = 0  # rows of its feed that give log-probabilities of prompt tokens
    reason: Reason | None = None  # why k is no larger; None: the policy did not choose k
    alpha: float = 0.0  # estimated chance that the first draft is accepted
    confidence: float = 0.0  # joint confidence below which the draft model stops; 0: it does not stop
    tree: Parents | None = None  # the tree that the policy wants of its drafts, of k nodes or more; None: a chain
    ahead: int = 0  # look-ahead tokens behind its last committed token and behind each draft

    @property
    def shape(self) -> Parents | None:
        """The tree of drafts that is wanted, cut to k nodes; None: a chain."""
        tree = self.sequence.tree or self.tree
        return None if tree is None else tree[: self.k]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step does."""

    slices: tuple[Slice, ...]  # by cache slot: neighbours in memory are neighbours in the pass
    started: tuple[tuple[Sequence, int], ...] = ()  # sequences that start to run, with their cached tokens
    preempted: tuple[Sequence, ...] = ()  # sequences whose memory was taken back
    expected: Decision | None = None  # the policy's choice and predictions; None: no sequence decodes

    @property
    def prefill_tokens(self) -> int:
        return sum(s.committed for s in self.slices if s.committed > 1 or not s.emits)

    def without_drafts(self) -> "Plan":
        """The same slices with k = 0, for which no policy gave a reason."""
        return replace(self, slices=tuple(s._replace(k=0, reason=None, ahead=0) for s in self.slices))


@dataclass(slots=True)
class StartQueue:
    """The sequences that may start in one plan, and those that do."""

    order: list[Sequence]
    started: list[tuple[Sequence, int]] = field(default_factory=list)  # with their cached tokens
    deferred: int = 0  # sequences that wait for a leader to read what they have in common
    owed_tokens: int = 0  # that the deferred sequences will have to feed


class Scheduler:
    """Plans one step at a time. Every running sequence advances in every step, or loses its memory and waits again.

    Memory. A plan reserves the memory for what it feeds; the memory for a whole prompt is reserved when the sequence
    starts. When memory runs out, there are first fewer drafts, then the youngest sequence is preempted. The oldest is
    never preempted, so it finishes, and all others finish in their turn.

    Fairness. A group is all choices of one client's request. The next sequence to start comes from the group with the
    fewest running sequences; among equals the first to arrive. The prompt tokens of a pass are divided evenly between
    at most MAX_PREFILL_GROUPS groups, and a share that one group does not need goes to the others. Each group reads one
    prompt after the other.
    """

    def __init__(
        self, target: Runner, choose: ChooseK, max_running: int, max_step_tokens: int, chunk: ChunkSize
    ) -> None:
        self._target = target
        self._cache = target.cache
        self._choose_k = choose
        self._max_running = max_running
        self._max_step_tokens = max_step_tokens
        self._chunk = chunk
        self.waiting: list[Sequence] = []  # in order of arrival
        self.running: list[Sequence] = []  # in order of arrival

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_arrival)

    def plan(self) -> Plan:
        """Plan the next step within its budget: decoding sequences, then begun prompts, then waiting sequences."""
        preempted = self._reserve_next_tokens()
        unread = {s: self._target.uncached(s) for s in self.running}
        decoding = [s for s, count in unread.items() if count == 1]
        expected = self._choose_k(decoding, self._expected_prefill(unread, len(decoding))) if decoding else None
        slices = self._decode_slices(decoding, expected) if expected else []
        rows = sum(s.committed + s.k for s in slices)
        budget = self._max_step_tokens - rows
        if decoding:  # their clients wait for all that is in the pass
            budget = min(budget, self._chunk(rows))
        queue = StartQueue([] if preempted else self._start_order())
        slices += [
            self._prefill_slice(sequence, count)
            for sequence, count in self._divide_prefill(budget, queue, unread).items()
        ]
        slices.sort(key=lambda s: self._cache.slot(s.sequence.handle))
        slices = self._look_ahead(slices)
        return Plan(tuple(slices), tuple(queue.started), tuple(preempted), expected)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, waiting or running, and free its memory. Idempotent: every exit path may call it."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        self._target.release(sequence)

    def _reserve_next_tokens(self) -> list[Sequence]:
        """Reserve one more token for every running sequence, oldest first. Returns the preempted sequences."""
        preempted: list[Sequence] = []
        for sequence in tuple(self.running):
            while sequence.state is State.RUNNING:
                try:
                    self._cache.reserve(sequence.handle, 1)
                    break
                except CacheFull:
                    preempted.append(self._preempt())
        return preempted

    def _preempt(self) -> Sequence:
        """Take back the memory of the youngest sequence, which waits again. Raises CacheFull if only one is running."""
        if len(self.running) == 1:
            raise CacheFull("the cache has no room for one more token of the only running sequence")
        youngest = self.running.pop()
        self._target.release(youngest)
        youngest.preempt()
        self.add(youngest)
        return youngest

    def _expected_prefill(self, unread: Mapping[Sequence, int], rows: int) -> Prefill:
        """The prompts to expect in this pass, beside so many verified rows, and in the next ones.

        unread: tokens of each running sequence. One that waits may wait for long, and one with few tokens to emit is
        gone soon, so they are not expected to decode beside the others.
        """
        begun = {sequence: count for sequence, count in unread.items() if count > 1}
        waiting = sum(len(s.tokens) for s in islice(self.waiting, self._max_running - len(self.running)))
        chunk, tokens = self._chunk(rows), sum(begun.values())
        joining = sum(sequence.remaining > FEW_TOKENS for sequence in begun)
        return Prefill(min(tokens + waiting, chunk), joining, ceil(tokens / chunk))

    def _decode_slices(self, decoding: Seq[Sequence], chosen: Decision) -> list[Slice]:
        """One slice per decoding sequence: its last token, and as many of its k drafts as there is memory for."""
        slices = []
        for n, (sequence, chosen_k) in enumerate(zip(decoding, chosen.ks, strict=True)):
            k = min(chosen_k, self._cache.room(sequence.handle) - 1) if chosen_k else 0
            self._cache.reserve(sequence.handle, 1 + k)
            reason = chosen.reasons[n] if k == chosen_k else "cache"
            confidence = chosen.confidence if sequence.k is None else 0.0
            slices.append(Slice(sequence, 1, k, True, 0, reason, chosen.alphas[n], confidence, chosen.shapes[n]))
        return slices

    def _look_ahead(self, slices: list[Slice]) -> list[Slice]:
        """The slices with look-ahead tokens, where the pass and the memory have room for them: they come last."""
        riding, left = self._target.look_ahead, self._max_step_tokens - sum(s.committed + s.k for s in slices)
        if riding is None:
            return slices
        for i, s in enumerate(slices):
            if s.emits:
                ahead, rows = riding.reserve(self._cache, s.sequence, s.k, s.shape, committed=s.committed, most=left)
                # Look-ahead tokens hang behind each draft that is planned, so none is planned that cannot come.
                k = min(s.k, riding.most) if ahead and s.shape is None else s.k
                slices[i], left = s._replace(k=k, ahead=ahead), left - rows
        return slices

    def _divide_prefill(self, budget: int, queue: StartQueue, unread: Mapping[Sequence, int]) -> dict[Sequence, int]:
        """Divide the pass's prompt tokens: sequence → tokens. Starts waiting sequences while there are tokens for them.

        Every begun prompt gets at least one token, even beyond the budget. It fits into max_step_tokens, which is at
        least max_running × (1 + max_spec_length).
        """
        left = {s: count - 1 for s, count in unread.items() if count > 1}
        fed = dict.fromkeys(left, 1)
        budget -= len(fed)
        while budget > 0:
            reading: dict[str, Sequence] = {}  # group → its oldest prompt with tokens left
            for sequence in left:
                reading.setdefault(sequence.group, sequence)
            while (
                len(reading) < min(MAX_PREFILL_GROUPS, budget) and (new := self._start_next(queue, reading)) is not None
            ):
                reading[new.group] = new
                left[new] = self._target.uncached(new)
            if not reading:
                break
            share = max(1, budget // len(reading))
            for sequence in reading.values():
                count = min(share, budget, left[sequence])
                budget -= count
                fed[sequence] = fed.get(sequence, 0) + count
                left[sequence] -= count
                if not left[sequence]:
                    del left[sequence]
        return fed

    def _prefill_slice(self, sequence: Sequence, count: int) -> Slice:
        """A slice of up to `count` prompt tokens: fewer if a failed pass gave back the prompt's reserved memory."""
        count = min(count, self._cache.room(sequence.handle))
        self._cache.reserve(sequence.handle, count)
        emits = count == self._target.uncached(sequence)
        return Slice(sequence, count, 0, emits, prompt_rows=self._count_prompt_rows(sequence, count))

    def _count_prompt_rows(self, sequence: Sequence, chunk: int) -> int:
        """Rows of a chunk that are followed by a prompt token, if the request asks for prompt_logprobs; else 0."""
        if sequence.params.prompt_logprobs is None or sequence.record.rounds:
            return 0
        start = len(sequence.tokens) - self._target.uncached(sequence)
        return max(0, min(chunk, sequence.num_prompt - 1 - start))

    def _start_order(self) -> list[Sequence]:
        """The waiting sequences in the order in which they start."""
        if not self.waiting or not self._cache.free_slots:
            return []
        members = Counter(sequence.group for sequence in self.running)
        ranked = []
        for sequence in self.waiting:
            ranked.append((members[sequence.group], sequence.handle, sequence))
            members[sequence.group] += 1
        return [sequence for _, _, sequence in sorted(ranked)]

    def _start_next(self, queue: StartQueue, reading: Container[str]) -> Sequence | None:
        """Start the queue's next sequence whose group is not in `reading`. None: there is none, or no slot or memory.

        A sequence is deferred while a running leader is about to read tokens that both have in common. The
        sequences that overtake it leave it a slot and memory. If memory is too short for a sequence, none overtakes it.
        """
        for sequence in tuple(queue.order):
            if self._cache.free_slots <= queue.deferred:
                return None
            if sequence.group in reading:
                continue
            queue.order.remove(sequence)
            self._cache.allocate(sequence.handle, _reusable_tokens(sequence), sequence.cache_salt)
            leader, common = self._leader(sequence)
            if leader is not None and self._worth_waiting(sequence, leader, common):
                self._cache.release(sequence.handle)
                queue.deferred += 1
                queue.owed_tokens += len(sequence.tokens) - common
                continue
            if leader is not None:
                self._cache.fork(leader.handle, sequence.handle, min(common, self._cache.length(leader.handle)))
            if not self._start(sequence, queue.owed_tokens):
                queue.order.clear()
                return None
            queue.started.append((sequence, self._cache.length(sequence.handle)))
            return sequence
        return None

    def _start(self, sequence: Sequence, owed_tokens: int) -> bool:
        """Start the sequence, or return False if there is not enough memory: for its tokens, or those that it holds at
        once, for the owed ones, and headroom for every running sequence. Nothing is reserved, and so no cached prefix
        is evicted, before it fits."""
        needed = self._target.layout.needed(len(sequence.tokens), self._cache.length(sequence.handle))
        headroom = owed_tokens + min(sequence.remaining, HEADROOM * len(self.running)) if self.running else 0
        if self._cache.room(sequence.handle) < needed + headroom:
            self._cache.release(sequence.handle)
            return False
        self._cache.reserve(sequence.handle, needed)
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_arrival)
        sequence.start()
        return True

    def _leader(self, sequence: Sequence) -> tuple[Sequence | None, int]:
        """(the running sequence with the longest prefix in common, its length); (None, 0) below MIN_SHARED tokens.

        Among equals it is the one that has read most. The last token never counts: its logits are needed.
        """
        best: Sequence | None = None
        best_lengths = (0, 0)  # in common, read by the leader
        tokens = _reusable_tokens(sequence)
        if self._cache.shares:
            for other in self.running:
                if other.cache_salt == sequence.cache_salt and other.tokens[:MIN_SHARED] == tokens[:MIN_SHARED]:
                    common = min(common_prefix(other.tokens, tokens), len(tokens) - 1)
                    lengths = common, self._cache.length(other.handle)
                    if lengths > best_lengths:
                        best, best_lengths = other, lengths
        return (best, best_lengths[0]) if best_lengths[0] >= MIN_SHARED else (None, 0)

    def _worth_waiting(self, sequence: Sequence, leader: Sequence, common: int) -> bool:
        """Whether the leader is about to read many common tokens that are not cached for the sequence yet."""
        cached = max(self._cache.length(leader.handle), self._cache.length(sequence.handle))
        return common - cached >= MIN_SHARED and self._target.uncached(leader) > 1


def _arrival(sequence: Sequence) -> int:
    return sequence.handle


def _reusable_tokens(sequence: Sequence) -> list[int]:
    """Tokens that need not be fed if the cache holds them: none while the prompt's log-probabilities are needed."""
    if sequence.params.prompt_logprobs is not None and not sequence.record.rounds:
        return []
    return sequence.tokens


def common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix, by bisection: comparing slices takes no more than memory bandwidth."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
