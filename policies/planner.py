"""The k of each sequence with which a round emits the most tokens per second, over all its sequences.

A round's goodput is its expected tokens divided by its predicted seconds. The j-th draft of a sequence is worth the
chance that it and all before it are accepted, which only falls with j. So for any number of drafts n and any largest k,
the n drafts with the best chances are the best choice, and those of one sequence are its first ones. The planner
evaluates every n under every largest k. This is exact where all drafts cost the same, whatever a pass costs as a
function of n: the draft model makes all of them and has read every sequence, or no model makes any.

Elsewhere drafts are ranked by their worth less the worth of their seconds at the goodput without drafts (one step of
Dinkelbach 1967, On nonlinear fractional programming), which is an approximation. Standard library and numpy only.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from policies.observation import UNREAD, Floats, Ints, Observation

MOST_ENTRIES = 1 << 15  # drafts × pairs of depths to evaluate, some 3 ms: beyond, not every pair is tried
TIE = 1e-12  # relative: goodputs this close are equal, and then fewer drafts are better


class Allocation(NamedTuple):
    """A round, and what is expected of it."""

    ks: Ints  # [B]
    goodput: float  # tokens per second, with gaps amortised
    tokens: float


class PossibleDrafts(NamedTuple):
    """The drafts that the policy may ask for, N of them, the most valuable first."""

    sequence: Ints  # [N] its place in the round
    position: Ints  # [N] 0 for the first draft of a sequence
    by_model: Ints  # [N] 1 if the draft model makes it, else 0
    chance: Floats  # [N] that it and all drafts before it are accepted
    read_s: Floats  # [N] seconds that the draft model reads for it; a first draft includes its gap, amortised


def expected_tokens(observation: Observation, ks: Ints) -> float:
    """Mean number of tokens that the round emits: one for each sequence, and its accepted drafts."""
    within = np.arange(observation.survival.shape[1]) < ks[:, None]
    return len(ks) + float(observation.survival[within].sum())


def seconds(observation: Observation, ks: Ints, amortised: bool = True) -> float:
    """Seconds of the round. amortised: a gap costs its share of the rounds over which reading it pays off."""
    drafts, deepest, forwards, read = 0, 0, 0, 0.0
    columns = ks.tolist(), observation.gaps.tolist(), observation.horizon.tolist()
    for k, gap, horizon in zip(*columns, strict=True):  # quicker than arrays up to a hundred sequences
        if k:
            drafts, deepest = drafts + k, max(deepest, k)
            if gap:
                forwards, read = max(forwards, k), read + k + (max(gap - UNREAD, 0) / horizon if amortised else gap - 1)
    return observation.cost.seconds(drafts, deepest, forwards, read)


def _behind(observation: Observation) -> Floats:
    """[B] tokens of the gap to read in each round over which it is spread, beyond the one that every round reads."""
    return np.maximum(observation.gaps - UNREAD, 0) / observation.horizon


def evaluate(observation: Observation, ks: Ints) -> Allocation:
    """The expected outcome of these ks. Its goodput is the objective that `plan` maximises."""
    tokens = expected_tokens(observation, ks)
    return Allocation(ks, tokens / seconds(observation, ks), tokens)


def plan(observation: Observation) -> Allocation:
    """The best ks within the limits; among equals those with the fewest drafts. Every round must cost some time."""
    nothing = evaluate(observation, np.maximum(observation.fixed, 0))
    drafts = _ranked_drafts(observation, nothing.goodput)
    if not drafts.sequence.size:
        return nothing
    best = evaluate(observation, _best_first(observation, nothing, drafts))
    return best if best.goodput > nothing.goodput * (1 + TIE) else nothing


def lone_ks(observation: Observation) -> Ints:
    """[B] the k that each sequence would get in a round of its own, by the same objective."""
    cost, survival = observation.alone, observation.survival
    k = np.arange(survival.shape[1] + 1)
    tokens = 1 + np.hstack([np.zeros((len(survival), 1)), survival.cumsum(1)])
    model_s = cost.model_s + k * (cost.step_s + cost.token_s) + _behind(observation)[:, None] * cost.token_s
    drafting_s = np.where(k > 0, cost.drafting_s + np.where(observation.gaps[:, None] > 0, model_s, 0.0), 0.0)
    goodput = tokens / (cost.base_s + cost.verify_s[k] + cost.padding_s[k] + drafting_s)
    return np.where(k <= observation.limits[:, None], goodput, 0.0).argmax(1)


def _ranked_drafts(observation: Observation, goodput: float) -> PossibleDrafts:
    """Drafts by their tokens less those that their seconds would bring otherwise, which never rise in a sequence.

    A gap counts in equal parts for all drafts of its sequence, so that the first one does not hide the cheap ones
    behind it.
    """
    limits = np.where(observation.fixed < 0, observation.limits, 0)
    sequence, position = np.nonzero(np.arange(observation.survival.shape[1]) < limits[:, None])
    chance = observation.survival[sequence, position]
    modelled, behind = observation.gaps > 0, _behind(observation)
    token_s = observation.cost.token_s
    part_s = token_s * modelled * (1 + behind / np.maximum(limits, 1))
    order = np.argsort(goodput * part_s[sequence] - chance, kind="stable")
    sequence, position = sequence[order], position[order]
    by_model = modelled[sequence]
    read_s = token_s * by_model * (1 + (position == 0) * behind[sequence])
    return PossibleDrafts(sequence, position, by_model.astype(np.int64), chance[order], read_s)


@lru_cache(maxsize=1024)
def _depths(others: int, model: int, every: bool) -> Ints:
    """[P, 2] largest k to try, of drafts without a model and of the draft model's. Drafts without a model cost nothing
    for their depth up to the draft model's. every: otherwise they get that depth or the largest."""
    pairs = [
        (other, own)
        for own in range(model + 1)
        for other in (range(min(own, others), others + 1) if every else (min(own, others), others))
    ]
    return np.array(pairs[not any(pairs[0]) :])  # without (0, 0)


def _best_first(observation: Observation, nothing: Allocation, drafts: PossibleDrafts) -> Ints:
    """[B] the best ks among those that take, for some pair of largest ks, the first n drafts no deeper than it.

    nothing: the plan without any of the drafts. The seconds of a row are those of a plan as deep as the row allows. A
    plan that is less deep has its true seconds in another row.
    """
    others, model = (int(((drafts.position + 1) * (drafts.by_model == kind)).max()) for kind in (0, 1))
    every = not model or (others + 1) * (model + 1) * drafts.sequence.size <= MOST_ENTRIES
    depths = _depths(others, model, every)
    included = drafts.position < depths[:, drafts.by_model]  # [P, N]
    count = included.cumsum(1)
    round_s = observation.cost.verify_s[int(nothing.ks.sum()) + count] + (included * drafts.read_s).cumsum(1)
    round_s += _seconds_of_depths(observation, nothing, depths)[:, None]
    goodput = (nothing.tokens + (included * drafts.chance).cumsum(1)) / round_s
    equal = np.flatnonzero(goodput >= goodput.max() * (1 - TIE))
    row, last = divmod(int(equal[count.ravel()[equal].argmin()]), drafts.sequence.size)
    taken = drafts.sequence[: last + 1][included[row, : last + 1]]
    return nothing.ks + np.bincount(taken, minlength=len(nothing.ks))


def _seconds_of_depths(observation: Observation, nothing: Allocation, depths: Ints) -> Floats:
    """[P] seconds of the rounds without the target's pass over n drafts and the reading for each."""
    cost, ks = observation.cost, nothing.ks
    fixed, deepest = int(ks.sum()), int(ks.max())
    forwards = int(ks[observation.gaps > 0].max(initial=0))
    more = depths[:, 1] - forwards  # forwards of the draft model
    model_s = np.where(more > 0, more * cost.step_s + (0.0 if forwards else cost.model_s), 0.0)
    padding_s = cost.padding_s[np.maximum(depths.max(1), deepest)] - cost.padding_s[deepest]
    rest_s = nothing.tokens / nothing.goodput - cost.verify_s[fixed]
    return rest_s + (0.0 if fixed else cost.drafting_s) + model_s + padding_s
