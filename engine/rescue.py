"""A round that fails is tried again: without drafts, then in halves, until who makes it fail is alone (R9).

One failing request of n costs two passes for each halving, 2·log2(n) in all. Where one pass has succeeded, the others
are tried to the end: at most 2·n passes, each of which is smaller than the one that failed. Where none has, the device
is taken for dead after some 4·log2(n) of them.
"""

import logging
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from engine.drafters.base import Draft, Drafter
from engine.host_memory import out_of_memory
from engine.models.runner import Runner
from engine.round import FailedRequests, Outcome, run_round
from engine.sampling.acceptance import Verdict
from engine.scheduler import Plan

log = logging.getLogger(__name__)


class RescuedRound(NamedTuple):
    outcome: Outcome | None  # of the slices whose passes succeeded; None: of none
    failures: FailedRequests  # the others'


def run_or_rescue(plan: Plan, target: Runner, drafter: Drafter) -> RescuedRound:
    """The plan's round, or what can be saved of it."""
    attempts = RoundAttempts(target, drafter)
    outcome = attempts.run(plan, last=False)
    return RescuedRound(outcome, {}) if outcome is not None else attempts.retry_in_halves(plan.without_drafts())


class RoundAttempts:
    """At one plan's round."""

    def __init__(self, target: Runner, drafter: Drafter) -> None:
        self._target = target
        self._drafter = drafter
        self._reason = ""  # of the last failure, safe to show

    def run(self, plan: Plan, *, last: bool) -> Outcome | None:
        """None if it failed: then the target's cache holds what it held, memory that was reserved is given back, and
        what the pass wrote there is zeroed. After the last attempt all stays, for the request ends, and what it holds
        is looked at then. The failed pass's tensors are free: they hang on the error, which is gone."""
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
        """Try the plan, the halves of what fails, the larger parts first, and so on."""
        saved: list[tuple[int, Outcome]] = []
        failures: FailedRequests = {}
        patience = 4 * len(plan.slices).bit_length()  # failures before the first success
        failed = 0
        parts = deque([range(len(plan.slices))])
        while parts:
            part = parts.popleft()
            slices = plan.slices[part.start : part.stop]
            alone, hopeless = len(part) == 1, not saved and failed >= patience
            outcome = None if hopeless else self.run(replace(plan, slices=slices), last=alone)
            failed += outcome is None
            if outcome is not None:
                saved.append((part.start, outcome))
            elif not alone and not hopeless:
                middle = len(part) // 2
                parts += part[:middle], part[middle:]
            else:
                failures |= {s.sequence.handle: self._reason for s in slices}
        outcomes = [outcome for _, outcome in sorted(saved, key=lambda pair: pair[0])]
        return RescuedRound(_joined(outcomes) if outcomes else None, failures)


def _reason(error: Exception) -> str:
    if out_of_memory(error):
        return "there was not enough memory to process this request"
    return "the model failed to process this request"


def _joined(outcomes: Seq[Outcome]) -> Outcome:
    """One outcome of rounds without drafts, in which no draft was made because a pass failed."""
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
    )
