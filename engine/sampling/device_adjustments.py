"""The first part of the one transform (R4) on another device than the CPU: as adjustments.py, from numbers that are put
on their way before the round computes. What excludes tokens comes first, and penalties leave −inf as it is.
"""

from collections.abc import Sequence as Seq

from torch import Tensor

from engine.device.staging import RoundNumbers
from engine.sampling.adjustments import RoundRows
from engine.sampling.device_bans import Bans, most_bans
from engine.sampling.device_bias import BiasTable, DeviceBias, DeviceBiases, is_biased
from engine.sampling.device_penalties import DevicePenalties, DeviceText, TextTable
from engine.sequence import Sequence


class DeviceAdjustments:
    """The adjustments of one round's rows. Each kind is one operation on all rows that are asked for, or none."""

    def __init__(self, sequences: Seq[Sequence], rows: RoundRows, vocab_size: int, numbers: RoundNumbers) -> None:
        self._sequences, self._rows, self._numbers = sequences, rows, numbers
        self._biases: list[DeviceBias | None] = []  # by sequence; []: none has any
        self._texts: list[DeviceText | None] = []  # the same
        self._banning = {i for i, s in enumerate(sequences) if most_bans(s)}
        if any(is_biased(s.params) for s in sequences):
            self._bias_table = BiasTable.of(numbers.staging, vocab_size)
            self._biases = [self._bias(s) for s in sequences]
            self._bias_table.put()
        if any(s.params.penalised for s in sequences):
            self._text_table = TextTable.of(numbers.staging, vocab_size)
            self._texts = [self._text(s) for s in sequences]
            self._text_table.put(len(sequences))

    def take_in(self) -> None:
        """Record all that was put of texts and biases."""
        if self._biases:
            self._bias_table.take_in()
        if self._texts:
            self._text_table.take_in()

    def touches(self, rows: Seq[int]) -> bool:
        """Whether any of the rows may be adjusted."""
        return any((self._is_biased(rows), self._is_penalised(rows), self._bans(rows)))

    def prepare(self, rows: Seq[int]) -> None:
        """Put what these rows need on its way to the device."""
        if self._is_biased(rows):
            self._device_biases(rows)
        if self._is_penalised(rows):
            self._device_penalties(rows)
        if self._bans(rows):
            Bans(self._sequences, self._rows, rows, self._numbers)

    def apply(self, logits: Tensor, rows: Seq[int], drafts: Tensor | None) -> Tensor:
        """As Adjustments.apply."""
        if self._is_biased(rows):
            logits = self._device_biases(rows).apply(logits)
        if self._is_penalised(rows):
            logits = self._device_penalties(rows).apply(logits, drafts)
        if self._bans(rows):
            logits = Bans(self._sequences, self._rows, rows, self._numbers).apply(logits, drafts)
        return logits

    def _owners(self, rows: Seq[int]) -> list[int]:
        return [self._rows.places[row][0] for row in rows]

    def _is_biased(self, rows: Seq[int]) -> bool:
        return bool(self._biases) and any(self._biases[i] is not None for i in self._owners(rows))

    def _is_penalised(self, rows: Seq[int]) -> bool:
        return bool(self._texts) and any(self._texts[i] is not None for i in self._owners(rows))

    def _bans(self, rows: Seq[int]) -> bool:
        return bool(self._banning) and not self._banning.isdisjoint(self._owners(rows))

    def _device_biases(self, rows: Seq[int]) -> DeviceBiases:
        return DeviceBiases(self._bias_table, [self._biases[i] for i in self._owners(rows)], self._numbers, tuple(rows))

    def _device_penalties(self, rows: Seq[int]) -> DevicePenalties:
        owners = self._owners(rows)
        texts = [self._texts[i] for i in owners]
        params = [self._sequences[i].params for i in owners]
        places = [(i, self._rows.seen(row)) for i, row in zip(owners, rows, strict=True)]
        return DevicePenalties(self._text_table, texts, params, places, self._numbers, tuple(rows))

    def _bias(self, sequence: Sequence) -> DeviceBias | None:
        """The sequence's row of the table; written in its first round. None if it has no bias."""
        if not is_biased(sequence.params):
            return None
        bias = sequence.device_bias
        if bias is None or bias.table is not self._bias_table:
            bias = sequence.device_bias = self._bias_table.start(sequence.params)
        return bias

    def _text(self, sequence: Sequence) -> DeviceText | None:
        """The sequence's token counts, up to its end; made in its first round. None if it has no penalties."""
        if not sequence.params.penalised:
            return None
        text = sequence.device_text
        if text is None or text.table is not self._text_table:
            text = sequence.device_text = self._text_table.start(sequence.num_prompt)
        text.sync(sequence.tokens)
        return text
