"""The drafts of each sequence with which a round emits the most tokens per second, over all its sequences.

A round's goodput is its expected tokens divided by its predicted seconds. A draft is worth the chance that it and all
before it on its path are accepted (trees.py). So for any number of drafts n and any largest depth, the n drafts that
are worth most are the best choice. They form a chain or a tree for each sequence, because a draft is worth no more than
its parent and its lower siblings. The planner evaluates every n under every largest depth: of chains, and, where
sequences may branch, of trees, whose rounds take longer for themselves. This is exact where all drafts cost the same,
whatever a pass costs as a function of n: no model makes any, or the draft model makes all of them, has read every
sequence, and reads them for nothing if there are trees.

Elsewhere drafts are ranked by their worth less the worth of their seconds at the goodput without drafts (one step of
Dinkelbach 1967, On nonlinear fractional programming), which is an approximation. Standard library and numpy only.
"""

from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np

from policies.observation import UNREAD, Floats, Ints, Observation
from policies.trees import Shapes, depths_of, measure, places_of, shape_of

MOST_ENTRIES = 1 << 15  # drafts × pairs of depths to evaluate, some 3 ms: beyond, not every pair is tried
MOST_DRAFTS = 1 << 8  # of trees to evaluate, 0.2 ms: beyond, only the most valuable ones of each sequence
TIE = 1e-12  # relative: goodputs this close are equal, and then fewer drafts are better


class Allocation(NamedTuple):
    """A round, and what is expected of it."""

    ks: Ints  # [B]
    goodput: float  # tokens per second, with gaps amortised
    tokens: float
    shapes: Shapes = ()


class PossibleDrafts(NamedTuple):
    """The drafts that the policy may ask for, N of them, the most valuable first."""

    sequence: Ints  # [N] its place in the round
    node: Ints  # [N] among Observation.nodes
    position: Ints  # [N] 0 for the first draft on a path
    # [N, K + 1] by the largest depth that is allowed: its number among its sequence's drafts, 1 for the best; None: it
    # is its depth, because there are only chains
    numbers: Ints | None
    by_model: Ints  # [N] 1 if the draft model makes it, else 0
    chance: Floats  # [N] that it and all drafts before it on its path are accepted
    read_s: Floats  # [N] seconds that the draft model reads for it; a first draft includes its gap, amortised


Table = tuple[Ints, Ints, Ints | None]  # sequence, node and numbers of possible drafts, as in PossibleDrafts


def expected_tokens(observation: Observation, ks: Ints, shapes: Shapes | None = None) -> float:
    """Mean number of tokens that the round emits: one for each sequence, and its accepted drafts.

    shapes: here and below, the trees of these drafts. By default only requests that fixed a tree have one.
    """
    shapes = observation.trees if shapes is None else shapes
    chains = ks if not any(shapes) else np.where([shape is None for shape in shapes], ks, 0)
    within = np.arange(observation.survival.shape[1]) < chains[:, None]
    tokens = len(ks) + float(observation.survival[within].sum())
    if chains is not ks:
        depth = observation.survival.shape[1]
        places = [[] if shape is None else places_of(shape, depth, observation.size) for shape in shapes]
        rows = np.repeat(np.arange(len(ks)), [len(row) for row in places])
        tokens += float(observation.values[rows, list(chain.from_iterable(places))].sum())
    return tokens


def seconds(observation: Observation, ks: Ints, shapes: Shapes | None = None, amortised: bool = True) -> float:
    """Seconds of the round. amortised: a gap costs its share of the rounds over which reading it pays off."""
    shapes = (observation.trees if shapes is None else shapes) or (None,) * len(ks)
    drafts, longest, forwards, read = 0, 0, 0, 0.0
    columns = ks.tolist(), observation.gaps.tolist(), observation.horizon.tolist(), shapes
    for k, gap, horizon, shape in zip(*columns, strict=True):  # quicker than arrays up to a hundred sequences
        if k:
            depth, inner = (k, k) if shape is None else measure(shape)
            drafts, longest = drafts + k, max(longest, k)
            if gap:
                forwards = max(forwards, depth)
                read += inner + (max(gap - UNREAD, 0) / horizon if amortised else gap - 1)
    return observation.cost.seconds(drafts, longest, forwards, read, branched=any(shapes))


def _behind(observation: Observation) -> Floats:
    """[B] tokens of the gap to read in each round over which it is spread, beyond the one that every round reads."""
    return np.maximum(observation.gaps - UNREAD, 0) / observation.horizon


def evaluate(observation: Observation, ks: Ints, shapes: Shapes | None = None) -> Allocation:
    """The expected outcome of these drafts. Its goodput is the objective that `plan` maximises."""
    shapes = observation.trees if shapes is None else shapes
    tokens = expected_tokens(observation, ks, shapes)
    return Allocation(ks, tokens / seconds(observation, ks, shapes), tokens, shapes)


def plan(observation: Observation) -> Allocation:
    """The best drafts within the limits; among equals the fewest. Every round must cost some time."""
    best = nothing = evaluate(observation, np.maximum(observation.fixed, 0))
    branches = observation.size and observation.siblings[observation.free].any()
    tables = [_chains(observation), _trees(observation)] if branches else [_chains(observation)]
    for table in tables:
        drafts = _ranked_drafts(observation, nothing.goodput, table)
        if drafts.sequence.size:
            found = evaluate(observation, *_best_first(observation, nothing, drafts))
            best = found if found.goodput > best.goodput * (1 + TIE) else best
    return best


def lone_ks(observation: Observation) -> Ints:
    """[B] the k that each sequence would get in a round of its own: by the same objective for chains, and for trees
    among those of its most valuable drafts."""
    k = np.arange(observation.survival.shape[1] + 1)
    goodput = _lone_goodput(observation, observation.survival, k[None], k[None])
    if observation.size:
        nodes, none = observation.nodes, np.zeros((len(goodput), 1), np.int64)
        order = np.argsort(-observation.values, axis=1, kind="stable")[:, : len(k) - 1]
        depths = np.hstack([none, np.maximum.accumulate(nodes.depths[order] + 1, 1)])
        reads = np.hstack([none, (nodes.ranks[order] == 0).cumsum(1)])
        branched = np.hstack([none, np.maximum.accumulate(nodes.branched[order], 1)])
        trees = _lone_goodput(observation, np.take_along_axis(observation.values, order, 1), depths, reads)
        goodput = np.maximum(goodput, trees / np.where(branched, observation.alone.tree, 1))
    return np.where(k <= observation.limits[:, None], goodput, 0.0).argmax(1)


def _lone_goodput(observation: Observation, values: Floats, depths: Ints, reads: Ints) -> Floats:
    """[B, K + 1] of a round of each sequence alone, by its number of drafts. values: of the 1st, 2nd … draft; depths,
    reads: the most drafts on a path, and the drafts that are read, so far."""
    cost, k = observation.alone, np.arange(values.shape[1] + 1)
    tokens = 1 + np.hstack([np.zeros((len(values), 1)), values.cumsum(1)])
    model_s = cost.model_s + depths * cost.step_s + (reads + _behind(observation)[:, None]) * cost.token_s
    drafting_s = np.where(k > 0, cost.drafting_s + np.where(observation.gaps[:, None] > 0, model_s, 0.0), 0.0)
    return tokens / (cost.base_s + cost.verify_s[k] + cost.padding_s[k] + drafting_s)


def _limits(observation: Observation) -> Ints:
    """[B] most drafts that the policy may add."""
    return np.where(observation.fixed < 0, observation.limits, 0)


def _chains(observation: Observation) -> Table:
    """The drafts of chains: the first nodes."""
    sequence, node = np.nonzero(np.arange(observation.survival.shape[1]) < _limits(observation)[:, None])
    return sequence, node, None


def _trees(observation: Observation) -> Table:
    """The drafts of trees."""
    limits, depths = _limits(observation), observation.nodes.depths
    batch, deepest = observation.survival.shape
    order = np.argsort(-observation.values, axis=1, kind="stable")[:, : max(4, MOST_DRAFTS // batch)]
    within = depths[order][:, :, None] < np.arange(deepest + 1)
    numbers = within.cumsum(1)
    fits = (within & (numbers <= limits[:, None, None])).any(2)
    sequence, place = np.nonzero(fits & (np.take_along_axis(observation.values, order, 1) > 0))
    return sequence, order[sequence, place], numbers[sequence, place]


def _ranked_drafts(observation: Observation, goodput: float, table: Table) -> PossibleDrafts:
    """Drafts by their tokens less those that their seconds would bring otherwise, which never rise in a sequence.

    A gap counts in equal parts for all drafts of its sequence, so that the first one does not hide the cheap ones
    behind it. So does what the draft model reads, though only drafts with others behind them are read.
    """
    sequence, node, numbers = table
    nodes, token_s = observation.nodes, observation.cost.token_s
    chance = observation.values[sequence, node]
    modelled, behind = observation.gaps > 0, _behind(observation)
    part_s = token_s * modelled * (1 + behind / np.maximum(_limits(observation), 1))
    order = np.argsort(goodput * part_s[sequence] - chance, kind="stable")
    sequence, node = sequence[order], node[order]
    by_model = modelled[sequence]
    read_s = token_s * by_model * ((nodes.ranks == 0)[node] + (node == 0) * behind[sequence])
    position, kinds = nodes.depths[node], by_model.astype(np.int64)
    numbers = None if numbers is None else numbers[order]
    return PossibleDrafts(sequence, node, position, numbers, kinds, chance[order], read_s)


@lru_cache(maxsize=1024)
def _depths(others: int, model: int, every: bool) -> Ints:
    """[P, 2] largest depth to try, of drafts without a model and of the draft model's. Drafts without a model cost
    nothing for their depth up to the draft model's. every: otherwise they get that depth or the largest."""
    pairs = [
        (other, own)
        for own in range(model + 1)
        for other in (range(min(own, others), others + 1) if every else (min(own, others), others))
    ]
    return np.array(pairs[not any(pairs[0]) :])  # without (0, 0)


def _best_first(observation: Observation, nothing: Allocation, drafts: PossibleDrafts) -> tuple[Ints, Shapes]:
    """The best ks and shapes among those that take, for some pair of largest depths, the first n drafts no deeper than
    it, of chains or of trees.

    nothing: the plan without any of the drafts. The seconds of a row are those of a plan as deep as the row allows. A
    plan that is less deep has its true seconds in another row.
    """
    others, model = (int(((drafts.position + 1) * (drafts.by_model == kind)).max()) for kind in (0, 1))
    every = not model or (others + 1) * (model + 1) * drafts.sequence.size <= MOST_ENTRIES
    depths = _depths(others, model, every)
    allowed = depths[:, drafts.by_model]  # [P, N]
    included = drafts.position < allowed
    longest = depths.max(1)[:, None]
    if drafts.numbers is not None:
        numbers = np.take_along_axis(drafts.numbers, allowed.T, 1).T
        included &= numbers <= observation.limits[drafts.sequence]
        longest = np.maximum.accumulate(numbers * included, axis=1)
    count = included.cumsum(1)
    round_s = observation.cost.verify_s[int(nothing.ks.sum()) + count] + (included * drafts.read_s).cumsum(1)
    round_s += _seconds_of_depths(observation, nothing, depths)[:, None]
    padding_s, already = observation.cost.padding_s, int(nothing.ks.max())
    round_s += padding_s[np.maximum(longest, already)] - padding_s[already]
    goodput = (nothing.tokens + (included * drafts.chance).cumsum(1)) / round_s
    equal = np.flatnonzero(goodput >= goodput.max() * (1 - TIE))
    row, last = divmod(int(equal[count.ravel()[equal].argmin()]), drafts.sequence.size)
    taken = np.flatnonzero(included[row, : last + 1])
    ks = nothing.ks + np.bincount(drafts.sequence[taken], minlength=len(nothing.ks))
    return ks, _shapes(observation, nothing, drafts, taken)


def _shapes(observation: Observation, nothing: Allocation, drafts: PossibleDrafts, taken: Ints) -> Shapes:
    """The trees that the taken drafts form; () if all are chains."""
    if drafts.numbers is None:
        return nothing.shapes
    branching = set(drafts.sequence[taken[observation.nodes.branched[drafts.node[taken]] > 0]].tolist())
    if not branching:
        return nothing.shapes
    shapes = list(nothing.shapes) or [None] * len(nothing.ks)
    of_sequence = drafts.sequence[taken]
    for n in branching:
        nodes = np.sort(drafts.node[taken[of_sequence == n]])
        shapes[n] = shape_of(tuple(nodes.tolist()), observation.survival.shape[1], observation.size)
    return tuple(shapes)


def _seconds_of_depths(observation: Observation, nothing: Allocation, depths: Ints) -> Floats:
    """[P] seconds of the rounds without the target's pass over the drafts and what is read of them."""
    cost, ks = observation.cost, nothing.ks
    paths = np.array(depths_of(ks.tolist(), nothing.shapes)) if nothing.shapes else ks
    fixed = int(ks.sum())
    forwards = int(paths[observation.gaps > 0].max(initial=0))
    more = depths[:, 1] - forwards  # forwards of the draft model
    model_s = np.where(more > 0, more * cost.step_s + (0.0 if forwards else cost.model_s), 0.0)
    rest_s = nothing.tokens / nothing.goodput / (cost.tree if any(nothing.shapes) else 1) - cost.verify_s[fixed]
    return rest_s + (0.0 if fixed else cost.drafting_s) + model_s
