"""The drafts of each sequence with which a round emits the most tokens per second, over all its sequences.

A round's goodput is its expected tokens divided by its predicted seconds. A draft is worth the chance that it and all
before it on its path are accepted (trees.py). A draft is worth no more than its parent and its lower siblings. So the n
drafts that are worth most form a chain or a tree for each sequence, and are the best n drafts under any largest depth.
The planner evaluates every n under every largest depth, for chains and for trees. Its plan is the best one if all
drafts cost the same. It is an approximation where some drafts come from a model and others do not, where a sequence has
a gap to read, and where the nodes of a tree differ in what the model reads. Drafts are ranked there by their worth less
the worth of their seconds at the goodput without drafts (one step of Dinkelbach 1967, On nonlinear fractional
programming). Standard library and numpy only.
"""

from collections import defaultdict
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from policies.observation import UNREAD, Bools, Floats, Ints, Observation, beyond_usual
from policies.trees import Shapes, measure, places_of, shape_of

TIE = 1e-12  # relative: goodputs this close are equal, and then fewer drafts are better


class Allocation(NamedTuple):
    """A round, and what is expected of it."""

    ks: Ints  # [B]
    shapes: Shapes  # [B]
    tokens: float
    goodput: float  # tokens per second, with gaps amortised


def expected_tokens(observation: Observation, ks: Ints, shapes: Shapes) -> float:
    """Mean number of tokens that the round emits: one for each sequence, and its accepted drafts."""
    if not ks.any():  # as in each plan that drafts must beat
        return float(len(ks))
    depth = observation.survival.shape[1]
    reached = np.zeros((len(ks), depth + 1))  # accepted drafts of a chain
    np.cumsum(observation.survival, axis=1, out=reached[:, 1:])
    tokens = 1 + reached[np.arange(len(ks)), np.minimum(ks, depth)]
    for n, shape in enumerate(shapes):
        if shape is not None:
            values = observation.values[n]  # only those of a chain where no drafts may branch
            tokens[n] = 1 + sum(values[node] for node in places_of(shape, depth) if node < len(values))
    return float(tokens.sum())


def _work(observation: Observation, ks: Ints, shapes: Shapes, amortised: bool) -> tuple[int, int, int, float]:
    """(all drafts, the largest k, forwards of the draft model, tokens that it reads)."""
    drafts, longest, forwards, read = 0, 0, 0, 0.0
    columns = ks.tolist(), observation.gaps.tolist(), observation.unread.tolist(), observation.horizon.tolist(), shapes
    for k, gap, unread, horizon, shape in zip(*columns, strict=True):  # quicker than arrays up to a hundred sequences
        if k:
            depth, inner = (k, k) if shape is None else measure(shape)
            drafts, longest = drafts + k, max(longest, k)
            if gap:
                forwards = max(forwards, depth)
                read += inner + (unread / horizon if amortised else min(gap, UNREAD) - 1 + unread)
    return drafts, longest, forwards, read


def seconds(observation: Observation, ks: Ints, shapes: Shapes, amortised: bool = True) -> float:
    """Seconds of the round. amortised: a gap costs its share of the rounds over which reading it pays off."""
    return observation.cost.of_round(*_work(observation, ks, shapes, amortised), branched=any(shapes))


def evaluate(observation: Observation, ks: Ints, shapes: Shapes) -> Allocation:
    """The expected outcome of these drafts. Its goodput is the objective that `plan` maximises."""
    tokens = expected_tokens(observation, ks, shapes)
    return Allocation(ks, shapes, tokens, tokens / seconds(observation, ks, shapes))


def fixed_drafts_only(observation: Observation) -> Allocation:
    """The drafts that requests fixed, and no others."""
    return evaluate(observation, np.maximum(observation.fixed, 0), observation.trees)


def plan(observation: Observation, least: Allocation | None = None, tree_margin: float = TIE) -> Allocation:
    """The best drafts within the limits; among equals the fewest. Every round must cost some time.

    least: what `fixed_drafts_only` returns, if it is known. tree_margin: share by which a plan with trees must beat the
    best one of chains. The larger of two noisy estimates is too high on average.
    """
    best = least = least or fixed_drafts_only(observation)
    for table, margin in zip(_tables(observation), (TIE, tree_margin), strict=False):
        found = _search(observation, least, table)
        best = found if found.goodput > best.goodput * (1 + margin) else best
    return best


def lone_ks(observation: Observation) -> Ints:
    """[B] the k that each sequence would get in a round of its own: by the same objective, of chains, and of trees of
    its most valuable drafts."""
    nodes, cost, drafts = observation.nodes, observation.alone, np.arange(1, observation.survival.shape[1] + 1)
    by_model, behind = observation.gaps[:, None] > 0, beyond_usual(observation.gaps, cost) / observation.left
    goodput = np.zeros((len(by_model), 1 + drafts.size))
    goodput[:, 0] = 1 / cost.of_round(0, 0, 0, 0)
    for table in _tables(observation):
        order = table[:, : drafts.size]
        forwards = np.where(by_model, np.maximum.accumulate(nodes.depths[order] + 1, 1), 0)
        read = np.where(by_model, (nodes.ranks[order] == 0).cumsum(1) + behind[:, None], 0.0)
        branched = np.maximum.accumulate(nodes.branched[order], 1) > 0
        round_s = cost.seconds(drafts, drafts, forwards, read, branched=branched)
        tokens = 1 + np.take_along_axis(observation.values, order, 1).cumsum(1)
        goodput[:, 1:] = np.maximum(goodput[:, 1:], tokens / round_s)
    return np.where(np.arange(1 + drafts.size) <= observation.limits[:, None], goodput, 0.0).argmax(1)


def _tables(observation: Observation) -> list[Ints]:
    """[B, ≥ K] what the drafts of each sequence may be, those that are worth most first: of chains, and of trees if the
    policy may choose any."""
    most = observation.survival.shape[1]
    tables = [np.broadcast_to(np.arange(most), observation.survival.shape)]
    if observation.sibling_chances[observation.free].any():  # half of the nodes may be too deep
        tables.append(np.argsort(-observation.values, axis=1, kind="stable")[:, : 2 * most])
    return tables


@lru_cache(maxsize=1024)
def _depths(others: int, model: int) -> Ints:
    """[P, 2] largest depth to try, of drafts without a model and of the draft model's. Beside the model's, drafts
    without a model cost nothing for their depth up to the model's: they get that depth or the largest."""
    pairs = {(other, own) for own in range(model + 1) for other in (min(own, others), others)}
    pairs |= set() if model else {(other, 0) for other in range(others)}
    return np.array(sorted(pairs - {(0, 0)}), np.int64).reshape(-1, 2)


def _search(observation: Observation, least: Allocation, table: Ints) -> Allocation:
    """The best plan among those that add, for some pair of largest depths, the first n drafts no deeper than it.

    table [B, M]: the possible drafts of each sequence, those that are worth most first. A plan's forwards are those of
    its depth. A plan that is less deep has its true seconds under another depth.
    """
    cost, kind = observation.cost, (observation.gaps > 0).astype(np.int64)
    order = _ranking(observation, least.goodput, table)  # N places in the table
    sequence, node = order // table.shape[1], table.ravel()[order]
    depth = observation.nodes.depths[node]
    depths = _depths(*(int((depth + 1)[kind[sequence] == k].max(initial=0)) for k in (0, 1)))
    if not depths.size:
        return least
    added = depth < depths[:, kind[sequence]]  # [P, N], as all below
    number = depth + 1
    if observation.nodes.branched[node].any():
        number = _numbers(added, order, table.shape)
    added &= number <= observation.open[sequence]
    fixed, longest, forwards, read = _work(observation, least.ks, least.shapes, True)
    drafts = fixed + added.cumsum(1)
    deepest = np.maximum(np.maximum.accumulate(number * added, axis=1), longest) if cost.padding_s[-1] else longest
    read_by = read + (added * _read(observation, sequence, node)).cumsum(1)
    round_s = cost.seconds(drafts, deepest, np.maximum(depths[:, 1:], forwards), read_by)
    tokens = least.tokens + (added * observation.values[sequence, node]).cumsum(1)
    goodput = tokens / round_s
    equal = np.flatnonzero(goodput >= goodput.max() * (1 - TIE))
    row, last = divmod(int(equal[drafts.ravel()[equal].argmin()]), order.size)
    chosen = order[: last + 1][added[row, : last + 1]]
    ks, shapes = _add_chosen(observation, least, table, chosen)
    slower = cost.tree if any(shapes) else 1.0
    return Allocation(ks, shapes, float(tokens[row, last]), float(goodput[row, last]) / slower)


def _ranking(observation: Observation, goodput: float, table: Ints) -> Ints:
    """[N] places of possible drafts in the table: by their tokens less those that their seconds would bring otherwise.

    What a sequence has to read counts in equal parts for all of its drafts, so that the first one does not hide the
    cheap ones behind it.
    """
    nodes, limits = observation.nodes, observation.open
    value = observation.values[np.arange(len(limits))[:, None], table]
    possible = nodes.depths[table] < limits[:, None]
    possible &= (value > 0) | (nodes.branched[table] == 0)
    parts = np.where(observation.gaps > 0, 1 + observation.behind / np.maximum(limits, 1), 0.0)
    loss = goodput * observation.cost.token_s * parts[:, None] - value
    places = np.flatnonzero(possible)
    return places[loss.ravel()[places].argsort(kind="stable")]


def _numbers(added: Bools, order: Ints, shape: tuple[int, ...]) -> Ints:
    """[P, N] how many drafts of its sequence are added up to this one."""
    table = np.zeros((len(added), *shape), np.int64)
    flat = table.reshape(len(added), -1)
    flat[:, order] = added
    return table.cumsum(2).reshape(flat.shape)[:, order]


def _read(observation: Observation, sequence: Ints, node: Ints) -> Floats:
    """[N] tokens that the draft model reads for each draft; a first draft includes its gap, amortised."""
    read = (observation.nodes.ranks[node] == 0) + (node == 0) * observation.behind[sequence]
    return np.where(observation.gaps[sequence] > 0, read, 0.0)


def _add_chosen(observation: Observation, least: Allocation, table: Ints, chosen: Ints) -> tuple[Ints, Shapes]:
    """The drafts of `least`, and those at the chosen places of the table."""
    sequence, node = chosen // table.shape[1], table.ravel()[chosen]
    shapes = list(least.shapes)
    branched = observation.nodes.branched[node] > 0
    if branched.any():
        grown = defaultdict[int, list[int]](list)
        for n, added in zip(sequence.tolist(), node.tolist(), strict=True):
            grown[n].append(added)
        for n in set(sequence[branched].tolist()):
            shapes[n] = shape_of(tuple(sorted(grown[n])), observation.survival.shape[1])
    return least.ks + np.bincount(sequence, minlength=len(shapes)), tuple(shapes)
