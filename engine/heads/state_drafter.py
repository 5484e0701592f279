"""The drafter of heads without memory: one state of the target per sequence, no KV cache."""

import logging
from collections.abc import Collection, Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from engine.device.round_clock import Forward, mark
from engine.device.staging import RoundNumbers, Staged
from engine.drafters.base import NO_OFFER, NO_TOKEN, Draft, DraftBatch, Offer
from engine.drafters.draft_columns import DraftColumns
from engine.drafters.growing_trees import GrowingTree, GrownDraft, ReadNode
from engine.drafters.merging import merge_drafts
from engine.drafters.model_trees import TreeDraft, joining_chains
from engine.heads.captured_heads import CapturedHeads
from engine.heads.state_heads import HeadRun, StateHeads
from engine.heads.states import TargetStates
from engine.heads.tree_levels import TreeLevels
from engine.models.feeds import Feed
from engine.models.runner import Runner
from engine.sampling.acceptance import Verdict
from engine.sequence import Sequence
from engine.trees import ROOT, Growth, Parents, depths, within_depth

log = logging.getLogger(__name__)


class StateDrafter:
    """Drafts with heads that read one state of the target and keep nothing between rounds.

    A sequence of n committed tokens needs the state of position n − 2, the last one that the target has read. The
    target's passes give it. After a prefix hit of the whole text, and after its memory was lost, a sequence has no such
    state until its next pass, and nothing is drafted for it until then.

    Drafts are drawn as a draft model's are (ModelDrafter): with each request's sampling parameters, for `match` with
    the target's noise, for the other verifiers with the laws in `logq`. A draft is at most as deep as there are heads,
    and a deeper tree is cut. Confidence ends chains, not trees.

    Steps and read tokens of a draft are steps of the heads and rows of their logits. They grow with a draft as a draft
    model's do, so the same cost model fits.

    If a draft ends in NO_TOKEN, a head gave a law that is not finite. Nothing more is drafted for its sequence.
    """

    def __init__(
        self, heads: StateHeads, states: TargetStates, target_vocab: int, device: torch.device, rank: int = 0
    ) -> None:
        """states: the reader of the target's runner, for the layer behind the final norm. rank: the rank of the noise
        for draws that are not coupled, as in ModelDrafter."""
        self.heads = heads
        self.states = states
        self._vocab = target_vocab
        self._device = device
        self._rank = rank
        self._drafted: set[int] = set()  # handles of the sequences that the latest proposal has drafts for
        self._given_up: set[int] = set()  # handles of the sequences whose draft was not finite

    def offer(self, sequence: Sequence, k: int) -> Offer:
        """Up to k drafts, one per head. The gap is the last committed token, which every first step reads."""
        if k <= 0 or not self._ready(sequence):
            return NO_OFFER
        return Offer(sequence.drafter, min(k, self.heads.most), 1, trees=True)

    def propose(self, batch: DraftBatch, ks: Seq[int]) -> Draft:
        began = mark(self._device)
        ks = [k if k and self._ready(s) else 0 for s, k in zip(batch.sequences, ks, strict=True)]
        shapes = {
            i: within_depth(shape[: ks[i]], self._most(batch.sequences[i]))
            for i, shape in enumerate(batch.shapes)
            if shape is not None and ks[i]
        }
        growths = {
            i: Growth(k, min(k, batch.depths[i], self._most(batch.sequences[i])))
            for i, k in enumerate(ks)
            if k and batch.grows(i)
        }
        branched = shapes.keys() | growths.keys()
        chains = [0 if i in branched else min(k, self._most(batch.sequences[i])) for i, k in enumerate(ks)]
        if batch.captured and any(ks) and not growths:
            lengths = [len(shapes.get(i, ())) or k for i, k in enumerate(chains)]
            heads = CapturedHeads(self.heads, self.states, batch, lengths, shapes, self._vocab, self._rank)
            drafts = [heads.propose()]
        else:
            drafts = self._draw(batch, chains, shapes, growths)
        draft = merge_drafts(drafts, len(ks))
        self._drafted = {s.handle for s, k in zip(batch.sequences, draft.ks, strict=True) if k}
        return replace(draft, forwards=(Forward(began, mark(self._device), draft.read),))

    def _draw(
        self, batch: DraftBatch, chains: Seq[int], shapes: dict[int, Parents], growths: dict[int, Growth]
    ) -> list[Draft]:
        """The chains, the trees of given shapes and the trees that grow, operation by operation."""
        joining = joining_chains(batch, dict(enumerate(chains))) if shapes else {}
        chains = [0 if i in joining else k for i, k in enumerate(chains)]
        columns = self._plan_chains(batch, chains) if any(chains) else None
        trees = self._plan_trees(batch, shapes | joining, joining) if shapes else None
        drafts = []
        if columns is not None:
            drafts.append(self._draw_chains(batch, columns, max(chains)))
        if trees is not None:
            drafts.append(self._draw_trees(batch, *trees))
        if growths:
            drafts.append(self._grow_trees(batch, growths))
        return drafts

    def observe(self, batch: DraftBatch, verdict: Verdict) -> None:
        """Keep for each sequence the state that its next draft reads."""
        drafted, self._drafted = self._drafted, set()
        for i, sequence in enumerate(batch.sequences):
            handle, base = sequence.handle, len(sequence.tokens)
            accepted = verdict.paths.get(i, range(verdict.accepted[i]))
            self.states.settle(handle, base, accepted)
            self.states.skip(handle, base + len(accepted) - 1)
            if handle in drafted and NO_TOKEN in verdict.drafts[i]:
                self._give_up(sequence)

    def describe(self) -> str:
        """What their time depends on."""
        return f"{type(self.heads).__name__}, {self.heads.most} drafts, {self.heads.weight_bytes} bytes"

    def imagine_inputs(self, sequence: Sequence, target: Runner) -> None:
        """Let the next draft of a throw-away sequence read zeros in place of the state that it needs."""
        self._imagine(sequence, target, target.decoder.config.hidden_size)

    def _imagine(self, sequence: Sequence, target: Runner, width: int) -> None:
        """width: numbers of a state."""
        zeros = torch.zeros(1, width, dtype=target.decoder.dtype, device=self._device)
        self.states.drop(sequence.handle)
        self.states.read([Feed(sequence, 1)], [len(sequence.tokens) - 2], zeros)

    def forget(self, sequence: Sequence) -> None:
        self._given_up.discard(sequence.handle)
        self.states.drop(sequence.handle)

    def audit(self, live: Set[int]) -> None:
        self.states.audit(live)
        assert self._given_up <= live, f"sequences that have ended were not forgotten: {sorted(self._given_up - live)}"

    def _ready(self, sequence: Sequence) -> bool:
        """Whether the state that the next draft reads is there."""
        position = len(sequence.tokens) - 2
        return sequence.handle not in self._given_up and position in self.states.positions(sequence.handle)

    def _most(self, sequence: Sequence) -> int:
        """The most drafts that follow each other."""
        return self.heads.most

    def _plan_chains(self, batch: DraftBatch, ks: Seq[int]) -> DraftColumns:
        """Put what all columns need, unless the device is a CPU or a confidence decides who stays active."""
        active, numbers = [i for i, k in enumerate(ks) if k], batch.sampler.numbers
        columns = DraftColumns(batch, ks, active, self._device, self._rank)
        if numbers.staging.deferred and not columns.limited:
            self._put_start(batch, active)
            columns.prepare()
        return columns

    def _plan_trees(
        self, batch: DraftBatch, shapes: dict[int, Parents], chains: Collection[int]
    ) -> tuple[TreeDraft, TreeLevels]:
        self._put_start(batch, list(shapes))
        draft = TreeDraft(batch, shapes, self._vocab, self._device, chains=chains)
        return draft, TreeLevels(draft, batch.sampler.numbers.staging)

    def _put_start(self, batch: DraftBatch, indices: Seq[int]) -> tuple[Staged, Staged]:
        """(rows of the states, last tokens) of these sequences."""
        sequences, numbers = [batch.sequences[i] for i in indices], batch.sampler.numbers

        def rows() -> list[int]:
            ends = [(s.handle, len(s.tokens) - 1) for s in sequences]
            return [row for handle, end in ends for row in self.states.row_numbers(handle, end - 1, end)]

        tokens = numbers.ints(("last tokens", tuple(indices)), lambda: [s.tokens[-1] for s in sequences])
        return numbers.ints(("states", tuple(indices)), rows), tokens

    def _start(self, batch: DraftBatch, indices: Seq[int], depth: int) -> tuple[HeadRun, Tensor]:
        """(the heads at the first step, its logits [len(indices), vocab])."""
        rows, tokens = self._put_start(batch, indices)
        run = self.heads.start(self.states.take(rows.tensor), depth)
        return run, run.step(None, tokens.tensor)

    def _draw_chains(self, batch: DraftBatch, columns: DraftColumns, depth: int) -> Draft:
        active = columns.active
        run, logits = self._start(batch, active, depth)
        steps, read = 1, len(active)
        while True:
            drawn = columns.draw(logits[:, : self._vocab])
            if drawn is None:
                return replace(columns.draft(), steps=steps, read=read)
            logits = run.step(self._rows(batch, active, columns.active), drawn)
            active = columns.active
            steps, read = steps + 1, read + len(active)

    def _draw_trees(self, batch: DraftBatch, draft: TreeDraft, levels: TreeLevels) -> Draft:
        levels.run, logits = self._start(batch, list(draft.shapes), max(max(depths(s)) for s in draft.shapes.values()))
        return replace(draft.draw(logits, levels), steps=levels.steps, read=levels.read)

    def _grow_trees(self, batch: DraftBatch, growths: dict[int, Growth]) -> Draft:
        grown = GrownDraft(batch, growths, self._vocab, self._device)
        run, logits = self._start(batch, list(growths), max(most.depth for most in growths.values()))
        return grown.draw(logits, _GrownLevels(run, list(growths), batch.sampler.numbers))

    def _rows(self, batch: DraftBatch, before: Seq[int], active: Seq[int]) -> Tensor | None:
        """The rows of the step before that go on; None: all."""
        if len(active) == len(before):
            return None
        places = {i: place for place, i in enumerate(before)}
        return batch.sampler.numbers.index([places[i] for i in active]).tensor

    def _give_up(self, sequence: Sequence) -> None:
        log.error(
            "the heads gave no valid distribution for request %s; they draft no more for this request",
            sequence.request_id,
        )
        self._given_up.add(sequence.handle)


class _GrownLevels:
    """Gives the logits behind the nodes of growing trees (GrowthReader)."""

    def __init__(self, run: HeadRun, indices: Seq[int], numbers: RoundNumbers) -> None:
        """run: the heads at their first step, with a row for each of these sequences."""
        self._run, self._numbers = run, numbers
        self._rows = {(i, ROOT): row for row, i in enumerate(indices)}  # of the latest step
        self.steps, self.read = 1, len(indices)

    def __call__(self, level: Seq[ReadNode], trees: Mapping[int, GrowingTree], tokens: Tensor) -> Tensor:
        parents = self._numbers.index([self._rows[i, trees[i].parents[place]] for i, place in level])
        self._rows = {node: row for row, node in enumerate(level)}
        self.steps, self.read = self.steps + 1, self.read + len(level)
        return self._run.step(parents.tensor, tokens)
