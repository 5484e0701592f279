"""Draws trees: one step for each depth, for all sequences and branches at once. A draft model's step is a pass."""

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.device.staging import Staged
from engine.drafters.base import NO_TOKEN, Draft, DraftBatch
from engine.kernels import laws
from engine.models.feeds import Feed
from engine.models.runner import PlannedPass, Runner
from engine.sampling.adjustments import take
from engine.sequence import Sequence
from engine.trees import ROOT, Parents, chain

NO_NODE = ROOT - 1  # fills up a level

BatchNode = tuple[int, int]  # (index of a sequence in the batch, node of its tree, ROOT or NO_NODE)
# (number of one of TreeDraft's levels, the drafts so far [B, nodes]) → logits [N, vocab] behind the level's nodes
ReadLevel = Callable[[int, Tensor], Tensor]


@dataclass(slots=True)
class FedTree:
    """The nodes of a sequence's tree that the draft model has read. They lie in its memory in this order, behind the
    committed tokens. A node without children is never read."""

    parents: Parents  # of the whole tree
    nodes: list[int] = field(default_factory=list)

    def feed(self, sequence: Sequence, new: Seq[int]) -> Feed:
        """The feed that reads these nodes; their parents were read before."""
        self.nodes += new
        places = {node: place for place, node in enumerate(self.nodes)} | {ROOT: ROOT}
        shape = tuple(places[self.parents[node]] for node in self.nodes)
        return Feed(sequence, 0, len(new), outputs=len(new), parents=shape)

    def kept(self, accepted: Seq[int]) -> list[int]:
        """The places of the accepted nodes that were read, counted from the first node's."""
        places = {node: place for place, node in enumerate(self.nodes)}
        return [places[node] for node in accepted if node in places]


@dataclass(frozen=True, slots=True)
class _LevelPass:
    """A pass over the nodes of a level that have children."""

    feeds: list[Feed]
    columns: int  # of the table of ids; those beyond a sequence's own nodes are not fed
    places: Staged  # [feeds · columns] where their ids stand in the table of drafts
    planned: PlannedPass | None  # None: on the CPU


class TreeReader:
    """Feeds the draft model a tree's nodes, level by level (ReadLevel). On another device than the CPU, what all passes
    need is put when the reader is made, before the pass that reads the committed tokens."""

    def __init__(self, runner: Runner, batch: DraftBatch, draft: "TreeDraft") -> None:
        self._runner = runner
        self._batch = batch
        self._size = draft.size
        self.fed = {i: FedTree(parents) for i, parents in draft.shapes.items()}
        self._passes = [self._plan(level) for level in draft.levels[1:]]
        self.steps = 0  # passes
        self.read = 0  # nodes that these passes fed

    def __call__(self, number: int, drafts: Tensor) -> Tensor:
        level = self._passes[number - 1]
        ids = drafts.view(-1).index_select(0, level.places.tensor).view(-1, level.columns)
        self.steps, self.read = self.steps + 1, self.read + sum(feed.drafts for feed in level.feeds)
        if level.planned is None:
            return self._runner.run(level.feeds, ids)
        return self._runner.compute(level.planned, ids)

    def _plan(self, level: Seq[BatchNode]) -> _LevelPass:
        by_sequence: dict[int, list[int]] = {}
        for i, node in level:
            by_sequence.setdefault(i, []).append(node)
        columns = max(map(len, by_sequence.values()))
        places = [
            i * self._size + node
            for i, nodes in by_sequence.items()
            for node in (*nodes, *[0] * (columns - len(nodes)))
        ]
        # The first pass closes the gaps, and the passes before this one feed the nodes above.
        ahead = [self._runner.uncached(self._batch.sequences[i]) + len(self.fed[i].nodes) for i in by_sequence]
        feeds = [self.fed[i].feed(self._batch.sequences[i], nodes) for i, nodes in by_sequence.items()]
        planned = self._runner.prepare(feeds, ahead) if self._runner.staging.deferred else None
        return _LevelPass(feeds, columns, self._batch.sampler.numbers.index(places), planned)


@dataclass(frozen=True, slots=True)
class _Children:
    """The children that one kind of draw gives to nodes of a level."""

    parents: list[int]  # their places among the level's nodes
    rows: list[int]  # the sampler's rows of these nodes
    width: int  # siblings that are drawn for each of them
    sources: Staged | None  # [n] where the children stand among those siblings; None: all are children
    targets: Staged  # [n] where they go in the table of drafts
    law_targets: Staged | None  # [n] where their laws go in the table of laws; None: their draws have no law


@dataclass(frozen=True, slots=True)
class _LevelDraw:
    """The draws of all children of a level's nodes."""

    rows: list[int]  # of the sampler, one for each node
    coupled: _Children | None
    with_law: _Children | None


class TreeDraft:
    """A draft of trees in the making.

    Siblings are the best tokens of one race: the race of the target's own draw for coupled sequences, else a race whose
    best tokens are draws without replacement, each with its law. A node that runs out of tokens repeats its first
    child. No verifier accepts the repeated one.
    """

    def __init__(
        self,
        batch: DraftBatch,
        shapes: Mapping[int, Parents],
        vocab: int,
        device: torch.device,
        *,
        chains: Collection[int] = (),
        padded: bool = False,
    ) -> None:
        """shapes: index of a sequence in the batch → the shape of its draft. Puts what the draws of all levels need on
        its way to the device. chains: the sequences whose drafts are chains for all others (joining_chains). padded: in
        each level all sequences have as many nodes as the one with the most, and all nodes as many siblings. What is
        drawn beyond their own is written to one more column of the table of drafts."""
        self.shapes = shapes
        self.trees = {i: parents for i, parents in shapes.items() if i not in chains}  # of the draft
        self.size = max(map(len, shapes.values())) + padded
        self._padded = padded
        self._ks = tuple(len(shapes.get(i, ())) for i in range(len(batch.sequences)))
        self._vocab = vocab
        self._sampler = batch.sampler.on_trees(self.trees)
        self._table = len(batch.sequences), self.size
        self._device = device
        self._tokens = torch.empty(0)  # made when the draws begin, which may be in the region of a graph
        # In the batch's order, in which the verification reads the laws.
        self._law_rows = {i: n for n, i in enumerate(i for i in sorted(shapes) if not batch.sequences[i].coupled)}
        self._laws: Tensor | None = None  # [with laws, size, vocab]
        self._children = {i: _children(parents) for i, parents in shapes.items()}
        self.levels = self._find_levels()  # the nodes whose children are drawn in one step; first the roots
        self._draws = [self._plan(level) for level in self.levels]

    def draw(self, logits: Tensor, read: ReadLevel) -> Draft:
        """Draw all trees. logits [len(shapes), vocab'] behind the committed tokens, in the order of shapes. `read`
        gives the logits behind the nodes of a later level."""
        self._tokens = torch.zeros(self._table, dtype=torch.int64, device=self._device)
        for number, level in enumerate(self._draws):
            if number:
                logits = read(number, self._tokens)
            self._draw_children(level, logits[:, : self._vocab])
        return Draft(self._ks, self._tokens, self._laws, self._law_rows, trees=self.trees)

    def _find_levels(self) -> list[list[BatchNode]]:
        levels: list[list[BatchNode]] = []
        level: list[BatchNode] = [(i, ROOT) for i in self.shapes]
        while level:
            levels.append(level)
            level = [(i, node) for i, parent in level for node in self._children[i][parent] if self._children[i][node]]
        return [self._fill(level) for level in levels] if self._padded else levels

    def _fill(self, level: Seq[BatchNode]) -> list[BatchNode]:
        own: dict[int, list[BatchNode]] = {i: [] for i in self.shapes}
        for i, node in level:
            own[i].append((i, node))
        width = max(map(len, own.values()))
        return [node for i, nodes in own.items() for node in (*nodes, *[(i, NO_NODE)] * (width - len(nodes)))]

    def _plan(self, level: Seq[BatchNode]) -> _LevelDraw:
        with_law = [n for n, (i, _) in enumerate(level) if i in self._law_rows]
        coupled = [n for n, (i, _) in enumerate(level) if i not in self._law_rows]
        rows = [self._sampler.offsets[i] + 1 + max(ROOT, node) for i, node in level]
        if with_law and coupled:
            self._sampler.prepare_laws(rows)
            self._sampler.numbers.index(with_law)
            self._sampler.numbers.index(coupled)
        return _LevelDraw(
            rows,
            self._plan_children(level, coupled, rows, with_law=False) if coupled else None,
            self._plan_children(level, with_law, rows, with_law=True) if with_law else None,
        )

    def _plan_children(self, level: Seq[BatchNode], parents: list[int], rows: Seq[int], *, with_law: bool) -> _Children:
        found = [(i, self._children[i].get(node, [])) for i, node in (level[n] for n in parents)]
        picked, width = [rows[n] for n in parents], max(len(nodes) for _, nodes in found)
        put = self._sampler.numbers.staging.ints
        if self._padded:
            found = [(i, [*nodes, *[self.size - 1] * (width - len(nodes))]) for i, nodes in found]
        places = [(i, node) for i, nodes in found for node in nodes]
        sources = [n * width + rank for n, (_, nodes) in enumerate(found) for rank in range(len(nodes))]
        if with_law:
            self._sampler.prepare_proposals(picked)
        else:
            self._sampler.prepare(picked)
        return _Children(
            parents,
            picked,
            width,
            put(sources) if len(sources) < len(parents) * width else None,
            put([i * self.size + node for i, node in places]),
            put([self._law_rows[i] * self.size + node for i, node in places]) if with_law else None,
        )

    def _draw_children(self, level: _LevelDraw, logits: Tensor) -> None:
        """Draw the children of a level's nodes from their rows of logits [nodes, vocab]."""
        sampler = self._sampler
        scores = sampler.scores(logits, level.rows, self._tokens)
        if (children := level.coupled) is not None:
            own = take(scores, children.parents, sampler.numbers)
            self._put(children, sampler.sample_top(own, children.rows, children.width).tokens(), logits)
        if (children := level.with_law) is not None:
            laws = sampler.laws(take(scores, children.parents, sampler.numbers), children.rows)
            drawn, given = sampler.propose_top(laws, children.rows, children.width)
            self._put(children, drawn, logits)
            self._put_laws(children, given)

    def _put(self, children: _Children, drawn: Tensor, logits: Tensor) -> None:
        """Write the drawn siblings [parents, width] into the table of drafts. logits: the level's."""
        marked = mark_non_finite(drawn, take(logits, children.parents, self._sampler.numbers))
        self._tokens.view(-1).index_copy_(0, children.targets.tensor, _pick(marked.flatten(), children.sources))

    def _put_laws(self, children: _Children, given: Tensor) -> None:
        """Write the laws [parents, width, vocab] of the drawn siblings into the table of laws."""
        if self._laws is None:
            self._laws = given.new_full((len(self._law_rows), self.size, given.shape[2]), -torch.inf)
        assert children.law_targets is not None, "these draws have laws"
        rows = _pick(given.flatten(0, 1), children.sources)
        self._laws.flatten(0, 1).index_copy_(0, children.law_targets.tensor, rows)


def joining_chains(batch: DraftBatch, lengths: Mapping[int, int]) -> dict[int, Parents]:
    """The chains of these lengths that are drawn in the steps of the trees beside them, as trees of one branch. A
    chain with a confidence has steps of its own, because each of its steps decides whether another one follows."""
    return {i: chain(k) for i, k in lengths.items() if k and not (batch.confidences and batch.confidences[i])}


def _pick(values: Tensor, rows: Staged | None) -> Tensor:
    return values if rows is None else values.index_select(0, rows.tensor)


def _children(parents: Parents) -> dict[int, list[int]]:
    """Node or ROOT → its children."""
    found: dict[int, list[int]] = {node: [] for node in range(ROOT, len(parents))}
    for node, parent in enumerate(parents):
        found[parent].append(node)
    return found


def mark_non_finite(drawn: Tensor, logits: Tensor) -> Tensor:
    """The drafts [n, width], with NO_TOKEN for each whose logit in logits [n, vocab] is not finite.

    The logits are the model's own: a request may exclude every token of its vocabulary, and that is no fault. Once the
    memory of a path is not finite, all later logits of the path are not either.
    """
    mark = laws.mark_reference if drawn.device.type == "cpu" else laws.mark_non_finite
    return mark(drawn, logits, NO_TOKEN)
