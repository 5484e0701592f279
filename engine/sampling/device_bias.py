"""Biases on another device than the CPU. A bias is added to the logits of single tokens, and is the same for all rows
of a sequence: logit bias, and −inf for tokens that allowed_token_ids and bad words of one token exclude. It stays in a
table on the device.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.device.staging import RoundNumbers, Staged, Staging
from engine.sampling.row_table import RowTable
from engine.types import SamplingParams


def is_biased(params: SamplingParams) -> bool:
    """Whether something is added to logits whatever the text is."""
    words = params.bad_word_ids
    single = bool(words) and any(len(word) == 1 for word in words)  # nearly always there are none, and every round asks
    return single or bool(params.logit_bias) or params.allowed_token_ids is not None


class BiasTable:
    """What each biased sequence adds to its logits, [sequences, vocab] fp32 on the device. Row 0 adds nothing.

    A sequence's row is written in the first round that draws for it. What is not written yet is put on its way in each
    round until it is.
    """

    def __init__(self, staging: Staging, vocab_size: int) -> None:
        self._staging = staging
        self._rows = RowTable(staging, vocab_size, torch.float32)
        self._new: dict[int, SamplingParams] = {}  # by row
        self._waiting: tuple[Staged, ...] = ()  # all of `_new`; (): to be put again

    @classmethod
    def of(cls, staging: Staging, vocab_size: int) -> "BiasTable":
        """The one table of this staging's device."""
        return staging.keep(("biases", vocab_size), lambda: cls(staging, vocab_size))

    def start(self, params: SamplingParams) -> "DeviceBias":
        """A new row. It is free again once the result is collected."""
        bias = DeviceBias(self, self._rows.take_row())
        self._rows.free_with(bias, bias.row)
        self._new[bias.row], self._waiting = params, ()
        return bias

    def put(self) -> None:
        """Put what is not written on its way to the device."""
        self._staging.note("biases", len(self._rows.values))
        if not self._new:
            return
        added = {row: _added(params) for row, params in self._new.items()}
        places = [(row, token) for row, (_, tokens) in added.items() for token in tokens]
        self._waiting = (
            self._staging.ints(list(added)),
            self._staging.floats([rest for rest, _ in added.values()]),
            self._staging.ints([x for column in zip(*places, strict=True) for x in column]),
            self._staging.floats([value for _, tokens in added.values() for value in tokens.values()]),
        )

    @property
    def values(self) -> Tensor:
        """[> sequences, vocab] fp32, with all that was put on its way."""
        self.take_in()
        return self._rows.values

    def take_in(self) -> None:
        """Write what was put on its way."""
        if not self._waiting:
            return
        rows, rest, places, values = (staged.tensor for staged in self._waiting)
        table = self._rows.values
        table.index_copy_(0, rows, rest.float()[:, None].expand(-1, table.shape[1]))
        table.index_put_(tuple(places.view(2, -1).unbind(0)), values.float())
        self._new, self._waiting = {}, ()


class DeviceBias:
    """A biased sequence's row of the table."""

    def __init__(self, table: BiasTable, row: int) -> None:
        self.table = table
        self.row = row


class DeviceBiases:
    """The biases of A rows. Some rows have none."""

    def __init__(
        self, table: BiasTable, biases: Seq[DeviceBias | None], numbers: RoundNumbers, name: tuple[int, ...]
    ) -> None:
        """biases [A]: of each row's sequence. name: tells these rows from others of the round."""
        self._table = table
        self._rows = numbers.ints(("biases", name), lambda: [0 if bias is None else bias.row for bias in biases])

    def apply(self, logits: Tensor) -> Tensor:
        """Logits [A, vocab'] with the biases; vocab' may be a draft model's smaller vocabulary."""
        values = self._table.values[:, : logits.shape[1]]
        return logits + values.index_select(0, self._rows.tensor).to(logits.dtype)


def _added(params: SamplingParams) -> tuple[float, dict[int, float]]:
    """(what is added to all tokens that are not named, what is added to those that are)."""
    added, rest = dict(params.logit_bias), 0.0
    if params.allowed_token_ids is not None:
        added, rest = {token: added.get(token, 0.0) for token in params.allowed_token_ids}, -torch.inf
    return rest, added | {word[0]: -torch.inf for word in params.bad_word_ids if len(word) == 1}
