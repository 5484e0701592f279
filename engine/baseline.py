"""Estimates how long plain decoding would have taken for the tokens of a step. Speedups are relative to it.

The page and the metrics both sum `StepStats.plain_us`, so that they tell one speedup.
"""

from collections.abc import Sequence

from policies.cost import CostModel


def plain_seconds(
    cost: CostModel,
    *,
    batch: int,
    ks: Sequence[int],
    branched: bool,
    forwards: int,
    read: int,
    emitted: float,
    step_s: float,
    policy_s: float,
    faulty: bool,
) -> float:
    """Estimated seconds of plain decoding for `emitted` tokens of each of `batch` sequences, on the mean.

    ks: drafts per sequence. branched: whether a draft has several paths. forwards, read: of the draft model, and the
    tokens that it was fed. policy_s: the part of step_s that chose k. faulty: the drafter failed, or the pass over its
    drafts did.

    The estimate is a share of the real step: predicted plain seconds over predicted seconds of the step as it was. A
    machine that is busy with something else for a while slows both alike; the prediction alone was up to a third too
    low then. The time for choosing k counts against drafts, and so does a fault. A step without drafts is plain
    decoding: its estimate is its real time.
    """
    if not faulty and not any(ks):
        return step_s
    plain = cost.round_cost(batch, 0)
    plain_s = emitted * plain.of_round(0, 0, 0, 0)
    if faulty:
        return plain_s
    predicted_s = plain.of_round(sum(ks), max(ks), forwards, read, branched=branched)
    return plain_s / (predicted_s + policy_s) * step_s
