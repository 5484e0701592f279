"""The draft-model drafter: a smaller decoder proposes k tokens one after the other, for all sequences at once."""

from collections.abc import Sequence as Seq
from collections.abc import Set
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from deployments.engine.acceptance import Verdict
from deployments.engine.drafters.base import Draft, DraftBatch
from deployments.engine.runner import Feed, Runner
from deployments.engine.sequence import Sequence


class ModelDrafter:
    """Feeds its model `tokens[cached_len:]`, whatever the gap is: the whole prompt at first, one token after a partial
    acceptance, two after a full one, many after plain rounds. A round feeds at most `max_catch_up` of such tokens, and
    at most `chunk` where other sequences wait for it: a larger gap is fed in pieces, and nothing is drafted for that
    sequence until it is closed."""

    needs_hidden: ClassVar[tuple[int, ...]] = ()

    def __init__(self, runner: Runner, target_vocab: int, max_catch_up: int, chunk: int) -> None:
        self.runner = runner
        self._vocab = min(target_vocab, runner.vocab_size)
        self._max_catch_up = max_catch_up
        self._chunk = chunk

    def propose(self, batch: DraftBatch, ks: Seq[int]) -> Draft:
        """Drafts drawn with the round's own parameters: under `match` with the target's own noise, so that they agree
        as often as they can; for the other verifiers with noise of their own, and with the laws they were drawn from.
        """
        before = self.runner.forward_ns
        ks = [self._hold(s, k) if k else 0 for s, k in zip(batch.sequences, ks, strict=True)]
        ks, pieces = self._catch_up(batch.sequences, ks)
        active = self._by_slot(batch.sequences, [i for i, k in enumerate(ks) if k])
        feeds = [Feed(s, self.runner.uncached(s)) for s in (batch.sequences[i] for i in active)] + pieces
        first = self.runner.run(feeds) if feeds else None
        draft = Draft.none(len(ks)) if first is None or not active else self._draw(batch, ks, active, first)
        return replace(draft, steps=max(ks), forward_us=(self.runner.forward_ns - before) // 1000)

    def _draw(self, batch: DraftBatch, ks: Seq[int], active: list[int], logits: Tensor) -> Draft:
        """One forward per column; `logits` [len(active), vocab] draw the first."""
        columns = torch.zeros(max(ks), len(ks), dtype=torch.int64, device=self.runner.device)
        laws = Laws([i for i in active if not batch.sequences[i].coupled], max(ks))
        places = self._index(active)
        for j, column in enumerate(columns):
            drawn = laws.draw(batch, active, logits[:, : self._vocab], columns[:j].t())
            column.index_copy_(0, places, drawn)
            still = [n for n, i in enumerate(active) if ks[i] > j + 1]
            if not still:
                break
            if len(still) < len(active):
                drawn, active = drawn[self._index(still)], [active[n] for n in still]
                places = self._index(active)
            logits = self.runner.step([batch.sequences[i] for i in active], drawn)
        return Draft(tuple(ks), columns.t(), laws.table, laws.rows)

    def observe(self, batch: DraftBatch, verdict: Verdict) -> None:
        cache = self.runner.cache
        for sequence, accepted in zip(batch.sequences, verdict.accepted, strict=True):
            if cache.holds(sequence.handle):
                agreed = len(sequence.tokens) + accepted
                cache.truncate_to(sequence.handle, min(cache.length(sequence.handle), agreed))

    def forget(self, sequence: Sequence) -> None:
        self.runner.cache.release(sequence.handle)

    def audit(self, live: Set[int]) -> None:
        self.runner.cache.audit(live)

    def _hold(self, sequence: Sequence, k: int) -> int:
        """The sequence holds memory, shared where somebody's draft has read the same, for up to k drafts: how many."""
        cache = self.runner.cache
        if cache.holds(sequence.handle):
            cache.publish(sequence.handle, sequence.tokens)
        elif cache.free_slots:
            cache.allocate(sequence.handle, sequence.tokens, sequence.cache_salt)
        else:  # one that is gone could not be forgotten: the audit's to find
            return 0
        gap = self.runner.uncached(sequence)
        k = max(0, min(k, 1 + cache.room(sequence.handle) - gap))  # the last draft is not fed
        if k:
            cache.reserve(sequence.handle, gap + k - 1)
        return k

    def _catch_up(self, sequences: Seq[Sequence], ks: Seq[int]) -> tuple[list[int], list[Feed]]:
        """Which gaps are closed now, the smallest first, and one piece of the first that is too large for that; the
        sequences left behind get k = 0 this round."""
        gaps = [self.runner.uncached(s) if k else 0 for s, k in zip(sequences, ks, strict=True)]
        allowed, budget = list(ks), self._max_catch_up if len(gaps) == 1 else self._chunk
        pieces: list[Feed] = []
        for i in sorted(range(len(gaps)), key=gaps.__getitem__):
            if gaps[i] > budget:
                allowed[i] = 0
                if budget:
                    pieces.append(Feed(sequences[i], budget, outputs=0))
            budget -= min(gaps[i], budget)
        return allowed, pieces

    def _by_slot(self, sequences: Seq[Sequence], active: list[int]) -> list[int]:
        """Neighbours in the draft's memory are neighbours in its pass; its slots have an order of their own."""
        cache = self.runner.cache
        return sorted(active, key=lambda i: cache.slot(sequences[i].handle))

    def _index(self, values: Seq[int]) -> Tensor:
        return torch.tensor(values, device=self.runner.device)


class Laws:
    """Draws a round's drafts, and keeps the log-laws [n, depth, vocab] of those whose verifier needs them."""

    def __init__(self, sequences: Seq[int], depth: int) -> None:
        self.rows = {i: row for row, i in enumerate(sequences)}  # sequence of the batch → row of the table
        self.table: Tensor | None = None
        self._depth = depth

    def draw(self, batch: DraftBatch, active: Seq[int], logits: Tensor, drafts: Tensor) -> Tensor:
        """The next draft of each active sequence, from logits [len(active), vocab], given those so far [B, j]."""
        sampler, ahead = batch.sampler, drafts.shape[1]
        rows = [sampler.offsets[i] + ahead for i in active]
        scores = sampler.scores(logits, rows, drafts)
        exact = [n for n, i in enumerate(active) if i in self.rows]
        if not exact:
            return sampler.sample(scores, rows, drafting=True)
        places = torch.tensor(exact, device=scores.device)
        chosen = [rows[n] for n in exact]
        laws = sampler.laws(scores[places], chosen)
        self._keep([active[n] for n in exact], ahead, laws)
        own = sampler.propose(laws, chosen)
        if len(exact) == len(active):
            return own
        return sampler.sample(scores, rows, drafting=True).index_copy(0, places, own)

    def _keep(self, sequences: Seq[int], column: int, laws: Tensor) -> None:
        if self.table is None:
            self.table = laws.new_full((len(self.rows), self._depth, laws.shape[-1]), -torch.inf)
        self.table[[self.rows[i] for i in sequences], column] = laws
