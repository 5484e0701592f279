"""Tokens that single rows must not give, on another device than the CPU: the last token of a bad word behind the word's
other tokens, and end tokens before min_tokens.

The host knows whether the committed text ends with a word's first tokens, the device whether the drafts go on with the
others.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.device.staging import RoundNumbers, Staged
from engine.sampling.adjustments import RoundRows, banned
from engine.sequence import Sequence
from engine.types import MAX_BAD_WORD

ANY = -1  # of a draft: it does not decide
NOTHING = 1 << 40  # outside of any vocabulary: a ban that bans nothing

Ban = tuple[int, int, int, dict[int, int]]  # row, sequence, token, the drafts that must be so by column


def most_bans(sequence: Sequence) -> int:
    """The most tokens that a row of the sequence must not give. It changes only when min_tokens is reached."""
    words = sequence.params.bad_word_ids
    return (sum(len(word) > 1 for word in words) if words else 0) + len(banned(sequence, 0))


class Bans:
    """The bans of A rows.

    In a round that may be captured the number of bans follows from the rows' sequences alone, up to a power of two.
    """

    def __init__(self, sequences: Seq[Sequence], rows: RoundRows, picked: Seq[int], numbers: RoundNumbers) -> None:
        """sequences: how many the round has. picked [A]: its rows."""
        self._sequences, self._rows, self._picked, self._numbers = sequences, rows, picked, numbers
        self._width = max((column + 1 for row in picked for column in rows.seen(row)), default=0)  # columns that decide
        self._bans: Staged = numbers.ints(("bans", tuple(picked)), self._table)

    def apply(self, logits: Tensor, drafts: Tensor | None) -> Tensor:
        """Logits [A, vocab'] with −inf for banned tokens. vocab' may be a draft model's smaller vocabulary. drafts [B,
        ≥ the columns that are seen]; None if none is seen."""
        vocab = logits.shape[1]
        bans = self._bans.tensor.view(-1, 3 + self._width)
        rows, owners, tokens = bans[:, :3].unbind(1)
        holds = tokens < vocab
        if self._width:
            assert drafts is not None, "some rows see drafts"
            expected = bans[:, 3:]
            holds &= ((expected == ANY) | (expected == drafts[owners, : self._width])).all(1)
        added = torch.zeros_like(holds, dtype=logits.dtype).masked_fill(holds, -torch.inf)
        places = rows * vocab + tokens.clamp(max=vocab - 1)
        return logits.flatten().scatter_add(0, places, added).view_as(logits)

    def _table(self) -> list[int]:
        """Rows of (row, sequence, token, the draft that each column must have)."""
        found, staging = list(self._found()), self._numbers.staging
        count = max(1, len(found))
        if staging.fixed:
            most = sum(most_bans(self._sequences[self._rows.places[row][0]]) for row in self._picked)
            count = 1 << (most - 1).bit_length()
        found += [(0, 0, NOTHING, {})] * (count - len(found))
        staging.note("bans", len(found), self._width)
        columns = range(self._width)
        return [x for *ban, drafts in found for x in (*ban, *(drafts.get(column, ANY) for column in columns))]

    def _found(self) -> Iterator[Ban]:
        for place, row in enumerate(self._picked):
            i, ahead = self._rows.places[row]
            sequence, seen = self._sequences[i], self._rows.seen(row)
            output = sequence.tokens[max(sequence.num_prompt, len(sequence.tokens) - MAX_BAD_WORD) :]
            for token in banned(sequence, ahead):
                yield place, i, token, {}
            for *start, last in sequence.params.bad_word_ids:
                drafted = min(len(start), len(seen))
                said = start[: len(start) - drafted]
                if start and output[len(output) - len(said) :] == said:
                    first = len(seen) - drafted
                    yield place, i, last, dict(zip(seen[first:], start[len(said) :], strict=True))
