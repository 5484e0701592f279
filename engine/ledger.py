"""Writes down what a step did: one round in the record of each of its requests, and the step's statistics (R10)."""

import time

from engine.baseline import plain_seconds
from engine.round import Outcome
from engine.scheduler import Plan, Slice
from engine.types import DRAFTERS, REASONS, RoundRecord, StepStats
from policies.cost import CostModel


class Ledger:
    """Counts the steps and their faults, and times the running step."""

    def __init__(self, cost: CostModel) -> None:
        """cost: the policy's cost model, which learns from every round; it estimates the time of plain decoding."""
        self._cost = cost
        self.steps = 0  # number of steps that have ended
        self.draft_faults = 0  # faults since the last step's statistics that no Outcome reports
        # Rounds of the running step: (slice, what its round decided, its place there, emitted tokens).
        self._noted: list[tuple[Slice, Outcome, int, int]] = []
        self._began_ns = time.monotonic_ns()

    def begin(self) -> None:
        self.drop()
        self._began_ns = time.monotonic_ns()

    @property
    def spent_us(self) -> int:
        """Microseconds since the step began."""
        return (time.monotonic_ns() - self._began_ns) // 1000

    def note(self, part: Slice, outcome: Outcome, i: int, emitted: int) -> None:
        """Note the round of the i-th sequence of the outcome. `settle` adds it to the request's record."""
        self._noted.append((part, outcome, i, emitted))

    def drop(self) -> None:
        """Settle a step that raised. Its tokens reach only the requests that it finished; the others emitted none."""
        noted = self._noted
        self._noted = [
            (s, outcome, i, n if s.sequence.record.finished is not None else 0) for s, outcome, i, n in noted
        ]
        self.settle()

    def settle(self) -> tuple[int, tuple[RoundRecord, ...]]:
        """End the step: add the noted rounds to their records. Returns (microseconds of the step, its rounds)."""
        (noted, self._noted), step_us = (self._noted, []), self.spent_us
        parts = tuple(self._record(*one, step_us) for one in noted)
        for (part, _, _, _), record in zip(noted, parts, strict=True):
            part.sequence.record.add(record)
        return step_us, parts

    def _record(self, part: Slice, outcome: Outcome, i: int, emitted: int, step_us: int) -> RoundRecord:
        draft, verdict = outcome.draft, outcome.verdict
        return RoundRecord(
            k=part.k,
            reason=-1 if part.reason is None else REASONS.index(part.reason),
            alpha=round(1000 * part.alpha),
            drafted=draft.ks[i],
            accepted=verdict.accepted[i],
            emitted=emitted,
            proposer=_proposer(outcome, i, part),
            step=self.steps + 1,
            batch=len(outcome.slices),
            began_us=self._began_ns // 1000 - round(1e6 * part.sequence.record.arrived),
            draft_us=outcome.draft_us,
            score_us=outcome.score_us,
            step_us=step_us,
            tree=draft.trees.get(i, ()),
            path=tuple(verdict.paths.get(i, ())),
        )

    def close(
        self, plan: Plan, outcome: Outcome | None, *, emitted: int, running: int, waiting: int, policy_us: int
    ) -> StepStats:
        """End the step and return its statistics. outcome: None for a step without a round."""
        faults, self.draft_faults = self.draft_faults, 0
        faults += outcome.draft.failed + outcome.verdict.num_illegal if outcome else 0
        (step_us, parts), expected = self.settle(), plan.expected
        self.steps += 1
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
            draft_forward_us=outcome.draft_forward_us if outcome else 0,
            step_us=step_us,
            running=running,
            waiting=waiting,
            draft_faults=faults,
            failed=bool(plan.slices) and outcome is None,
            preempted=len(plan.preempted),
            cached_tokens=sum(cached for _, cached in plan.started),
            decoding=len(expected.ks) if expected else 0,
            predicted_us=round(expected.seconds * 1e6) if expected else 0,
            predicted_tokens=expected.tokens if expected else 0.0,
            policy_us=policy_us,
            plain_us=(
                self._plain_us(outcome, emitted / len(parts), step_us, policy_us, faults)
                if outcome and parts and not plan.prefill_tokens
                else 0
            ),
            began=self._began_ns / 1e9,
            parts=parts,
            requests=tuple(part.sequence.request_id for part in plan.slices),
        )

    def _plain_us(self, outcome: Outcome, emitted: float, step_us: int, policy_us: int, faults: int) -> int:
        """emitted: mean tokens per sequence."""
        plain_s = plain_seconds(
            self._cost,
            batch=len(outcome.slices),
            ks=outcome.draft.ks,
            branched=outcome.siblings > 0,
            forwards=outcome.draft.steps,
            read=outcome.draft.read,
            emitted=emitted,
            step_s=step_us / 1e6,
            policy_s=policy_us / 1e6,
            faulty=faults > 0,
        )
        return round(1e6 * plain_s)


def _proposer(outcome: Outcome, i: int, part: Slice) -> int:
    """Return the index in DRAFTERS of the drafter that proposed; -1: none did."""
    draft = outcome.draft
    if not draft.ks[i]:
        return -1
    name = part.sequence.drafter if draft.proposers is None else draft.proposers[i]
    return -1 if name is None else DRAFTERS.index(name)
