"""The draws of captured trees of given shapes."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from torch import Tensor

from engine.drafters.base import Draft, DraftBatch
from engine.drafters.model_trees import ReadLevel, TreeDraft
from engine.sequence import PADDING
from engine.trees import Parents, chain


class TreeDraws:
    """Draws for B coupled sequences that are filled up to S. A chain is drawn as a tree of one branch.

    All sequences have as many nodes in a level as the one with the most, and all nodes have as many children. Ignore
    what is drawn beyond their own. So the work depends on two numbers for each level.
    """

    def __init__(self, batch: DraftBatch, ks: Seq[int], shapes: Mapping[int, Parents], vocab: int) -> None:
        """Put what the draws of all levels need on its way to the device."""
        size = len(batch.sampler.offsets)
        padded = replace(batch, sequences=(*batch.sequences, *[PADDING] * (size - len(ks))))
        filled = {i: shapes.get(i, chain(ks[i]) if i < len(ks) else ()) for i in range(size)}
        self._ks, self._shapes = tuple(ks), dict(shapes)
        self.trees = TreeDraft(padded, filled, vocab, batch.sampler.device, padded=True)

    def draw(self, logits: Tensor, read: ReadLevel) -> Tensor:
        """All drafts [S, nodes]. logits [S, ≥ vocab]: behind the committed tokens. Part of the region."""
        tokens = self.trees.draw(logits, read).tokens
        assert tokens is not None, "every sequence has a tree"
        return tokens

    def draft(self, tokens: Tensor) -> Draft:
        """The round's draft, given what the graph has drawn."""
        nodes = sum(len(set(parents)) for parents in self.trees.shapes.values())  # that have children, with the roots
        return Draft(self._ks, tokens[: len(self._ks)], trees=self._shapes, steps=len(self.trees.levels), read=nodes)
