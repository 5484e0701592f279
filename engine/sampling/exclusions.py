"""The tokens that a request excludes by allowed_token_ids and bad words (a part of the one transform, R4), on the CPU.
device_bias.py and device_bans.py have them on another device.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.types import SamplingParams

ANY = -1  # in front of a short word: equals every token
NOTHING = -2  # in front of a short output: equals no token


class Exclusions:
    """What one sequence may not emit: tokens without allowance, and the last token of a bad word where
    the output ends with the word's other tokens (as in vLLM). Does not change."""

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        words = [word for word in params.bad_word_ids if len(word) > 1]
        self.width = max((len(word) - 1 for word in words), default=0)  # tokens of the output that decide
        starts = [[ANY] * (self.width + 1 - len(word)) + list(word[:-1]) for word in words]
        self._starts = torch.tensor(starts, dtype=torch.int64)  # [words, width]
        self._lasts = torch.tensor([word[-1] for word in words], dtype=torch.int64)
        self._always = self._mask(params, vocab_size)  # [vocab], 0 or −inf; None: no token is always excluded

    def apply(self, logits: Tensor, tail: Seq[int], drafts: Tensor | None, columns: Seq[Seq[int]]) -> Tensor:
        """Logits [rows, vocab'], with −inf for what row r excludes behind the output and the drafts in columns[r].

        tail: the last `width` tokens of the output, fewer for a shorter one. drafts [n]; None if no row sees any.
        vocab' may be a draft model's smaller vocabulary.
        """
        vocab = logits.shape[-1]
        if self._always is not None:
            logits = logits + self._always[:vocab].to(logits.dtype)
        if not self.width:
            return logits
        seen = torch.tensor([NOTHING] * (self.width - len(tail)) + list(tail))
        if drafts is not None:
            seen = torch.cat([seen, drafts])
        places = [
            place
            for row in columns
            for place in (*range(len(row), self.width), *(self.width + column for column in row[-self.width :]))
        ]
        ends = seen[torch.tensor(places)].view(-1, self.width)  # the last tokens that each row sees
        matches = (self._starts == ANY) | (self._starts == ends[:, None])
        excluded = matches.all(-1) & (self._lasts < vocab)  # [rows, words]
        rows = torch.arange(len(columns))[:, None].expand_as(excluded)
        lasts = self._lasts.clamp(max=vocab - 1).expand_as(excluded)
        penalty = torch.zeros(excluded.shape, dtype=logits.dtype)
        return logits.index_put((rows, lasts), penalty.masked_fill_(excluded, -torch.inf), accumulate=True)

    @staticmethod
    def _mask(params: SamplingParams, vocab_size: int) -> Tensor | None:
        allowed = params.allowed_token_ids
        single = [word[0] for word in params.bad_word_ids if len(word) == 1]
        if allowed is None and not single:
            return None
        mask = torch.full((vocab_size,), 0.0 if allowed is None else -torch.inf)
        mask[list(allowed or ())] = 0.0
        mask[single] = -torch.inf
        return mask
