"""Bias and penalties: the first part of the one transform (R4).

In transformers' order: logit_bias, repetition penalty, then frequency and presence penalty as OpenAI defines them. On a
CPU they touch the tokens of a row's text only; device_bias.py and device_penalties.py are for other devices.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from cache.transfer import index_tensor
from engine.device.staging import RoundNumbers
from engine.types import SamplingParams


class History:
    """A penalised sequence's committed text, on the CPU.

    `tokens`: prompt and output, for the repetition penalty (as in transformers and vLLM). `counts` [vocab]: how often a
    token is in the output, for presence and frequency penalties (as OpenAI defines them).
    """

    def __init__(self, params: SamplingParams, num_prompt: int, vocab_size: int) -> None:
        self.params = params
        self.tokens = torch.empty(0, dtype=torch.int64)
        self.counts = torch.zeros(vocab_size)
        self._num_prompt = num_prompt

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def vocab_size(self) -> int:
        return len(self.counts)

    def sync(self, tokens: Seq[int]) -> None:
        """Add the tokens that were committed since the last call."""
        if len(tokens) > self.length:
            new = index_tensor(tokens[self.length :], self.tokens.device)
            prompt = max(0, self._num_prompt - self.length)
            self.tokens = torch.cat([self.tokens, new])
            self.counts.index_add_(0, new[prompt:], torch.ones(len(new[prompt:])))


def add_bias(logits: Tensor, params: Seq[SamplingParams]) -> Tensor:
    """Logits [A, vocab'] plus the logit_bias of each row, which has 32 bits on every device; vocab' may be a draft
    model's smaller vocabulary."""
    entries = [(n, t, value) for n, p in enumerate(params) for t, value in p.logit_bias if t < logits.shape[-1]]
    if not entries:
        return logits
    rows, ids, values = zip(*entries, strict=True)
    index = torch.tensor(rows), torch.tensor(ids)
    return logits.index_put(index, torch.tensor(values).to(logits.dtype), accumulate=True)


class PenaltyRows:
    """The penalties of A rows on the CPU. Row n sees the text of histories[n] and the drafts that `seen` names."""

    def __init__(
        self,
        histories: Seq[History],
        seen: Seq[tuple[int, int, int]],
        numbers: RoundNumbers,
        name: tuple[int, ...],
    ) -> None:
        """seen [D]: (row, sequence of the round, column) of each draft that a row sees. name: tells these rows from
        others of the round."""
        self._histories = histories
        own = [history.length for history in histories]
        distinct = {id(h): n for n, h in enumerate(dict.fromkeys(histories))}  # rows of a sequence share its history
        owners = [row for row, _, _ in seen]
        self._num_seen = len(seen)
        self._index = numbers.ints(
            ("penalties", name),
            lambda: [
                *own,
                *owners,
                *(i for _, i, _ in seen),
                *(column for _, _, column in seen),
                *(distinct[id(histories[owner])] for owner in owners),
            ],
        )
        names = "repetition_penalty", "frequency_penalty", "presence_penalty"
        self._params = numbers.floats(
            ("penalty parameters", name), lambda: [getattr(h.params, p) for p in names for h in histories]
        )

    def apply(self, logits: Tensor, drafts: Tensor | None) -> Tensor:
        """Logits [A, vocab'] with the penalties; vocab' may be a draft model's smaller vocabulary. drafts [B, ≥ the
        columns that are seen]; None if none is seen."""
        vocab, size = logits.shape[-1], self._histories[0].vocab_size
        lengths, *of_drafts = self._index.tensor.split([len(self._histories), *[self._num_seen] * 4])
        owners, sequences, columns, distinct = of_drafts
        of_texts = torch.arange(len(lengths)).repeat_interleave(lengths)
        # An illegal draft is rejected, so the rows behind it do not matter.
        drafted = owners if drafts is None else drafts[sequences, columns].clamp(0, size - 1)
        rows = torch.cat([of_texts, owners])
        tokens = torch.cat([*(h.tokens for h in self._histories), drafted])
        committed = torch.cat([*(h.counts[h.tokens] for h in self._histories), self._counts_of(distinct, drafted)])
        # A token that a row sees twice gets the same logit twice.
        places, draft_places = rows * size + tokens, owners * size + drafted
        counts = (committed + occurrences(places, draft_places)).to(logits.dtype)
        repetition, frequency, presence = self._params.tensor.to(logits.dtype).view(3, -1)[:, rows].unbind(0)
        if vocab < size:
            known = tokens < vocab
            rows, tokens, counts = rows[known], tokens[known], counts[known]
            repetition, frequency, presence = repetition[known], frequency[known], presence[known]
        old = logits[rows, tokens]
        new = torch.where(old > 0, old / repetition, old * repetition)
        new = new - (frequency * counts + presence * (counts > 0))
        return logits.index_put((rows, tokens), new)

    def _counts_of(self, distinct: Tensor, tokens: Tensor) -> Tensor:
        """How often each draft is in the output of its row's history."""
        if not len(tokens):
            return tokens.float()
        return torch.stack([h.counts for h in dict.fromkeys(self._histories)])[distinct, tokens]


def occurrences(numbers: Tensor, among: Tensor) -> Tensor:
    """How often each of the numbers [n] is among others [m], int64 [n]."""
    in_order = among.sort().values
    return torch.searchsorted(in_order, numbers, right=True) - torch.searchsorted(in_order, numbers)
