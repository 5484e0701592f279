"""The trees of a captured round: the verdict of `match` about them, and the move of what it accepts."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from cache.gathered import GatheredStorage
from engine.kernels.path_rows import NO_ROW, path_rows
from engine.kernels.verdict import match_verdict
from engine.models.runner import Runner
from engine.models.tree_moves import HeldTree, parent_rows, rows_and_targets
from engine.sequence import Sequence
from engine.trees import Parents, chain, is_chain


class CapturedTrees:
    """The drafts of B sequences that are filled up to S: trees or chains of up to K nodes.

    Their shapes are numbers that the graph reads, so one graph decides about all shapes of as many nodes.
    """

    def __init__(
        self, sequences: Seq[Sequence], ks: Seq[int], shapes: Mapping[int, Parents], size: int, target: Runner
    ) -> None:
        """Put the shapes, and the rows of memory that hold the nodes, on their way to the device. The memory is
        reserved. size: S. Raises ValueError if another sequence could read a place that may be written."""
        storage, width = target.storage, max(ks)
        assert isinstance(storage, GatheredStorage)
        self._storage, self._size = storage, size
        parents, rows, targets = list[int](), list[int](), list[int]()
        for i, (sequence, k) in enumerate(zip(sequences, ks, strict=True)):
            shape = shapes.get(i, chain(k))
            parents += parent_rows(shape, width)
            own = [NO_ROW] * width, [storage.spare_row] * width  # nothing of a chain moves
            if not is_chain(shape):
                held = HeldTree(i, sequence, len(sequence.tokens), shape, range(k))
                own = rows_and_targets(target, storage, held, width)
            rows += own[0]
            targets += own[1]
        rest = (size - len(ks)) * width
        filled = (*parents, *parent_rows((), rest), *rows, *[NO_ROW] * rest, *targets, *[storage.spare_row] * rest)
        self._numbers = target.staging.ints(filled)

    def decide(self, drawn: Tensor, finite: Tensor, drafts: Tensor, first_rows: Tensor) -> Tensor:
        """As match_verdict [S, 3 + K]. Moves the accepted nodes to where a chain's would lie. Part of the region of a
        graph."""
        parents, rows, targets = self._numbers.tensor.view(3, self._size, -1).unbind(0)
        table = match_verdict(drawn, finite, drafts, first_rows, parents)
        owners = torch.arange(self._size, device=drafts.device)
        sources = path_rows(table[:, 0], owners, parents, rows, targets)
        self._storage.move_rows(sources.view(-1), targets.reshape(-1))
        return table

    def run(self, last_rows: Tensor) -> None:
        """As PlannedMoves.run: the round's graph has moved them already."""
