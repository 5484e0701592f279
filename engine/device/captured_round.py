"""The target's part of a round in which every sequence decodes: its pass with the verdict, as one captured graph.

Within a round all sequences have as many rows as the one with the most drafts. Sequences that nobody reads fill the
round up to a rounded number (RoundLimits.padded). So the device's work depends on the rounded number of sequences, on
the number of drafts, on whether any of them are trees, on the width of the tables of blocks, on whether anybody
truncates its law, and on whether anybody wants log-probabilities.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import repeat
from typing import Self

import torch
from torch import Tensor

from cache.gathered import GatheredStorage
from engine.device.captured_laws import CapturedLaws
from engine.device.captured_trees import CapturedTrees
from engine.device.round_limits import RoundLimits
from engine.drafters.base import NO_TOKEN, Draft, DraftBatch
from engine.kernels.paged_rows import MAX_NODES
from engine.kernels.verdict import match_verdict
from engine.models import padded_pass
from engine.models.decoder import WatchedStates
from engine.models.feeds import Feed
from engine.models.padded_pass import PaddedPlans
from engine.models.paged_attention import PagedAttention, cutting_windows
from engine.models.runner import Runner
from engine.models.spans import Span
from engine.sampling.acceptance import DeviceVerdict, Verdict
from engine.sampling.device_bias import is_biased
from engine.scheduler import Plan, Slice
from engine.sequence import PADDING, Sequence
from engine.trees import Parents, chain, is_chain
from engine.types import DrafterName
from engine.verification import copy_to_host

# Drafters that may draft trees, or want what the target draws, without being asked.
BRANCHING: frozenset[DrafterName] = frozenset({"lookahead", "merged"})


def can_capture(plan: Plan, target: Runner) -> bool:
    """Whether parts of the plan's round may be captured graphs. All other rounds run operation by operation, and the
    reason is counted."""
    graphs = target.staging.graphs
    if graphs is None:
        return False
    why = _obstacle(plan, target)
    if why is not None:
        graphs.eager[why] += 1
    return why is None


def can_capture_drafts(plan: Plan, target: Runner) -> bool:
    """Whether the drafts of a round that cannot be captured as a whole, because it reads prompts, may be: chains that
    are verified by the target's own draws, of whoever drafts without the target's states."""
    if target.staging.graphs is None or target.look_ahead is not None or target.reader is not None:
        return False
    emitting, most_new = [part for part in plan.slices if part.emits], target.staging.limits.new_tokens
    chains = all(s.sequence.coupled and s.shape is None and not s.sequence.tree_depth for s in emitting)
    unplanned = any(s.k and s.sequence.drafter in BRANCHING for s in emitting)
    drafts = any(s.k for s in emitting)
    return drafts and chains and not unplanned and not any(_obstacle_of_draws(s, most_new) for s in emitting)


def _obstacle(plan: Plan, target: Runner) -> str | None:
    """Why no part of the plan's round can be captured."""
    if target.look_ahead is not None:
        return "look-ahead tokens ride in the target's passes"
    if not padded_pass.can_capture(target):
        return "the target's pass cannot be captured"
    if len({s.sequence.verifier for s in plan.slices if not s.sequence.coupled}) > 1:
        return "rejection beside block"
    if any(s.shape or s.sequence.tree_depth for s in plan.slices) and not all(s.sequence.coupled for s in plan.slices):
        return "a tree beside rejection or block"
    most_new = target.staging.limits.new_tokens
    why = next(filter(None, (_obstacle_of(part, most_new) for part in plan.slices)), None)
    if why is None and target.reader is not None:
        feeds = [Feed(part.sequence, 1, part.k) for part in plan.slices]
        why = None if target.reader.fits(feeds) else "no room for the states that a head reads"
    return why


def _obstacle_of(part: Slice, most_new: int) -> str | None:
    """None if the slice feeds one committed token and its drafts, and draws by nothing but its noise, temperature,
    filters, biases, bans and penalties. most_new: tokens that a round commits for one sequence at most."""
    if not part.emits or part.committed != 1 or part.prompt_rows:
        return "a prompt"
    return _obstacle_of_draws(part, most_new)


def _obstacle_of_draws(part: Slice, most_new: int) -> str | None:
    sequence, params, text = part.sequence, part.sequence.params, part.sequence.device_text
    if sequence.device_bias is None and is_biased(params):
        return "a bias that the device does not have"
    if params.penalised and (text is None or len(sequence.tokens) - text.length > most_new):
        return "a text that penalties do not know"
    if part.k > MAX_NODES and (part.shape is not None or sequence.tree_depth > 0):
        return "a tree of too many nodes"
    if sequence.typical is not None:
        return "typical acceptance"
    return "a confidence" if part.confidence else None


def filled_up(sequences: Seq[Sequence], ks: Seq[int], limits: RoundLimits) -> tuple[list[Sequence], list[int]]:
    """(the sequences of a captured round and what fills it up, the number of drafts for which each has rows)."""
    filled = [*sequences, *repeat(PADDING, limits.padded(len(sequences)) - len(sequences))]
    return filled, [max(ks)] * len(filled)


def has_unplanned_form(batch: DraftBatch, ks: Seq[int]) -> bool:
    """Whether the drafts' form is known only once they are drafted: a drafter may choose the shapes of its trees, may
    want what the target draws, or may have laws that are merged with another drafter's."""
    drafters = {s.drafter for s, k in zip(batch.sequences, ks, strict=True) if k}
    with_laws = not all(s.coupled for s in batch.sequences)
    return (
        bool(batch.depths)
        or not drafters.isdisjoint(BRANCHING)
        or (with_laws and (len(drafters) > 1 or "cascade" in drafters))
    )


class CapturedVerdict:
    """The target's pass over a round's drafts, and the verdict.

    B sequences are filled up to S. All S have rows for K drafts. Ignore the drafts of a sequence beyond its own k.
    """

    def __init__(self, batch: DraftBatch, ks: Seq[int], target: Runner, shapes: Mapping[int, Parents]) -> None:
        """Reserve the pass's memory and put its numbers on their way to the device. batch.sampler has at least 1 + K
        rows for each of S sequences. shapes: those of the drafts that are trees; then all sequences are coupled. Raises
        CacheFull."""
        storage, staging, cache = target.storage, target.staging, target.cache
        assert isinstance(storage, GatheredStorage)
        self._batch, self._ks, self._target = batch, tuple(ks), target
        self._depth, self._size = max(ks), len(batch.sampler.offsets)
        self._shapes = {} if all(map(is_chain, shapes.values())) else dict(shapes)
        self._sampler = batch.sampler.on_trees(self._shapes) if self._shapes else batch.sampler
        rest = self._size - len(ks)
        self._counts = {s.handle: 1 + k for s, k in zip(batch.sequences, ks, strict=True)}
        for handle, count in self._counts.items():
            cache.reserve(handle, count)
        storage.prepare()
        self._wants_logits = any(s.params.logprobs is not None for s in batch.sequences)
        staging.note("verdict", self._depth, self._wants_logits)
        slots = [cache.slot(handle) for handle in self._counts]
        spans = [
            Span.at(slot, cache.length(handle), count, self._shapes.get(i))
            for i, (slot, (handle, count)) in enumerate(zip(slots, self._counts.items(), strict=True))
        ]
        plans = PaddedPlans([*slots, *[None] * rest], storage, staging)
        windows = cutting_windows(target.decoder.config.traits.windows, self._depth) if self._shapes else None
        self._plan = plans.put([*spans, *[None] * rest], 1 + self._depth, windows=windows)
        self._attention = PagedAttention(self._plan, storage)
        self._ids = staging.ints([*(s.tokens[-1] for s in batch.sequences), *[0] * rest])
        self._limits = staging.ints([*ks, *[0] * rest])
        feeds = [Feed(s, 1, k) for s, k in zip(batch.sequences, ks, strict=True)] if target.reader is not None else []
        self._reader = target.reader if target.reader is not None and target.reader.wants(feeds) else None
        if self._reader is not None:
            starts = [span.start for span in spans]
            staging.note("states", self._reader.number)
            self._states = self._reader.prepare_padded(feeds, starts, 1 + self._depth, self._size, staging)
        self._rows = [first + j for first in batch.sampler.offsets for j in range(1 + self._depth)]
        coupled = all(s.coupled for s in batch.sequences)
        self._laws = None if coupled else CapturedLaws(batch, ks, self._rows, target)
        if self._laws is None or not self._laws.is_alone:
            self._sampler.prepare(self._rows)
        self.trees = CapturedTrees(batch.sequences, ks, self._shapes, self._size, target) if self._shapes else None
        self._logq: Tensor | None = None
        self._key = staging.layout

    @classmethod
    def of(cls, batch: DraftBatch, draft: Draft, target: Runner) -> Self:
        """The verdict about drafts that were not foreseen."""
        target.staging.begin_last_part()
        # The round's sampler may have put lists already, and the key does not tell where. A new one puts them again.
        return cls(replace(batch, sampler=batch.sampler.on_trees({})), draft.ks, target, draft.trees)

    @property
    def starts(self) -> range:
        """The first row of each of the B sequences."""
        return range(0, len(self._ks) * (1 + self._depth), 1 + self._depth)

    @property
    def _drafts(self) -> Tensor:
        """[S, K] int64, at the same address in every round of this size."""
        size = self._size, self._depth
        return self._target.staging.keep(
            ("drafts", size), lambda: torch.zeros(size, dtype=torch.int64, device=self._target.device)
        )

    @staticmethod
    def fits(batch: DraftBatch, draft: Draft) -> bool:
        """Whether a captured verdict can decide about the draft."""
        if draft.trees and (max(draft.ks) > MAX_NODES or not all(s.coupled for s in batch.sequences)):
            return False
        return not (draft.wants_drawn or (draft.logq_rows and draft.law_owner is None))

    def holds(self, draft: Draft) -> bool:
        """Whether this verdict can: each draft is the beginning of the draft that was planned."""
        if not (draft.trees or self._shapes):
            return True
        planned = [self._shapes.get(i, chain(k)) for i, k in enumerate(self._ks)]
        return all(draft.trees.get(i, chain(k)) == planned[i][:k] for i, k in enumerate(draft.ks))

    def run(self, draft: Draft) -> tuple[Verdict, Tensor | None]:
        """(the verdict, logits [B · (1 + K), vocab] if a request wants log-probabilities). Extends the cache by the
        planned drafts. A planned draft that did not come has a token that is rejected."""
        count = len(self._ks)
        self._batch.sampler.take_in_texts()
        if draft.tokens is not None:
            width = min(self._depth, draft.tokens.shape[1])
            self._drafts[:count, :width].copy_(draft.tokens[:, :width])
        if draft.ks != self._ks:
            ks = self._target.staging.ints(draft.ks)
            self._limits.tensor[:count].copy_(ks.tensor)
        if self._laws is not None:
            self._laws.expect(draft)
            self._logq = draft.logq
        key = None if self._key is None else (self._key, draft.law_owner)
        table, overlaps, states = self._target.run_captured(key, self._decide, self._counts)
        if self._reader is not None:
            self._reader.keep_padded()
        # Each graph keeps its results, and the logits of some graphs would fill the memory: they are computed again.
        logits = None if states is None else self._target.decoder.logits(states[: count * (1 + self._depth)])
        accepted, tokens, finite = table[:count, :3].unbind(1)
        verdict = DeviceVerdict(
            accepted, tokens, finite, None if overlaps is None else overlaps[:count], table=table[:count]
        )
        decided = copy_to_host(verdict, draft, self._target.vocab_size)
        return replace(decided, last_rows=accepted) if draft.trees else decided, logits

    def _decide(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(the table of match_verdict, overlaps [S, K] if drafts have laws, states [S · (1 + K), hidden] if logits are
        wanted). The region of the graph."""
        decoder, tokens, drafts, legal = self._target.decoder, self._ids.tensor, self._drafts, None
        if self._depth:
            columns = torch.arange(self._depth, device=drafts.device)
            drafts = drafts.masked_fill(columns >= self._limits.tensor[:, None], NO_TOKEN)  # never accepted
            legal = drafts.clamp(0, self._target.vocab_size - 1)
            tokens = torch.cat([tokens[:, None], legal], 1).flatten()
        watched = None if self._reader is None else WatchedStates(self._reader.layers)
        states = decoder.forward(tokens, self._attention, watched)
        if self._reader is not None and watched is not None:
            assert watched.table is not None, "the pass kept what it was asked to"
            self._reader.store(self._states.tensor, watched.table)
        logits, overlaps, table = decoder.logits(states), None, None
        if self._laws is None or not self._laws.is_alone:
            drawn, finite = self._sampler.draw(logits, self._rows, legal)
            decide = match_verdict if self.trees is None else self.trees.decide
            table = decide(drawn, finite, drafts, self._plan.first_rows.tensor)
        if self._laws is not None:
            decided, overlaps = self._laws.decide(logits, drafts, legal, self._limits.tensor, self._logq)
            if table is not None:
                decided = torch.where(self._laws.apart, decided, table)
                overlaps = None if overlaps is None else overlaps.masked_fill(~self._laws.apart, -1)
            table = decided
        assert table is not None, "every sequence is coupled or not"
        return table, overlaps, states if self._wants_logits else None
