"""THE round: draft → score → accept → roll back, once, for every sequence of the plan at once.

k = 0 is plain decoding and a prefill chunk is a feed without drafts: there is no other path. Nothing here commits
tokens; the caller does, so a round that raises leaves every sequence as it was.
"""

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from time import perf_counter_ns

import torch
from torch import Tensor

from engine.drafters.base import Draft, DraftBatch, Drafter, DrafterFault, try_forget
from engine.models.runner import Feed, Runner
from engine.sampling.acceptance import Verdict
from engine.sampling.logprobs import Failure, Told, Wanted, tell_all, tell_one
from engine.sampling.sampler import Sampler
from engine.scheduler import Plan, Slice
from engine.verification import verify

log = logging.getLogger(__name__)


Failures = dict[int, str]  # handles of sequences whose requests end, and why: safe to show to their clients


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the round decided, for the slices that emit, in the plan's order."""

    slices: tuple[Slice, ...]
    draft: Draft
    verdict: Verdict
    logprobs: tuple[Told, ...]  # of each slice's emitted tokens; empty where not asked for
    prompt_logprobs: tuple[tuple[Slice, Told], ...]  # for any slices of the plan, of the prompt tokens that they scored
    failures: Failures  # of any slices of the plan: what only their requests wanted could not be made
    draft_us: int
    score_us: int
    target_forward_us: int


def run_round(plan: Plan, target: Runner, drafter: Drafter) -> Outcome:
    """One speculative round (Leviathan et al. 2023, Algorithm 1), each sequence with the verifier it asked for."""
    slices = tuple(s for s in plan.slices if s.emits)
    wanted = [s.k for s in slices]
    sequences = tuple(s.sequence for s in slices)
    sampler = Sampler(sequences, wanted, target.vocab_size, target.device)
    batch = DraftBatch(sequences, sampler, tuple(s.confidence for s in slices))
    started = perf_counter_ns()

    draft = _propose(drafter, batch, wanted)
    drafted = perf_counter_ns()

    forward_ns = target.forward_ns
    feeds = _feeds(plan, draft)
    logits, prompt_logits = _split(target.run(feeds, draft.tokens), feeds)
    verdict = verify(batch, draft, logits)
    failures: Failures = {}
    logprobs = _logprobs(batch, draft, verdict, logits, failures)
    prompt_logprobs = _prompt_logprobs(plan, feeds, prompt_logits, target, failures)
    scored = perf_counter_ns()

    for sequence, accepted, bad in zip(batch.sequences, verdict.accepted, verdict.bad, strict=True):
        if not bad:  # else its memory, rejected drafts' too, is to be cleared before anybody gets it
            target.cache.truncate_to(sequence.handle, len(sequence.tokens) + accepted)
            target.vouch(sequence)
    observed = _observe(drafter, batch, verdict)
    return Outcome(
        slices,
        draft if observed else replace(draft, failed=True),
        verdict,
        logprobs,
        prompt_logprobs,
        failures,
        draft_us=(drafted - started) // 1000,
        score_us=(scored - drafted) // 1000,
        target_forward_us=(target.forward_ns - forward_ns) // 1000,
    )


def _propose(drafter: Drafter, batch: DraftBatch, wanted: Seq[int]) -> Draft:
    """The drafter's proposals; a drafter that fails costs this round its drafts and nothing else (R9)."""
    if not any(wanted):
        return Draft.none(len(wanted))
    try:
        return drafter.propose(batch, wanted)
    except Exception:
        log.exception("the drafter failed; this round runs without drafts")
        return Draft.none(len(wanted), failed=True)


def _observe(drafter: Drafter, batch: DraftBatch, verdict: Verdict) -> bool:
    """Whether the drafter took the verdict in. If not, it starts from nothing: what its caches hold is unknown (R9)."""
    try:
        drafter.observe(batch, verdict)
    except DrafterFault:  # dealt with by the part that failed
        return False
    except Exception:
        log.exception("the drafter failed to observe; it forgets the round's sequences")
        for sequence in batch.sequences:
            try_forget(drafter, sequence)
        return False
    return True


def _feeds(plan: Plan, draft: Draft) -> list[Feed]:
    ks = iter(draft.ks)
    feeds = []
    for s in plan.slices:
        k = next(ks) if s.emits else 0
        feeds.append(Feed(s.sequence, s.committed, k, outputs=k + 1 if s.emits else 0, scored=s.scored))
    return feeds


def _split(logits: Tensor, feeds: Seq[Feed]) -> tuple[Tensor, Tensor | None]:
    """(rows to draw from, rows that score a prompt; None: no such rows)."""
    if not any(feed.scored for feed in feeds):
        return logits, None
    scores_prompt = [part for feed in feeds for part in [True] * feed.scored + [False] * feed.outputs]
    drawn = [row for row, scored in enumerate(scores_prompt) if not scored]
    scored = [row for row, scored in enumerate(scores_prompt) if scored]
    index = torch.tensor(drawn + scored, device=logits.device)
    return logits[index[: len(drawn)]], logits[index[len(drawn) :]]


def _logprobs(
    batch: DraftBatch, draft: Draft, verdict: Verdict, logits: Tensor, failures: Failures
) -> tuple[Told, ...]:
    """A second copy to the host, in rounds of which somebody asked for it."""
    told: list[Told] = [()] * len(batch.sequences)
    wanted: dict[int, Wanted] = {}
    first = 0
    for i, (sequence, k, emitted) in enumerate(zip(batch.sequences, draft.ks, verdict.emitted, strict=True)):
        if sequence.params.logprobs is not None:
            wanted[i] = Wanted(range(first, first + len(emitted)), emitted, sequence.params.logprobs)
        first += k + 1
    results = tell_all(logits, list(wanted.values())) if wanted else []
    for i, result in zip(wanted, results, strict=True):
        if isinstance(result, Failure):
            failures[batch.sequences[i].handle] = result.reason
        else:
            told[i] = result
    return tuple(told)


def _prompt_logprobs(
    plan: Plan, feeds: Seq[Feed], logits: Tensor | None, target: Runner, failures: Failures
) -> tuple[tuple[Slice, Told], ...]:
    """The row of a prompt's token tells of the next one."""
    if logits is None:
        return ()
    told: list[tuple[Slice, Told]] = []
    first = 0
    for s, feed in zip(plan.slices, feeds, strict=True):
        if not feed.scored:
            continue
        # The pass has fed this slice already: its first row is so far behind the cache's end.
        start = target.cache.length(s.sequence.handle) - feed.committed - feed.drafts + 1
        tokens = s.sequence.tokens[start : start + feed.scored]
        rows = logits[first : first + feed.scored]
        result = tell_one(rows, Wanted(range(feed.scored), tokens, s.sequence.params.prompt_logprobs or 0))
        if isinstance(result, Failure):
            failures[s.sequence.handle] = result.reason
        else:
            told.append((s, result))
        first += feed.scored
    return tuple(told)
