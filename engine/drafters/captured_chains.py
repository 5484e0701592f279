"""All steps of a round's chains with their draws, as one captured graph."""

from collections.abc import Sequence as Seq
from dataclasses import replace

from torch import Tensor

from cache.gathered import GatheredStorage
from engine.drafters.base import Draft, DraftBatch
from engine.drafters.chain_draws import ChainDraws
from engine.models import padded_pass
from engine.models.padded_pass import PaddedPlans
from engine.models.paged_attention import PagedAttention
from engine.models.runner import Runner
from engine.models.spans import Span
from engine.sequence import Sequence


def can_capture(runner: Runner, batch: DraftBatch, ks: Seq[int]) -> bool:
    """Whether the drafts of a round with these ks may come from a captured graph, if no gap is too long for it."""
    if not batch.captured or not any(ks) or not padded_pass.can_capture(runner):
        return False
    return not any(k and batch.grows(i) for i, k in enumerate(ks))  # its shape follows from what is drawn


class GapPass:
    """The first pass of captured drafts. It reads each drafting sequence's gap."""

    def __init__(self, runner: Runner, batch: DraftBatch, ks: Seq[int]) -> None:
        """Put its numbers on their way to the device. The memory for ks is reserved. B sequences are filled up to S."""
        storage, rest = runner.storage, len(batch.sampler.offsets) - len(ks)
        assert isinstance(storage, GatheredStorage)
        self._runner = runner
        self.gaps = [runner.uncached(s) if k else 0 for s, k in zip(batch.sequences, ks, strict=True)]
        self._width = runner.chains.rows(self.gaps)  # rows of each sequence
        self.ids = runner.staging.ints([*self._read(batch.sequences), *[0] * (rest * self._width)])
        runner.chains.put(batch.sequences, self.gaps, len(batch.sampler.offsets))
        handles = [s.handle if k else None for s, k in zip(batch.sequences, ks, strict=True)]
        storage.prepare()
        # [S] of the model's memory; None: the sequence drafts nothing.
        self.slots = [*(None if handle is None else runner.cache.slot(handle) for handle in handles), *[None] * rest]
        starts = [*(0 if handle is None else runner.cache.length(handle) for handle in handles), *[0] * rest]
        self.ends = [start + gap for start, gap in zip(starts, [*self.gaps, *[0] * rest], strict=True)]
        self._plans, self._storage = PaddedPlans(self.slots, storage, runner.staging), storage
        spans = [
            None if slot is None else Span.at(slot, start, end - start)
            for slot, start, end in zip(self.slots, starts, self.ends, strict=True)
        ]
        self._attention = PagedAttention(self._plans.put(spans, self._width, at_end=True), storage)

    def run(self) -> tuple[Tensor, Tensor | None]:
        """As ChainPasses.run, for the last token of each of S sequences. Part of the region of a graph."""
        last = slice(self._width - 1, None, self._width)
        return self._runner.chains.run(self.ids.tensor, self._attention, last, None)

    def put(self, spans: Seq[Span | None], rows: int, windows: Seq[int] | None = None) -> PagedAttention:
        """A later pass over the same sequences, as PaddedPlans.put."""
        return PagedAttention(self._plans.put(spans, rows, windows=windows), self._storage)

    def put_steps(self, steps: Seq[int]) -> list[PagedAttention]:
        """Passes behind this one that read one token each, as PaddedPlans.put_steps."""
        plans = self._plans.put_steps(self.slots, self.ends, steps)
        return [PagedAttention(plan, self._storage) for plan in plans]

    def _read(self, sequences: Seq[Sequence]) -> list[int]:
        """Padding, then the gap, of each sequence."""
        ids, last = list[int](), self._runner.vocab_size - 1
        for sequence, gap in zip(sequences, self.gaps, strict=True):
            tokens = self._runner.tokens(sequence)
            ids += [0] * (self._width - gap)
            ids += tokens[len(tokens) - gap :]
        # A draft model's vocabulary may be smaller than the target's.
        return ids if max(ids) <= last else [min(token, last) for token in ids]


class CapturedChains:
    """The chains that a draft model draws for the sequences of a round. Every sequence has rows in each pass.
    Ignore what is drawn for a sequence that drafts nothing or has finished drafting: its rows are padding."""

    def __init__(self, runner: Runner, batch: DraftBatch, ks: Seq[int], vocab: int, rank: int = 0) -> None:
        """Put the numbers of all passes and draws on their way to the device. The memory for ks is reserved. vocab: ids
        from there on are not drawn. rank: the rank of the noise for draws from the drafts' own laws."""
        self._runner, self._batch, self._ks = runner, batch, tuple(ks)
        runner.staging.note("chains", max(ks))
        self._gap = GapPass(runner, batch, ks)
        self._attentions = self._put_passes()
        self._draws = ChainDraws(batch, ks, vocab, runner.decoder.dtype, runner.number, rank)
        self._key = runner.staging.layout

    def propose(self) -> Draft:
        """Draw the chains, and extend the cache by what the passes read."""
        self._runner.take_forwards()
        self._batch.sampler.take_in_texts()
        counts = {
            sequence.handle: gap + k - 1  # the last draft is not fed
            for sequence, gap, k in zip(self._batch.sequences, self._gap.gaps, self._ks, strict=True)
            if k
        }
        tokens = self._runner.run_captured(self._key, self._draw, counts)
        self._runner.chains.end([s for s, k in zip(self._batch.sequences, self._ks, strict=True) if k])
        # A copy, because another model's graph may run before the verification.
        draft = self._draws.draft(tokens[: len(self._ks)].clone())
        return replace(draft, read=sum(counts.values()), forwards=self._runner.take_forwards())

    def _draw(self) -> Tensor:
        """Drafts [≥ B, max k]. The region of the graph."""
        draws, runner = self._draws, self._runner
        draws.begin()
        states, carried = self._gap.run()
        for attention in self._attentions:
            fed = draws.draw(runner.decoder.logits(states))
            states, carried = runner.chains.run(fed, attention, slice(None), carried)
        draws.draw(runner.decoder.logits(states))
        return draws.table()

    def _put_passes(self) -> list[PagedAttention]:
        """The passes over each column of drafts but the last."""
        ks = [*self._ks, *[0] * (len(self._gap.ends) - len(self._ks))]
        return self._gap.put_steps([max(0, k - 1) for k in ks])
