"""Chains of a draft model on a CPU that one call of compiled code draws, with or behind the pass that reads the gaps.

Where one sequence needs more than that, all chains of the round are drawn operation by operation: with filters or
adjustments, with laws, and at a temperature where the vocabulary's noise is made in blocks (noise.py). Such models are
large enough for their arithmetic to count most.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import numpy as np
import torch
from torch import Tensor

from engine.device.round_clock import Forward, Mark, mark
from engine.drafters.base import Draft, DraftBatch
from engine.models.attention import Attention
from engine.models.chain_code import ChainCode, ChainNoise, ChainRows, Gaps
from engine.models.feeds import Feed
from engine.models.runner import Runner
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class CompiledChains:
    """The chains of a round. Sequences have the order of the code: the longest chain first."""

    code: ChainCode
    sequences: tuple[Sequence, ...]
    indices: list[int]  # of the sequences in the batch
    order: list[int]  # their places among the active ones
    depths: list[int]  # drafts of each
    count: int  # sequences of the batch
    noise: ChainNoise

    @classmethod
    def of(cls, code: ChainCode, batch: DraftBatch, ks: Seq[int], active: Seq[int]) -> Self | None:
        """The chains of the active sequences, indices in the batch; ks: drafts of each sequence of the batch. None:
        they must be drawn operation by operation."""
        depths, coupled = [ks[i] for i in active], all(batch.sequences[i].coupled for i in active)
        if len(active) > code.most_rows or any(batch.confidences) or not coupled:
            return None
        order = sorted(range(len(active)), key=lambda n: -depths[n])
        indices, depths = [active[n] for n in order], [depths[n] for n in order]
        places = [(column, s) for s, depth in enumerate(depths) for column in range(depth)]
        made = batch.sampler.noise_keys([batch.sampler.offsets[indices[s]] + column for column, s in places])
        if made is None:
            return None
        keys, sequences = np.zeros((depths[0], len(order)), np.uint64), tuple(batch.sequences[i] for i in indices)
        keys[tuple(zip(*places, strict=True))] = made
        noise = ChainNoise(keys, np.array([sequence.params.temperature for sequence in sequences]))
        return cls(code, sequences, indices, order, depths, len(ks), noise)

    def draw(self, runner: Runner, logits: Tensor) -> Draft:
        """Draw the chains, from the logits [active, vocab] of the first drafts on."""
        began, scores = mark(runner.device), logits.float()
        if self.order != list(range(len(self.order))):
            scores = scores[self.order]
        states = runner.chain_states(self.sequences)
        tokens = self.code.draw(self._rows(runner), self.noise, scores.contiguous(), states)
        return self._end(runner, began, tokens)

    def read_and_draw(self, runner: Runner, feeds: Seq[Feed]) -> Draft:
        """Read the gaps of the active sequences, and draw the chains. feeds: one for each, in the order of the active
        ones."""
        ends, planned = list(accumulate(feed.count for feed in feeds)), runner.prepare(feeds)
        if ends[-1] > self.code.most_read:
            return self.draw(runner, runner.compute(planned))
        began, attention = mark(runner.device), runner.attention(planned)
        assert isinstance(attention, Attention), "compiled code is for CPUs"
        if attention.by_blocks is None:
            del attention  # it may hold a large mask
            return self.draw(runner, runner.compute(planned))
        assert planned.ids is not None, "gaps are committed tokens"
        gaps = Gaps(planned.ids.tensor, attention, [ends[n] - 1 for n in self.order])
        runner.mark_unknown(planned.handles)
        rows = self._rows(runner, {feed.sequence.handle: feed.count for feed in feeds})
        tokens = self.code.draw(rows, self.noise, gaps, runner.chain_states(self.sequences, planned))
        for feed in feeds:
            runner.cache.extend(feed.sequence.handle, feed.count)
        runner.chains.end([feed.sequence for feed in feeds])
        return self._end(runner, began, tokens, ends[-1])

    def _rows(self, runner: Runner, gaps: dict[int, int] | None = None) -> ChainRows:
        """gaps: tokens that are read before the chains, by handle."""
        cache, handles = runner.cache, [sequence.handle for sequence in self.sequences]
        lengths = [cache.length(handle) + (gaps or {}).get(handle, 0) for handle in handles]
        return ChainRows([cache.slot(handle) for handle in handles], lengths, self.depths)

    def _end(self, runner: Runner, began: Mark, tokens: np.ndarray, of_gaps: int = 0) -> Draft:
        read = sum(self.depths) - len(self.depths)
        runner.forwards.append(Forward(began, mark(runner.device), of_gaps + read))
        for sequence, depth in zip(self.sequences, self.depths, strict=True):
            runner.cache.extend(sequence.handle, depth - 1)  # the last draft is not fed
        table, drawn = np.zeros((self.count, self.depths[0]), np.int64), [0] * self.count
        table[self.indices] = tokens.T
        for i, depth in zip(self.indices, self.depths, strict=True):
            drawn[i] = depth
        return Draft(tuple(drawn), torch.from_numpy(table), steps=self.depths[0] - 1, read=read)
