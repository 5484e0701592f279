"""The draws of a captured chain: each column is the next draft of every sequence of a round."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.device.captured_laws import law_dtype, law_memory
from engine.drafters.base import Draft, DraftBatch
from engine.drafters.model_trees import mark_non_finite


class ChainDraws:
    """Draws for B sequences that are filled up to S. Ignore what is drawn for a sequence that drafts nothing or has
    finished drafting."""

    def __init__(self, batch: DraftBatch, ks: Seq[int], vocab: int, dtype: torch.dtype, owner: int, rank: int) -> None:
        """Put the numbers of all draws on their way to the device.

        vocab: ids from there on are not drawn. dtype: the logits' type. owner: owns the graph, see graphs.Key. rank:
        the rank of the noise for draws from the drafts' own laws.
        """
        self._sampler, self._ks, self._vocab = batch.sampler, tuple(ks), vocab
        self._owner, self._rank = owner, rank
        staging, offsets = batch.sampler.numbers.staging, batch.sampler.offsets
        self._columns = [[offset + j for offset in offsets] for j in range(max(ks))]
        apart = [not s.coupled for s in batch.sequences]
        self._with_law = [i for i, k in enumerate(ks) if k and apart[i]]
        self._all_laws = all(apart)
        staging.note("draft laws", max(ks), vocab, any(apart), self._all_laws)
        self._laws: Tensor | None = None
        self._is_apart = staging.ints([*map(int, apart), *[0] * (len(offsets) - len(ks))]) if any(apart) else None
        if any(apart):
            self._laws = law_memory(staging, owner, vocab, law_dtype(dtype))[: len(offsets)]
        for rows in self._columns:
            if not self._all_laws:
                batch.sampler.prepare(rows)
            if any(apart):
                batch.sampler.prepare_proposals(rows, rank)
        self._drawn: list[Tensor] = []
        self._marked: list[Tensor] = []

    def begin(self) -> None:
        """The region of the graph begins."""
        self._drawn, self._marked = [], []

    def draw(self, logits: Tensor) -> Tensor:
        """The next column [S], from logits [S, ≥ vocab]. Part of the region."""
        logits = logits[:, : self._vocab]
        drawn = self._draw(logits, self._columns[len(self._drawn)])
        self._drawn.append(drawn)
        self._marked.append(mark_non_finite(drawn[:, None], logits))
        return drawn

    def table(self) -> Tensor:
        """All drafts [S, columns], once they are drawn. Part of the region."""
        return torch.cat(self._marked, 1)

    def draft(self, tokens: Tensor) -> Draft:
        """The round's draft, given what the graph has made of table()."""
        return Draft(
            self._ks,
            tokens,
            self._laws if self._with_law else None,
            {i: i for i in self._with_law},
            law_owner=self._owner if self._with_law else None,
            steps=len(self._columns),
        )

    def _draw(self, logits: Tensor, rows: Seq[int]) -> Tensor:
        sampler = self._sampler
        seen = torch.stack(tuple(self._drawn), 1) if self._drawn and sampler.adjusts else None
        if self._laws is None or self._is_apart is None:
            return sampler.draw(logits, rows, seen)[0]
        scores = sampler.scores(logits, rows, seen)
        laws = sampler.laws(scores, rows)
        self._laws[:, len(self._drawn)].copy_(laws)
        drawn = sampler.propose(laws, rows, self._rank)
        if self._all_laws:
            return drawn
        return torch.where(self._is_apart.tensor > 0, drawn, sampler.sample(scores, rows))
