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
from numpy.typing import NDArray

from policies.observation import UNREAD, Floats, Ints, Observation
from policies.trees import MOST_NODES, Shapes, measure, places_of, shape_of

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
    by_model: Ints  # [N] 1 if the draft model makes it, else 0
    chance: Floats  # [N] that it and all drafts before it on its path are accepted
    read_s: Floats  # [N] seconds that the draft model reads for it; a first draft includes its gap, amortised


def expected_tokens(observation: Observation, ks: Ints, shapes: Shapes | None = None) -> float:
    """Mean number of tokens that the round emits: one for each sequence, and its accepted drafts.

    shapes: here and below, the trees of these drafts. By default only requests that fixed a tree have one.
    """
    depth, size = observation.survival.shape[1], observation.size
    shapes = (observation.trees if shapes is None else shapes) or (None,) * len(ks)
    places = [
        range(min(k, depth)) if shape is None else places_of(shape, depth, size)
        for k, shape in zip(ks.tolist(), shapes, strict=True)
    ]
    rows = np.repeat(np.arange(len(ks)), [len(row) for row in places])
    return len(ks) + float(observation.values[rows, list(chain.from_iterable(places))].sum())


def _work(observation: Observation, ks: Ints, shapes: Shapes, amortised: bool) -> tuple[int, int, int, float]:
    """(all drafts, the largest k, forwards of the draft model, tokens that it reads)."""
    drafts, longest, forwards, read = 0, 0, 0, 0.0
    columns = ks.tolist(), observation.gaps.tolist(), observation.horizon.tolist(), shapes or (None,) * len(ks)
    for k, gap, horizon, shape in zip(*columns, strict=True):  # quicker than arrays up to a hundred sequences
        if k:
            depth, inner = (k, k) if shape is None else measure(shape)
            drafts, longest = drafts + k, max(longest, k)
            if gap:
                forwards = max(forwards, depth)
                read += inner + (max(gap - UNREAD, 0) / horizon if amortised else gap - 1)
    return drafts, longest, forwards, read


def seconds(observation: Observation, ks: Ints, shapes: Shapes | None = None, amortised: bool = True) -> float:
    """Seconds of the round. amortised: a gap costs its share of the rounds over which reading it pays off."""
    shapes = observation.trees if shapes is None else shapes
    return observation.cost.seconds(*_work(observation, ks, shapes, amortised), branched=any(shapes))


def evaluate(observation: Observation, ks: Ints, shapes: Shapes | None = None) -> Allocation:
    """The expected outcome of these drafts. Its goodput is the objective that `plan` maximises."""
    shapes = observation.trees if shapes is None else shapes
    tokens = expected_tokens(observation, ks, shapes)
    return Allocation(ks, tokens / seconds(observation, ks, shapes), tokens, shapes)


def plan(observation: Observation, nothing: Allocation | None = None) -> Allocation:
    """The best drafts within the limits; among equals the fewest. Every round must cost some time.

    nothing: the plan with fixed drafts only, if it is known.
    """
    best = nothing = nothing or evaluate(observation, np.maximum(observation.fixed, 0))
    branches = observation.size and observation.siblings[observation.free].any()
    for table in (_chains, _trees) if branches else (_chains,):
        drafts = _ranked_drafts(observation, nothing.goodput, *table(observation))
        if drafts.sequence.size:
            found = _best_first(observation, nothing, drafts)
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
    model_s = cost.model_s + depths * cost.step_s + (reads + observation.behind[:, None]) * cost.token_s
    drafting_s = np.where(k > 0, cost.drafting_s + np.where(observation.gaps[:, None] > 0, model_s, 0.0), 0.0)
    return tokens / (cost.base_s + cost.verify_s[k] + cost.padding_s[k] + drafting_s)


def _chains(observation: Observation) -> tuple[Ints, Ints]:
    """(sequence, node) of the drafts of chains: the first nodes."""
    sequence, node = np.nonzero(np.arange(observation.survival.shape[1]) < observation.open[:, None])
    return sequence, node


def _trees(observation: Observation) -> tuple[Ints, Ints]:
    """(sequence, node) of the drafts of trees: of each sequence the most valuable ones."""
    most = max(4, MOST_NODES // 4 // len(observation.open))
    order = np.argsort(-observation.values, axis=1, kind="stable")[:, :most]
    possible = (np.take_along_axis(observation.values, order, 1) > 0) & (observation.open[:, None] > 0)
    sequence, place = np.nonzero(possible)
    return sequence, order[sequence, place]


def _ranked_drafts(observation: Observation, goodput: float, sequence: Ints, node: Ints) -> PossibleDrafts:
    """Drafts by their tokens less those that their seconds would bring otherwise, which never rise in a sequence.

    A gap counts in equal parts for all drafts of its sequence, so that the first one does not hide the cheap ones
    behind it. So does what the draft model reads, though only drafts with others behind them are read.
    """
    nodes, token_s, behind = observation.nodes, observation.cost.token_s, observation.behind
    modelled = observation.gaps > 0
    part_s = token_s * modelled * (1 + behind / np.maximum(observation.open, 1))
    order = np.argsort(goodput * part_s[sequence] - observation.values[sequence, node], kind="stable")
    sequence, node = sequence[order], node[order]
    by_model = modelled[sequence]
    read_s = token_s * by_model * ((nodes.ranks == 0)[node] + (node == 0) * behind[sequence])
    chance = observation.values[sequence, node]
    return PossibleDrafts(sequence, node, nodes.depths[node], by_model.astype(np.int64), chance, read_s)


@lru_cache(maxsize=1024)
def _depths(others: int, model: int) -> Ints:
    """[P, 2] largest depth to try, of drafts without a model and of the draft model's. Beside the model's, drafts
    without a model cost nothing for their depth up to the model's: they get that depth or the largest."""
    pairs = {(other, own) for own in range(model + 1) for other in (min(own, others), others)}
    pairs |= set() if model else {(other, 0) for other in range(others)}
    return np.array(sorted(pairs - {(0, 0)}))


def _best_first(observation: Observation, nothing: Allocation, drafts: PossibleDrafts) -> Allocation:
    """The best plan among those that take, for some pair of largest depths, the first n drafts no deeper than it, of
    chains or of trees.

    nothing: the plan without any of the drafts. A row's forwards are those of its depth. A plan that is less deep has
    its true seconds in another row.
    """
    cost, sequence = observation.cost, drafts.sequence
    others, model = (int(((drafts.position + 1) * (drafts.by_model == kind)).max()) for kind in (0, 1))
    depths = _depths(others, model)
    included = drafts.position < depths[:, drafts.by_model]  # [P, N]
    branched = observation.nodes.branched[drafts.node].any()
    numbers = _numbers(included, sequence) if branched else drafts.position + 1
    included &= numbers <= observation.limits[sequence]
    count = included.cumsum(1)
    fixed, longest, least, read = _work(observation, nothing.ks, nothing.shapes, True)
    forwards = np.maximum(depths[:, 1], least)
    once_s: Floats = (forwards > 0) * cost.model_s + forwards * cost.step_s + read * cost.token_s
    once_s += cost.base_s + cost.drafting_s
    round_s = once_s[:, None] + (included * drafts.read_s).cumsum(1) + cost.verify_s[fixed + count]
    if cost.padding_s[-1]:
        round_s += cost.padding_s[np.maximum(np.maximum.accumulate(numbers * included, axis=1), longest)]
    tokens = nothing.tokens + (included * drafts.chance).cumsum(1)
    goodput = tokens / round_s
    equal = np.flatnonzero(goodput >= goodput.max() * (1 - TIE))
    row, last = divmod(int(equal[count.ravel()[equal].argmin()]), sequence.size)
    taken = np.flatnonzero(included[row, : last + 1])
    ks = nothing.ks + np.bincount(sequence[taken], minlength=len(nothing.ks))
    shapes = _shapes(observation, nothing.shapes, sequence[taken], drafts.node[taken])
    slower = cost.tree if any(shapes) else 1.0
    return Allocation(ks, float(goodput[row, last]) / slower, float(tokens[row, last]), shapes)


def _numbers(included: NDArray[np.bool_], sequence: Ints) -> Ints:
    """[P, N] how many drafts of its sequence a row includes up to this one."""
    order = np.argsort(sequence, kind="stable")
    count = included[:, order].cumsum(1)
    first = np.searchsorted(sequence[order], sequence[order])
    numbers = np.empty_like(count)
    numbers[:, order] = count - count[:, first] + included[:, order[first]]
    return numbers


def _shapes(observation: Observation, shapes: Shapes, sequence: Ints, node: Ints) -> Shapes:
    """`shapes` and the trees that these drafts form."""
    depth, size = observation.survival.shape[1], observation.size
    branching = set(sequence[observation.nodes.branched[node] > 0].tolist())
    grown = list(shapes or [None] * len(observation.handles)) if branching else []
    for n in branching:
        grown[n] = shape_of(tuple(np.sort(node[sequence == n]).tolist()), depth, size)
    return tuple(grown) or shapes
