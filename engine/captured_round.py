"""The target's part of a round in which every sequence decodes: its pass with the verdict, as one captured graph.

Within a round all sequences have as many rows as the one with the most drafts. So the device's work depends on the
numbers of sequences and drafts, on the width of the tables of blocks, on whether anybody truncates its law, and on
whether anybody wants log-probabilities.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from cache.gathered import GatheredStorage
from engine.drafters.base import NO_TOKEN, Draft, DraftBatch
from engine.kernels.verdict import match_verdict
from engine.models import padded_pass
from engine.models.attention import Span
from engine.models.padded_pass import PaddedPlans
from engine.models.paged_attention import PagedAttention
from engine.models.runner import Runner
from engine.sampling.acceptance import DeviceVerdict, Verdict
from engine.sampling.adjustments import banned
from engine.scheduler import Plan, Slice
from engine.verification import copy_to_host


def can_capture(plan: Plan, target: Runner) -> bool:
    """Whether parts of the plan's round may be captured graphs. All other rounds run operation by operation."""
    known = target.reader is None and padded_pass.can_capture(target)
    return known and bool(plan.slices) and all(map(_decodes, plan.slices))


def _decodes(part: Slice) -> bool:
    """Whether the slice feeds one committed token and the drafts of a chain, and draws by nothing but its noise,
    temperature and filters."""
    sequence, params = part.sequence, part.sequence.params
    feeds = part.emits and part.committed == 1 and not part.prompt_rows
    adjusted = params.logit_bias or params.penalised or params.excludes or banned(sequence, 0)
    return (
        feeds
        and part.shape is None
        and not sequence.tree_depth
        and not part.confidence
        and sequence.coupled
        and not adjusted
    )


class CapturedVerdict:
    """The target's pass over a round's drafts, and the verdict of `match`."""

    def __init__(self, batch: DraftBatch, ks: Seq[int], target: Runner) -> None:
        """Reserve the pass's memory and put its numbers on their way to the device. batch.sampler has as many rows for
        each sequence as the one with the largest k needs. Raises CacheFull."""
        storage, staging, cache = target.storage, target.staging, target.cache
        assert isinstance(storage, GatheredStorage)
        self._batch, self._ks, self._target = batch, tuple(ks), target
        self._depth = max(ks)
        self._counts = {s.handle: 1 + k for s, k in zip(batch.sequences, ks, strict=True)}
        for handle, count in self._counts.items():
            cache.reserve(handle, count)
        storage.prepare(list(self._counts))
        self._wants_logits = any(s.params.logprobs is not None for s in batch.sequences)
        staging.note("verdict", self._depth, self._wants_logits)
        plans = PaddedPlans([cache.slot(handle) for handle in self._counts], storage, staging)
        spans = [Span.at(cache.slot(handle), cache.length(handle), count) for handle, count in self._counts.items()]
        self._plan = plans.put(spans, 1 + self._depth)
        self._attention = PagedAttention(self._plan, storage)
        self._ids = staging.ints([s.tokens[-1] for s in batch.sequences])
        self._limits = staging.ints(ks)
        self._rows = range(len(ks) * (1 + self._depth))
        batch.sampler.prepare(self._rows)
        self._key = staging.layout

    @property
    def _drafts(self) -> Tensor:
        """[B, K] int64, at the same address in every round of B sequences and K drafts."""
        size = len(self._ks), self._depth
        return self._target.staging.keep(
            ("drafts", size), lambda: torch.zeros(size, dtype=torch.int64, device=self._target.device)
        )

    def fits(self, draft: Draft) -> bool:
        """Whether `run` can decide about the draft: it has chains, no longer than planned."""
        short = all(k <= planned for k, planned in zip(draft.ks, self._ks, strict=True))
        return short and not (draft.trees or draft.logq_rows or draft.wants_drawn)

    def run(self, draft: Draft) -> tuple[Verdict, Tensor | None]:
        """(the verdict, logits [B · (1 + K), vocab] if a request wants log-probabilities). Extends the cache by the
        planned drafts: those that did not come have tokens that are rejected."""
        if draft.tokens is not None:
            width = min(self._depth, draft.tokens.shape[1])
            self._drafts[:, :width].copy_(draft.tokens[:, :width])
        if draft.ks != self._ks:
            ks = self._target.staging.ints(draft.ks)
            self._limits.tensor.copy_(ks.tensor)
        table, states = self._target.run_captured(self._key, self._decide, self._counts)
        # Each graph keeps its results, and the logits of some graphs would fill the memory: they are computed again.
        logits = None if states is None else self._target.decoder.logits(states)
        accepted, tokens, finite = table[:, :3].unbind(1)
        verdict = DeviceVerdict(accepted, tokens, finite, table=table)
        return copy_to_host(verdict, draft, self._target.vocab_size), logits

    def _decide(self) -> tuple[Tensor, Tensor | None]:
        """(the table of match_verdict, states [B · (1 + K), hidden] if logits are wanted). The region of the graph."""
        decoder, tokens, drafts = self._target.decoder, self._ids.tensor, self._drafts
        if self._depth:
            columns = torch.arange(self._depth, device=drafts.device)
            drafts = drafts.masked_fill(columns >= self._limits.tensor[:, None], NO_TOKEN)  # never accepted
            legal = drafts.clamp(0, self._target.vocab_size - 1)
            tokens = torch.cat([tokens[:, None], legal], 1).flatten()
        states = decoder.forward(tokens, self._attention)
        logits = decoder.logits(states)
        drawn, finite = self._batch.sampler.draw(logits, self._rows)
        table = match_verdict(drawn, finite, drafts, self._plan.first_rows.tensor)
        return table, states if self._wants_logits else None
