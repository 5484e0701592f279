"""All draft steps of a round with their draws, as one captured graph."""

from collections.abc import Sequence as Seq
from dataclasses import replace

from torch import Tensor

from cache.gathered import GatheredStorage
from engine.drafters.base import Draft, DraftBatch
from engine.drafters.chain_draws import ChainDraws
from engine.models import padded_pass
from engine.models.attention import Span
from engine.models.padded_pass import PaddedPlans
from engine.models.paged_attention import PagedAttention
from engine.models.runner import Runner


def can_capture(runner: Runner, batch: DraftBatch, ks: Seq[int]) -> bool:
    """Whether the chains of a round with these ks may come from a captured graph."""
    if not batch.captured or not any(ks) or not padded_pass.can_capture(runner):
        return False
    if any(k and (batch.grows(i) or batch.shape(i) is not None) for i, k in enumerate(ks)):
        return False
    return all(runner.uncached(s) <= runner.chains.most_gap for s, k in zip(batch.sequences, ks, strict=True) if k)


class CapturedChains:
    """The chains that a draft model draws for the sequences of a round. Every sequence has rows in each pass. Those of
    one that drafts nothing, or no more, are padding, and what is drawn for it means nothing."""

    def __init__(self, runner: Runner, batch: DraftBatch, ks: Seq[int], vocab: int, rank: int = 0) -> None:
        """Put the numbers of all passes and draws on their way to the device. The memory for ks is reserved. vocab: ids
        from there on are not drawn. rank: of the noise of draws from the drafts' own laws."""
        self._runner, self._batch, self._ks = runner, batch, tuple(ks)
        self._rest = len(batch.sampler.offsets) - len(ks)  # what fills up the round
        self._gaps = [runner.uncached(s) if k else 0 for s, k in zip(batch.sequences, ks, strict=True)]
        self._width = runner.chains.rows(self._gaps)  # rows of each sequence in the first pass
        runner.staging.note("chains", max(ks))
        self._ids = runner.staging.ints(self._gap_ids())
        runner.chains.put(batch.sequences, self._gaps, len(batch.sampler.offsets))
        self._attentions = self._put_passes()
        self._draws = ChainDraws(batch, ks, vocab, runner.decoder.dtype, runner.number, rank)
        self._key = runner.staging.layout

    def propose(self) -> Draft:
        """Draw the chains, and extend the cache by what the passes read."""
        self._runner.take_forwards()
        self._batch.sampler.take_in_texts()
        counts = {
            sequence.handle: gap + k - 1  # the last draft is not fed
            for sequence, gap, k in zip(self._batch.sequences, self._gaps, self._ks, strict=True)
            if k
        }
        tokens = self._runner.run_captured(self._key, self._draw, counts)
        drafting = [i for i, k in enumerate(self._ks) if k]
        self._runner.chains.end([self._batch.sequences[i] for i in drafting], [self._ks[i] - 1 for i in drafting])
        # A copy, because another model's graph may run before the verification.
        draft = self._draws.draft(tokens[: len(self._ks)].clone())
        return replace(draft, read=sum(counts.values()), forwards=self._runner.take_forwards())

    def _draw(self) -> Tensor:
        """Drafts [≥ B, max k]. The region of the graph."""
        draws, fed, carried = self._draws, self._ids.tensor, None
        draws.begin()
        rows = slice(self._width - 1, None, self._width)
        for attention in self._attentions:
            states, carried = self._runner.chains.run(fed, attention, rows, carried)
            fed, rows = draws.draw(self._runner.decoder.logits(states)), slice(None)
        return draws.table()

    def _gap_ids(self) -> list[int]:
        """What the first pass reads: padding, then the gap, of each sequence."""
        ids: list[int] = []
        for sequence, gap in zip(self._batch.sequences, self._gaps, strict=True):
            tokens = self._runner.tokens(sequence)
            # A draft model's vocabulary may be smaller than the target's.
            read = [min(token, self._runner.vocab_size - 1) for token in tokens[len(tokens) - gap :]]
            ids += [0] * (self._width - gap) + read
        return ids + [0] * (self._rest * self._width)

    def _put_passes(self) -> list[PagedAttention]:
        """The pass over the gaps, then one over each column of drafts but the last."""
        cache, storage = self._runner.cache, self._runner.storage
        assert isinstance(storage, GatheredStorage)
        handles = [s.handle if k else None for s, k in zip(self._batch.sequences, self._ks, strict=True)]
        storage.prepare([handle for handle in handles if handle is not None])
        handles += [None] * self._rest
        slots = [None if handle is None else cache.slot(handle) for handle in handles]
        starts = [0 if handle is None else cache.length(handle) for handle in handles]
        plans = PaddedPlans(slots, storage, self._runner.staging)
        ks, counts = [*self._ks, *[0] * self._rest], [*self._gaps, *[0] * self._rest]
        rows, put = self._width, list[PagedAttention]()
        for column in range(1, max(self._ks) + 1):
            spans = [
                None if slot is None or not count else Span.at(slot, start, count)
                for slot, start, count in zip(slots, starts, counts, strict=True)
            ]
            put.append(PagedAttention(plans.put(spans, rows, at_end=True), storage))
            starts = [start + count for start, count in zip(starts, counts, strict=True)]
            counts, rows = [int(k > column) for k in ks], 1
        return put
