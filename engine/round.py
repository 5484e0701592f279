"""THE round: draft → score → accept → roll back, once, for every sequence of the plan at once.

Plain decoding is a round with k = 0, and a prefill chunk is a feed without drafts: there is no other path. The caller
commits the tokens, so a round that raises leaves every sequence as it was.
"""

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

from torch import Tensor

from engine import trees, verification
from engine.device.captured_round import (
    CapturedVerdict,
    can_capture,
    can_capture_drafts,
    filled_up,
    has_unplanned_form,
)
from engine.device.captured_trees import CapturedTrees
from engine.device.round_clock import HostClock, RoundClock, forwards_us
from engine.drafters.base import Draft, DraftBatch, Drafter, DrafterFault, try_forget
from engine.models.feeds import Feed
from engine.models.look_ahead import LookAheadFault
from engine.models.runner import PlannedPass, Runner
from engine.models.tree_moves import HeldTree, PlannedMoves
from engine.sampling.acceptance import Verdict
from engine.sampling.logprobs import (
    LogitRows,
    LogprobFailure,
    LogprobRequest,
    TokenLogprobs,
    compute_logprobs,
    compute_logprobs_alone,
)
from engine.sampling.sampler import Sampler
from engine.scheduler import Plan, Slice
from engine.trees import Parents
from engine.verification import verify

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlannedScores:
    """The target's pass over a round's drafts, and how it keeps the accepted nodes of trees."""

    scored: PlannedPass
    moves: PlannedMoves | None  # None: the host moves them, if there are any

    @classmethod
    def of(cls, feeds: Seq[Feed], batch: DraftBatch, shapes: Mapping[int, Parents], target: Runner) -> Self:
        scored, sequences = target.prepare(feeds), batch.sequences
        held = [
            HeldTree(i, sequences[i], len(sequences[i].tokens), parents, range(len(parents)))
            for i, parents in shapes.items()
        ]
        return cls(scored, PlannedMoves.of(target, held))


# What verifies drafts of the planned lengths and shapes.
Ahead = CapturedVerdict | PlannedScores
Moves = CapturedTrees | PlannedMoves  # moves the accepted nodes of trees
FailedRequests = dict[int, str]  # sequence handle → why its request ends, safe to show to the client


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round decided for the slices that emit, in the plan's order."""

    slices: tuple[Slice, ...]
    draft: Draft
    verdict: Verdict
    logprobs: tuple[TokenLogprobs, ...]  # of each slice's emitted tokens; empty if its request asks for none
    prompt_logprobs: tuple[tuple[Slice, TokenLogprobs], ...]  # of prompt tokens, for any slice of the plan
    failures: FailedRequests  # any slices of the plan whose log-probabilities could not be computed
    draft_us: int
    score_us: int
    target_forward_us: int
    draft_forward_us: int
    usual: bool = True  # False: parts of it were captured, or run for the first time; its time shows nothing

    @property
    def siblings(self) -> int:
        """The drafts that are not first children, in the trees that the plan asked for. A tree that a drafter makes by
        itself does not count: the drafter always drafts in this way."""
        wanted = (p for i, p in self.draft.trees.items() if self.slices[i].shape or self.slices[i].sequence.tree_depth)
        return sum(sum(map(bool, trees.ranks(parents))) for parents in wanted)

    def decided_drafts(self, i: int) -> tuple[int, ...]:
        """The i-th sequence's drafts. A chain gives all of them. A tree gives those on the accepted path and those
        rejected behind it."""
        drafts = self.verdict.drafts[i]
        if i not in self.draft.trees:
            return tuple(drafts)
        return tuple(drafts[node] for node in trees.decided(self.draft.trees[i], self.verdict.paths[i]))


def run_round(plan: Plan, target: Runner, drafter: Drafter, host_ns: HostClock | None = None) -> Outcome:
    """Run one speculative round (Leviathan et al. 2023, Algorithm 1), each sequence with its request's verifier.

    host_ns: the host's clock that times its parts; None: the time that passes.
    """
    slices = tuple(s for s in plan.slices if s.emits)
    planned_ks = [s.k for s in slices]
    captured = can_capture(plan, target)
    drafts_apart = not captured and can_capture_drafts(plan, target)
    batch = _make_batch(slices, target, captured=captured or drafts_apart)
    target.take_forwards()  # forgets the forwards of a round that failed
    graphs = target.staging.graphs
    known = 0 if graphs is None else graphs.discovered
    clock = RoundClock(target.device, host_ns)

    ahead = None if drafts_apart else _prepare(plan, batch, planned_ks, target)
    draft = _propose(drafter, batch, planned_ks)
    if any(planned_ks):
        clock.mark_drafted()
    if drafts_apart:
        batch = _make_batch(slices, target, captured=False)

    verdict, logits, starts, moves = _score(plan, batch, draft, ahead, target)
    _check_look_ahead(slices, verdict, target)
    failures: FailedRequests = {}
    logprobs = _logprobs(batch, starts, verdict, logits, failures)
    prompt_logprobs = _prompt_logprobs(plan, target, failures)
    draft_us, score_us = clock.stop(downloaded=bool(slices))
    target.staging.end()

    _roll_back(batch, verdict, target, moves)
    observed = _observe(drafter, batch, verdict)
    return Outcome(
        slices,
        draft if observed else replace(draft, failed=True),
        verdict,
        logprobs,
        prompt_logprobs,
        failures,
        draft_us=draft_us,
        score_us=score_us,
        target_forward_us=target.read_forwards(),
        draft_forward_us=forwards_us(draft.forwards),
        usual=graphs is None or graphs.discovered == known,
    )


def _make_batch(slices: Seq[Slice], target: Runner, *, captured: bool) -> DraftBatch:
    """A part of the round begins, whose numbers go to the device together: all of it, or what drafts or what verifies.

    captured: whether it may be captured. Then it has equally many rows for each of a rounded number of sequences.
    """
    sequences, ks = tuple(s.sequence for s in slices), [s.k for s in slices]
    target.staging.begin(fixed=captured)
    drawing, rows = filled_up(sequences, ks, target.staging.limits) if captured else (sequences, ks)
    sampler = Sampler(drawing, rows, target.vocab_size, target.device, target.staging)
    shapes = tuple(s.shape for s in slices) if any(s.shape for s in slices) else ()
    depths = tuple(s.tree_depth for s in sequences) if any(s.tree_depth for s in sequences) else ()
    confidences = tuple(s.confidence for s in slices)
    return DraftBatch(sequences, sampler, confidences, shapes, depths=depths, captured=captured)


def _propose(drafter: Drafter, batch: DraftBatch, planned_ks: Seq[int]) -> Draft:
    """The drafter's proposals. A drafter that raises costs the round its drafts and nothing else (R9)."""
    if not any(planned_ks):
        return Draft.none(len(planned_ks))
    try:
        return drafter.propose(batch, planned_ks)
    except Exception:
        log.exception("the drafter failed; this round runs without drafts")
        return Draft.none(len(planned_ks), failed=True)


def _check_look_ahead(slices: Seq[Slice], verdict: Verdict, target: Runner) -> None:
    """Raise LookAheadFault if look-ahead tokens may have spoilt scores: such a sequence gets no more of them, and the
    round is tried again."""
    spoilt = [s.sequence for s, bad in zip(slices, verdict.non_finite, strict=True) if bad and s.ahead]
    if target.look_ahead is not None and spoilt:
        for sequence in spoilt:
            target.look_ahead.refuse(sequence)
        raise LookAheadFault(f"scores of {len(spoilt)} sequences are not finite beside look-ahead tokens")


def _roll_back(batch: DraftBatch, verdict: Verdict, target: Runner, moves: Moves | None) -> None:
    """Drop the rejected drafts from the target's cache. The accepted ones of a tree move together before."""
    if moves is not None and verdict.last_rows is not None:
        moves.run(verdict.last_rows)
    else:
        paths = [(i, path) for i, path in verdict.paths.items() if not verdict.non_finite[i]]
        target.keep_paths((batch.sequences[i], len(batch.sequences[i].tokens), path) for i, path in paths)
    for sequence, accepted, non_finite in zip(batch.sequences, verdict.accepted, verdict.non_finite, strict=True):
        # A sequence with non-finite scores keeps all its memory until the engine clears it: others could get a part.
        if not non_finite:
            target.cache.truncate_to(sequence.handle, len(sequence.tokens) + accepted)
            target.mark_finite(sequence)


def _observe(drafter: Drafter, batch: DraftBatch, verdict: Verdict) -> bool:
    """Whether the drafter took in the verdict. If it raised, its caches are in an unknown state, so it forgets the
    round's sequences (R9)."""
    try:
        drafter.observe(batch, verdict)
    except DrafterFault:  # the drafter has forgotten them already
        return False
    except Exception:
        log.exception("the drafter failed to observe; it forgets the round's sequences")
        for sequence in batch.sequences:
            try_forget(drafter, sequence)
        return False
    return True


def _prepare(plan: Plan, batch: DraftBatch, ks: Seq[int], target: Runner) -> Ahead | None:
    """Put what the drafts that are planned need for their verification on its way to the device, so that it goes there
    together with what drafting needs. None: it is prepared when the drafts are known."""
    shapes = {i: shape for i, shape in enumerate(batch.shapes) if shape is not None and ks[i]}
    if batch.captured:
        return None if has_unplanned_form(batch, ks) else CapturedVerdict(batch, ks, target, shapes)
    if not target.staging.deferred or batch.depths:
        return None
    verification.prepare(batch, ks, shapes)
    return PlannedScores.of(_make_feeds(plan, ks, shapes), batch, shapes, target)


def _score(
    plan: Plan, batch: DraftBatch, draft: Draft, ahead: Ahead | None, target: Runner
) -> tuple[Verdict, Tensor | None, Seq[int], Moves | None]:
    """Score the drafts and decide about them. ahead: what `_prepare` returned.

    Returns (the verdict, the logits that led to it, the first row of each sequence among them, how accepted nodes are
    kept). There are no logits if nobody wants log-probabilities.
    """
    starts = tuple(accumulate((k + 1 for k in draft.ks), initial=0))[:-1]
    if batch.captured and CapturedVerdict.fits(batch, draft):
        if not isinstance(ahead, CapturedVerdict) or not ahead.holds(draft):
            ahead = CapturedVerdict.of(batch, draft, target)
        return *ahead.run(draft), ahead.starts, ahead.trees
    feeds = _make_feeds(plan, draft.ks, draft.trees)
    if not target.staging.deferred:  # the host moves accepted nodes, and nothing has to be sent ahead
        logits = target.run(feeds, draft.tokens)
        return verify(batch, draft, logits), logits, starts, None
    if not isinstance(ahead, PlannedScores) or ahead.scored.feeds != tuple(feeds):
        verification.prepare(batch, draft.ks, draft.trees)
        ahead = PlannedScores.of(feeds, batch, draft.trees, target)
    logits = target.compute(ahead.scored, draft.tokens)
    return verify(batch, draft, logits), logits, starts, ahead.moves


def _make_feeds(plan: Plan, ks: Seq[int], shapes: Mapping[int, Parents]) -> list[Feed]:
    drafted = enumerate(ks)
    feeds = []
    for s in plan.slices:
        i, k = next(drafted) if s.emits else (-1, 0)
        outputs = k + 1 if s.emits else 0
        feeds.append(Feed(s.sequence, s.committed, k, outputs, s.prompt_rows, shapes.get(i), s.ahead))
    return feeds


def _logprobs(
    batch: DraftBatch, starts: Seq[int], verdict: Verdict, logits: Tensor | None, failures: FailedRequests
) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of each sequence's emitted tokens. If a request asks for them, they take a second copy to the
    host. starts: each sequence's first row of the logits."""
    logprobs: list[TokenLogprobs] = [()] * len(batch.sequences)
    requests: dict[int, LogprobRequest] = {}
    for i, (sequence, first, emitted) in enumerate(zip(batch.sequences, starts, verdict.emitted, strict=True)):
        if sequence.params.logprobs is not None:
            path = verdict.paths.get(i, range(len(emitted) - 1))  # the root's row gives the path's first token
            rows = [first, *(first + 1 + node for node in path)]
            requests[i] = LogprobRequest(rows, emitted, sequence.params.logprobs)
    rows_of = None if logits is None else LogitRows.of(logits)
    results = [] if rows_of is None or not requests else compute_logprobs(rows_of, list(requests.values()))
    for i, result in zip(requests, results, strict=True):
        if isinstance(result, LogprobFailure):
            failures[batch.sequences[i].handle] = result.reason
        else:
            logprobs[i] = result
    return tuple(logprobs)


def _prompt_logprobs(plan: Plan, target: Runner, failures: FailedRequests) -> tuple[tuple[Slice, TokenLogprobs], ...]:
    """Log-probabilities of prompt tokens. The row of one token gives the log-probability of the next one."""
    wanted = [s for s in plan.slices if s.prompt_rows]
    if not wanted:
        return ()
    logits = LogitRows(target.prompt_logits, target.vocab_size, target.device)
    logprobs: list[tuple[Slice, TokenLogprobs]] = []
    first = 0
    for s in wanted:
        # The pass has fed this slice already, so the cache's length is the end of its feed. Prompts have no drafts.
        start = target.cache.length(s.sequence.handle) - s.committed + 1
        tokens = s.sequence.tokens[start : start + s.prompt_rows]
        rows = range(first, first + s.prompt_rows)
        request = LogprobRequest(rows, tokens, s.sequence.params.prompt_logprobs or 0)
        result = compute_logprobs_alone(logits, request)
        if isinstance(result, LogprobFailure):
            failures[s.sequence.handle] = result.reason
        else:
            logprobs.append((s, result))
        first += s.prompt_rows
    return tuple(logprobs)
