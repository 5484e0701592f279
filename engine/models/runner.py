"""One model with its cache: feed what is uncached, get logits for the rows that are asked for (architecture R1, R2)."""

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from time import perf_counter_ns

import torch
from torch import Tensor

from cache.layout import Layout, make_cache
from cache.memory import make_storage
from cache.storage import KVShape
from engine.models.attention import Attention, Span, plan_attention
from engine.models.decoder import Decoder, DecoderConfig
from engine.sequence import Sequence

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Feed:
    """What one sequence contributes to a pass: `committed` of its uncached tokens, then `drafts` draft tokens."""

    sequence: Sequence
    committed: int
    drafts: int = 0
    outputs: int = 1  # logits rows wanted, counted from the end of the feed
    scored: int = 0  # and from its beginning: rows that tell what the prompt's own next tokens were worth


class Runner:
    """A decoder, its KV memory and its bookkeeping. All state it has is in the cache."""

    def __init__(self, decoder: Decoder, layout: Layout, device: torch.device) -> None:
        self.decoder = decoder
        self.device = device
        self.forward_ns = 0  # spent in forwards so far, by the host's clock: the device's time on CPU, less on GPU
        self._largest = (1, 0)  # tokens of the largest pass so far, and nanoseconds that the latest such pass took
        self.layout = layout
        self.cache = make_cache(layout)
        self.storage = make_storage(layout, self.cache, kv_shape(decoder.config, decoder.dtype, device))
        self._vouched: set[int] = set()  # handles whose memory is known to be finite

    @property
    def vocab_size(self) -> int:
        return self.decoder.config.vocab_size

    def uncached(self, sequence: Sequence) -> int:
        """Committed tokens that the cache does not hold yet."""
        cached = self.cache.length(sequence.handle) if self.cache.holds(sequence.handle) else 0
        return len(sequence.tokens) - cached

    def pass_s(self, tokens: int) -> float:
        """Seconds that a pass of so many tokens may take: those of the largest one so far, in proportion."""
        count, spent = self._largest
        return max(1.0, tokens / count) * spent / 1e9

    def let_go(self, sequence: Sequence) -> None:
        """Free its memory. If nobody vouched for it since a pass wrote to it, it is looked at first. Does not raise:
        what cannot be looked at is cleared, and what cannot be cleared is withheld (R9)."""
        handle = sequence.handle
        if self.cache.holds(handle) and handle not in self._vouched and not self._finite(handle):
            self.spoil(sequence)
        self._vouched.discard(handle)
        self.cache.release(handle)

    def vouch(self, sequence: Sequence) -> None:
        """What its memory holds has led to finite scores."""
        self._vouched.add(sequence.handle)

    def spoil(self, sequence: Sequence) -> None:
        """What it computed is not finite: nobody may find it, or get its memory as it is. Where that cannot be cleared,
        the sequence loses it at once, and nobody gets it."""
        self.cache.discard(sequence.handle)
        try:
            self.storage.clear(sequence.handle)
        except Exception:
            log.exception("the memory of request %s could not be cleared; it is withheld", sequence.request_id)
            self.cache.quarantine(sequence.handle)
        else:
            self._vouched.add(sequence.handle)

    def take_back(self, sequence: Sequence, length: int) -> None:
        """Forget positions ≥ length after a pass that failed. What it wrote there may not be finite, and its memory may
        go to others: it is zeroed. Does not raise; where that fails, it is only logged."""
        try:
            self.storage.clear(sequence.handle, length)
        except Exception:
            log.exception("what a failed pass wrote for request %s could not be cleared", sequence.request_id)
        self.cache.truncate_to(sequence.handle, length)

    def reclaim(self) -> None:
        """Clear what is withheld, so that it can be had again. Does not raise: what cannot be cleared stays withheld.
        Next to nothing where nothing is, so that it may be tried before every round."""
        if not self.cache.withheld:
            return
        try:
            self.storage.clear_withheld()
        except Exception:  # as often as rounds are tried: a warning each would drown the one that told of it
            log.debug("withheld memory could not be cleared", exc_info=True)
        else:
            log.warning("withheld memory is cleared, and can be had again")

    def _finite(self, handle: int) -> bool:
        try:
            return self.storage.is_finite(handle)
        except Exception:
            log.exception("whether memory is finite could not be found out; it counts as not finite")
            return False

    def run(self, feeds: Seq[Feed], drafts: Tensor | None = None) -> Tensor:
        """One pass over all feeds; returns logits [Σ (scored + outputs), vocab], and the caches hold what was fed.

        Raises CacheFull, before anything is computed, for feeds that nobody reserved memory for and that find none.
        drafts [B, ≥ max drafts]: row i holds the ids fed after the committed tokens of the i-th feed with outputs.
        """
        ids: list[int] = []
        spans: list[Span] = []
        wanted: list[int] = []
        draft_rows: list[int] = []
        draft_places: list[tuple[int, int]] = []
        draft_index = -1
        for feed in feeds:
            draft_index += feed.outputs > 0
            handle = feed.sequence.handle
            self._vouched.discard(handle)
            if not self.cache.holds(handle):
                self.cache.allocate(handle)
            start, count = self.cache.length(handle), feed.committed + feed.drafts
            self.cache.reserve(handle, count)
            spans.append(Span.at(self.cache.slot(handle), start, count))
            wanted += range(len(ids), len(ids) + feed.scored)
            ids += feed.sequence.tokens[start : start + feed.committed]
            draft_rows += range(len(ids), len(ids) + feed.drafts)
            draft_places += [(draft_index, j) for j in range(feed.drafts)]
            ids += [0] * feed.drafts
            wanted += range(len(ids) - feed.outputs, len(ids))
        # A draft's table may be smaller than its target's: an id beyond it may cost drafts, not fault the embedding.
        tokens = torch.tensor(ids, device=self.device).clamp_(max=self.vocab_size - 1)
        if drafts is not None and draft_rows:
            self._place_drafts(tokens, draft_rows, drafts, draft_places)
        rows = torch.tensor(wanted, dtype=torch.int64, device=self.device) if len(wanted) < len(ids) else None
        logits = self._forward([feed.sequence.handle for feed in feeds], tokens, spans, rows)
        for feed, span in zip(feeds, spans, strict=True):
            self.cache.extend(feed.sequence.handle, span.count)
        return logits

    def step(self, sequences: Seq[Sequence], tokens: Tensor) -> Tensor:
        """Feed one more token each, ids [B] on the device (a draft's own); returns logits [B, vocab]."""
        handles = [s.handle for s in sequences]
        for handle in handles:
            self.cache.reserve(handle, 1)
        spans = [Span.at(self.cache.slot(h), self.cache.length(h), 1) for h in handles]
        logits = self._forward(handles, tokens, spans, None)
        for handle in handles:
            self.cache.extend(handle, 1)
        return logits

    def _forward(self, handles: Seq[int], tokens: Tensor, spans: Seq[Span], rows: Tensor | None) -> Tensor:
        """Logits of `rows` of the pass; None: of all. Timed as one forward: from ids to logits, mask included."""
        started = perf_counter_ns()
        config = self.decoder.config
        self.storage.prepare(handles)
        plan = plan_attention(
            spans,
            self.storage,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            dtype=self.decoder.dtype,
            device=self.device,
        )
        hidden = self.decoder.forward(tokens, Attention(plan, self.storage))
        logits = self.decoder.logits(hidden if rows is None else hidden[rows])
        spent, count = perf_counter_ns() - started, tokens.shape[0]
        self.forward_ns += spent
        if count >= self._largest[0]:
            self._largest = count, spent
        return logits

    def _place_drafts(self, tokens: Tensor, rows: list[int], drafts: Tensor, places: list[tuple[int, int]]) -> None:
        # An illegal id is rejected by the verifier; here it must only not fault the embedding.
        legal = drafts.clamp(0, self.vocab_size - 1)
        if len(places) == drafts.numel():
            values = legal.flatten()
        else:
            at = torch.tensor(places, device=self.device)
            values = legal[at[:, 0], at[:, 1]]
        tokens[torch.tensor(rows, device=self.device)] = values


def kv_shape(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> KVShape:
    return KVShape(config.num_layers, config.num_kv_heads, config.head_dim, dtype, device)
