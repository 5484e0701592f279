"""Runs an EAGLE head as a draft model: its rows also read states, the target's or its own."""

from collections.abc import Sequence as Seq
from collections.abc import Set
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from cache.layout import Layout
from engine.heads.eagle import EagleHead
from engine.heads.states import TargetStates
from engine.models.attention import Attention, index_tensor
from engine.models.decoder import DecoderConfig, WatchedStates
from engine.models.runner import Feed, Runner
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

    def forward(self, ids: Tensor, attention: Attention, watched: WatchedStates | None = None) -> Tensor:
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


@dataclass(frozen=True, slots=True)
class _Outputs:
    """What rows gave, for the rows of drafts that follow them."""

    table: Tensor  # g [n, hidden]
    rows: dict[tuple[int, int], int]  # (handle, place in its tree or ROOT) → row of the table

    def take(self, keys: Seq[tuple[int, int]]) -> Tensor:
        """g [len(keys), hidden]."""
        rows = [self.rows[key] for key in keys]
        if rows == list(range(len(self.table))):
            return self.table
        return self.table[index_tensor(rows, self.table.device)]


class HeadRunner(Runner):
    """A head with its KV memory, over the target's states.

    A row for the committed text reads the target's state. A row for a draft reads the head's own output of the row
    before. Such a row is computed anew when its draft was accepted, because then the target's state is known.

    Positions whose states the target has not computed for this sequence, such as those of a prefix that it found in its
    index, cannot be read. The head finds them in its own index, whose entries other sequences computed; or it begins
    behind them, as if the text began there. It does the same where `states` had to drop positions. So nothing is
    computed twice, and such a draft only lacks the older context.
    """

    def __init__(self, head: EagleHead, layout: Layout, device: torch.device, states: TargetStates) -> None:
        """states: the reader of the target's runner."""
        self._pass = HeadPass(head)
        super().__init__(self._pass, layout, device)
        self.states = states
        self._texts: dict[int, _Text] = {}  # by handle
        self._outputs: _Outputs | None = None  # of the last committed tokens, and of the trees' nodes behind them
        self._steps: _Outputs | None = None  # of the latest step of the chains behind the same tokens

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
        if self.cache.holds(handle) and known.start > self._next_position(sequence):
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
        start, stop = self._next_position(sequence), len(sequence.tokens) - 1
        width = self._pass.head.state_width
        zeros = torch.zeros(stop - start, width, dtype=self._pass.dtype, device=self.device)
        self.states.drop(sequence.handle)
        self.states.read([Feed(sequence, stop - start)], [start], zeros)

    def run(self, feeds: Seq[Feed], drafts: Tensor | None = None) -> Tensor:
        """As Runner.run. All feeds have committed tokens only, or all have the nodes of trees only."""
        grows = bool(feeds) and feeds[0].drafts > 0
        self._pass.states = self._states_of_nodes(feeds) if grows else self._states_of_tokens(feeds)
        logits = super().run(feeds, drafts)
        carried = self._pass.carry()
        if grows:
            self._append_nodes(feeds, carried)
        else:
            self._restart(feeds, carried)
            for feed in feeds:
                self.states.skip(feed.sequence.handle, self._next_position(feed.sequence))
        return logits

    def step(self, sequences: Seq[Sequence], tokens: Tensor) -> Tensor:
        keys, before = [(s.handle, ROOT) for s in sequences], self._steps or self._outputs
        assert before is not None, "the committed tokens are read first"
        self._pass.states = before.take(keys)
        logits = super().step(sequences, tokens)
        # Beside _outputs: trees of the same round begin there.
        self._steps = _Outputs(self._pass.carry(), {key: row for row, key in enumerate(keys)})
        return logits

    def _text(self, sequence: Sequence) -> _Text:
        text = self._texts.setdefault(sequence.handle, _Text())
        if new := sequence.tokens[text.offset + 1 + len(text.tokens) :]:
            text.tokens += new
        return text

    def _next_position(self, sequence: Sequence) -> int:
        """The position whose state the head reads next."""
        return self._text(sequence).offset + self.cache.length(sequence.handle)

    def _states_of_tokens(self, feeds: Seq[Feed]) -> Tensor:
        """g of committed tokens, from the target's states."""
        rows: list[int] = []
        for feed in feeds:
            first = self._next_position(feed.sequence)
            rows += self.states.row_numbers(feed.sequence.handle, first, first + feed.committed)
        return self._pass.head.project(self.states.take(rows))

    def _states_of_nodes(self, feeds: Seq[Feed]) -> Tensor:
        """g of the last nodes of trees, from their parents' outputs."""
        assert self._outputs is not None, "the committed tokens are read first"
        keys = []
        for feed in feeds:
            assert feed.parents is not None, "a head's drafts are nodes of trees"
            keys += [(feed.sequence.handle, parent) for parent in feed.parents[-feed.drafts :]]
        return self._outputs.take(keys)

    def _restart(self, feeds: Seq[Feed], carried: Tensor) -> None:
        """Keep the outputs of the feeds' last rows, from which drafts begin."""
        ends = [end - 1 for end in accumulate(feed.committed for feed in feeds)]
        table = carried if len(ends) == len(carried) else carried[index_tensor(ends, self.device)]
        self._outputs = _Outputs(table, {(feed.sequence.handle, ROOT): row for row, feed in enumerate(feeds)})
        self._steps = None

    def _append_nodes(self, feeds: Seq[Feed], carried: Tensor) -> None:
        """Keep the outputs of new nodes beside those of the nodes before."""
        assert self._outputs is not None
        rows = dict(self._outputs.rows)
        row = len(self._outputs.table)
        for feed in feeds:
            assert feed.parents is not None
            for place in range(len(feed.parents) - feed.drafts, len(feed.parents)):
                rows[feed.sequence.handle, place] = row
                row += 1
        self._outputs = _Outputs(torch.cat([self._outputs.table, carried]), rows)
