"""Grows trees by what the draft model itself says (EAGLE-2, Li et al. 2024, arXiv 2406.16858, section 4).

A node's value is the product of the chances on its path, as the draft model estimates them (siblings.log_chances). At
each depth the model reads the most valuable nodes, and at the end the most valuable nodes of all depths are kept. A
child is never worth more than its parent, so they form a tree. Its shape depends on the drawn tokens: only verifiers
that draw the target's own tokens are exact on it.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.drafters.base import Draft, DraftBatch
from engine.drafters.model_trees import FedTree, mark_non_finite
from engine.models.feeds import Feed
from engine.models.runner import Runner
from engine.sampling.siblings import log_chances
from engine.trees import ROOT, Growth, Parents, chain, trunk

WIDTH = 6  # children that a node may have
DROPPED = ROOT - 1  # in place of a node that was read, and is not in the tree

ReadNode = tuple[int, int]  # (index of a sequence in the batch, place of a node among those that were read, or ROOT)


class Found(NamedTuple):
    """A token that may become a node."""

    order: tuple[float, int]  # −log of its value, then its depth: a parent comes before its children
    parent: int  # its parent's place among the nodes that were read
    rank: int  # among its siblings
    source: int  # where its token stands among all that were drawn


@dataclass(slots=True)
class GrowingTree:
    """One sequence's tree in the making: `found` are the most valuable nodes so far, the best first."""

    most: Growth
    found: list[Found] = field(default_factory=list)
    read: list[Found] = field(default_factory=list)  # those that the model has read, or is about to
    depth: int = 0  # the depth of the nodes that were drawn last
    worst: float = inf  # as Found.order, of the last node that is kept; inf: there is room for any

    @property
    def parents(self) -> Parents:
        """The shape of the nodes that were read, in their order."""
        return tuple(node.parent for node in self.read)

    def add(self, parent: int, chances: Seq[float], first: int) -> None:
        """Take the children of a node. chances: their logs, the largest first. first: where the first token stands."""
        above = 0.0 if parent == ROOT else self.read[parent].order[0]
        for rank, chance in enumerate(chances):
            if not above - chance < self.worst:
                break
            self.found.append(Found((above - chance, self.depth), parent, rank, first + rank))

    def expand(self) -> list[Found]:
        """Keep the best nodes. Returns the nodes of the latest depth that the model reads next."""
        self.found.sort(key=attrgetter("order"))
        del self.found[self.most.nodes :]
        if len(self.found) == self.most.nodes:
            self.worst = self.found[-1].order[0]
        levels = self.most.depth - self.depth  # that are still to come
        if levels <= 0:  # others may go deeper
            return []
        # The model reads fewer nodes than the tree may have, as with any tree, and at least one for each level.
        left = self.most.nodes - len(self.read) - levels
        new = [node for node in self.found if node.order[1] == self.depth][: min(left, -(-left // levels) + 1)]
        self.read += new
        return new

    def shape(self) -> tuple[Parents, list[Found], list[int]]:
        """(the parents of the tree depth first, its nodes, the node at each place that was read)."""
        places = {id(node): place for place, node in enumerate(self.read)}
        children: dict[int, list[Found]] = {}
        for node in sorted(self.found, key=attrgetter("rank"), reverse=True):
            children.setdefault(node.parent, []).append(node)
        parents, nodes, numbers = list[int](), list[Found](), [DROPPED] * len(self.read)
        waiting = [(node, ROOT) for node in children.get(ROOT, [])]
        while waiting:
            node, parent = waiting.pop()
            place = places.get(id(node))
            if place is not None:
                numbers[place] = len(nodes)
                waiting += [(child, len(nodes)) for child in children.get(place, [])]
            nodes.append(node)
            parents.append(parent)
        return tuple(parents), nodes, numbers


class GrowthReader(Protocol):
    """Gives the logits [n, vocab] behind new nodes [n], whose tokens [n] are given. Their parents were read before."""

    steps: int  # so far
    read: int  # nodes so far

    def __call__(self, level: Seq[ReadNode], trees: Mapping[int, GrowingTree], tokens: Tensor) -> Tensor: ...


class FedNodes:
    """Feeds a draft model the nodes of growing trees, in one pass for each depth."""

    def __init__(self, runner: Runner, batch: DraftBatch) -> None:
        self._runner = runner
        self._batch = batch
        self.fed: dict[int, FedTree] = {}
        self.steps = 0
        self.read = 0

    def __call__(self, level: Seq[ReadNode], trees: Mapping[int, GrowingTree], tokens: Tensor) -> Tensor:
        by_sequence: dict[int, list[int]] = {}
        for i, place in level:
            by_sequence.setdefault(i, []).append(place)
        feeds, rows = list[Feed](), list[int]()
        first, columns = 0, max(map(len, by_sequence.values()))
        for i, places in by_sequence.items():
            fed = self.fed.setdefault(i, FedTree(()))
            fed.parents = trees[i].parents
            feeds.append(fed.feed(self._batch.sequences[i], places))
            rows += [*range(first, first + len(places)), *[first] * (columns - len(places))]
            first += len(places)
        self.steps, self.read = self.steps + 1, self.read + len(level)
        ids = tokens.index_select(0, self._batch.sampler.numbers.index(rows).tensor).view(-1, columns)
        return self._runner.run(feeds, ids)


class GrownDraft:
    """A draft of growing trees. Each depth costs a copy of the chances to the host, which decides what is read next."""

    def __init__(self, batch: DraftBatch, growths: Mapping[int, Growth], vocab: int, device: torch.device) -> None:
        """growths: index of a sequence in the batch → the limits of its tree, which has at least one node."""
        self.trees = {i: GrowingTree(most) for i, most in growths.items()}
        self.shapes: dict[int, Parents] = {}  # of the finished trees
        self.numbers: dict[int, list[int]] = {}  # per place that was read, the node of the finished tree
        self._batch = batch
        self._vocab = vocab
        self._size = max(most.nodes for most in growths.values())
        self._table = torch.zeros(len(batch.sequences), self._size, dtype=torch.int64, device=device)
        self._drawn: list[Tensor] = []  # [n] of each level, flat
        # A shape with all depths, so that the noise of all is made together.
        deepest = {i: chain(most.depth) + (ROOT,) * (most.nodes - most.depth) for i, most in growths.items()}
        self._noise = batch.sampler.on_trees(deepest)

    def draw(self, logits: Tensor, read: GrowthReader) -> Draft:
        """Draw all trees. logits [len(growths), vocab'] behind the committed tokens, in the order of growths."""
        level: list[ReadNode] = [(i, ROOT) for i in self.trees]
        while True:
            self._draw_children(level, logits[:, : self._vocab])
            level, sources = [], list[int]()
            for i, tree in self.trees.items():
                start, new = len(tree.read), tree.expand()
                level += [(i, start + n) for n in range(len(new))]
                sources += [node.source for node in new]
            if not level:
                return self._finish(read)
            tokens = self._pick(sources)
            self._put([i * self._size + place for i, place in level], tokens)
            logits = read(level, self.trees, tokens)

    def _draw_children(self, level: Seq[ReadNode], logits: Tensor) -> None:
        sampler = self._noise
        if len(self._drawn):
            sampler = self._batch.sampler.on_trees({i: tree.parents for i, tree in self.trees.items()}, self._noise)
        rows = [sampler.offsets[i] + 1 + place for i, place in level]
        scores = sampler.scores(logits, rows, self._table)
        siblings = sampler.sample_top(scores, rows, min(WIDTH, self._size, logits.shape[1]))
        tokens, chances = siblings.tokens(), log_chances(siblings, scores, lambda t: sampler.noise(t, rows))
        first, width = sum(map(len, self._drawn)), tokens.shape[1]
        self._drawn.append(mark_non_finite(tokens, logits).flatten())
        for tree in self.trees.values():
            tree.depth += 1
        for n, ((i, place), values) in enumerate(zip(level, chances.tolist(), strict=True)):  # a copy to the host
            self.trees[i].add(place, values, first + n * width)

    def _finish(self, read: GrowthReader) -> Draft:
        ks, targets, sources = [0] * len(self._batch.sequences), list[int](), list[int]()
        for i, tree in self.trees.items():
            self.shapes[i], nodes, self.numbers[i] = tree.shape()
            ks[i] = len(nodes)
            targets += range(i * self._size, i * self._size + len(nodes))
            sources += [node.source for node in nodes]
        self._put(targets, self._pick(sources))
        self._batch.sampler.on_trees(self.shapes, self._noise)  # the verification asks for it
        return Draft(tuple(ks), self._table, trees=dict(self.shapes), steps=read.steps, read=read.read)

    def _pick(self, sources: Seq[int]) -> Tensor:
        return torch.cat(self._drawn).index_select(0, self._batch.sampler.numbers.index(sources).tensor)

    def _put(self, places: Seq[int], tokens: Tensor) -> None:
        self._table.view(-1).index_copy_(0, self._batch.sampler.numbers.index(places).tensor, tokens)


def wanted_trees(batch: DraftBatch, ks: list[int], *, may_branch: bool) -> tuple[dict[int, Parents], dict[int, Growth]]:
    """Index of a sequence → the tree that it gets, cut to its k nodes; or the limits of its tree, if it grows.

    may_branch: whether the drafter draws trees. If it does not, there are no trees, and ks becomes the number of first
    children.
    """
    shapes = {i: shape[: ks[i]] for i, shape in enumerate(batch.shapes) if shape is not None and ks[i]}
    growths = {i: Growth(k, min(k, batch.depths[i])) for i, k in enumerate(ks) if k and batch.grows(i)}
    if may_branch:
        return shapes, growths
    depths = {i: len(trunk(shape)) for i, shape in shapes.items()} | {i: g.depth for i, g in growths.items()}
    for i, depth in depths.items():
        ks[i] = depth
    return {}, {}


def grow_trees(
    runner: Runner, batch: DraftBatch, growths: Mapping[int, Growth], vocab: int, logits: Tensor
) -> tuple[Draft, dict[int, FedTree]]:
    """(drafts of a draft model for these sequences, handle → the nodes that the model holds).

    logits [n, vocab] of the last committed tokens, in the order of growths.
    """
    reader, grown = FedNodes(runner, batch), GrownDraft(batch, growths, vocab, runner.device)
    draft = grown.draw(logits, reader)
    trees = ((i, FedTree(shape, grown.numbers[i])) for i, shape in grown.shapes.items())
    return draft, {batch.sequences[i].handle: fed for i, fed in trees}
