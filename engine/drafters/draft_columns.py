"""Draws chains column by column, operation by operation. Each column is one more token of every active sequence."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.drafters.base import Draft, DraftBatch
from engine.drafters.confidence import ConfidenceLimit
from engine.drafters.model_trees import mark_non_finite
from engine.sampling.adjustments import put, take


class DraftColumns:
    """A draft in the making. Each column is one more token of every sequence that is still active."""

    def __init__(self, batch: DraftBatch, max_ks: Seq[int], active: Seq[int], device: torch.device, rank: int) -> None:
        self.active = list(active)  # indices in the batch
        self._batch = batch
        self._numbers = batch.sampler.numbers
        self._max_ks = max_ks
        self._ks = [0] * len(max_ks)
        self._tokens = torch.zeros(max(max_ks), len(max_ks), dtype=torch.int64, device=device)
        # In the batch's order, in which the verification reads the laws.
        self._laws = DraftLaws([i for i in sorted(active) if not batch.sequences[i].coupled], max(max_ks), rank)
        self._confidence = ConfidenceLimit.of(batch.confidences, device)
        self._column = 0
        self._shortest = min(max_ks[i] for i in active)  # columns until the next sequence ends

    @property
    def limited(self) -> bool:
        """Whether a confidence may end drafts early."""
        return self._confidence is not None

    def active_by_column(self) -> list[list[int]]:
        """The sequences that each column draws for, if no confidence ends their drafts."""
        return [[i for i in self.active if self._max_ks[i] > j] for j in range(max(self._max_ks))]

    def prepare(self) -> None:
        """Put what all columns need on its way to the device (Sampler.prepare)."""
        before = self.active
        for ahead, active in enumerate(self.active_by_column()):
            self._numbers.index(active)
            if len(active) < len(before):
                self._numbers.index([n for n, i in enumerate(before) if i in set(active)])
            self._laws.prepare(self._batch, active, ahead)
            before = active

    def draw(self, logits: Tensor) -> Tensor | None:
        """Draw the next column from logits [len(active), vocab]. Returns the drafts of the sequences that stay active,
        to be fed next; None once no sequence does."""
        if self._confidence is not None:
            logits = self._keep(self._confidence.sure_rows(logits, self._index(self.active)), logits)
            if not self.active:
                return None
        drawn = self._laws.draw(self._batch, self.active, logits, self._tokens[: self._column].t())
        ends = self._column + 1 == self._shortest
        self._tokens[self._column].index_copy_(
            0,
            self._index(self.active),
            # Memory that is not finite makes all later logits so: the last draft tells.
            mark_non_finite(drawn[:, None], logits)[:, 0] if ends else drawn,
        )
        self._column += 1
        if ends:
            drawn = self._keep([n for n, i in enumerate(self.active) if self._max_ks[i] > self._column], drawn)
        return drawn if self.active else None

    def draft(self) -> Draft:
        """The finished draft, once no sequence is active."""
        if not self._column:
            return Draft.none(len(self._ks))
        rows = {i: row for i, row in self._laws.rows.items() if self._ks[i]}
        return Draft(tuple(self._ks), self._tokens.t(), self._laws.table, rows)

    def _keep(self, rows: Seq[int], values: Tensor) -> Tensor:
        """Let only `rows` of the active sequences stay active. Returns these rows of values [len(active), …]."""
        if len(rows) == len(self.active):
            return values
        for i in self.active:
            self._ks[i] = self._column
        self.active = [self.active[n] for n in rows]
        if not rows:
            return values
        self._shortest = min(self._max_ks[i] for i in self.active)
        return values[self._index(rows)]

    def _index(self, values: Seq[int]) -> Tensor:
        return self._numbers.index(values).tensor


class DraftLaws:
    """Draws a round's drafts, and keeps the log-laws [n, depth, vocab] of the sequences whose verifier needs them."""

    def __init__(self, indices: Seq[int], depth: int, rank: int = 0) -> None:
        self.rows = {i: row for row, i in enumerate(indices)}  # index in the batch → row of the table
        self.table: Tensor | None = None
        self._depth = depth
        self._rank = rank

    def prepare(self, batch: DraftBatch, active: Seq[int], ahead: int) -> None:
        """Put what `draw` needs for these sequences after `ahead` drafts on its way to the device."""
        sampler, with_law = batch.sampler, [n for n, i in enumerate(active) if i in self.rows]
        rows = [sampler.offsets[i] + ahead for i in active]
        if len(with_law) < len(active):
            sampler.prepare(rows)
        if not with_law:
            return
        if len(with_law) < len(active):
            sampler.numbers.index(with_law)
        sampler.prepare_laws(rows)
        sampler.prepare_proposals([rows[n] for n in with_law], self._rank)
        sampler.numbers.index([self.rows[active[n]] for n in with_law])

    def draw(self, batch: DraftBatch, active: Seq[int], logits: Tensor, drafts: Tensor) -> Tensor:
        """Draw the next draft of each active sequence from logits [len(active), vocab], after the drafts [B, j]."""
        sampler, ahead = batch.sampler, drafts.shape[1]
        rows = [sampler.offsets[i] + ahead for i in active]
        with_law = [n for n, i in enumerate(active) if i in self.rows]
        if not with_law:
            return sampler.draw_drafts(logits, rows, drafts)
        scores = sampler.scores(logits, rows, drafts)
        law_rows = [rows[n] for n in with_law]
        laws = sampler.laws(take(scores, with_law, sampler.numbers), law_rows)
        self._keep(sampler.numbers.index([self.rows[active[n]] for n in with_law]).tensor, ahead, laws)
        drawn = sampler.propose(laws, law_rows, self._rank)
        if len(with_law) == len(active):
            return drawn
        return put(sampler.sample(scores, rows, drafting=True), with_law, drawn, sampler.numbers)

    def _keep(self, rows: Tensor, column: int, laws: Tensor) -> None:
        if self.table is None:
            self.table = laws.new_full((len(self.rows), self._depth, laws.shape[-1]), -torch.inf)
        self.table[:, column].index_copy_(0, rows, laws)
