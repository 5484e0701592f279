"""Moves the keys and values of accepted nodes to where a chain's would lie. The device has decided which are accepted.

Runner.keep_paths does it by what the host knows. Here the rows of all nodes are put before the round computes, so no
copy to the device follows the verdict.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from cache.gathered import GatheredStorage
from engine.device.staging import Staged
from engine.kernels.path_rows import NO_ROW, path_rows
from engine.models.runner import Runner
from engine.sampling.tree_acceptance import NONE
from engine.sequence import Sequence
from engine.trees import Parents, is_chain


class HeldTree(NamedTuple):
    """A tree of a round. Some of its nodes lie in a model's memory."""

    owner: int  # the sequence's place in the round
    sequence: Sequence
    base: int  # the place of the first node that lies in memory
    parents: Parents
    nodes: Seq[int]  # in the order in which they lie there


def parent_rows(parents: Parents, size: int) -> list[int]:
    """The row of each node's parent, as path_rows() and match_verdict() want them, for up to `size` nodes."""
    return [*(parent + 1 for parent in parents), *[NONE] * (size - len(parents))]


def rows_and_targets(
    runner: Runner, storage: GatheredStorage, tree: HeldTree, size: int
) -> tuple[list[int], list[int]]:
    """The rows and targets of path_rows() for a tree of up to `size` nodes in the runner's memory. Raises ValueError if
    another sequence could read a place that may be written."""
    handle = tree.sequence.handle
    runner.require_writable(tree.sequence, tree.base)
    held = storage.row_numbers(runner.cache.slot(handle), tree.base, tree.base + len(tree.nodes))
    row_of = dict(zip(tree.nodes, held, strict=True))
    rows = [row_of.get(node, NO_ROW) for node in range(size)]
    return rows, [*held, *[storage.spare_row] * (size - len(held))]


@dataclass(frozen=True, slots=True)
class PlannedMoves:
    """The rows of M trees of up to K nodes, on their way to the device."""

    numbers: Staged  # [M · (1 + 3 · K)] owners, then parents, rows and targets as path_rows() wants them
    count: int
    storage: GatheredStorage

    @classmethod
    def of(cls, runner: Runner, trees: Seq[HeldTree]) -> "PlannedMoves | None":
        """The moves in the runner's memory, which is reserved for these nodes. None if nothing can move, and on the
        CPU. Raises ValueError if another sequence could read a place that may be written."""
        trees = [tree for tree in trees if tree.nodes and not is_chain(tree.parents)]
        storage = runner.storage
        if not trees or not runner.staging.deferred or not isinstance(storage, GatheredStorage):
            return None
        size = max(len(tree.parents) for tree in trees)
        owners, parents, rows, targets = [tree.owner for tree in trees], list[int](), list[int](), list[int]()
        for tree in trees:
            own_rows, own_targets = rows_and_targets(runner, storage, tree, size)
            parents += parent_rows(tree.parents, size)
            rows += own_rows
            targets += own_targets
        return cls(runner.staging.ints([*owners, *parents, *rows, *targets]), len(trees), storage)

    def run(self, last_rows: Tensor) -> None:
        """Move the accepted nodes, given DeviceVerdict.last_rows of the round."""
        numbers = self.numbers.tensor
        owners, tables = numbers[: self.count], numbers[self.count :].view(3, self.count, -1)
        parents, rows, targets = tables.unbind(0)
        self.storage.move_rows(path_rows(last_rows, owners, parents, rows, targets).view(-1), targets.reshape(-1))
