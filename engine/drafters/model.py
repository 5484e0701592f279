"""The draft-model drafter: a smaller decoder proposes k tokens one after the other, for all sequences at once."""

import logging
from collections.abc import Sequence as Seq
from collections.abc import Set
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from engine.drafters.base import NO_OFFER, NO_TOKEN, Draft, DraftBatch, Offer
from engine.drafters.confidence import ConfidenceLimit
from engine.models.runner import Feed, Runner
from engine.sampling.acceptance import Verdict
from engine.sequence import Sequence

log = logging.getLogger(__name__)


class ModelDrafter:
    """Feeds its model `tokens[cached_len:]`, whatever the gap is: the whole prompt at first, one token after a partial
    acceptance, two after a full one, many after plain rounds. A round feeds at most `max_catch_up` of such tokens, and
    at most `chunk` where other sequences wait for it: a larger gap is fed in pieces, and nothing is drafted for that
    sequence until it is closed.

    Where the batch names a confidence for a sequence, its draft ends before the position at which the joint confidence
    falls below that: the product of the draft's largest probabilities so far, of its raw logits. Whether a position is
    drafted then depends on the tokens before it alone, which keeps every verifier lossless. It takes a copy to the host
    per column, of one bit per sequence, in rounds in which somebody has a confidence.

    A sequence whose draft ends in NO_TOKEN is given up: what its memory holds is not finite. That is cleared, so that
    nobody else meets it, and nothing is drafted for the sequence until it is forgotten.
    """

    needs_hidden: ClassVar[tuple[int, ...]] = ()

    def __init__(self, runner: Runner, target_vocab: int, max_catch_up: int, chunk: int) -> None:
        self.runner = runner
        self._vocab = min(target_vocab, runner.vocab_size)
        self._max_catch_up = max_catch_up
        self._chunk = chunk
        self._drawn: set[int] = set()  # handles of the sequences that the last proposal drafted for
        self._given_up: set[int] = set()  # and of those that nothing is drafted for any more

    def offer(self, sequence: Sequence, k: int) -> Offer:
        """As many as are asked for and its memory has room for, behind the gap. Whether its cache could share some of
        the gap of a sequence that holds nothing yet is not looked up: the gap is then its whole text."""
        if sequence.handle in self._given_up:
            return NO_OFFER
        self.runner.restore_withheld()
        cache, gap = self.runner.cache, self.runner.uncached(sequence)
        if cache.holds(sequence.handle):
            k = min(k, 1 + cache.room(sequence.handle) - gap)  # the last draft is not fed
        elif not cache.free_slots:
            k = 0
        return Offer(sequence.drafter, max(0, k), gap)

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
        self._drawn = {s.handle for s, k in zip(batch.sequences, draft.ks, strict=True) if k}
        return replace(
            draft,
            steps=draft.steps + bool(feeds),
            read=draft.read + sum(feed.committed for feed in feeds),
            forward_us=(self.runner.forward_ns - before) // 1000,
        )

    def _draw(self, batch: DraftBatch, most: Seq[int], active: list[int], logits: Tensor) -> Draft:
        """Up to most[i] drafts for sequence i, one forward per column; `logits` [len(active), vocab] draw the first."""
        columns = Columns(batch, most, active, self.runner.device)
        steps = read = 0
        while True:
            drawn = columns.draw(logits[:, : self._vocab])
            if drawn is None:
                return replace(columns.draft(), steps=steps, read=read)
            logits = self.runner.step([batch.sequences[i] for i in columns.active], drawn)
            steps, read = steps + 1, read + len(columns.active)

    def observe(self, batch: DraftBatch, verdict: Verdict) -> None:
        cache, drawn = self.runner.cache, self._drawn
        self._drawn = set()
        for sequence, accepted, drafts in zip(batch.sequences, verdict.accepted, verdict.drafts, strict=True):
            told = sequence.handle in drawn and drafts
            if told and NO_TOKEN in drafts:
                self._give_up(sequence)
            elif told:
                self.runner.mark_finite(sequence)
            if cache.holds(sequence.handle):
                agreed = len(sequence.tokens) + accepted
                cache.truncate_to(sequence.handle, min(cache.length(sequence.handle), agreed))

    def forget(self, sequence: Sequence) -> None:
        self._given_up.discard(sequence.handle)
        self.runner.release(sequence)

    def audit(self, live: Set[int]) -> None:
        self.runner.cache.audit(live)
        assert self._given_up <= live, f"sequences that are gone were given up: {sorted(self._given_up - live)}"

    def _give_up(self, sequence: Sequence) -> None:
        log.error(
            "the draft model gave no valid distribution for request %s; it gets no more drafts of it",
            sequence.request_id,
        )
        self.runner.clear_non_finite(sequence)
        self.runner.release(sequence)
        self._given_up.add(sequence.handle)

    def _hold(self, sequence: Sequence, k: int) -> int:
        """The sequence holds memory, shared where somebody's draft has read the same, for up to k drafts: how many."""
        cache = self.runner.cache
        if sequence.handle in self._given_up:
            return 0
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


class Columns:
    """A draft in the making, one more token of each sequence that is still active at a time."""

    def __init__(self, batch: DraftBatch, most: Seq[int], active: Seq[int], device: torch.device) -> None:
        self.active = list(active)  # sequences of the batch
        self._batch = batch
        self._most = most
        self._ks = [0] * len(most)
        self._tokens = torch.zeros(max(most), len(most), dtype=torch.int64, device=device)
        self._laws = Laws([i for i in active if not batch.sequences[i].coupled], max(most))
        self._confidence = ConfidenceLimit.of(batch.confidences, device)
        self._places = self._index(self.active)
        self._column = 0
        self._shortest = min(most[i] for i in active)

    def draw(self, logits: Tensor) -> Tensor | None:
        """The next column, from logits [len(active), vocab]: what those that go on behind it have drawn, to be fed;
        None once nobody does."""
        if self._confidence is not None:
            logits = self._narrow(self._confidence.sure(logits, self._places), logits)
            if not self.active:
                return None
        drawn = self._laws.draw(self._batch, self.active, logits, self._tokens[: self._column].t())
        ends = self._column + 1 == self._shortest
        self._tokens[self._column].index_copy_(0, self._places, _legal(drawn, logits) if ends else drawn)
        self._column += 1
        if ends:
            drawn = self._narrow([n for n, i in enumerate(self.active) if self._most[i] > self._column], drawn)
        return drawn if self.active else None

    def draft(self) -> Draft:
        """Once nobody is active any more."""
        if not self._column:
            return Draft.none(len(self._ks))
        rows = {i: row for i, row in self._laws.rows.items() if self._ks[i]}
        return Draft(tuple(self._ks), self._tokens.t(), self._laws.table, rows)

    def _narrow(self, still: Seq[int], values: Tensor) -> Tensor:
        """Only places `still` of the active ones go on; of values [len(active), …] their rows."""
        if len(still) == len(self.active):
            return values
        for i in self.active:
            self._ks[i] = self._column
        self.active = [self.active[n] for n in still]
        if not still:
            return values
        self._shortest = min(self._most[i] for i in self.active)
        self._places = self._index(self.active)
        return values[self._index(still)]

    def _index(self, values: Seq[int]) -> Tensor:
        return torch.tensor(values, device=self._tokens.device)


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


def _legal(drawn: Tensor, logits: Tensor) -> Tensor:
    """The drafts [n], with NO_TOKEN for each whose logit, of logits [n, vocab], is not finite.

    Once the memory of a sequence is not finite, no later logit is: its last draft tells of all that was fed for it.
    """
    finite = logits.gather(1, drawn[:, None])[:, 0].abs() < torch.inf
    return torch.where(finite, drawn, NO_TOKEN)
