"""The k of each sequence with which a round emits the most tokens per second, all its sequences together.

A round's goodput is its expected tokens over its predicted seconds. A sequence's j-th draft is worth the chance that it
and all before it are accepted, which only falls with j. So for any number of drafts n and any greatest k, the n
worthiest slots (sequence, j) are the best ones, and those of a sequence among them are its first. To evaluate every n
under every greatest k is to evaluate every plan that may be the best, however irregular a pass' seconds are in n. That
is exact where all drafts to be decided about cost the same: all a model's, with no gap but what a round leaves, or none
a model's.

Elsewhere slots are ranked by their worth less what their seconds are worth at the best goodput known (Dinkelbach 1967,
On nonlinear fractional programming), again while that rises; and a sequence with a gap to read is ranked by the mean of
its first drafts, so that the dear first one does not hide the cheap ones behind it. This is an approximation, but what
it proposes is compared by the exact objective, and k = 0 for all is always compared. Standard library and numpy only.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from policies.observation import Bools, Floats, Ints, Observation

TIE = 1e-12  # goodputs that differ by a smaller share are equal: then fewer drafts are better
RANKINGS = 2  # most rankings of slots that differ in cost
GAIN = 1e-3  # that a ranking must have brought for another to be tried
BLOCK = 1 << 12  # slots × combinations of depths that are evaluated at once: few enough to stay in the cache
LONG = 1 << 10  # slots from which on combinations are evaluated one by one
ENTRIES = 1 << 15  # slots × combinations of depths: where kinds are mixed, combinations are left out for no more
THIN = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # the depths that are left then

LEFT = 2  # tokens that a round leaves unread at most: the last draft, if all were accepted, and the one behind it
NO_MODEL, CURRENT, BEHIND = range(3)  # kinds of slots: no model drafts; one does, gap up to LEFT; larger gap


class Allocation(NamedTuple):
    """A round, and what is expected of it."""

    ks: Ints  # [B]
    goodput: float  # tokens per second, gaps amortised
    seconds: float  # of this very round, with all that it reads
    tokens: float


class Positions(NamedTuple):
    """The drafts that there may be, N of them."""

    row: Ints  # [N] place of the sequence
    position: Ints  # [N] j, from 0
    kind: Ints  # [N] NO_MODEL, CURRENT or BEHIND
    value: Floats  # [N] tokens
    seconds: Floats  # [N] of the draft model's reading, amortised; a sequence's gap is in its first slot


def expected_tokens(observation: Observation, ks: Ints) -> float:
    """Mean number of tokens that the round emits: one for each sequence, and its accepted drafts."""
    within = np.arange(observation.survival.shape[1]) < ks[:, None]
    return len(ks) + float(observation.survival[within].sum())


def seconds(observation: Observation, ks: Ints, amortised: bool = True) -> float:
    """What the round takes. amortised: a gap costs only its share of the rounds in which having read it pays off."""
    cost = observation.cost
    read = (ks > 0) & (observation.gaps > 0)
    behind = _behind(observation)[read] if amortised else observation.gaps[read] - 1
    modelled = ks[read]
    round_s = cost.seconds(int(ks.sum()), int(ks.max(initial=0)), int(modelled.max(initial=0)), int(modelled.sum()))
    return round_s + float(behind.sum()) * cost.token_s


def _behind(observation: Observation) -> Floats:
    """[B] tokens to read in each round over which a gap is spread, beyond the one that every round reads."""
    return np.maximum(observation.gaps - LEFT, 0) / observation.horizon


def evaluate(observation: Observation, ks: Ints) -> Allocation:
    """What is expected of these ks, and the objective that `plan` maximises."""
    tokens = expected_tokens(observation, ks)
    return Allocation(ks, tokens / seconds(observation, ks), seconds(observation, ks, amortised=False), tokens)


def plan(observation: Observation) -> Allocation:
    """The best ks within the limits, those with the fewest drafts among equals. The cost of any round is positive."""
    best = evaluate(observation, np.maximum(observation.fixed, 0))
    slots = _slots(observation)
    if not slots.row.size:
        return best
    without = best
    alike = bool((slots.seconds == slots.seconds[0]).all())
    depths = _combinations(slots)
    for _ in range(RANKINGS):
        ranking = np.argsort(-(slots.value if alike else _worth(slots, best.goodput)), kind="stable")
        ranked = Positions._make(column[ranking] for column in slots)
        found = evaluate(observation, _best_prefix(observation, without, ranked, depths))
        gain = found.goodput / best.goodput - 1
        if gain > TIE:
            best = found
        if alike or gain <= GAIN:
            break
    return best


def even_plan(observation: Observation) -> Allocation:
    """The best of those that give everybody the same k, as far as the limits and what is fixed allow."""
    depths = np.arange(observation.survival.shape[1] + 1)
    free = observation.fixed < 0
    ks = np.where(free, np.minimum(depths[:, None], observation.limits), np.maximum(observation.fixed, 0))  # [K + 1, B]
    sums = np.hstack([np.zeros((len(free), 1)), observation.survival.cumsum(1)])
    tokens = len(free) + sums[np.arange(len(free)), ks].sum(1)
    cost, modelled = observation.cost, np.where(observation.gaps > 0, ks, 0)
    drafts, deepest, forwards = ks.sum(1), ks.max(1), modelled.max(1)
    behind = np.where(modelled > 0, _behind(observation), 0.0).sum(1)
    model_s = cost.model_s + forwards * cost.step_s + (modelled.sum(1) + behind) * cost.token_s
    seconds = cost.base_s + cost.verify_s[drafts] + cost.padding_s[deepest]
    seconds = seconds + np.where(drafts > 0, cost.drafting_s, 0.0) + np.where(forwards > 0, model_s, 0.0)
    return evaluate(observation, ks[int((tokens / seconds).argmax())])


def lone_ks(observation: Observation) -> Ints:
    """[B] k that each sequence would get in a round of its own, by the same objective."""
    cost, survival = observation.alone, observation.survival
    k = np.arange(survival.shape[1] + 1)
    tokens = np.ones((len(survival), k.size))
    np.cumsum(survival, axis=1, out=tokens[:, 1:])
    tokens[:, 1:] += 1
    drafting = np.where(k > 0, cost.drafting_s, 0.0)
    modelled = np.where(k > 0, cost.model_s + k * (cost.step_s + cost.token_s), 0.0)
    first = _behind(observation) * cost.token_s
    pass_s = cost.base_s + cost.verify_s[k] + cost.padding_s[k] + drafting
    model_s = np.where((observation.gaps > 0)[:, None], modelled + first[:, None] * (k > 0), 0.0)
    goodput = np.where(k <= observation.limits[:, None], tokens / (pass_s + model_s), 0.0)
    return goodput.argmax(1)


def _slots(observation: Observation) -> Positions:
    free = observation.free
    row, position = np.nonzero(np.arange(observation.survival.shape[1]) < observation.limits[free][:, None])
    row = free[row]
    gap = observation.gaps[row]
    kind = np.where(gap > LEFT, BEHIND, np.minimum(gap, CURRENT))
    token_s = observation.cost.token_s
    behind_s = np.where(position == 0, _behind(observation)[row], 0.0) * token_s
    model_s = np.where(kind == NO_MODEL, 0.0, token_s + behind_s)
    return Positions(row, position, kind, observation.survival[row, position], model_s)


def _worth(slots: Positions, goodput: float) -> Floats:
    """[N] what to rank slots by: tokens less what their seconds would have brought otherwise, non-increasing in j.

    In a row that rises at first, its upper concave hull: the first slots up to the best mean count as that mean.
    """
    net = slots.value - goodput * slots.seconds
    if not (slots.kind == BEHIND).any():
        return net
    grid = np.full((int(slots.row.max()) + 1, int(slots.position.max()) + 1), -np.inf)
    grid[slots.row, slots.position] = net
    place = np.arange(grid.shape[1])
    mean = np.cumsum(grid, axis=1) / (place + 1)
    pooled = place <= mean.argmax(1)[:, None]
    return np.where(pooled, mean.max(1, keepdims=True), grid)[slots.row, slots.position]


def _best_prefix(observation: Observation, without: Allocation, slots: Positions, depths: Ints) -> Ints:
    """[B] the best ks of those that take, for some row of `depths` [P, kinds], the first n slots no deeper than it.

    without: the plan with none of the slots. A row's seconds are those of a plan that is as deep as it allows: one
    that is not is evaluated at what it really takes in another row.
    """
    start, size = int(without.ks.sum()), slots.row.size
    common_s = float(slots.seconds.min())
    pass_s = observation.cost.verify_s[start : start + size + 1] + np.arange(size + 1) * common_s
    slots = slots._replace(seconds=slots.seconds - common_s)
    rest_s = _seconds_of_depths(observation, without, depths)[:, None]
    rows = max(1, BLOCK // size) if size <= LONG else 1
    search = _best_of_row if rows == 1 else _best_of_rows
    best, taken = 0.0, slots.row[:0]
    for at in range(0, len(depths), rows):
        included = slots.position < depths[at : at + rows, slots.kind]
        found, chosen = search(slots, included, without.tokens, pass_s, rest_s[at : at + rows])
        if found > best * (1 + TIE) or (found >= best * (1 - TIE) and chosen.size < taken.size):
            best, taken = found, chosen
    return without.ks + np.bincount(slots.row[taken], minlength=len(without.ks))


def _best_of_rows(
    slots: Positions, included: Bools, tokens: float, pass_s: Floats, rest_s: Floats
) -> tuple[float, Ints]:
    """(goodput, places of the slots taken) of the best first n of those that are `included` [rows of depths, N].

    tokens: of the round without any of them; pass_s: [≥ 1 + N] seconds by n; rest_s: [rows of depths, 1].
    """
    drafts = included.cumsum(1, dtype=np.int32)
    round_s = pass_s.take(drafts)
    if slots.seconds.any():
        round_s += (included * slots.seconds).cumsum(1)
    round_s += rest_s
    goodput = (included * slots.value).cumsum(1)
    goodput += tokens
    goodput /= round_s
    best = float(goodput.max())
    equal = np.flatnonzero(goodput >= best * (1 - TIE))
    row, last = divmod(int(equal[drafts.ravel()[equal].argmin()]), slots.row.size)
    return best, np.flatnonzero(included[row, : last + 1])


def _best_of_row(
    slots: Positions, included: Bools, tokens: float, pass_s: Floats, rest_s: Floats
) -> tuple[float, Ints]:
    """The same for a single row of depths, and faster where there are many slots: those left out take no time."""
    kept = np.flatnonzero(included)
    round_s = pass_s[1 : 1 + kept.size] + rest_s[0, 0]
    if slots.seconds.any():
        round_s += slots.seconds[kept].cumsum()
    goodput = (slots.value[kept].cumsum() + tokens) / round_s
    best = float(goodput.max())
    return best, kept[: int((goodput >= best * (1 - TIE)).argmax()) + 1]


def _seconds_of_depths(observation: Observation, without: Allocation, depths: Ints) -> Floats:
    """[P] all that the rounds take but for the target's pass over n drafts and the reading for each."""
    cost, ks = observation.cost, without.ks
    start, deepest = int(ks.sum()), int(ks.max())
    forwards = int(ks[observation.gaps > 0].max(initial=0))
    more = depths[:, CURRENT:].max(1) - forwards  # forwards of the draft model
    model_s = np.where(more > 0, more * cost.step_s + (0.0 if forwards else cost.model_s), 0.0)
    padding_s = cost.padding_s[np.maximum(depths.max(1), deepest)] - cost.padding_s[deepest]
    drafting_s = 0.0 if start else cost.drafting_s
    round_s = without.tokens / without.goodput - cost.verify_s[start]
    return round_s + drafting_s + model_s + padding_s


def _combinations(slots: Positions) -> Ints:
    """[P, kinds] greatest positions + 1 to try: all that matter if that is not too much, in any case if one kind is."""
    no_model, current, behind = (int(slots.position[slots.kind == kind].max(initial=-1)) + 1 for kind in range(3))
    mixed = (no_model > 0) + (current > 0) + (behind > 0) > 1
    for fineness in (2, 1, 0):
        depths = _depths(no_model, current, behind, fineness)
        if not mixed or depths.shape[0] * slots.row.size <= ENTRIES:
            break
    return depths


@lru_cache(maxsize=1024)
def _depths(no_model: int, current: int, behind: int, fineness: int) -> Ints:
    """Depths up to those given, of drafts without a model and of a model's. Sequences that are behind may be left out.

    fineness 2: every pair of depths; 1: every depth, the same for both or as deep as may be without a model; 0: few.
    """
    most = max(no_model, current, behind)
    grid = [d for d in range(most + 1) if fineness or d in THIN or d in (0, most)]
    combinations = {
        (min(without, no_model), min(model, current), min(late, behind))
        for model in grid
        for without in (grid if fineness == 2 else (model, no_model))
        for late in (0, model)
    }
    return np.array(sorted(combinations - {(0, 0, 0)}))
