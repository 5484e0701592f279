"""What a pass of a model reads, and who reads along."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.device.staging import Staged, Staging
from engine.sequence import Sequence
from engine.trees import Parents, chain, with_chains


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
    ahead: int = 0  # look-ahead tokens behind each row that gives logits (look_ahead.py); they lie behind the drafts

    @property
    def count(self) -> int:
        """Tokens that the cache holds after the pass."""
        return self.committed + self.drafts

    @property
    def riders(self) -> int:
        """Look-ahead tokens."""
        return self.outputs * self.ahead

    @property
    def shape(self) -> Parents | None:
        """The shape of the tree of drafts and look-ahead tokens; None: a chain of drafts."""
        if not self.ahead:
            return self.parents
        return with_chains(chain(self.drafts) if self.parents is None else self.parents, self.ahead)


def ragged(feeds: Seq[Feed]) -> bool:
    """Whether the feeds with outputs have different numbers of drafts."""
    return len({feed.drafts for feed in feeds if feed.outputs}) > 1


def insert_drafts(tokens: Tensor, rows: Staged, drafts: Tensor, places: Staged | None) -> None:
    """Write drafts[places] into rows `rows` of tokens, without a copy to the host. places: (row, column) pairs of the
    table of drafts; None: the first columns of all its rows."""
    if places is None:
        values = drafts[:, : len(rows.tensor) // len(drafts)].flatten()
    else:
        owners, columns = places.tensor.view(-1, 2).unbind(1)
        values = drafts[owners, columns]
    tokens.index_copy_(0, rows.tensor, values)


class StateReader(Protocol):
    """What reads a target's hidden states after its passes, for a head that drafts from them. Its methods do not raise:
    a head costs drafts and nothing else (R9)."""

    number: int  # no other reader of the process has it

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose states it reads, numbered as in WatchedStates."""
        ...

    def wants(self, feeds: Seq[Feed]) -> bool:
        """Whether it reads the states of a pass over these feeds. A pass that it does not read costs nothing."""
        ...

    def prepare(self, feeds: Seq[Feed], starts: Seq[int], staging: Staging) -> None:
        """Put what `read` needs after a pass over these feeds on its way to the device, if there is a need to."""
        ...

    def read(self, feeds: Seq[Feed], starts: Seq[int], states: Tensor) -> None:
        """Take the states [N, len(layers) · hidden] of a pass. The i-th feed's rows belong to the positions from
        starts[i] on. Rows of drafts are among them; the verdict comes later. The tensor belongs to the reader."""
        ...

    def fits(self, feeds: Seq[Feed]) -> bool:
        """Whether it has room for all states of a captured pass over these feeds."""
        ...

    def prepare_padded(self, feeds: Seq[Feed], starts: Seq[int], rows: int, sequences: int, staging: Staging) -> Staged:
        """As prepare, for a captured pass. It has `rows` rows for each of `sequences` sequences, and the feeds are the
        first of these. Returns where the states of all these rows go."""
        ...

    def store(self, targets: Tensor, states: Tensor) -> None:
        """Copy the states of a captured pass there. A part of the region of a graph."""
        ...

    def keep_padded(self) -> None:
        """The captured pass that was prepared is asked for: its states belong to their sequences."""
        ...
