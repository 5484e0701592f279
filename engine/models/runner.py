"""One model with its KV cache: feed the uncached tokens, get logits for the rows that are asked for (R1, R2)."""

import itertools
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from cache.layout import Layout, make_cache
from cache.memory import make_storage
from cache.storage import KVShape
from engine.device.round_clock import Forward, elapsed_ns, forwards_us, mark
from engine.device.staging import Staged, Staging
from engine.drafters.translation import DraftText, Translation
from engine.models.attention import Attention
from engine.models.attention_plans import AttentionPlans
from engine.models.chain_code import ChainModel
from engine.models.chain_passes import ChainPasses
from engine.models.decoder import Decoder, DecoderConfig, LanguageModel, WatchedStates
from engine.models.feeds import Feed, StateReader, insert_drafts, ragged
from engine.models.look_ahead import LookAhead, LookAheadRows
from engine.models.paged_attention import PagedAttention, PagedPlan
from engine.models.spans import Span
from engine.sequence import Sequence

log = logging.getLogger(__name__)

T = TypeVar("T")

_numbers = itertools.count()


class PlannedPass(NamedTuple):
    """A pass that can be computed: what the host knows of it is on its way to the device."""

    feeds: tuple[Feed, ...]
    handles: list[int]
    spans: list[Span]
    ids: Staged | None  # [N] int64; 0 for drafts; None: a step's ids come with the call
    draft_rows: Staged | None  # rows of the pass that are drafts; None: there are none
    draft_places: Staged | None  # … and where their ids stand, as (feed with outputs, column) pairs; None: in order
    logit_rows: Staged | None  # rows that give logits; None: all
    prompt_rows: Staged | None
    paged: PagedPlan | None  # where attention reads the blocks themselves
    state_rows: Staged | None = None  # where a head finds the target's states of the rows
    last_rows: Staged | None = None  # the last row of each feed, if a head needs to know
    ahead: LookAheadRows | None = None


class Runner:
    """A decoder with its KV memory (`storage`) and the bookkeeping of that memory (`cache`).

    Memory that holds numbers which are not finite must never reach another sequence: attention would spread them even
    where it masks them. A pass marks the memory that it writes as unknown. The round marks it as finite when finite
    scores came of it. Memory in an unknown state is examined before it is freed, and cleared if need be.
    """

    def __init__(
        self,
        decoder: LanguageModel,
        layout: Layout,
        device: torch.device,
        *,
        deterministic: bool = False,
        staging: Staging | None = None,
    ) -> None:
        """staging: what takes numbers to the device, shared by all that a round runs; None: one of its own.
        deterministic: a row's result does not depend on the other rows of a pass, if the decoder's products keep
        to that. It does not hold for a node of a tree: attention adds in another order where keys of other branches lie
        between the keys that the node sees."""
        self.decoder = decoder
        self.number = next(_numbers)  # no other runner of the process has it
        self.device = device
        self.staging = Staging(device) if staging is None else staging
        self.forwards: list[Forward] = []  # that nobody has taken: the device may still be at work
        self._largest_pass = (1, 0)  # tokens of the largest pass so far, nanoseconds of the latest pass of that size
        self.layout = layout
        self.cache = make_cache(layout)
        shape = kv_shape(decoder.config, decoder.dtype, device)
        self.storage = make_storage(layout, self.cache, shape)
        separate_to = layout.max_len if deterministic else None
        self.attention_plans = AttentionPlans(
            decoder.config, self.storage, shape, separate_to, lambda: decoder.block_rows
        )
        self.translation: Translation | None = None  # of a draft model with another tokenizer; its drafter sets it
        self.chains = ChainPasses(decoder)
        self.reader: StateReader | None = None
        self.look_ahead: LookAhead | None = None
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
        return len(self.tokens(sequence)) - self.cache.held(sequence.handle)

    def allocate(self, sequence: Sequence) -> None:
        """Give the sequence a slot, and what the prefix index holds of its committed tokens."""
        self.cache.allocate(sequence.handle, self.tokens(sequence), sequence.cache_salt)

    def ready(self, sequence: Sequence) -> bool:
        """Whether the model can read all of the sequence's uncached tokens. A head also needs the target's states."""
        return True

    def imagine_inputs(self, sequence: Sequence) -> None:
        """Let a head read zeros for a throw-away sequence, in place of the target's states of its uncached tokens."""

    def chain_model(self) -> ChainModel | None:
        """What compiled code draws chains with; None: it does not know the model."""
        return ChainModel(self.decoder) if isinstance(self.decoder, Decoder) else None

    def chain_states(self, sequences: Seq[Sequence], gaps: PlannedPass | None = None) -> Tensor | None:
        """What a head reads beside the first drafts of these sequences [n, hidden], or beside the rows of their gaps'
        pass [N, hidden], behind which it has no outputs for trees. None: it is no head."""
        return None

    def take_forwards(self) -> tuple[Forward, ...]:
        """The forwards since the last call. Their times can be read once the device has done them."""
        forwards, self.forwards = tuple(self.forwards), []
        return forwards

    def read_forwards(self) -> int:
        """Microseconds of the forwards that nobody has taken. The device must have done them."""
        forwards = self.take_forwards()
        for forward in forwards:
            if forward.tokens >= self._largest_pass[0]:
                self._largest_pass = forward.tokens, elapsed_ns(forward.begin, forward.end)
        return forwards_us(forwards)

    def pass_s(self, tokens: int) -> float:
        """Estimated seconds of a pass of so many tokens: in proportion to the largest pass that was timed, and never
        less."""
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
        if self.cache.window is None or not self.cache.unseen(handle, len(tokens)):
            return True
        finite = handle in self._known_finite or self._finite(handle)
        if finite:
            self.cache.slide(handle, len(tokens))
        return finite

    def mark_finite(self, sequence: Sequence) -> None:
        """The sequence's memory has led to finite scores, so it is finite."""
        self._known_finite.add(sequence.handle)

    def mark_unknown(self, handles: Iterable[int]) -> None:
        """A pass writes into the memory of these sequences."""
        self._known_finite.difference_update(handles)

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
        """Prepare and compute a pass."""
        return self.compute(self.prepare(feeds), drafts)

    def prepare(self, feeds: Seq[Feed], ahead: Seq[int] = ()) -> PlannedPass:
        """Reserve memory for a pass over all feeds, and put what it needs on its way to the device.

        ahead: the pass comes when the cache holds ahead[i] more tokens of the i-th feed's sequence; (): no more. Raises
        CacheFull if no memory is reserved for a feed and none is free.
        """
        ids, spans, logit_rows, prompt_rows = list[int](), list[Span](), list[int](), list[int]()
        draft_rows, draft_places, draft_index = list[int](), list[int](), -1
        for feed, more in zip(feeds, ahead or [0] * len(feeds), strict=True):
            draft_index += feed.outputs > 0
            handle = feed.sequence.handle
            if not self.cache.holds(handle):
                self.cache.allocate(handle)
            start, count = self.cache.length(handle) + more, feed.count + feed.riders
            self.cache.reserve(handle, more + count)
            spans.append(Span.at(self.cache.slot(handle), start, count, feed.shape))
            prompt_rows += range(len(ids), len(ids) + feed.prompt_rows)
            ids += self.tokens(feed.sequence)[start : start + feed.committed]
            draft_rows += range(len(ids), len(ids) + feed.drafts)
            for j in range(feed.drafts):
                draft_places += (draft_index, j)
            ids += [0] * feed.drafts
            logit_rows += range(len(ids) - feed.outputs, len(ids))
            ids += [0] * feed.riders
        if self.reader is not None and self.staging.deferred and self.reader.wants(feeds):
            self.reader.prepare(feeds, [span.start for span in spans], self.staging)
        put, last = self.staging.ints, self.vocab_size - 1
        # A draft model's vocabulary may be smaller than the target's. A wrong id costs drafts; a fault costs the pass.
        riding = self.look_ahead if any(feed.ahead for feed in feeds) else None
        legal = ids if not ids or max(ids) <= last else [min(token, last) for token in ids]
        return PlannedPass(
            tuple(feeds),
            [feed.sequence.handle for feed in feeds],
            spans,
            put(legal),
            put(draft_rows) if draft_rows else None,
            put(draft_places) if draft_rows and ragged(feeds) else None,
            None if len(logit_rows) >= len(ids) else put(logit_rows),
            put(prompt_rows) if prompt_rows else None,
            self._plan_ahead(spans),
            ahead=None if riding is None else riding.plan(feeds, [span.start for span in spans], self.staging),
        )

    def compute(self, planned: PlannedPass, drafts: Tensor | None = None) -> Tensor:
        """Compute a pass and extend the cache by its feeds. Returns logits [Σ outputs, vocab].

        The logits of prompt rows can be many, so only their states are kept, until the next pass: see `prompt_logits`.
        drafts [B, ≥ max drafts]: row i holds the draft ids of the i-th feed with outputs.
        """
        self.mark_unknown(planned.handles)
        assert planned.ids is not None, "a step has its own ids"
        tokens = planned.ids.tensor
        if drafts is not None and planned.draft_rows is not None:
            # The verifier rejects an illegal id; here it must not fault the embedding.
            insert_drafts(tokens, planned.draft_rows, drafts.clamp(0, self.vocab_size - 1), planned.draft_places)
        watched = self._watch(planned.feeds)
        logits, states = self._forward(planned, tokens, watched)
        for feed in planned.feeds:
            self.cache.extend(feed.sequence.handle, feed.count)
        if self.look_ahead is not None and planned.ahead is not None:
            self.look_ahead.read(planned.ahead, states)
        if self.reader is not None and watched is not None and watched.table is not None:
            self.reader.read(planned.feeds, [span.start for span in planned.spans], watched.table)
        rows = planned.prompt_rows
        self._prompt_states = None if rows is None else states[rows.tensor]
        return logits

    def run_captured(self, key: Hashable | None, region: Callable[[], T], counts: Mapping[int, int]) -> T:
        """Do the region's work, which feeds counts[handle] tokens of each sequence, by a captured graph if there is one
        (device/graphs.py). Its memory is reserved, and the numbers that it reads are put.

        key: what the region depends on beside this model, with the layout of its numbers; None: it is not captured.
        """
        self.staging.send()
        self.mark_unknown(counts)
        self._prompt_states = None
        graphs = self.staging.graphs
        assert graphs is not None, "only an engine with graphs has captured rounds"
        layout = None if self.staging.layout is None else key
        began = mark(self.device)
        result = graphs.run(self.number, layout, region)
        self.forwards.append(Forward(began, mark(self.device), sum(counts.values())))
        for handle, length in counts.items():
            self.cache.extend(handle, length)
        return result

    def keep_paths(self, paths: Iterable[tuple[Sequence, int, Seq[int]]]) -> None:
        """Move the keys and values of accepted nodes to where a chain's would lie. All sequences and layers share one
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
            self.require_writable(sequence, base + in_place)
            slot = self.cache.slot(sequence.handle)
            rows = list(self.storage.row_numbers(slot, base, base + nodes[-1] + 1))
            sources += [rows[node] for node in nodes[in_place:]]
            targets += rows[in_place : len(nodes)]
        if sources:
            self.storage.move(sources, targets)

    def require_writable(self, sequence: Sequence, start: int) -> None:
        """Raise ValueError if another sequence could read a place from `start` on."""
        if not self.cache.writable(sequence.handle, start):
            raise ValueError(f"others can read the drafts of request {sequence.request_id}: they must not move")

    def prompt_logits(self, rows: Tensor) -> Tensor:
        """Logits [n, vocab] of rows [n] among the prompt rows of the latest pass."""
        assert self._prompt_states is not None, "the latest pass had prompt rows"
        return self.decoder.logits(self._prompt_states[rows])

    def step(self, sequences: Seq[Sequence], tokens: Tensor, planned: PlannedPass | None = None) -> Tensor:
        """Feed each sequence one more token, ids [B] on the device. Returns logits [B, vocab].

        planned: what `prepare_step` returned for these sequences at this place.
        """
        planned = self.prepare_step(sequences) if planned is None else planned
        logits, _ = self._forward(planned, tokens, None)
        for handle in planned.handles:
            self.cache.extend(handle, 1)
        return logits

    def prepare_step(self, sequences: Seq[Sequence], ahead: Seq[int] = ()) -> PlannedPass:
        """As `prepare`, for a step that comes when the cache holds ahead[i] more tokens of sequence i; (): no more."""
        handles, spans = [s.handle for s in sequences], list[Span]()
        for handle, more in zip(handles, ahead or [0] * len(handles), strict=True):
            self.cache.reserve(handle, 1 + more)
            spans.append(Span.at(self.cache.slot(handle), self.cache.length(handle) + more, 1))
        paged = self._plan_ahead(spans)
        return PlannedPass((), handles, spans, None, None, None, None, None, paged)

    def _watch(self, feeds: Seq[Feed]) -> WatchedStates | None:
        """The states that the reader wants of a pass over these feeds; None: nobody reads any."""
        reader = self.reader
        return WatchedStates(reader.layers) if reader is not None and reader.wants(feeds) else None

    def _plan_ahead(self, spans: Seq[Span]) -> PagedPlan | None:
        """The plan of a pass whose numbers are put on their way with it; None: `attention` makes it."""
        if not self.attention_plans.ahead:
            return None
        self.storage.prepare()
        return self.attention_plans.plan_ahead(spans, self.staging)

    def attention(self, planned: PlannedPass) -> Attention | PagedAttention:
        """The attention of a planned pass."""
        if planned.paged is None:
            self.storage.prepare()
        return self.attention_plans.attention(planned.spans, planned.paged)

    def _forward(self, planned: PlannedPass, tokens: Tensor, watched: WatchedStates | None) -> tuple[Tensor, Tensor]:
        """(logits of the rows that give any, states of all rows). What is timed leaves out prompt rows."""
        began = mark(self.device)
        attention, ahead = self.attention(planned), planned.ahead
        if ahead is None or self.look_ahead is None:
            hidden = self.decoder.forward(tokens, attention, watched)
        else:
            hidden = self.look_ahead.forward(ahead, tokens, attention, watched)
        rows = planned.logit_rows
        logits = self.decoder.logits(hidden if rows is None else hidden[rows.tensor])
        self.forwards.append(Forward(began, mark(self.device), tokens.shape[0]))
        return logits, hidden


def kv_shape(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> KVShape:
    return KVShape(config.num_layers, config.num_kv_heads, config.head_dim, dtype, device, config.traits.widest_window)
