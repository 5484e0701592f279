"""Runs an EAGLE head as a draft model: its rows also read states, the target's or its own."""

import weakref
from collections.abc import Sequence as Seq
from collections.abc import Set
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from cache.layout import Layout
from engine.device.staging import Staged, Staging
from engine.heads.eagle import EagleHead
from engine.heads.states import TargetStates
from engine.models.chain_code import ChainModel
from engine.models.chain_passes import ChainPasses
from engine.models.decoder import DecoderConfig, WatchedStates
from engine.models.feeds import Feed
from engine.models.paged_attention import PagedAttention
from engine.models.pass_attention import PassAttention
from engine.models.runner import PlannedPass, Runner
from engine.sequence import Sequence
from engine.trees import ROOT


class HeadPass:
    """A head as the LanguageModel of a Runner: the runner sets what the rows of the coming pass read."""

    def __init__(self, head: EagleHead) -> None:
        self.head = head
        self.states: Tensor | None = None  # g [N, hidden] of the coming pass
        self._hidden: Tensor | None = None  # outputs [N, hidden] of the latest pass

    @property
    def config(self) -> DecoderConfig:
        return self.head.config

    @property
    def dtype(self) -> torch.dtype:
        return self.head.dtype

    @property
    def weight_bytes(self) -> int:
        return self.head.weight_bytes

    @property
    def can_capture(self) -> bool:
        return self.head.body.can_capture

    @property
    def block_rows(self) -> int:
        return self.head.block_rows

    def forward(self, ids: Tensor, attention: PassAttention, watched: WatchedStates | None = None) -> Tensor:
        assert self.states is not None, "the runner sets the states of each pass"
        states, self.states = self.states, None
        self._hidden = self.head.forward(ids, states, attention)
        return self._hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.logits(hidden)

    def carry(self) -> Tensor:
        """g [N, hidden] for the rows that follow those of the latest pass. Its outputs are not kept any longer."""
        assert self._hidden is not None, "there was a pass"
        hidden, self._hidden = self._hidden, None
        return self.head.carry(hidden)


@dataclass(slots=True)
class _Text:
    """A sequence's tokens as the head reads them: entry j is the sequence's token offset + j + 1, and it is read
    together with the target's state of position offset + j."""

    offset: int = 0
    tokens: list[int] = field(default_factory=list)


class _Rows:
    """Which row of a table of outputs belongs to whom. The host knows it before the device has computed the table."""

    def __init__(self, handles: Seq[int]) -> None:
        """One row for each sequence's last committed token, or for the latest draft of its chain."""
        self._rows = {(handle, ROOT): row for row, handle in enumerate(handles)}

    def append(self, key: tuple[int, int]) -> None:
        """key: (handle, place in its tree)."""
        self._rows[key] = len(self._rows)

    def find(self, keys: Seq[tuple[int, int]]) -> list[int] | None:
        """The rows of these keys; None: they are all rows, in order."""
        rows = [self._rows[key] for key in keys]
        return None if rows == list(range(len(self._rows))) else rows


class HeadRunner(Runner):
    """A head with its KV memory, over the target's states.

    A row for the committed text reads the target's state. A row for a draft reads the head's own output of the row
    before. Such a row is computed anew when its draft was accepted, because then the target's state is known.

    Positions whose states the target has not computed for this sequence, such as those of a prefix that it found in its
    index, cannot be read. The head finds them in its own index, whose entries other sequences computed; or it begins
    behind them, as if the text began there. It does the same where `states` had to drop positions. So nothing is
    computed twice, and such a draft only lacks the older context.
    """

    def __init__(self, head: EagleHead, layout: Layout, states: TargetStates, staging: Staging) -> None:
        """states: the reader of the target's runner."""
        self._pass = HeadPass(head)
        super().__init__(self._pass, layout, staging.device, staging=staging)
        self.states = states
        self._texts: dict[int, _Text] = {}  # by handle
        self.chains = HeadChains(self, head)
        # What the next rows read is planned before it is computed. g [n, hidden] of rows …
        self._tree_rows = _Rows(())
        self._outputs: Tensor | None = None  # … of the last committed tokens, and of the trees' nodes behind them
        self._chain_rows = _Rows(())
        self._steps: Tensor | None = None  # … of the latest step of the chains behind the same tokens

    def tokens(self, sequence: Sequence) -> list[int]:
        return self._text(sequence).tokens

    def uncached(self, sequence: Sequence) -> int:
        if self.cache.holds(sequence.handle):
            return super().uncached(sequence)
        return max(1, len(sequence.tokens) - 1 - self.states.positions(sequence.handle).start)

    def ready(self, sequence: Sequence) -> bool:
        """Whether the target's states are there up to the last token but one. If older ones are missing, the head's
        memory of the sequence is freed, and the head begins anew behind them."""
        handle, known = sequence.handle, self.states.positions(sequence.handle)
        if known.stop < len(sequence.tokens) - 1 or not known:
            return False
        if self.cache.holds(handle) and known.start > self.next_position(sequence):
            self.release(sequence)
        return True

    def allocate(self, sequence: Sequence) -> None:
        """Give the sequence a slot. It begins with the prefix index's entries, if they reach to the states that are
        kept, else with the first of these states."""
        handle, start = sequence.handle, self.states.positions(sequence.handle).start
        self._texts[handle] = _Text()
        # Entry 0 also depends on the first token, which is not among the head's. It stands first, because a salt may
        # hold any text.
        salt = f"{sequence.tokens[0]}\n{sequence.cache_salt}"
        self.cache.allocate(handle, self.tokens(sequence), salt)
        if self.cache.length(handle) >= start:
            return
        self.cache.release(handle)
        self._texts[handle] = _Text(offset=start)
        self.cache.allocate(handle, (), salt)

    def publish(self, sequence: Sequence) -> bool:
        """As Runner.publish. Entries behind a hole are good for nobody else, so nobody finds them."""
        return True if self._text(sequence).offset else super().publish(sequence)

    def release(self, sequence: Sequence) -> None:
        super().release(sequence)
        self._texts.pop(sequence.handle, None)

    def audit(self, live: Set[int]) -> None:
        """Raise AssertionError if anything is held for other handles than those in `live`."""
        self.states.audit(live)
        assert self._texts.keys() <= live, f"texts of ended sequences are held: {sorted(self._texts.keys() - live)}"

    def imagine_inputs(self, sequence: Sequence) -> None:
        start, stop = self.next_position(sequence), len(sequence.tokens) - 1
        width = self._pass.head.state_width
        zeros = torch.zeros(stop - start, width, dtype=self._pass.dtype, device=self.device)
        self.states.drop(sequence.handle)
        self.states.read([Feed(sequence, stop - start)], [start], zeros)

    def prepare(self, feeds: Seq[Feed], ahead: Seq[int] = ()) -> PlannedPass:
        """As Runner.prepare. All feeds have committed tokens only, or all have the nodes of trees only. Passes are
        computed in the order in which they were prepared."""
        planned = super().prepare(feeds, ahead)
        if feeds and feeds[0].drafts:
            return planned._replace(state_rows=self._put(self._parents_of(feeds)))
        rows: list[int] = []
        for feed in feeds:
            first = self.next_position(feed.sequence)
            rows += self.states.row_numbers(feed.sequence.handle, first, first + feed.committed)
        ends = [end - 1 for end in accumulate(feed.committed for feed in feeds)]
        self._tree_rows, self._chain_rows = _Rows(planned.handles), _Rows(planned.handles)
        last_rows = self._put(ends if len(ends) < len(rows) else None)
        return planned._replace(state_rows=self._put(rows), last_rows=last_rows)

    def compute(self, planned: PlannedPass, drafts: Tensor | None = None) -> Tensor:
        feeds = planned.feeds
        of_nodes, rows = bool(feeds and feeds[0].drafts), planned.state_rows
        if of_nodes:
            self._pass.states = _take(self._outputs, rows)
        else:
            assert rows is not None, "committed tokens have rows of states"
            self._pass.states = self._pass.head.project(self.states.take(rows.tensor))
        logits = super().compute(planned, drafts)
        carried = self._pass.carry()
        if of_nodes:
            assert self._outputs is not None
            self._outputs = torch.cat([self._outputs, carried])
            return logits
        self._outputs = self._steps = _take(carried, planned.last_rows)
        for feed in feeds:
            self.states.skip(feed.sequence.handle, self.next_position(feed.sequence))
        return logits

    def prepare_step(self, sequences: Seq[Sequence], ahead: Seq[int] = ()) -> PlannedPass:
        handles = [sequence.handle for sequence in sequences]
        rows = self._chain_rows.find([(handle, ROOT) for handle in handles])
        self._chain_rows = _Rows(handles)
        return super().prepare_step(sequences, ahead)._replace(state_rows=self._put(rows))

    def step(self, sequences: Seq[Sequence], tokens: Tensor, planned: PlannedPass | None = None) -> Tensor:
        planned = self.prepare_step(sequences) if planned is None else planned
        self._pass.states = _take(self._steps, planned.state_rows)
        logits = super().step(sequences, tokens, planned)
        self._steps = self._pass.carry()  # beside _outputs: trees of the same round begin there
        return logits

    def chain_model(self) -> ChainModel | None:
        head = self._pass.head
        if head.vocabulary is not None or head.hidden_norm is None:
            return None
        return ChainModel(head.body, head.hidden_norm, head.norm_residual, head.norm_output)

    def chain_states(self, sequences: Seq[Sequence], gaps: PlannedPass | None = None) -> Tensor | None:
        if gaps is not None:
            assert gaps.state_rows is not None, "committed tokens have rows of states"
            self._outputs = self._steps = None  # nobody keeps those of this pass
            return self._pass.head.project(self.states.take(gaps.state_rows.tensor))
        return _take(self._steps, self._put(self._chain_rows.find([(s.handle, ROOT) for s in sequences])))

    def _text(self, sequence: Sequence) -> _Text:
        text = self._texts.setdefault(sequence.handle, _Text())
        if new := sequence.tokens[text.offset + 1 + len(text.tokens) :]:
            text.tokens += new
        return text

    def next_position(self, sequence: Sequence) -> int:
        """The position whose state the head reads next."""
        return self._text(sequence).offset + self.cache.length(sequence.handle)

    def _parents_of(self, feeds: Seq[Feed]) -> list[int] | None:
        """The rows that the last nodes of trees follow. The nodes' own rows come behind all others."""
        keys: list[tuple[int, int]] = []
        for feed in feeds:
            assert feed.parents is not None, "a head's drafts are nodes of trees"
            keys += [(feed.sequence.handle, parent) for parent in feed.parents[-feed.drafts :]]
        rows = self._tree_rows.find(keys)
        for feed in feeds:
            count = len(feed.parents or ())
            for place in range(count - feed.drafts, count):
                self._tree_rows.append((feed.sequence.handle, place))
        return rows

    def _put(self, rows: Seq[int] | None) -> Staged | None:
        return None if rows is None else self.staging.ints(rows)


class HeadChains(ChainPasses):
    """The first pass of a head's captured drafts reads all tokens that a round committed with the target's states, the
    others a draft with the output of the row that it follows."""

    def __init__(self, runner: HeadRunner, head: EagleHead) -> None:
        # A circle of references would keep the memory of a head that was replaced until the next collection.
        self._runner, self._head = weakref.proxy(runner), head
        # Rows of the target's states that the first pass reads; None: no round has put any. A head may be loaded by
        # another thread while the engine uses the staging.
        self._states: Staged | None = None

    @property
    def most_gap(self) -> int:
        return self._runner.staging.limits.new_tokens

    def rows(self, gaps: Seq[int]) -> int:
        return self.most_gap

    def put(self, sequences: Seq[Sequence], gaps: Seq[int], size: int) -> None:
        states, rows = self._runner.states, list[int]()
        for sequence, gap in zip(sequences, gaps, strict=True):
            rows += [states.unread] * (self.most_gap - gap)
            if gap:
                first = self._runner.next_position(sequence)
                rows += states.row_numbers(sequence.handle, first, first + gap)
        rows += [states.unread] * (self.most_gap * size - len(rows))
        self._states = self._runner.staging.ints(rows)

    def run(
        self, ids: Tensor, attention: PagedAttention, rows: slice, before: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        head, states = self._head, before
        if states is None:
            assert self._states is not None, "the rows of the first pass are put before it runs"
            states = head.project(self._runner.states.take(self._states.tensor))
        hidden = head.forward(ids, states, attention)[rows]
        return hidden, head.carry(hidden)

    def end(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:  # the head has read all states of the committed tokens
            self._runner.states.skip(sequence.handle, self._runner.next_position(sequence))


def _take(table: Tensor | None, rows: Staged | None) -> Tensor:
    """The rows of a table of outputs; None: all."""
    assert table is not None, "the committed tokens are read first"
    return table if rows is None else table.index_select(0, rows.tensor)
