"""What decoding takes without drafts, estimated while drafts are made: what speculation is to be compared with."""

from collections.abc import Sequence

from engine.types import StepStats
from policies.cost import CostModel
from policies.observation import Timing

MANY = 256  # steps, after which one in EVERY is enough to follow the machine: learning takes longer than estimating
EVERY = 4


class PlainTime:
    """Watches steps, and tells what the tokens of one would have taken without drafts.

    A step over b sequences that emitted E tokens stands for E / b plain steps over them. What one of these takes is a
    share of what the step took: that of the two predictions by a cost model of its own, which the rounds measured at
    the start (`timings`; see profiling.py) begin and every step that is watched corrects. So a machine that is busy
    with something else for a while slows both alike; compared with the real seconds, the prediction alone was up to a
    third too low then. The time that choosing k takes counts against drafts. A step without drafts took what it took:
    where nothing is drafted the estimated speedup is 1. Nothing is learned from a step in which drafts failed, and what
    that cost counts against them.
    """

    def __init__(self, depth: int, timings: Sequence[Timing] = ()) -> None:
        """depth: the largest k there is."""
        self._cost = CostModel(max(1, depth), timings)
        self._watched = 0

    def seconds(self, step: StepStats) -> float:
        """For the tokens of a step that read no prompt and over one sequence or more."""
        batch, took = len(step.parts), step.step_us / 1e6
        if faulty(step):
            return step.emitted / batch * self._cost.round_cost(batch, 0).seconds(0, 0, 0, 0)
        self._watched += 1
        if self._watched <= MANY or self._watched % EVERY == 0:
            self._cost.observe(_timing(step))
        if not step.drafted:
            return took
        cost = self._cost.round_cost(batch, 0)
        predicted = cost.seconds(step.drafted, _depth(step), step.draft_steps, step.draft_tokens)
        share = cost.seconds(0, 0, 0, 0) / (predicted + step.policy_us / 1e6)
        return step.emitted / batch * share * took


def faulty(step: StepStats) -> bool:
    """Whether drafts were asked for in vain: they failed, or the pass over them did."""
    return step.failed or step.draft_faults > 0


def _depth(step: StepStats) -> int:
    return max(part.drafted for part in step.parts)


def _timing(step: StepStats) -> Timing:
    return Timing(
        batch=len(step.parts),
        drafts=step.drafted,
        depth=_depth(step),
        prefill=0,
        forwards=step.draft_steps,
        read=step.draft_tokens,
        draft_s=step.draft_us / 1e6,
        score_s=step.score_us / 1e6,
        rest_s=max(0, step.step_us - step.draft_us - step.score_us - step.policy_us) / 1e6,
    )
