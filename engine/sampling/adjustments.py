"""The first part of the one transform (R4): what changes single logits before temperature and filters, on the CPU.
device_adjustments.py does the same on another device.

In transformers' order: logit bias, repetition, frequency and presence penalties (penalties.py), no token that the
request excludes (exclusions.py), no end tokens before min_tokens.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.device.staging import RoundNumbers
from engine.sampling.exclusions import Exclusions
from engine.sampling.penalties import History, PenaltyRows, add_bias
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class RoundRows:
    """The places of a round's rows."""

    places: list[tuple[int, int]]  # (sequence, number of drafts that the row sees)
    paths: dict[int, list[int]] = field(default_factory=dict)  # row of a tree's node → columns of the drafts it sees

    def seen(self, row: int) -> Seq[int]:
        """Columns of the drafts that the row sees."""
        return self.paths[row] if row in self.paths else range(self.places[row][1])


class Adjustments:
    """The adjustments of one round's rows. Rows without any cost nothing."""

    def __init__(self, sequences: Seq[Sequence], rows: RoundRows, vocab_size: int, numbers: RoundNumbers) -> None:
        self._sequences = sequences
        self._rows = rows
        self._vocab_size = vocab_size
        self._numbers = numbers
        params = [sequences[i].params for i, _ in rows.places]
        self._biased = frozenset(row for row, p in enumerate(params) if p.logit_bias)
        self._penalised = frozenset(row for row, p in enumerate(params) if p.penalised)
        early = [(row, i, ahead) for row, (i, ahead) in enumerate(rows.places) if params[row].min_tokens]
        self._banned = {row: ids for row, i, ahead in early if (ids := banned(sequences[i], ahead))}
        self._exclusions = {i: self._excluded(s) for i, s in enumerate(sequences) if s.params.excludes}
        self._histories = [self._history(s) for s in sequences] if self._penalised else []

    def apply(self, logits: Tensor, rows: Seq[int], drafts: Tensor | None) -> Tensor:
        """Logits [len(rows), vocab'] of these rows, adjusted; `logits` is not changed.

        vocab' may be a draft model's smaller vocabulary. drafts [B, ≥ what the rows see]: the round's drafts so far;
        None if no row sees any.
        """
        if self._biased and (picked := [n for n, row in enumerate(rows) if row in self._biased]):
            params = [self._sequences[self._rows.places[rows[n]][0]].params for n in picked]
            logits = put(logits, picked, add_bias(take(logits, picked, self._numbers), params), self._numbers)
        if self._penalised and (picked := [n for n, row in enumerate(rows) if row in self._penalised]):
            penalised = self._penalties([rows[n] for n in picked]).apply(take(logits, picked, self._numbers), drafts)
            logits = put(logits, picked, penalised, self._numbers)
        if self._exclusions:
            logits = self._without_excluded(logits, rows, drafts)
        if self._banned and (pairs := self._bans(rows, logits.shape[-1])):
            row, token = torch.tensor(pairs).unbind(1)
            logits = logits.index_put((row, token), logits.new_full((), -torch.inf))
        return logits

    def touches(self, rows: Seq[int]) -> bool:
        """Whether any of the rows may be adjusted."""
        if not (self._biased or self._penalised or self._exclusions or self._banned):
            return False
        own = (self._biased, self._penalised, self._banned.keys())
        excluded = any(self._rows.places[row][0] in self._exclusions for row in rows)
        return excluded or any(row in kind for row in rows for kind in own)

    def _penalties(self, rows: Seq[int]) -> PenaltyRows:
        owners = [self._rows.places[row][0] for row in rows]
        histories = [h for h in (self._histories[i] for i in owners) if h is not None]
        seen = [(n, i, j) for n, i in enumerate(owners) for j in self._rows.seen(rows[n])]
        return PenaltyRows(histories, seen, self._numbers, tuple(rows))

    def _history(self, sequence: Sequence) -> History | None:
        """The sequence's token counts, up to its end; made in its first round. None if it has no penalties."""
        if not sequence.params.penalised:
            return None
        if sequence.history is None:
            sequence.history = History(sequence.params, sequence.num_prompt, self._vocab_size)
        sequence.history.sync(sequence.tokens)
        return sequence.history

    def _excluded(self, sequence: Sequence) -> Exclusions:
        """The sequence's exclusions, up to its end; made in its first round."""
        if sequence.exclusions is None:
            sequence.exclusions = Exclusions(sequence.params, self._vocab_size)
        return sequence.exclusions

    def _without_excluded(self, logits: Tensor, rows: Seq[int], drafts: Tensor | None) -> Tensor:
        logits = logits.clone()
        for i, exclusions in self._exclusions.items():
            picked = [n for n, row in enumerate(rows) if self._rows.places[row][0] == i]
            if not picked:
                continue
            sequence, columns = self._sequences[i], [self._rows.seen(rows[n]) for n in picked]
            tail = sequence.tokens[max(sequence.num_prompt, len(sequence.tokens) - exclusions.width) :]
            index = self._numbers.index(picked).tensor
            logits[index] = exclusions.apply(logits[index], tail, None if drafts is None else drafts[i], columns)
        return logits

    def _bans(self, rows: Seq[int], vocab: int) -> list[tuple[int, int]]:
        """(row, token) pairs that must not be drawn, for `apply` of these rows."""
        return [(n, t) for n, row in enumerate(rows) for t in self._banned.get(row, ()) if t < vocab]


def banned(sequence: Sequence, ahead: int) -> tuple[int, ...]:
    """Tokens that would end the text before min_tokens, if drawn `ahead` positions past its end."""
    early = sequence.num_output + ahead < sequence.params.min_tokens
    return tuple(sorted(sequence.end_ids)) if early else ()


def take(values: Tensor, rows: Seq[int], numbers: RoundNumbers) -> Tensor:
    """values[rows]; `values` itself if these are all its rows in order."""
    whole = list(rows) == list(range(values.shape[0]))
    return values if whole else values[numbers.index(rows).tensor]


def put(values: Tensor, rows: Seq[int], new: Tensor, numbers: RoundNumbers) -> Tensor:
    """A copy of values with these rows replaced; `new` itself if these are all rows."""
    if len(rows) == values.shape[0]:
        return new
    return values.index_copy(0, numbers.index(rows).tensor, new)
