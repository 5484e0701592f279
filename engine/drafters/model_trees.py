"""Draws trees: one step for each depth, for all sequences and branches at once. A draft model's step is a pass."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.drafters.base import NO_TOKEN, Draft, DraftBatch
from engine.models.attention import index_tensor
from engine.models.runner import Feed, Runner
from engine.sequence import Sequence
from engine.trees import ROOT, Parents

Node = tuple[int, int]  # (index of a sequence in the batch, node of its tree)
# (nodes of a level, the drafts so far [B, nodes]) → (these nodes in the order of their rows, their logits [N, vocab])
ReadLevel = Callable[[Seq[Node], Tensor], tuple[list[Node], Tensor]]


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


class TreeReader:
    """Feeds the draft model a tree's nodes, level by level (ReadLevel)."""

    def __init__(self, runner: Runner, batch: DraftBatch, shapes: Mapping[int, Parents]) -> None:
        self._runner = runner
        self._batch = batch
        self.fed = {i: FedTree(parents) for i, parents in shapes.items()}
        self.steps = 0  # passes
        self.read = 0  # nodes that these passes fed

    def __call__(self, level: Seq[Node], drafts: Tensor) -> tuple[list[Node], Tensor]:
        by_sequence: dict[int, list[int]] = {}
        for i, node in level:
            by_sequence.setdefault(i, []).append(node)
        # Columns beyond a sequence's own nodes are not fed.
        width = max(map(len, by_sequence.values()))
        columns = [nodes + [0] * (width - len(nodes)) for nodes in by_sequence.values()]
        places = index_tensor([x for row in columns for x in row], drafts.device).view(-1, width)
        ids = drafts[index_tensor(list(by_sequence), drafts.device)].gather(1, places)
        feeds = [self.fed[i].feed(self._batch.sequences[i], nodes) for i, nodes in by_sequence.items()]
        self.steps, self.read = self.steps + 1, self.read + len(level)
        return [(i, node) for i, nodes in by_sequence.items() for node in nodes], self._runner.run(feeds, ids)


class TreeDraft:
    """A draft of trees in the making.

    Siblings are the best tokens of one race: the race of the target's own draw for coupled sequences, else a race whose
    best tokens are draws without replacement, each with its law. A node that runs out of tokens repeats its first
    child, of which no verifier accepts the second.
    """

    def __init__(self, batch: DraftBatch, shapes: Mapping[int, Parents], vocab: int, device: torch.device) -> None:
        """shapes: index of a sequence in the batch → the shape of its draft, of at least one node."""
        self._batch = batch
        self._shapes = shapes
        self._vocab = vocab
        self._sampler = batch.sampler.on_trees(shapes)
        size = max(map(len, shapes.values()))
        self._tokens = torch.zeros(len(batch.sequences), size, dtype=torch.int64, device=device)
        self._law_rows = {i: n for n, i in enumerate(i for i in shapes if not batch.sequences[i].coupled)}
        self._laws: Tensor | None = None  # [with laws, size, vocab]
        self._children = {i: _children(parents) for i, parents in shapes.items()}

    def draw(self, logits: Tensor, read: ReadLevel) -> Draft:
        """Draw all trees. logits [len(shapes), vocab']: those behind the committed tokens, in the order of shapes.
        `read` gives the logits behind the nodes of a level that have children."""
        level: list[Node] = [(i, ROOT) for i in self._shapes]  # the nodes that the rows of logits belong to
        while True:
            self._draw_children(level, logits[:, : self._vocab])
            level = [(i, node) for i, parent in level for node in self._children[i][parent] if self._children[i][node]]
            if not level:
                return self._draft()
            level, logits = read(level, self._tokens)

    def _draw_children(self, level: Seq[Node], logits: Tensor) -> None:
        """Draw the children of these nodes from their rows of logits [len(level), vocab]."""
        rows = [self._sampler.offsets[i] + 1 + node for i, node in level]
        with_law = [n for n, (i, _) in enumerate(level) if i in self._law_rows]
        coupled = [n for n, (i, _) in enumerate(level) if i not in self._law_rows]
        scores = self._sampler.scores(logits, rows, self._tokens)
        if coupled:
            picked = [rows[n] for n in coupled]
            drawn = self._sampler.sample_top(_take(scores, coupled), picked, self._width(level, coupled))
            self._put(level, coupled, mark_non_finite(drawn, _take(logits, coupled)))
        if with_law:
            picked = [rows[n] for n in with_law]
            laws = self._sampler.laws(_take(scores, with_law), picked)
            drawn, given = self._sampler.propose_top(laws, picked, self._width(level, with_law))
            self._put(level, with_law, mark_non_finite(drawn, _take(logits, with_law)))
            self._put_laws(level, with_law, given)

    def _width(self, level: Seq[Node], picked: Seq[int]) -> int:
        return max(len(self._children[i][node]) for i, node in (level[n] for n in picked))

    def _put(self, level: Seq[Node], picked: Seq[int], drawn: Tensor) -> None:
        """Write the drawn siblings [len(picked), width] into the table of drafts."""
        owners, nodes, sources, ranks = self._index(self._places(level, picked))
        self._tokens[owners, nodes] = drawn[sources, ranks]

    def _put_laws(self, level: Seq[Node], picked: Seq[int], given: Tensor) -> None:
        """Write the laws [len(picked), width, vocab] of the drawn siblings into the table of laws."""
        if self._laws is None:
            self._laws = given.new_full((len(self._law_rows), self._tokens.shape[1], given.shape[2]), -torch.inf)
        places = [(self._law_rows[i], *place) for i, *place in self._places(level, picked)]
        law_rows, nodes, sources, ranks = self._index(places)
        self._laws[law_rows, nodes] = given[sources, ranks]

    def _places(self, level: Seq[Node], picked: Seq[int]) -> list[tuple[int, int, int, int]]:
        """(sequence, node, row of `picked`, rank) of each child."""
        return [
            (i, child, source, rank)
            for source, (i, node) in enumerate(level[n] for n in picked)
            for rank, child in enumerate(self._children[i][node])
        ]

    def _index(self, places: Seq[tuple[int, ...]]) -> tuple[Tensor, ...]:
        """The columns of a table of four, [n] each, on the device."""
        return index_tensor([x for place in places for x in place], self._tokens.device).view(-1, 4).unbind(1)

    def _draft(self) -> Draft:
        ks = tuple(len(self._shapes.get(i, ())) for i in range(len(self._batch.sequences)))
        return Draft(ks, self._tokens, self._laws, self._law_rows, trees=dict(self._shapes))


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
    return torch.where(logits.gather(1, drawn).abs() < torch.inf, drawn, NO_TOKEN)


def _take(values: Tensor, rows: Seq[int]) -> Tensor:
    return values if len(rows) == len(values) else values[index_tensor(rows, values.device)]
