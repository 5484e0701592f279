"""Penalties on another device than the CPU: a table of all penalised texts stays there; one operation applies it."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.device.staging import RoundNumbers, Staged, Staging
from engine.kernels.penalise import NO_COLUMN, NO_ROW, penalise, record_texts
from engine.sampling.row_table import RowTable
from engine.types import SamplingParams


class TextTable:
    """How often each token is in the text of each penalised sequence, [texts, vocab] on the device (record_texts).

    A text has a row from its first round on, until it is collected. Row 0 takes what belongs to none. Tokens are put on
    their way once per round and taken in when the table is read.
    """

    def __init__(self, staging: Staging, vocab_size: int) -> None:
        self._staging = staging
        self._rows = RowTable(staging, vocab_size, torch.int32)
        # What is not recorded yet: rows of new texts, and tokens. It is put again in each round until it is.
        self._started: list[int] = []
        self._new: list[tuple[int, int, int]] = []
        self._waiting: tuple[Staged | None, Staged | None] = None, None  # all of it; (None, None): to be put again

    @classmethod
    def of(cls, staging: Staging, vocab_size: int) -> "TextTable":
        """The one table of this staging's device."""
        return staging.keep(("texts", vocab_size), lambda: cls(staging, vocab_size))

    def start(self, num_prompt: int) -> "DeviceText":
        """A new, empty text. Its row is free again once the text is collected."""
        row = self._rows.take_row()
        self._new = [entry for entry in self._new if entry[0] != row]  # the row's last text is gone
        self._started.append(row)
        self._waiting = None, None
        text = DeviceText(self, row, num_prompt)
        self._rows.free_with(text, row)
        return text

    def add(self, row: int, tokens: Seq[int], num_prompt: int) -> None:
        """Add tokens to a row's text; the first num_prompt of them belong to the prompt."""
        self._new += [(row, token, int(n >= num_prompt)) for n, token in enumerate(tokens)]
        self._waiting = None, None

    def put(self, sequences: int = 0) -> None:
        """Put what is not recorded on its way to the device. sequences: how many the round has. If the round may be
        captured, the number of tokens is the most that they can have committed since the last round. Tokens of no text
        fill it up."""
        new = self._new
        if self._staging.fixed:
            self._staging.note("texts", len(self._rows.values))
            new = [*new, *[(0, 0, 0)] * (sequences * self._staging.limits.new_tokens - len(new))]
        cleared = self._staging.ints(self._started) if self._started else None
        tokens = self._staging.ints([x for column in zip(*new, strict=True) for x in column]) if new else None
        self._waiting = cleared, tokens

    @property
    def uses(self) -> Tensor:
        """[≥ texts, vocab] int32, with all that was put on its way. If recording raises, the same is put again in the
        next round."""
        self.take_in()
        return self._rows.values

    def take_in(self) -> None:
        """Record all that was put on its way."""
        cleared, tokens = self._waiting
        if cleared is None and tokens is None:
            return
        if cleared is not None:
            self._rows.values.index_fill_(0, cleared.tensor, 0)
        if tokens is not None:
            record_texts(self._rows.values, tokens.tensor)
        self._started, self._new, self._waiting = [], [], (None, None)


class DeviceText:
    """A penalised sequence's committed text: a row of the table."""

    def __init__(self, table: TextTable, row: int, num_prompt: int) -> None:
        self.table = table
        self.row = row
        self.length = 0  # tokens that were added
        self._num_prompt = num_prompt

    def sync(self, tokens: Seq[int]) -> None:
        """Add the tokens that were committed since the last call."""
        if len(tokens) > self.length:
            self.table.add(self.row, tokens[self.length :], self._num_prompt - self.length)
            self.length = len(tokens)


class DevicePenalties:
    """The penalties of A rows. Some rows have none."""

    def __init__(
        self,
        table: TextTable,
        texts: Seq[DeviceText | None],
        params: Seq[SamplingParams],
        places: Seq[tuple[int, Seq[int]]],
        numbers: RoundNumbers,
        name: tuple[int, ...],
    ) -> None:
        """texts and params [A]: each row's sequence's. places [A]: (sequence of the round, columns of the drafts that
        the row sees). name: tells these rows from others of the round."""
        self._table = table
        # The width reaches to the last column that any row sees. It does not depend on the shape of a tree.
        width = max((columns[-1] + 1 for _, columns in places if columns), default=0)

        def index() -> list[int]:
            rows = zip(texts, places, strict=True)
            return [x for text, place in rows for x in _index_row(text, *place, width)]

        self._index = numbers.ints(("penalties", name), index)
        names = "repetition_penalty", "frequency_penalty", "presence_penalty"
        self._params = numbers.floats(
            ("penalty parameters", name), lambda: [getattr(p, n) for n in names for p in params]
        )

    def apply(self, logits: Tensor, drafts: Tensor | None) -> Tensor:
        """Logits [A, vocab'] with the penalties; vocab' may be a draft model's smaller vocabulary. drafts [B, ≥ the
        columns that are seen]; None if none is seen."""
        count = len(logits)
        index, params = self._index.tensor.view(count, -1), self._params.tensor.view(3, count)
        return penalise(logits, self._table.uses, index, params, drafts if index.shape[1] > 2 else None)


def _index_row(text: DeviceText | None, sequence: int, columns: Seq[int], width: int) -> list[int]:
    """A row of the index of penalise()."""
    if text is None:
        return [NO_ROW, sequence, *[NO_COLUMN] * width]
    return [text.row, sequence, *columns, *[NO_COLUMN] * (width - len(columns))]
