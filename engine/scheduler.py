"""Who runs, and with how many tokens: continuous batching with chunked prefill under budgets of tokens and memory."""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Container
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import islice

from cache.protocol import CacheFull
from engine.models.runner import Runner
from engine.sequence import Sequence, State
from policies.held_choice import Decision
from policies.reasons import Reason

WORTH_SHARING = 16  # tokens in common, below which nobody waits for another's or shares its memory
HEADROOM = 16  # positions per running sequence that must be free after an admission, or it would soon be undone
READERS = 4  # groups whose prompts are read at the same time: if there were more, all would get their first token late
Chunk = Callable[[int], int]  # rows that verify → prompt tokens that may be in the same pass
Choose = Callable[[Seq[Sequence], int], Decision]  # decoding sequences, prompt tokens beside them → their k


@dataclass(frozen=True, slots=True)
class Slice:
    """One sequence's part of a round: feed `committed` tokens; if it `emits`, verify up to k drafts after them."""

    sequence: Sequence
    committed: int
    k: int
    emits: bool  # False: a prefill chunk that leaves more of the prompt to come
    scored: int = 0  # tokens of the prompt whose log-probability this part tells
    reason: Reason | None = None  # why k is that and no more; None: nobody chose it
    alpha: float = 0.0  # chance that its first draft is accepted
    confidence: float = 0.0  # the draft model may stop where it is less sure than this; 0: it never does


@dataclass(frozen=True, slots=True)
class Plan:
    slices: tuple[Slice, ...]  # by cache slot: neighbours in memory are neighbours in the pass
    started: tuple[tuple[Sequence, int], ...] = ()  # admitted by this plan, with how many tokens the cache had of each
    preempted: tuple[Sequence, ...] = ()  # whose memory this plan took back
    expected: Decision | None = None  # what the policy thought of it; None: nothing decoded

    @property
    def prefill_tokens(self) -> int:
        return sum(s.committed for s in self.slices if s.committed > 1 or not s.emits)

    def without_drafts(self) -> "Plan":
        """Nobody chose that."""
        return replace(self, slices=tuple(replace(s, k=0, reason=None) for s in self.slices))


@dataclass(slots=True)
class Queue:
    """The sequences that may start in one plan, and those that did."""

    order: list[Sequence]
    started: list[tuple[Sequence, int]] = field(default_factory=list)  # with how many tokens the cache had of each
    passed: int = 0  # sequences passed over,
    owed: int = 0  # and tokens that they will have to feed


class Scheduler:
    """Every running sequence advances in every step, or its memory is taken back. Groups are treated alike.

    Memory for what a plan feeds is reserved when it is made, that of a prompt when it is admitted. When memory runs out
    there are fewer drafts, then the youngest sequence has to wait again, and never the oldest: so the oldest always
    ends, and all do in their turn.

    A group is all choices of one client's request. The next sequence to start is that of the group which has the fewest
    running, of several the first to come: a group that has none comes before all that have any. What a pass reads of
    prompts is divided evenly between at most READERS groups, and what one does not need goes to the others; each group
    reads one prompt after another.
    """

    def __init__(self, target: Runner, choose: Choose, max_running: int, max_step_tokens: int, chunk: Chunk) -> None:
        self._target = target
        self._cache = target.cache
        self._choose = choose
        self._max_running = max_running
        self._max_step_tokens = max_step_tokens
        self._chunk = chunk
        self.waiting: list[Sequence] = []  # in order of arrival
        self.running: list[Sequence] = []  # in order of arrival

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_arrival)

    def plan(self) -> Plan:
        """Decoding goes first, then what is left of prompts, then who waits, while the budget lasts."""
        preempted = self._secure()
        decoding = [s for s in self.running if self._target.uncached(s) == 1]
        expected = self._choose(decoding, self._prefill(len(decoding))) if decoding else None
        slices = self._verifications(decoding, expected) if expected else []
        rows = sum(s.committed + s.k for s in slices)
        budget = self._max_step_tokens - rows
        if decoding:  # their streams wait for what else is in the pass
            budget = min(budget, self._chunk(rows))
        queue = Queue([] if preempted else self._order())
        slices += [self._part(sequence, count) for sequence, count in self._read(budget, queue).items()]
        slices.sort(key=lambda s: self._cache.slot(s.sequence.handle))
        return Plan(tuple(slices), tuple(queue.started), tuple(preempted), expected)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out wherever it is and free its memory. Idempotent, so that every exit path may call it."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        self._target.let_go(sequence)

    def _secure(self) -> list[Sequence]:
        """Memory for one more token of every running sequence, the oldest first; returns those that had to give way."""
        preempted: list[Sequence] = []
        for sequence in tuple(self.running):
            while sequence.state is State.RUNNING and self._cache.room(sequence.handle) < 1:
                preempted.append(self._preempt())
            if sequence.state is State.RUNNING:
                self._cache.reserve(sequence.handle, 1)
        return preempted

    def _preempt(self) -> Sequence:
        """Take back the memory of the youngest, to be computed again. Raises CacheFull if that is the oldest too."""
        if len(self.running) == 1:
            raise CacheFull("the cache has no room for one more token of the only sequence that holds memory")
        youngest = self.running.pop()
        self._target.let_go(youngest)
        youngest.preempt()
        self.add(youngest)
        return youngest

    def _prefill(self, rows: int) -> int:
        """About how many tokens of prompts will be in the pass."""
        pending = sum(left for s in self.running if (left := self._target.uncached(s)) > 1)
        pending += sum(len(s.tokens) for s in islice(self.waiting, self._max_running - len(self.running)))
        return min(pending, self._chunk(rows))

    def _verifications(self, decoding: Seq[Sequence], chosen: Decision) -> list[Slice]:
        """Every decoding sequence gets its token, and as many of its drafts as there is memory for."""
        slices = []
        for n, (sequence, wanted) in enumerate(zip(decoding, chosen.ks, strict=True)):
            k = min(wanted, self._cache.room(sequence.handle) - 1) if wanted else 0
            self._cache.reserve(sequence.handle, 1 + k)
            reason = chosen.reasons[n] if k == wanted else "cache"
            confidence = chosen.confidence if sequence.k is None else 0.0
            slices.append(Slice(sequence, 1, k, True, reason=reason, alpha=chosen.alphas[n], confidence=confidence))
        return slices

    def _read(self, budget: int, queue: Queue) -> dict[Sequence, int]:
        """How many tokens of which prompts are read. Prompts are started while there are tokens for them.

        A prompt that has begun gets a token even if the budget is less: max_step_tokens has room for that, being at
        least max_running × (1 + max_spec_length).
        """
        left = {s: count - 1 for s in self.running if (count := self._target.uncached(s)) > 1}
        fed = dict.fromkeys(left, 1)
        budget -= len(fed)
        while budget > 0:
            reading: dict[str, Sequence] = {}  # of each group the oldest prompt that has tokens left
            for sequence in left:
                reading.setdefault(sequence.group, sequence)
            while len(reading) < min(READERS, budget) and (new := self._start_next(queue, reading)) is not None:
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

    def _part(self, sequence: Sequence, count: int) -> Slice:
        """Up to `count` tokens: a failed pass may have given back what was reserved for the rest of its prompt."""
        count = min(count, self._cache.room(sequence.handle))
        self._cache.reserve(sequence.handle, count)
        emits = count == self._target.uncached(sequence)
        return Slice(sequence, count, 0, emits, scored=self._scored(sequence, count))

    def _scored(self, sequence: Sequence, chunk: int) -> int:
        """Rows of a chunk that precede another token of the prompt, where their log-probabilities were asked for."""
        if sequence.params.prompt_logprobs is None or sequence.record.rounds:
            return 0
        start = len(sequence.tokens) - self._target.uncached(sequence)
        return max(0, min(chunk, sequence.num_prompt - 1 - start))

    def _order(self) -> list[Sequence]:
        """The waiting sequences, the next to start first."""
        if not self.waiting or not self._cache.free_slots:
            return []
        members = Counter(sequence.group for sequence in self.running)
        ranked = []
        for sequence in self.waiting:
            ranked.append((members[sequence.group], sequence.handle, sequence))
            members[sequence.group] += 1
        return [sequence for _, _, sequence in sorted(ranked)]

    def _start_next(self, queue: Queue, reading: Container[str]) -> Sequence | None:
        """Start the next of the queue whose group is not in `reading`, if there are a slot and memory for it.

        One that can share what another is about to compute is passed over until then; whoever overtakes it leaves it a
        slot and memory. Where memory is short, nobody overtakes.
        """
        for sequence in tuple(queue.order):
            if self._cache.free_slots <= queue.passed:
                return None
            if sequence.group in reading:
                continue
            queue.order.remove(sequence)
            self._cache.allocate(sequence.handle, _findable(sequence), sequence.cache_salt)
            leader, common = self._leader(sequence)
            if leader is not None and self._worth_waiting(sequence, leader, common):
                self._cache.release(sequence.handle)
                queue.passed += 1
                queue.owed += len(sequence.tokens) - common
                continue
            if leader is not None:
                self._cache.fork(leader.handle, sequence.handle, min(common, self._cache.length(leader.handle)))
            if not self._start(sequence, queue.owed):
                queue.order.clear()
                return None
            queue.started.append((sequence, self._cache.length(sequence.handle)))
            return sequence
        return None

    def _start(self, sequence: Sequence, owed: int) -> bool:
        """Whether there is memory for all its tokens, for those owed, and some to go on for everybody; if so, it runs.

        Asked before anything is reserved: that would evict what others may find, and perhaps for nothing.
        """
        needed = self._target.uncached(sequence)
        headroom = owed + min(sequence.remaining, HEADROOM * len(self.running)) if self.running else 0
        if self._cache.room(sequence.handle) < needed + headroom:
            self._cache.release(sequence.handle)
            return False
        self._cache.reserve(sequence.handle, needed)
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_arrival)
        sequence.start()
        return True

    def _leader(self, sequence: Sequence) -> tuple[Sequence | None, int]:
        """The running sequence that has most tokens in common with it, and how many: less than all of its own, since
        the last one's logits are wanted. Of several the one that has read most."""
        best: Sequence | None = None
        most = (0, 0)
        tokens = _findable(sequence)
        if self._cache.shares:
            for other in self.running:
                if other.cache_salt == sequence.cache_salt and other.tokens[:WORTH_SHARING] == tokens[:WORTH_SHARING]:
                    common = min(common_prefix(other.tokens, tokens), len(tokens) - 1)
                    if (common, self._cache.length(other.handle)) > most:
                        best, most = other, (common, self._cache.length(other.handle))
        return (best, most[0]) if most[0] >= WORTH_SHARING else (None, 0)

    def _worth_waiting(self, sequence: Sequence, leader: Sequence, common: int) -> bool:
        """Whether the leader is about to read a large part of what they have in common and the cache has not."""
        there = max(self._cache.length(leader.handle), self._cache.length(sequence.handle))
        return common - there >= WORTH_SHARING and self._target.uncached(leader) > 1


def _arrival(sequence: Sequence) -> int:
    return sequence.handle


def _findable(sequence: Sequence) -> list[int]:
    """The tokens that need not be fed again where the cache has them: none while the prompt's own logits are wanted."""
    if sequence.params.prompt_logprobs is not None and not sequence.record.rounds:
        return []
    return sequence.tokens


def common_prefix(a: list[int], b: list[int]) -> int:
    """The length of the longest common prefix, by bisection over slices, which compare at the speed of memory."""
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
