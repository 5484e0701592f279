"""All drafts that heads without memory draw in a round, as one captured graph."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from torch import Tensor

from engine.device.staging import Staging
from engine.drafters.base import Draft, DraftBatch
from engine.drafters.chain_draws import ChainDraws
from engine.drafters.tree_draws import TreeDraws
from engine.heads.state_heads import HeadRun, StateHeads
from engine.heads.states import TargetStates
from engine.heads.tree_levels import TreeLevels
from engine.trees import Parents, depths


def owner_of(states: TargetStates) -> int:
    """The owner of the graphs of heads that read these states (graphs.Key). Runners have numbers from 0 on."""
    return -1 - states.number


class CapturedHeads:
    """The drafts of B sequences that are filled up to S: chains, or trees of given shapes. All S have rows in each step
    of the heads. Ignore what is drawn for a sequence that drafts nothing or has finished drafting."""

    def __init__(
        self,
        heads: StateHeads,
        states: TargetStates,
        batch: DraftBatch,
        ks: Seq[int],
        shapes: Mapping[int, Parents],
        vocab: int,
        rank: int,
    ) -> None:
        """Put the numbers of all steps and draws on their way to the device.

        ks: the most drafts of each sequence. shapes: those of the drafts that are trees; then all sequences are
        coupled. vocab: ids from there on are not drawn. rank: the rank of the noise for draws from the drafts' own
        laws.
        """
        self._heads, self._states, self._sampler = heads, states, batch.sampler
        self._owner = owner_of(states)
        staging, rest = batch.sampler.numbers.staging, len(batch.sampler.offsets) - len(ks)
        self._staging = staging
        rows, tokens = list[int](), list[int]()
        for sequence, k in zip(batch.sequences, ks, strict=True):
            end = len(sequence.tokens) - 1
            rows.append(states.row_numbers(sequence.handle, end - 1, end)[0] if k else states.unread)
            tokens.append(sequence.tokens[-1] if k else 0)
        staging.note("heads", max(ks))
        self._rows, self._tokens = staging.ints([*rows, *[states.unread] * rest]), staging.ints([*tokens, *[0] * rest])
        self._draws: _Chains | _Trees
        if shapes:
            self._draws = _Trees(TreeDraws(batch, ks, shapes, vocab), staging)
        else:
            self._draws = _Chains(ks, ChainDraws(batch, ks, vocab, states.dtype, self._owner, rank))
        self._key = staging.layout

    def propose(self) -> Draft:
        graphs = self._staging.graphs
        assert graphs is not None, "only an engine with graphs has captured rounds"
        self._staging.send()
        self._sampler.take_in_texts()
        key = None if self._staging.layout is None else self._key
        return self._draws.draft(graphs.run(self._owner, key, self._draw))

    def _draw(self) -> Tensor:
        """Drafts [S, K]. The region of the graph."""
        run = self._heads.start(self._states.take(self._rows.tensor), self._draws.depth)
        return self._draws.draw(run, run.step(None, self._tokens.tensor))


class _Chains:
    def __init__(self, ks: Seq[int], draws: ChainDraws) -> None:
        self.depth = max(ks)
        self._ks, self._draws = ks, draws

    def draw(self, run: HeadRun, logits: Tensor) -> Tensor:
        """Part of the region. logits: of the first step."""
        self._draws.begin()
        for _ in range(1, self.depth):
            logits = run.step(None, self._draws.draw(logits))
        self._draws.draw(logits)
        return self._draws.table()

    def draft(self, tokens: Tensor) -> Draft:
        return replace(self._draws.draft(tokens[: len(self._ks)]), read=sum(self._ks))


class _Trees:
    def __init__(self, draws: TreeDraws, staging: Staging) -> None:
        self.depth = max(max(depths(shape), default=0) for shape in draws.trees.shapes.values())
        self._levels = TreeLevels(draws.trees, staging)
        self._draws = draws
        self.draft = draws.draft

    def draw(self, run: HeadRun, logits: Tensor) -> Tensor:
        """Part of the region. logits: of the first step."""
        self._levels.run = run
        return self._draws.draw(logits, self._levels)
