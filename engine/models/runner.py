"""One model with its KV cache: feed the uncached tokens, get logits for the rows that are asked for (R1, R2)."""

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Protocol

import torch
from torch import Tensor

from cache.layout import Layout, make_cache
from cache.memory import make_storage
from cache.storage import KVShape
from engine.drafters.translation import DraftText, Translation
from engine.models.attention import Attention, Span, index_tensor, plan_attention
from engine.models.decoder import DecoderConfig, LanguageModel, WatchedStates
from engine.sequence import Sequence
from engine.trees import Parents

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Feed:
    """What one sequence contributes to a pass: `committed` of its uncached tokens, then `drafts` draft tokens."""

    sequence: Sequence
    committed: int
    drafts: int = 0
    outputs: int = 1  # rows of logits, counted from the end of the feed
    prompt_rows: int = 0  # rows of states from its beginning, for the log-probabilities of the prompt's next tokens
    # The shape of the tree whose last nodes are the drafts; None: they are a chain. The tree's other nodes lie in the
    # slot already, and then nothing is committed.
    parents: Parents | None = None


class StateReader(Protocol):
    """What reads a target's hidden states after its passes, for a head that drafts from them. Its methods do not raise:
    a head costs drafts and nothing else (R9)."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose states it reads, numbered as in WatchedStates."""
        ...

    def wants(self, feeds: Seq[Feed]) -> bool:
        """Whether it reads the states of a pass over these feeds. A pass that it does not read costs nothing."""
        ...

    def read(self, feeds: Seq[Feed], starts: Seq[int], states: Tensor) -> None:
        """Take the states [N, len(layers) · hidden] of a pass. The i-th feed's rows belong to the positions from
        starts[i] on. Rows of drafts are among them; the verdict comes later."""
        ...


class Runner:
    """A decoder with its KV memory (`storage`) and the bookkeeping of that memory (`cache`).

    Memory that holds numbers which are not finite must never reach another sequence: attention would spread them even
    where it masks them. A pass marks the memory that it writes as unknown. The round marks it as finite when finite
    scores came of it. Memory in an unknown state is examined before it is freed, and cleared if need be.
    """

    def __init__(
        self, decoder: LanguageModel, layout: Layout, device: torch.device, *, deterministic: bool = False
    ) -> None:
        """deterministic: a row's result does not depend on the other rows of a pass, if the decoder's products keep
        to that. It does not hold for a node of a tree: attention adds in another order where keys of other branches lie
        between the keys that the node sees."""
        self.decoder = decoder
        self._separate_to = layout.max_len if deterministic else None
        self.device = device
        self.forward_ns = 0  # spent in forwards so far, by the host's clock: a GPU may still be at work
        self._largest_pass = (1, 0)  # tokens of the largest pass so far, nanoseconds of the latest pass of that size
        self.layout = layout
        self.cache = make_cache(layout)
        self.storage = make_storage(layout, self.cache, kv_shape(decoder.config, decoder.dtype, device))
        self.translation: Translation | None = None  # of a draft model with another tokenizer; its drafter sets it
        self.reader: StateReader | None = None
        self._prompt_states: Tensor | None = None  # [Σ prompt_rows, hidden] of the latest pass
        self._known_finite: set[int] = set()  # handles whose memory holds finite numbers only

    @property
    def vocab_size(self) -> int:
        return self.decoder.config.vocab_size

    def tokens(self, sequence: Sequence) -> list[int]:
        """The sequence's committed tokens as this model reads them. Read only."""
        if self.translation is None:
            return sequence.tokens
        if sequence.draft_text is None:
            sequence.draft_text = DraftText(self.translation)
        return sequence.draft_text.sync(sequence.tokens)

    def uncached(self, sequence: Sequence) -> int:
        """Committed tokens, as this model reads them, that the cache does not hold yet."""
        cached = self.cache.length(sequence.handle) if self.cache.holds(sequence.handle) else 0
        return len(self.tokens(sequence)) - cached

    def allocate(self, sequence: Sequence) -> None:
        """Give the sequence a slot, and what the prefix index holds of its committed tokens."""
        self.cache.allocate(sequence.handle, self.tokens(sequence), sequence.cache_salt)

    def ready(self, sequence: Sequence) -> bool:
        """Whether the model can read all of the sequence's uncached tokens. A head also needs the target's states."""
        return True

    def imagine_inputs(self, sequence: Sequence) -> None:
        """For a throw-away sequence: let a head read zeros in place of the target's states of its uncached tokens."""

    def pass_s(self, tokens: int) -> float:
        """Estimated seconds of a pass of so many tokens: in proportion to the largest pass so far, and never less."""
        count, spent_ns = self._largest_pass
        return max(1.0, tokens / count) * spent_ns / 1e9

    def release(self, sequence: Sequence) -> None:
        """Free the sequence's memory. Memory that is not known to be finite is examined first, and cleared if it is
        not. Idempotent. Does not raise: memory that cannot be examined is cleared, memory that cannot be cleared is
        withheld (R9)."""
        handle = sequence.handle
        if self.cache.holds(handle) and handle not in self._known_finite and not self._finite(handle):
            self.clear_non_finite(sequence)
        self._known_finite.discard(handle)
        self.cache.release(handle)

    def publish(self, sequence: Sequence) -> bool:
        """Let other sequences find what the cache holds of the committed tokens, and free what no later query sees.

        The memory is examined first if it is not known to be finite. Memory that is not finite is kept until the
        sequence ends. Returns False if it is: the sequence needs more memory than the layout promises.
        """
        handle, tokens = sequence.handle, self.tokens(sequence)
        self.cache.publish(handle, tokens)
        if not self.cache.unseen(handle, len(tokens)):
            return True
        finite = handle in self._known_finite or self._finite(handle)
        if finite:
            self.cache.slide(handle, len(tokens))
        return finite

    def mark_finite(self, sequence: Sequence) -> None:
        """The sequence's memory has led to finite scores, so it is finite."""
        self._known_finite.add(sequence.handle)

    def clear_non_finite(self, sequence: Sequence) -> None:
        """The sequence's scores are not finite: take its memory out of the prefix index and clear it. Does not raise:
        memory that cannot be cleared is taken from the sequence and withheld."""
        self.cache.discard(sequence.handle)
        try:
            self.storage.clear(sequence.handle)
        except Exception:
            log.exception(
                "the memory of request %s could not be cleared; no request gets it until it can", sequence.request_id
            )
            self.cache.quarantine(sequence.handle)
        else:
            self._known_finite.add(sequence.handle)

    def undo_failed_pass(self, sequence: Sequence, length: int) -> None:
        """Roll back to `length` after a pass that failed, and zero the positions beyond: the pass may have written
        numbers there that are not finite, and the memory may go to others. Does not raise; a failure is logged."""
        try:
            self.storage.clear(sequence.handle, length)
        except Exception:
            log.exception("what a failed pass wrote for request %s could not be cleared", sequence.request_id)
        self.cache.truncate_to(sequence.handle, length)

    def restore_withheld(self) -> None:
        """Try to clear the withheld memory and return it to the pool. Does not raise. Costs nothing while none is
        withheld, so it is called before every round."""
        if not self.cache.withheld:
            return
        try:
            self.storage.clear_withheld()
        except Exception:  # in every round: the warning was logged when the memory was withheld
            log.debug("withheld memory could not be cleared", exc_info=True)
        else:
            log.warning("withheld memory was cleared; requests can get it again")

    def _finite(self, handle: int) -> bool:
        try:
            return self.storage.is_finite(handle)
        except Exception:
            log.exception("the memory of a request could not be examined; it is taken to be not finite")
            return False

    def run(self, feeds: Seq[Feed], drafts: Tensor | None = None) -> Tensor:
        """Run one pass over all feeds and extend the cache by them. Returns logits [Σ outputs, vocab].

        The logits of prompt rows can be many, so only their states are kept, until the next pass: see `prompt_logits`.
        drafts [B, ≥ max drafts]: row i holds the draft ids of the i-th feed with outputs.
        Raises CacheFull, before anything is computed, if no memory is reserved for a feed and none is free.
        """
        ids: list[int] = []
        spans: list[Span] = []
        logit_rows: list[int] = []
        prompt_rows: list[int] = []
        draft_rows: list[int] = []
        draft_places: list[tuple[int, int]] = []
        draft_index = -1
        for feed in feeds:
            draft_index += feed.outputs > 0
            handle = feed.sequence.handle
            self._known_finite.discard(handle)
            if not self.cache.holds(handle):
                self.cache.allocate(handle)
            start, count = self.cache.length(handle), feed.committed + feed.drafts
            self.cache.reserve(handle, count)
            spans.append(Span.at(self.cache.slot(handle), start, count, feed.parents))
            prompt_rows += range(len(ids), len(ids) + feed.prompt_rows)
            ids += self.tokens(feed.sequence)[start : start + feed.committed]
            draft_rows += range(len(ids), len(ids) + feed.drafts)
            draft_places += [(draft_index, j) for j in range(feed.drafts)]
            ids += [0] * feed.drafts
            logit_rows += range(len(ids) - feed.outputs, len(ids))
        # A draft model's vocabulary may be smaller than the target's. A wrong id costs drafts; a fault costs the pass.
        tokens = index_tensor(ids, self.device).clamp_(max=self.vocab_size - 1)
        if drafts is not None and draft_rows:
            self._insert_drafts(tokens, draft_rows, drafts, draft_places)
        rows = None if len(logit_rows) >= len(ids) else index_tensor(logit_rows, self.device)
        watched = self._watch(feeds)
        logits, states = self._forward([feed.sequence.handle for feed in feeds], tokens, spans, rows, watched)
        for feed, span in zip(feeds, spans, strict=True):
            self.cache.extend(feed.sequence.handle, span.count)
        if self.reader is not None and watched is not None and watched.table is not None:
            self.reader.read(feeds, [span.start for span in spans], watched.table)
        self._prompt_states = states[index_tensor(prompt_rows, self.device)] if prompt_rows else None
        return logits

    def keep_paths(self, paths: Iterable[tuple[Sequence, int, Seq[int]]]) -> None:
        """Move the keys and values of accepted nodes to where those of a chain lie. All sequences and layers share one
        gather and one write.

        A path is (sequence, base, nodes from the root's child on). Node v lies at place base + v of its slot, and the
        i-th node of the path moves to place base + i. The caller then truncates the sequence behind the path. Raises
        ValueError, before anything moves, if another sequence could read a place that would be written.
        """
        sources: list[int] = []
        targets: list[int] = []
        for sequence, base, nodes in paths:
            in_place = next((i for i, node in enumerate(nodes) if node != i), len(nodes))
            if in_place == len(nodes):
                continue
            if not self.cache.writable(sequence.handle, base + in_place):
                raise ValueError(f"others can read the drafts of request {sequence.request_id}: they must not move")
            slot = self.cache.slot(sequence.handle)
            rows = list(self.storage.row_numbers(slot, base, base + nodes[-1] + 1))
            sources += [rows[node] for node in nodes[in_place:]]
            targets += rows[in_place : len(nodes)]
        if sources:
            self.storage.move(sources, targets)

    def prompt_logits(self, rows: Tensor) -> Tensor:
        """Logits [n, vocab] of rows [n] among the prompt rows of the latest pass."""
        assert self._prompt_states is not None, "the latest pass had prompt rows"
        return self.decoder.logits(self._prompt_states[rows])

    def step(self, sequences: Seq[Sequence], tokens: Tensor) -> Tensor:
        """Feed each sequence one more token, ids [B] on the device. Returns logits [B, vocab]."""
        handles = [s.handle for s in sequences]
        for handle in handles:
            self.cache.reserve(handle, 1)
        spans = [Span.at(self.cache.slot(h), self.cache.length(h), 1) for h in handles]
        logits, _ = self._forward(handles, tokens, spans, None)
        for handle in handles:
            self.cache.extend(handle, 1)
        return logits

    def _watch(self, feeds: Seq[Feed]) -> WatchedStates | None:
        """Where a pass over these feeds keeps the states that the reader wants; None: nobody reads any."""
        reader = self.reader
        return WatchedStates(reader.layers) if reader is not None and reader.wants(feeds) else None

    def _forward(
        self,
        handles: Seq[int],
        tokens: Tensor,
        spans: Seq[Span],
        rows: Tensor | None,
        watched: WatchedStates | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(logits of `rows` of the pass, states of all rows). rows None: all. forward_ns covers all but prompt rows."""
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
            separate_to=self._separate_to,
        )
        hidden = self.decoder.forward(tokens, Attention(plan, self.storage), watched)
        logits = self.decoder.logits(hidden if rows is None else hidden[rows])
        spent_ns, count = perf_counter_ns() - started, tokens.shape[0]
        self.forward_ns += spent_ns
        if count >= self._largest_pass[0]:
            self._largest_pass = count, spent_ns
        return logits, hidden

    def _insert_drafts(self, tokens: Tensor, rows: list[int], drafts: Tensor, places: list[tuple[int, int]]) -> None:
        """Write drafts[places] into rows `rows` of tokens, without a copy to the host."""
        # The verifier rejects an illegal id; here it must not fault the embedding.
        legal = drafts.clamp(0, self.vocab_size - 1)
        if len(places) == drafts.numel():
            values = legal.flatten()
        else:
            index = torch.tensor(places, device=self.device)
            values = legal[index[:, 0], index[:, 1]]
        tokens[index_tensor(rows, self.device)] = values


def kv_shape(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> KVShape:
    return KVShape(config.num_layers, config.num_kv_heads, config.head_dim, dtype, device, config.traits.widest_window)
