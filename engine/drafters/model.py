"""The draft model as a drafter: a smaller decoder proposes k tokens one after the other, for all sequences at once."""

import logging
from collections.abc import Collection, Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import replace

from torch import Tensor

from engine.drafters import captured_chains
from engine.drafters.base import NO_OFFER, NO_TOKEN, Draft, DraftBatch, Offer
from engine.drafters.captured_tree_draft import CapturedTreeDraft
from engine.drafters.compiled_chains import CompiledChains
from engine.drafters.draft_columns import DraftColumns
from engine.drafters.growing_trees import grow_trees, wanted_trees
from engine.drafters.merging import merge_drafts
from engine.drafters.model_trees import FedTree, TreeDraft, TreeReader, joining_chains
from engine.drafters.shared_tokens import SharedTokens
from engine.drafters.translation import Translation
from engine.models.chain_code import ChainCode
from engine.models.feeds import Feed
from engine.models.runner import PlannedPass, Runner
from engine.models.tree_moves import HeldTree, PlannedMoves
from engine.sampling.acceptance import Verdict
from engine.sequence import Sequence
from engine.trees import Growth, Parents

log = logging.getLogger(__name__)


class ModelDrafter:
    """Feeds its model the gap `tokens[cached_len:]` (R1): the whole prompt at first, one token after a partial
    acceptance, two after a full one, many after plain rounds. A round feeds at most `max_catch_up` of these tokens, and
    at most `chunk` if it has other sequences too. A larger gap is fed in pieces, and nothing is drafted for its
    sequence until it is closed. Captured graphs read short gaps only, so a long one is fed before them: otherwise the
    drafts of all sequences would run operation by operation.

    Confidence: if the batch has a confidence for a sequence, its draft ends before the position at which the joint
    confidence falls below it. The joint confidence is the product of the largest probabilities of the draft's raw
    logits so far. It depends only on the tokens before the position, so every verifier stays lossless. Such a round
    copies one bit per sequence to the host for each column.

    A model with another tokenizer has a `translation`. It drafts shared tokens only. Its gap, memory and context are
    counted in its own tokens.

    Trees: the model draws the shape that the batch wants of a sequence, level by level (model_trees.py). Chains beside
    them are drawn in the same passes. A model with another tokenizer draws the chain of its first children.

    A draft ends at the end of the model's own context, which may be shorter than the target's. A sequence that has
    passed it gets no more drafts, and its memory is freed.

    If a draft ends in NO_TOKEN, the memory of its sequence holds numbers that are not finite. The memory is cleared,
    and nothing is drafted for the sequence until it is forgotten.
    """

    def __init__(
        self,
        runner: Runner,
        target_vocab: int,
        max_catch_up: int,
        chunk: int,
        translation: Translation | None = None,
        rank: int = 0,
    ) -> None:
        """rank: the rank of the noise for draws that are not coupled. Models that draft for the same sequence have
        different ranks."""
        self.runner = runner
        runner.translation = translation
        self._shared = None if translation is None else SharedTokens(translation, target_vocab, runner.device)
        self._code = ChainCode.of(runner.chain_model(), runner.storage)
        self._vocab = min(target_vocab, runner.vocab_size)
        self._max_catch_up = max_catch_up
        self._chunk = chunk
        self._rank = rank
        self._drafted: set[int] = set()  # handles of the sequences that the latest proposal has drafts for
        self._fed_trees: dict[int, FedTree] = {}  # by handle: what the model has read of the latest proposal's trees
        self._moves: PlannedMoves | None = None  # will move these trees' accepted nodes
        self._given_up: set[int] = set()  # handles of the sequences whose draft was not finite

    def compile(self) -> None:
        """Compile what draws chains, so that no round waits for it, nor the profile of rounds."""
        if self._code is not None:
            self._code.compile()

    def offer(self, sequence: Sequence, k: int) -> Offer:
        """Up to k drafts, as far as there is memory for the gap and them. The prefix index is not searched, so the
        gap of a sequence without memory is its whole text."""
        k = min(k, self._left(sequence))
        if k <= 0 or sequence.handle in self._given_up or not self.runner.ready(sequence):
            return NO_OFFER
        self.runner.restore_withheld()
        cache, gap = self.runner.cache, self.runner.uncached(sequence)
        if cache.holds(sequence.handle):
            k = min(k, 1 + cache.room(sequence.handle) - self._next_read(gap))  # the last draft is not fed
        elif not cache.free_slots:
            k = 0
        return Offer(sequence.drafter, max(0, k), gap, trees=self._shared is None)

    def propose(self, batch: DraftBatch, ks: Seq[int]) -> Draft:
        """Draw drafts with each request's sampling parameters: for `match` with the target's noise, so that both agree
        as often as possible; for the other verifiers with separate noise, and with the laws in `logq`.
        """
        self.runner.take_forwards()
        self._moves = None
        ks = [self._reserve(s, k) if k else 0 for s, k in zip(batch.sequences, ks, strict=True)]
        captured = self._shared is None and captured_chains.can_capture(self.runner, batch, ks)
        ks, pieces = self._catch_up(batch.sequences, ks, self.runner.chains.most_gap if captured else None)
        if captured:
            return self._propose_captured(batch, ks, pieces)
        shapes, growths = wanted_trees(batch, ks, may_branch=self._shared is None)
        others = {i: k for i, k in enumerate(ks) if k and i not in shapes and i not in growths}
        joining = joining_chains(batch, others) if shapes else {}
        shapes |= joining
        active = self._by_slot(batch.sequences, [i for i, k in enumerate(ks) if k])
        active.sort(key=lambda i: (i in growths, i in shapes))
        feeds = [Feed(s, self.runner.uncached(s)) for s in (batch.sequences[i] for i in active)] + pieces
        planned = self.runner.prepare(feeds) if feeds and self.runner.staging.deferred else None
        chains = [i for i in active if i not in shapes and i not in growths]
        limits = [k if i in chains else 0 for i, k in enumerate(ks)]
        columns = self._columns(batch, limits, chains) if chains and planned is not None else None
        steps = [] if columns is None else self._prepare_steps(batch, columns)
        trees = self._plan_trees(batch, {i: shapes[i] for i in active if i in shapes}, joining) if shapes else None
        compiled = self._compiled(batch, limits, chains) if chains and planned is None else None
        drafts, first = [], None
        if compiled is not None and len(feeds) == len(chains):  # no trees, and no pieces of prompts
            drafts.append(compiled.read_and_draw(self.runner, feeds))
        elif feeds:
            first = self.runner.run(feeds) if planned is None else self.runner.compute(planned)
        if first is not None and compiled is not None:
            drafts.append(compiled.draw(self.runner, first[: len(chains)]))
        elif first is not None and chains:
            columns = self._columns(batch, limits, chains) if columns is None else columns
            drafts.append(self._draw(batch, columns, first[: len(chains)], steps))
        self._fed_trees = {}
        if first is not None and trees is not None:
            drafts.append(self._draw_trees(batch, trees, first[len(chains) : len(chains) + len(shapes)]))
        if first is not None and (grown := {i: growths[i] for i in active if i in growths}):
            drafts.append(self._grow_trees(batch, grown, first[-len(grown) :]))
        draft = merge_drafts(drafts, len(ks))
        self._drafted = {s.handle for s, k in zip(batch.sequences, draft.ks, strict=True) if k}
        return replace(
            draft,
            steps=draft.steps + bool(feeds),
            read=draft.read + sum(feed.committed for feed in feeds),
            forwards=self.runner.take_forwards(),
        )

    def _propose_captured(self, batch: DraftBatch, ks: list[int], pieces: list[Feed]) -> Draft:
        """Read the pieces operation by operation, then draw all drafts by a captured graph."""
        self._drafted, self._fed_trees = set(), {}
        if pieces:
            with self.runner.staging.apart():
                self.runner.run(pieces)
        reading = self.runner.take_forwards()
        draft = self._draw_captured(batch, ks) if any(ks) else Draft.none(len(ks))
        read = draft.read + sum(feed.committed for feed in pieces)
        return replace(draft, steps=draft.steps + bool(pieces), read=read, forwards=(*reading, *draft.forwards))

    def _draw_captured(self, batch: DraftBatch, ks: list[int]) -> Draft:
        self._drafted = {s.handle for s, k in zip(batch.sequences, ks, strict=True) if k}
        shapes, _ = wanted_trees(batch, ks, may_branch=True)
        if not shapes:
            return captured_chains.CapturedChains(self.runner, batch, ks, self._vocab, self._rank).propose()
        trees = CapturedTreeDraft(self.runner, batch, ks, shapes, self._vocab)
        self._fed_trees = {batch.sequences[i].handle: fed for i, fed in trees.fed.items()}
        self._moves = PlannedMoves.of(self.runner, self._held_trees(batch, trees.fed))
        return trees.propose()

    def _columns(self, batch: DraftBatch, ks: Seq[int], active: Seq[int]) -> DraftColumns:
        return DraftColumns(batch, ks, active, self.runner.device, self._rank)

    def _compiled(self, batch: DraftBatch, ks: Seq[int], active: Seq[int]) -> CompiledChains | None:
        """The chains, if compiled code can draw them."""
        if self._shared is not None or self._code is None or self._code.vocab_size != self._vocab:
            return None
        return CompiledChains.of(self._code, batch, ks, active)

    def _prepare_steps(self, batch: DraftBatch, columns: "DraftColumns") -> list[PlannedPass]:
        """The passes that feed the drafts of all columns but the last, on their way to the device. Empty if a
        confidence decides only later who stays active."""
        if columns.limited:
            return []
        columns.prepare()
        planned = []
        for column, active in enumerate(columns.active_by_column()[1:]):
            sequences = [batch.sequences[i] for i in active]
            # The first pass closes the gaps, and the steps before this one feed a draft each.
            planned.append(self.runner.prepare_step(sequences, [self.runner.uncached(s) + column for s in sequences]))
        return planned

    def _draw(self, batch: DraftBatch, columns: "DraftColumns", logits: Tensor, planned: Seq[PlannedPass]) -> Draft:
        """Draw the drafts. The first column is drawn from `logits` [active, vocab], and one forward gives the logits of
        each further column; planned: these forwards, if they are prepared."""
        steps = read = 0
        while True:
            shared = self._shared
            drawn = columns.draw(logits[:, : self._vocab] if shared is None else shared.restrict(logits))
            if drawn is None:
                return replace(columns.draft(), steps=steps, read=read)
            fed = drawn if shared is None else shared.to_draft(drawn)
            sequences = [batch.sequences[i] for i in columns.active]
            logits = self.runner.step(sequences, fed, *planned[steps : steps + 1])
            steps, read = steps + 1, read + len(columns.active)

    def _plan_trees(
        self, batch: DraftBatch, shapes: dict[int, Parents], chains: Collection[int]
    ) -> tuple[TreeDraft, TreeReader]:
        draft = TreeDraft(batch, shapes, self._vocab, self.runner.device, chains=chains)
        reader = TreeReader(self.runner, batch, draft)
        self._moves = PlannedMoves.of(self.runner, self._held_trees(batch, reader.fed))
        return draft, reader

    def _held_trees(self, batch: DraftBatch, trees: Mapping[int, FedTree]) -> list[HeldTree]:
        """The nodes that the model will have read, where their keys and values are of use after the round."""
        sequences = [(i, batch.sequences[i], fed) for i, fed in trees.items()]
        return [HeldTree(i, s, len(self.runner.tokens(s)), fed.parents, fed.nodes) for i, s, fed in sequences]

    def _draw_trees(self, batch: DraftBatch, trees: tuple[TreeDraft, TreeReader], logits: Tensor) -> Draft:
        planned, reader = trees
        draft = planned.draw(logits, reader)
        self._fed_trees |= {batch.sequences[i].handle: reader.fed[i] for i in draft.trees}
        return replace(draft, steps=reader.steps, read=reader.read)

    def _grow_trees(self, batch: DraftBatch, growths: dict[int, Growth], logits: Tensor) -> Draft:
        draft, fed = grow_trees(self.runner, batch, growths, self._vocab, logits)
        self._fed_trees |= fed
        self._moves = None  # moves of planned shapes alone would leave the grown trees' nodes where they are
        return draft

    def observe(self, batch: DraftBatch, verdict: Verdict) -> None:
        cache, drafted, fed_trees = self.runner.cache, self._drafted, self._fed_trees
        self._drafted, self._fed_trees = set(), {}
        moves, rows = self._moves, verdict.last_rows
        self._moves = None
        if moves is not None and rows is not None:  # before any memory is cleared or given back
            moves.run(rows)
        kept: list[tuple[Sequence, int, Seq[int]]] = []
        for i, sequence in enumerate(batch.sequences):
            drafts = verdict.drafts[i]
            has_draft = sequence.handle in drafted and drafts
            if has_draft and NO_TOKEN in drafts:
                self._give_up(sequence)
            elif has_draft:
                self.runner.mark_finite(sequence)
            if not cache.holds(sequence.handle):  # then its text is not looked at: many never ask the model
                continue
            if self._left(sequence) <= 0:
                self.runner.release(sequence)
            else:
                places = self._kept_places(i, verdict, fed_trees.get(sequence.handle))
                kept.append((sequence, len(self.runner.tokens(sequence)), places))
        if moves is None or rows is None:
            self.runner.keep_paths(kept)
        for sequence, base, places in kept:
            cache.truncate_to(sequence.handle, min(cache.length(sequence.handle), base + len(places)))

    def forget(self, sequence: Sequence) -> None:
        self._given_up.discard(sequence.handle)
        self.runner.release(sequence)

    def audit(self, live: Set[int]) -> None:
        self.runner.cache.audit(live)
        assert self._given_up <= live, f"sequences that have ended were not forgotten: {sorted(self._given_up - live)}"

    def _kept_places(self, i: int, verdict: Verdict, fed: FedTree | None) -> Seq[int]:
        """The places of sequence i's accepted drafts that the memory holds, counted from the end of the committed
        tokens."""
        if fed is not None:
            return fed.kept(verdict.paths.get(i, ()))
        accepted, translation = verdict.emitted[i][:-1], self.runner.translation
        return range(len(accepted) if translation is None else translation.num_fed(accepted))

    def _give_up(self, sequence: Sequence) -> None:
        log.error(
            "the draft model gave no valid distribution for request %s; it drafts no more for this request",
            sequence.request_id,
        )
        self.runner.clear_non_finite(sequence)
        self.runner.release(sequence)
        self._given_up.add(sequence.handle)

    def _left(self, sequence: Sequence) -> int:
        """Drafts until the end of the model's context. The last draft is not fed, so it needs no position."""
        return 1 + self.runner.cache.max_len - len(self.runner.tokens(sequence))

    def _reserve(self, sequence: Sequence, k: int) -> int:
        """Reserve memory for the sequence's gap and up to k drafts. Returns the number of drafts it is enough for."""
        cache = self.runner.cache
        if self._left(sequence) <= 0 or sequence.handle in self._given_up or not self.runner.ready(sequence):
            return 0
        if cache.holds(sequence.handle):
            self.runner.publish(sequence)
        elif cache.free_slots:
            self.runner.allocate(sequence)
        else:  # a sequence that has ended still holds its slot; the audit reports it
            return 0
        gap = self._next_read(self.runner.uncached(sequence))
        k = max(0, min(k, 1 + cache.room(sequence.handle) - gap))  # the last draft is not fed
        if k:
            cache.reserve(sequence.handle, gap + k - 1)
        return k

    def _next_read(self, gap: int) -> int:
        """Tokens of a gap that need memory at once: all, unless each piece that was read leaves a window."""
        return gap if self.runner.cache.window is None else min(gap, self._max_catch_up)

    def _catch_up(self, sequences: Seq[Sequence], ks: Seq[int], most_gap: int | None) -> tuple[list[int], list[Feed]]:
        """(ks, partial feeds). Closes the smallest gaps first, within the budget, and feeds a piece of the first gap
        that does not fit. A sequence whose gap stays open gets k = 0 in this round. most_gap: tokens that a captured
        graph can read before it drafts; of a longer gap it reads the last token, and a partial feed the others. None:
        drafts are not captured."""
        gaps = [self.runner.uncached(s) if k else 0 for s, k in zip(sequences, ks, strict=True)]
        ks, budget = list(ks), self._max_catch_up if len(gaps) == 1 else self._chunk
        pieces: list[Feed] = []
        for i in sorted(range(len(gaps)), key=gaps.__getitem__):
            if gaps[i] > budget:
                ks[i] = 0
                if budget:
                    pieces.append(Feed(sequences[i], budget, outputs=0))
            elif most_gap is not None and gaps[i] > most_gap:
                pieces.append(Feed(sequences[i], gaps[i] - 1, outputs=0))
            budget -= min(gaps[i], budget)
        return ks, pieces

    def _by_slot(self, sequences: Seq[Sequence], active: list[int]) -> list[int]:
        """The indices by slot: neighbours in the draft model's memory are neighbours in its pass."""
        cache = self.runner.cache
        return sorted(active, key=lambda i: cache.slot(sequences[i].handle))
