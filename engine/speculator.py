"""Between the engine and its policy: makes candidates of sequences, and measurements of rounds."""

from collections.abc import Sequence as Seq
from time import perf_counter_ns

from cache.protocol import KVCache
from engine import trees
from engine.drafters.base import NO_OFFER, Drafter, Offer
from engine.round import Outcome
from engine.scheduler import Slice
from engine.sequence import Sequence
from engine.speculation import FOR_TREES
from engine.trees import Parents
from policies.control import SpecControl
from policies.held_choice import Decision
from policies.observation import Candidate, Drafted, Prefill, Timing


class Speculator:
    """Asks the policy for the k of a round's sequences, and reports to it what came of them."""

    def __init__(self, control: SpecControl, drafter: Drafter, cache: KVCache, *, trees: bool = True) -> None:
        """trees: whether a round may check trees of drafts."""
        self.control = control
        self._trees = trees
        self._drafter = drafter
        self._cache = cache
        self._resting = False  # whether the round belongs to a rest
        self._spent_ns = 0
        self._drafted = False  # whether the last round that was observed had drafts

    def plan(self, decoding: Seq[Sequence], prefill: Prefill) -> Decision:
        """k for sequences that decode in the coming round, whose pass also reads prompts.

        Each sequence must hold memory for one more token.
        """
        fixed, drafters = {s.handle: s.k for s in decoding}, [s.drafter for s in decoding]
        rest = self.control.rest(fixed, drafters)
        self._resting = rest is not None
        if rest is not None:
            return rest
        started = perf_counter_ns()
        decision = self.control.plain(fixed, drafters)
        if decision is None:
            most, choice_is_held = self.control.most, self.control.keeps_choice(fixed, drafters)
            decision = self.control.plan([self._candidate(s, most, choice_is_held) for s in decoding], prefill)
        self._spent_ns += perf_counter_ns() - started
        return decision

    def observe(self, outcome: Outcome, prefill: int, rest_us: int) -> None:
        """Learn from a round. `prefill`: tokens in its pass beyond one per sequence and their drafts."""
        if self._resting:
            self.control.rested((outcome.draft_us + outcome.score_us + rest_us) / 1e6)
            return
        started = perf_counter_ns()
        drafts = outcome.draft
        rest_us -= self._spent_ns // 1000  # the control counts the time of choosing k by itself
        timing = Timing(
            batch=len(outcome.slices),
            drafts=sum(drafts.ks),
            depth=max(drafts.ks, default=0),
            prefill=prefill,
            forwards=drafts.steps,
            read=drafts.read,
            draft_s=outcome.draft_us / 1e6,
            score_s=outcome.score_us / 1e6,
            host_s=0.0 if drafts.failed else max(0, rest_us) / 1e6,  # after a failure it holds the pass that was lost
            branched_drafts=outcome.siblings,
        )
        drafted, idle = list[Drafted](), list[int]()
        for i, part in enumerate(outcome.slices):
            one = _drafted(part, i, outcome)
            if one is None:
                idle.append(part.sequence.handle)
            else:
                drafted.append(one)
        self.control.observe(timing if outcome.usual else None, drafted, idle)
        self._drafted = timing.drafts > 0
        self._spent_ns += perf_counter_ns() - started

    def forget(self, handle: int) -> None:
        """The sequence is gone. Idempotent."""
        self.control.forget(handle)

    def spent_us(self) -> int:
        """Microseconds in the policy's code since the last call."""
        spent, self._spent_ns = self._spent_ns, 0
        if self._drafted:
            self.control.spent(spent / 1e9)
            self._drafted = False
        return spent // 1000

    def _candidate(self, sequence: Sequence, most: int, choice_is_held: bool) -> Candidate:
        """most: drafts that the policy may give. choice_is_held: the policy keeps its choice, and the choice's drafters
        always have drafts. So they are not asked, and `propose` gives as many as there is memory for."""
        left = max(0, sequence.remaining - 1)
        wanted = min(left, most if sequence.k is None else sequence.k)
        offer = NO_OFFER
        if wanted and sequence.drafter:
            offer = Offer(sequence.drafter, wanted, 1) if choice_is_held else self._drafter.offer(sequence, wanted)
        return Candidate(
            handle=sequence.handle,
            fixed=sequence.k,
            max_k=sequence.max_k,
            left=left,
            room=max(0, self._cache.room(sequence.handle) - 1),
            source=offer.source,
            offered=offer.max_k,
            gap=offer.gap,
            tree=sequence.tree,
            branches=offer.trees
            and self._trees
            and sequence.tree is None
            and not sequence.tree_depth
            and sequence.verifier in FOR_TREES,
        )


def _drafted(part: Slice, i: int, outcome: Outcome) -> Drafted | None:
    """What became of the drafts of the round's i-th sequence; None if it had none.

    If the drafter failed to make the drafts that it was asked for, they count as rejected. Such a round says
    nothing about siblings.
    """
    draft, verdict, sequence = outcome.draft, outcome.verdict, part.sequence
    if verdict.non_finite[i] or sequence.drafter is None:
        return None
    if not draft.ks[i]:
        return Drafted(sequence.handle, sequence.drafter, part.k, 0) if draft.failed and part.k else None
    source = (sequence.drafter if draft.proposers is None else draft.proposers[i]) or sequence.drafter
    drafted = Drafted(sequence.handle, source, draft.ks[i], verdict.accepted[i], verdict.overlaps[i])
    return _with_tree(drafted, draft.trees[i], verdict.paths[i]) if i in draft.trees else drafted


def _with_tree(drafted: Drafted, parents: Parents, path: Seq[int]) -> Drafted:
    """Add what a tree tells about first children and about their siblings. A chain tells no more than its length."""
    if trees.is_chain(parents):
        return drafted
    fates = trees.fates(parents, path)
    of_ranks = ([fate[rank] for fate in fates if rank < len(fate)] for rank in range(1, max(map(len, fates))))
    return drafted._replace(
        overlaps=tuple(float(fate[0]) for fate in fates),
        sibling_counts=tuple((len(accepted), sum(accepted)) for accepted in of_ranks),
    )
