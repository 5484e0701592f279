"""Trees of given shapes that a draft model or an EAGLE head draws in a round, as one captured graph."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from torch import Tensor

from engine.device.staging import Staged
from engine.drafters.base import Draft, DraftBatch
from engine.drafters.captured_chains import GapPass
from engine.drafters.model_trees import NO_NODE, FedTree
from engine.drafters.tree_draws import TreeDraws
from engine.models.paged_attention import PagedAttention, cutting_windows
from engine.models.runner import Runner
from engine.models.spans import Span
from engine.trees import Parents


@dataclass(frozen=True, slots=True)
class _Level:
    """A pass over the nodes of a level that have children. All S sequences have R rows in it."""

    attention: PagedAttention
    places: Staged  # [S · R] where the rows' ids stand in the table of drafts
    parents: Staged  # [S · R] the rows of the level above that they follow


class CapturedTreeDraft:
    """The trees of B coupled sequences, beside chains, filled up to S (TreeDraws)."""

    def __init__(
        self, runner: Runner, batch: DraftBatch, ks: Seq[int], shapes: Mapping[int, Parents], vocab: int
    ) -> None:
        """Put the numbers of all passes and draws on their way to the device. The memory for ks is reserved. shapes:
        index of a sequence → its tree of ks[i] nodes; the others draw chains. vocab: ids from there on are not
        drawn."""
        self._runner, self._batch, self._ks = runner, batch, tuple(ks)
        runner.staging.note("tree draft", max(ks))
        self._gap = GapPass(runner, batch, ks)
        self._draws = TreeDraws(batch, ks, shapes, vocab)
        trees = self._draws.trees
        self._fed = {i: FedTree(trees.shapes[i]) for i, k in enumerate(ks) if k}
        self.fed = {i: self._fed[i] for i in shapes}  # by index in the batch: the nodes that the model will have read
        self._levels = [self._put_level(number) for number in range(1, len(trees.levels))]
        self._carried: Tensor | None = None  # g of the nodes of the latest level
        self._key = runner.staging.layout

    def propose(self) -> Draft:
        """Draw the trees, and extend the cache by what the passes read."""
        self._runner.take_forwards()
        self._batch.sampler.take_in_texts()
        drafting = {i: self._batch.sequences[i] for i in self._fed}
        read = {i: len(fed.nodes) for i, fed in self._fed.items()}
        counts = {sequence.handle: self._gap.gaps[i] + read[i] for i, sequence in drafting.items()}
        tokens = self._runner.run_captured(self._key, self._draw, counts)
        self._runner.chains.end(list(drafting.values()))
        # A copy, because another model's graph may run before the verification.
        draft = self._draws.draft(tokens[: len(self._ks)].clone())
        return replace(draft, read=sum(counts.values()), forwards=self._runner.take_forwards())

    def _draw(self) -> Tensor:
        """Drafts [S, nodes]. The region of the graph."""
        states, self._carried = self._gap.run()
        return self._draws.draw(self._runner.decoder.logits(states), self._read)

    def _read(self, number: int, drafts: Tensor) -> Tensor:
        """Read the nodes of a level (ReadLevel)."""
        level, runner = self._levels[number - 1], self._runner
        ids = drafts.view(-1).index_select(0, level.places.tensor).clamp(0, runner.vocab_size - 1)
        before = None if self._carried is None else self._carried.index_select(0, level.parents.tensor)
        states, self._carried = runner.chains.run(ids, level.attention, slice(None), before)
        return runner.decoder.logits(states)

    def _put_level(self, number: int) -> _Level:
        """number: the level's. Its nodes have as many drafts on their paths."""
        trees, staging = self._draws.trees, self._runner.staging
        above, level = trees.levels[number - 1 : number + 1]
        row_of, nodes = {node: row for row, node in enumerate(above)}, {i: list[int]() for i in trees.shapes}
        places, parents = list[int](), list[int]()
        for i, node in level:
            known = node != NO_NODE
            places.append(i * trees.size + max(0, node))
            parents.append(row_of[i, trees.shapes[i][node]] if known else 0)
            nodes[i] += [node] if known else []
        spans = [self._span(i, own) for i, own in nodes.items()]
        windows = cutting_windows(self._runner.decoder.config.traits.windows, number)
        attention = self._gap.put(spans, len(level) // len(nodes), windows)
        return _Level(attention, staging.ints(places), staging.ints(parents))

    def _span(self, i: int, nodes: Seq[int]) -> Span | None:
        """The places of these nodes of sequence i. They lie behind the nodes that were read before. None: there are no
        nodes."""
        if not nodes:
            return None
        slot, fed = self._gap.slots[i], self._fed[i]
        assert slot is not None, "a sequence with nodes drafts"
        start = self._gap.ends[i] + len(fed.nodes)
        return Span.at(slot, start, len(nodes), fed.feed(self._batch.sequences[i], nodes).parents)
