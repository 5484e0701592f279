"""Steps and records of runs that never ran."""

from typing import Any

from engine.types import REASONS, RequestRecord, RoundRecord, StepStats

PLAIN_STEP: dict[str, Any] = {
    "step": 0, "sequences": 1, "prefill_tokens": 0, "drafted": 0, "accepted": 0, "emitted": 1, "draft_us": 0,
    "draft_steps": 0, "draft_tokens": 0, "score_us": 1000, "target_forward_us": 1000, "draft_forward_us": 0,
    "step_us": 1000, "running": 1, "waiting": 0,
}  # fmt: skip


def step(**changes: Any) -> StepStats:
    """One sequence decodes plainly, unless changed."""
    return StepStats(**(PLAIN_STEP | changes))


def record(drafted: list[int], accepted: list[int], emitted: list[int], reason: str | None = None) -> RequestRecord:
    """reason: of all rounds but the first, in which the prompt was read and no k chosen; None: of no round."""
    chosen = -1 if reason is None else REASONS.index(reason)
    reasons = [-1, *[chosen] * (len(drafted) - 1)]
    rounds = [
        RoundRecord(k=d, reason=why, alpha=0, drafted=d, accepted=a, emitted=e, proposer=0 if d else -1)
        for why, d, a, e in zip(reasons, drafted, accepted, emitted, strict=True)
    ]
    return RequestRecord("r", 0, 3, max(drafted), 0.0, rounds=rounds)
