"""A round that fails is tried again: without drafts, then in halves, until each failing request is alone (R9).

One failing request among n costs two passes per halving, 2·log2(n) in all. Once a pass has succeeded, all halves are
tried to the end: at most 2·n passes, each smaller than the failed one. If about 4·log2(n) passes fail before any
succeeds, the device is taken to be broken, and the rest of the requests fail untried.
"""

import logging
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from engine.drafters.base import Draft, Drafter
from engine.memory.errors import out_of_memory
from engine.models.runner import Runner
from engine.round import FailedRequests, Outcome, run_round
from engine.sampling.acceptance import Verdict
from engine.scheduler import Plan

log = logging.getLogger(__name__)


class RescuedRound(NamedTuple):
    outcome: Outcome | None  # of the slices whose pass succeeded; None: every pass failed
    failures: FailedRequests  # the other sequences


def run_or_rescue(plan: Plan, target: Runner, drafter: Drafter) -> RescuedRound:
    """Run the plan's round. If it fails, run what can be saved of it."""
    attempts = RoundAttempts(target, drafter)
    outcome = attempts.run(plan, last=False)
    return RescuedRound(outcome, {}) if outcome is not None else attempts.retry_in_halves(plan.without_drafts())


class RoundAttempts:
    """Attempts at the round of one plan."""

    def __init__(self, target: Runner, drafter: Drafter) -> None:
        self._target = target
        self._drafter = drafter
        self._reason = ""  # of the last failure, safe to show to clients

    def run(self, plan: Plan, *, last: bool) -> Outcome | None:
        """Run the round; None if it raised. Then the target's cache is as before, the reserved memory is given back,
        and what the pass wrote is zeroed.

        last: nothing is undone, because the request ends and its memory is examined then. On return the failed pass's
        tensors are free: only the error referred to them.
        """
        sequences = [s.sequence for s in plan.slices]
        lengths = [self._target.cache.length(sequence.handle) for sequence in sequences]
        try:
            return run_round(plan, self._target, self._drafter)
        except Exception as error:
            log.exception("a round over %d sequences failed", len(sequences))
            self._reason = _reason(error)
        if not last:
            for sequence, length in zip(sequences, lengths, strict=True):
                self._target.undo_failed_pass(sequence, length)
        return None

    def retry_in_halves(self, plan: Plan) -> RescuedRound:
        """Run the plan. Halve the slices of every failed pass and run the halves, the larger ones first."""
        saved: list[tuple[int, Outcome]] = []
        failures: FailedRequests = {}
        patience = 4 * len(plan.slices).bit_length()  # failures before the first success
        failed = 0
        ranges = deque([range(len(plan.slices))])
        while ranges:
            current = ranges.popleft()
            slices = plan.slices[current.start : current.stop]
            alone, hopeless = len(current) == 1, not saved and failed >= patience
            outcome = None if hopeless else self.run(replace(plan, slices=slices), last=alone)
            failed += outcome is None
            if outcome is not None:
                saved.append((current.start, outcome))
            elif not alone and not hopeless:
                middle = len(current) // 2
                ranges += current[:middle], current[middle:]
            else:
                failures |= {s.sequence.handle: self._reason for s in slices}
        outcomes = [outcome for _, outcome in sorted(saved, key=lambda pair: pair[0])]
        return RescuedRound(_join(outcomes) if outcomes else None, failures)


def _reason(error: Exception) -> str:
    if out_of_memory(error):
        return "there was not enough memory to process this request"
    return "the model failed to process this request"


def _join(outcomes: Seq[Outcome]) -> Outcome:
    """One outcome from several rounds without drafts. Its draft counts as failed."""
    verdicts = [outcome.verdict for outcome in outcomes]
    slices = tuple(chain.from_iterable(outcome.slices for outcome in outcomes))
    return Outcome(
        slices,
        Draft.none(len(slices), failed=True),
        Verdict(
            accepted=list(chain.from_iterable(v.accepted for v in verdicts)),
            emitted=list(chain.from_iterable(v.emitted for v in verdicts)),
            non_finite=list(chain.from_iterable(v.non_finite for v in verdicts)),
            overlaps=list(chain.from_iterable(v.overlaps for v in verdicts)),
            num_illegal=0,
            drafts=list(chain.from_iterable(v.drafts for v in verdicts)),
        ),
        tuple(chain.from_iterable(outcome.logprobs for outcome in outcomes)),
        tuple(chain.from_iterable(outcome.prompt_logprobs for outcome in outcomes)),
        dict(chain.from_iterable(outcome.failures.items() for outcome in outcomes)),
        draft_us=sum(outcome.draft_us for outcome in outcomes),
        score_us=sum(outcome.score_us for outcome in outcomes),
        target_forward_us=sum(outcome.target_forward_us for outcome in outcomes),
        draft_forward_us=0,
        usual=all(outcome.usual for outcome in outcomes),
    )
