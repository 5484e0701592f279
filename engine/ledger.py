"""What a step leaves behind: columns of the records of its requests, and the statistics of the step (R10)."""

import time

from engine.round import Outcome
from engine.scheduler import Plan, Slice
from engine.types import DRAFTERS, Part, RequestRecord, StepStats
from policies.reasons import REASONS


class Ledger:
    """Counts steps and their faults, and times the one that runs."""

    def __init__(self) -> None:
        self.steps = 0  # that are over
        self.draft_faults = 0  # since the last step's statistics, of those that no Outcome reports
        self._noted: list[tuple[RequestRecord, Part]] = []  # in this step
        self._began_ns = time.monotonic_ns()

    def begin(self) -> None:
        self.drop()
        self._began_ns = time.monotonic_ns()

    @property
    def spent_us(self) -> int:
        """Since the step began."""
        return (time.monotonic_ns() - self._began_ns) // 1000

    def note(self, part: Slice, outcome: Outcome, i: int, emitted: int) -> None:
        """Add the round, in which this was the i-th sequence, to its request's record; `close` adds its step's time."""
        noted = Part(
            k=part.k,
            reason=-1 if part.reason is None else REASONS.index(part.reason),
            alpha=round(1000 * part.alpha),
            drafted=outcome.draft.ks[i],
            accepted=outcome.verdict.accepted[i],
            emitted=emitted,
            proposer=_proposer(outcome, i, part),
        )
        record = part.sequence.record
        record.steps.append(self.steps + 1)
        record.planned.append(noted.k)
        record.reasons.append(noted.reason)
        record.alphas.append(noted.alpha)
        record.drafted.append(noted.drafted)
        record.accepted.append(noted.accepted)
        record.emitted.append(emitted)
        record.proposer.append(noted.proposer)
        record.batch.append(len(outcome.slices))
        record.began_us.append(self._began_ns // 1000 - round(1e6 * record.arrived))
        record.draft_us.append(outcome.draft_us)
        record.score_us.append(outcome.score_us)
        self._noted.append((record, noted))

    def drop(self) -> None:
        """The step broke down, if one runs: what it emitted reaches nobody but those whom it finished."""
        for record, _ in self._noted:
            if record.finished is None:
                record.emitted[-1] = 0
        self.settle()

    def settle(self) -> tuple[int, tuple[Part, ...]]:
        """The step ends now: (its microseconds, the rounds noted in it). Records are whole after this."""
        (noted, self._noted), step_us = (self._noted, []), self.spent_us
        for record, _ in noted:
            record.step_us.append(step_us)
        return step_us, tuple(part for _, part in noted)

    def close(
        self, plan: Plan, outcome: Outcome | None, *, emitted: int, running: int, waiting: int, policy_us: int
    ) -> StepStats:
        """The step is over. outcome: None for a step without a round."""
        self.steps += 1
        faults, self.draft_faults = self.draft_faults, 0
        (step_us, parts), expected = self.settle(), plan.expected
        return StepStats(
            step=self.steps,
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
            draft_faults=faults + (outcome.draft.failed + outcome.verdict.num_illegal if outcome else 0),
            failed=bool(plan.slices) and outcome is None,
            preempted=len(plan.preempted),
            cached_tokens=sum(cached for _, cached in plan.started),
            decoding=len(expected.ks) if expected else 0,
            predicted_us=round(expected.seconds * 1e6) if expected else 0,
            predicted_tokens=expected.tokens if expected else 0.0,
            policy_us=policy_us,
            began=self._began_ns / 1e9,
            parts=parts,
            requests=tuple(part.sequence.request_id for part in plan.slices),
        )


def _proposer(outcome: Outcome, i: int, part: Slice) -> int:
    """Who proposed, as an index in DRAFTERS; -1: nobody."""
    draft = outcome.draft
    if not draft.ks[i]:
        return -1
    name = part.sequence.drafter if draft.proposers is None else draft.proposers[i]
    return -1 if name is None else DRAFTERS.index(name)
