"""Computes the logits of tree nodes, level by level, for heads without memory."""

from itertools import pairwise

from torch import Tensor

from engine.device.staging import Staged, Staging
from engine.drafters.model_trees import NO_NODE, TreeDraft
from engine.heads.state_heads import HeadRun


class TreeLevels:
    """Gives the logits behind a tree's nodes, level by level (ReadLevel)."""

    def __init__(self, draft: TreeDraft, staging: Staging) -> None:
        """Puts what all levels need on its way to the device."""
        self.run: HeadRun | None = None  # set before the first level is read
        self._levels: list[tuple[Staged, Staged]] = []  # the rows of the level above; where the nodes' drafts stand
        self._sizes = [len(level) for level in draft.levels]
        for above, level in pairwise(draft.levels):
            rows = {node: row for row, node in enumerate(above)}
            parents = [0 if node == NO_NODE else rows[i, draft.shapes[i][node]] for i, node in level]
            places = [i * draft.size + max(0, node) for i, node in level]
            self._levels.append((staging.ints(parents), staging.ints(places)))
        self.steps, self.read = 1, self._sizes[0]

    def __call__(self, number: int, drafts: Tensor) -> Tensor:
        parents, places = self._levels[number - 1]
        self.steps, self.read = self.steps + 1, self.read + self._sizes[number]
        assert self.run is not None, "the first step was done"
        return self.run.step(parents.tensor, drafts.view(-1).index_select(0, places.tensor))
