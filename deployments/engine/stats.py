"""What a step leaves behind: columns of the records of its requests, and the statistics of the step (R10)."""

from deployments.engine.round import Outcome
from deployments.engine.scheduler import Plan, Slice
from deployments.engine.types import DRAFTERS, RequestRecord, StepStats
from policies.reasons import REASONS


def note_round(record: RequestRecord, part: Slice, outcome: Outcome, i: int, step: int, emitted: int) -> None:
    """Add the round, in which this was the i-th sequence, to the request's record."""
    record.steps.append(step)
    record.planned.append(part.k)
    record.reasons.append(-1 if part.reason is None else REASONS.index(part.reason))
    record.alphas.append(round(1000 * part.alpha))
    record.drafted.append(outcome.draft.ks[i])
    record.accepted.append(outcome.verdict.accepted[i])
    record.emitted.append(emitted)
    record.proposer.append(_proposer(outcome, i, part))


def _proposer(outcome: Outcome, i: int, part: Slice) -> int:
    """Who proposed, as an index in DRAFTERS; -1: nobody."""
    draft = outcome.draft
    if not draft.ks[i]:
        return -1
    name = part.sequence.drafter if draft.proposers is None else draft.proposers[i]
    return -1 if name is None else DRAFTERS.index(name)


def step_stats(
    plan: Plan,
    outcome: Outcome | None,
    *,
    step: int,
    emitted: int,
    running: int,
    waiting: int,
    draft_faults: int,
    policy_us: int,
    step_us: int,
) -> StepStats:
    """outcome: None for a step without a round. draft_faults: those that no outcome reports."""
    expected = plan.expected
    return StepStats(
        step=step,
        sequences=len(plan.slices),
        prefill_tokens=plan.prefill_tokens,
        drafted=sum(outcome.draft.ks) if outcome else 0,
        accepted=sum(outcome.verdict.accepted) if outcome else 0,
        emitted=emitted,
        draft_us=outcome.draft_us if outcome else 0,
        draft_steps=outcome.draft.steps if outcome else 0,
        draft_tokens=outcome.draft.read if outcome else 0,
        score_us=outcome.score_us if outcome else 0,
        target_forward_us=outcome.target_forward_us if outcome else 0,
        draft_forward_us=outcome.draft.forward_us if outcome else 0,
        step_us=step_us,
        running=running,
        waiting=waiting,
        draft_faults=draft_faults + (outcome.draft.failed + outcome.verdict.illegal if outcome else 0),
        failed=bool(plan.slices) and outcome is None,
        preempted=len(plan.preempted),
        cached_tokens=sum(cached for _, cached in plan.started),
        decoding=len(expected.ks) if expected else 0,
        predicted_us=round(expected.seconds * 1e6) if expected else 0,
        predicted_tokens=expected.tokens if expected else 0.0,
        policy_us=policy_us,
    )
