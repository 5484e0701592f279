"""The draft-model drafter: a smaller decoder proposes k tokens one after the other, for all sequences at once."""

from collections.abc import Sequence as Seq
from typing import ClassVar

import torch
from torch import Tensor

from deployments.engine.acceptance import Verdict
from deployments.engine.drafters.base import Draft, DraftBatch
from deployments.engine.runner import Feed, Runner
from deployments.engine.sequence import Sequence


class ModelDrafter:
    """Feeds its model `tokens[cached_len:]`, whatever the gap is: the whole prompt at first, one token after a partial
    acceptance, two after a full one, many after plain rounds. A gap larger than `max_catch_up` is fed in pieces, one a
    round, and nothing is drafted for that sequence until it is closed, so that no long prompt delays the others."""

    needs_hidden: ClassVar[tuple[int, ...]] = ()

    def __init__(self, runner: Runner, target_vocab: int, max_catch_up: int) -> None:
        self.runner = runner
        self._vocab = min(target_vocab, runner.vocab_size)
        self._max_catch_up = max_catch_up

    def propose(self, batch: DraftBatch, ks: Seq[int]) -> Draft:
        """Drafts drawn by the round's sampler with the target's own noise, so that they agree as often as they can."""
        forward_ns = self.runner.forward_ns
        ks = self._catch_up(batch.sequences, ks)
        depth = max(ks)
        if not depth:
            return Draft.none(len(ks))
        active = [i for i, k in enumerate(ks) if k]
        tokens = torch.zeros(len(ks), depth, dtype=torch.int64, device=self.runner.device)
        logits = self.runner.run([Feed(s, self.runner.uncached(s)) for s in (batch.sequences[i] for i in active)])
        for j in range(depth):
            drawn = batch.sampler.sample(logits[:, : self._vocab], self._rows(batch, active, j))
            if len(active) == len(ks):
                tokens[:, j] = drawn
            else:
                tokens[self._index(active), j] = drawn
            still = [n for n, i in enumerate(active) if ks[i] > j + 1]
            if not still:
                break
            if len(still) < len(active):
                drawn, active = drawn[self._index(still)], [active[n] for n in still]
            logits = self.runner.step([batch.sequences[i] for i in active], drawn)
        return Draft(tuple(ks), tokens, steps=depth, forward_us=(self.runner.forward_ns - forward_ns) // 1000)

    def observe(self, batch: DraftBatch, verdict: Verdict) -> None:
        cache = self.runner.cache
        for sequence, accepted in zip(batch.sequences, verdict.accepted, strict=True):
            if cache.holds(sequence.handle):
                agreed = len(sequence.tokens) + accepted
                cache.truncate_to(sequence.handle, min(cache.length(sequence.handle), agreed))

    def forget(self, sequence: Sequence) -> None:
        self.runner.cache.release(sequence.handle)

    def audit(self) -> None:
        self.runner.cache.audit()

    def _catch_up(self, sequences: Seq[Sequence], ks: Seq[int]) -> list[int]:
        """Feed one piece of each gap that is too large; those sequences get k = 0 this round."""
        allowed, budget = list(ks), self._max_catch_up
        pieces = []
        for i, sequence in enumerate(sequences):
            gap = self.runner.uncached(sequence) if allowed[i] else 0
            if gap > budget:
                allowed[i] = 0
                if budget:
                    pieces.append(Feed(sequence, budget, outputs=0))
            budget -= min(gap, budget)
        if pieces:
            self.runner.run(pieces)
        return allowed

    def _rows(self, batch: DraftBatch, active: Seq[int], j: int) -> Tensor | None:
        if not batch.sampler.per_row:
            return None
        return self._index([batch.offsets[i] + j for i in active])

    def _index(self, values: Seq[int]) -> Tensor:
        return torch.tensor(values, device=self.runner.device)
