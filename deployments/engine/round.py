"""THE round: draft → score → accept → roll back, once, for every sequence of the plan at once.

k = 0 is plain decoding and a prefill chunk is a feed without drafts: there is no other path. Nothing here commits
tokens; the caller does, so a round that raises leaves every sequence as it was.
"""

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate
from time import perf_counter_ns

import torch

from deployments.engine.acceptance import Verdict, match
from deployments.engine.drafters.base import Draft, DraftBatch, Drafter, try_forget
from deployments.engine.runner import Feed, Runner
from deployments.engine.sampling import make_sampler
from deployments.engine.scheduler import Plan, Slice

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the round decided, for the slices that emit, in the plan's order."""

    slices: tuple[Slice, ...]
    draft: Draft
    verdict: Verdict
    draft_us: int
    score_us: int
    target_forward_us: int


def run_round(plan: Plan, target: Runner, drafter: Drafter, eos_ids: Seq[int]) -> Outcome:
    """One speculative round (Leviathan et al. 2023, Algorithm 1, with acceptance by equality: architecture R6)."""
    slices = tuple(s for s in plan.slices if s.emits)
    wanted = [s.k for s in slices]
    batch = _draft_batch(slices, wanted, target, eos_ids)
    started = perf_counter_ns()

    draft = _propose(drafter, batch, wanted, target.device)
    drafted = perf_counter_ns()

    forward_ns = target.forward_ns
    logits = target.run(_feeds(plan, draft), draft.tokens)
    drawn = batch.sampler.sample(logits, _rows(batch, draft))
    finite = logits.gather(1, drawn[:, None])[:, 0].abs() < torch.inf  # an argmax over NaN picks a NaN
    verdict = match(drawn, finite, draft.tokens, draft.ks, target.vocab_size)
    scored = perf_counter_ns()

    for sequence, accepted in zip(batch.sequences, verdict.accepted, strict=True):
        target.cache.truncate_to(sequence.handle, len(sequence.tokens) + accepted)
    observed = _observe(drafter, batch, verdict)
    return Outcome(
        slices,
        draft if observed else replace(draft, failed=True),
        verdict,
        draft_us=(drafted - started) // 1000,
        score_us=(scored - drafted) // 1000,
        target_forward_us=(target.forward_ns - forward_ns) // 1000,
    )


def _draft_batch(slices: Seq[Slice], wanted: Seq[int], target: Runner, eos_ids: Seq[int]) -> DraftBatch:
    sequences = tuple(s.sequence for s in slices)
    sampler = make_sampler(sequences, wanted, target.vocab_size, eos_ids, target.device)
    first_rows = accumulate((k + 1 for k in wanted), initial=0)
    return DraftBatch(sequences, sampler, tuple(first_rows)[:-1])


def _propose(drafter: Drafter, batch: DraftBatch, wanted: Seq[int], device: torch.device) -> Draft:
    """The drafter's proposals; a drafter that fails costs this round its drafts and nothing else (R9)."""
    if not any(wanted):
        return Draft.none(len(wanted))
    try:
        draft = drafter.propose(batch, wanted)
        _check(draft, wanted, device)
        return draft
    except Exception:
        log.exception("the drafter failed; this round runs without drafts")
        return Draft.none(len(wanted), failed=True)


def _check(draft: Draft, wanted: Seq[int], device: torch.device) -> None:
    """Raise ValueError unless the draft is what was asked for, in the form that the pass and the verifier take."""
    if any(not 0 <= k <= most for k, most in zip(draft.ks, wanted, strict=True)):
        raise ValueError(f"the drafter proposed {draft.ks} tokens where at most {tuple(wanted)} were asked for")
    tokens = draft.tokens
    if tokens is None:
        if any(draft.ks):
            raise ValueError(f"the drafter announced {draft.ks} tokens and gave none")
        return
    if tokens.dim() != 2 or tokens.shape[0] != len(wanted) or tokens.shape[1] < max(draft.ks):
        raise ValueError(f"the drafter announced {draft.ks} tokens and gave a table of shape {tuple(tokens.shape)}")
    if tokens.dtype is not torch.int64 or tokens.device.type != device.type:
        raise ValueError(f"the drafter gave {tokens.dtype} on {tokens.device}, not int64 on {device}")


def _observe(drafter: Drafter, batch: DraftBatch, verdict: Verdict) -> bool:
    """Whether the drafter took the verdict in. If not, it starts from nothing: what its caches hold is unknown (R9)."""
    try:
        drafter.observe(batch, verdict)
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
        feeds.append(Feed(s.sequence, s.committed, k, outputs=k + 1 if s.emits else 0))
    return feeds


def _rows(batch: DraftBatch, draft: Draft) -> list[int]:
    """The sampler's rows that were scored; all of them unless the drafter offered less than it was asked for."""
    return [first + j for first, k in zip(batch.offsets, draft.ks, strict=True) for j in range(k + 1)]
