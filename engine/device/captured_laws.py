"""Rejection and block verification within a captured round, for the sequences whose draft and target draw apart."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.device.staging import Staging
from engine.drafters.base import Draft, DraftBatch
from engine.kernels.decide import decide_chains
from engine.kernels.laws import NO_LAW, draft_laws
from engine.models.runner import Runner


def law_memory(staging: Staging, owner: int, vocab: int, dtype: torch.dtype) -> Tensor:
    """The memory to which a draft model's graphs write laws: [sequences, drafts, vocab] of the largest round. A
    law lies at the same address whatever the round's numbers are: the verdict's graph does not know how many drafts
    there was memory for. owner: the number of the model's runner."""
    size = staging.limits.sequences, staging.limits.drafts, vocab
    return staging.keep(("laws", owner), lambda: torch.zeros(size, dtype=dtype, device=staging.device))


def law_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of laws that are made from logits of this type."""
    return torch.float64 if dtype is torch.float64 else torch.float32


class CapturedLaws:
    """Decides about the drafts of the sequences that are not coupled, all by one verifier.

    B sequences are filled up to S. Ignore what is decided for coupled sequences and for those that fill up.
    """

    def __init__(self, batch: DraftBatch, ks: Seq[int], rows: Seq[int], target: Runner) -> None:
        """Put its numbers on their way to the device. rows: of all S sequences."""
        staging, sampler, size = target.staging, batch.sampler, len(batch.sampler.offsets)
        rest = size - len(batch.sequences)
        apart = [not s.coupled for s in batch.sequences]
        (verifier,) = {s.verifier for s, own in zip(batch.sequences, apart, strict=True) if own}
        self._sampler, self._rows, self._indices, self._staging = sampler, rows, range(size), staging
        self._expected = [i if own and k else NO_LAW for i, (own, k) in enumerate(zip(apart, ks, strict=True))]
        self.is_alone = all(apart)  # otherwise other sequences are decided about by `match`
        staging.note("laws", verifier == "block", self.is_alone)
        sampler.prepare_laws(rows)
        sampler.prepare_emit(self._indices)
        lenience = [s.lenience or 1.0 for s in batch.sequences]
        self._lenience = None if verifier == "block" else staging.floats([*lenience, *[1.0] * rest])
        self._apart = staging.ints([*map(int, apart), *[0] * rest])
        self._sources = staging.ints([*self._expected, *[NO_LAW] * rest])

    @property
    def apart(self) -> Tensor:
        """[S, 1] bool: whether the sequence is not coupled."""
        return (self._apart.tensor > 0)[:, None]

    def expect(self, draft: Draft) -> None:
        """Take in where the laws of the drafts are, before the graph runs."""
        sources = [draft.logq_rows.get(i, NO_LAW) for i in range(len(draft.ks))]
        if sources != self._expected:
            self._sources.tensor[: len(sources)].copy_(self._staging.ints(sources).tensor)

    def decide(
        self, logits: Tensor, drafts: Tensor, legal: Tensor | None, limits: Tensor, logq: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(as match_verdict [S, 3 + K], overlaps [S, K]) for logits [S · (1 + K), vocab] and drafts [S, K]. legal: the
        drafts that rows see. Part of the region of a graph."""
        sampler = self._sampler
        laws = sampler.laws(sampler.scores(logits, self._rows, legal), self._rows)
        depth, overlaps = drafts.shape[1], None
        if depth:
            logp = laws.view(len(self._indices), 1 + depth, -1)
            known = draft_laws(logq, None if logq is None else self._sources.tensor, drafts, logp)
            lenience = None if self._lenience is None else self._lenience.tensor
            numbers = sampler.coin_numbers(self._indices)
            accepted, weights, overlaps = decide_chains(logp, known, drafts, limits, lenience, *numbers)
        else:
            accepted, weights = torch.zeros_like(limits), laws
        finite = weights.amax(1).abs() < torch.inf
        emitted = sampler.emit(weights, self._indices, accepted)
        return torch.cat([torch.stack([accepted, emitted, finite.long()], 1), drafts], 1), overlaps
