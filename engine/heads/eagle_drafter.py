"""An EAGLE head as a drafter."""

from collections.abc import Mapping, Set
from collections.abc import Sequence as Seq

from engine.drafters.base import DraftBatch
from engine.drafters.model import ModelDrafter
from engine.drafters.model_trees import FedTree
from engine.heads.eagle_runner import HeadRunner
from engine.models.tree_moves import HeldTree
from engine.sampling.acceptance import Verdict
from engine.sequence import Sequence


class EagleDrafter(ModelDrafter):
    """Drafts as a draft model does, chains and trees, while the target's states are there.

    Its gap holds every token of the round before: the rows of accepted drafts are read again, with the target's states.
    """

    runner: HeadRunner

    def observe(self, batch: DraftBatch, verdict: Verdict) -> None:
        states = self.runner.states
        for i, sequence in enumerate(batch.sequences):
            if verdict.non_finite[i] or sequence.handle in self._given_up:
                states.drop(sequence.handle)
            else:
                path = verdict.paths.get(i, range(verdict.accepted[i]))
                states.settle(sequence.handle, len(sequence.tokens), path)
        super().observe(batch, verdict)

    def forget(self, sequence: Sequence) -> None:
        self.runner.states.drop(sequence.handle)
        super().forget(sequence)

    def audit(self, live: Set[int]) -> None:
        super().audit(live)
        self.runner.audit(live)

    def _held_trees(self, batch: DraftBatch, trees: Mapping[int, FedTree]) -> list[HeldTree]:
        return []

    def _kept_places(self, i: int, verdict: Verdict, fed: FedTree | None) -> Seq[int]:
        return ()
