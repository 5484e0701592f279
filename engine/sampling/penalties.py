"""Bias and penalties: the first part of the one transform (R4).

In transformers' order: logit_bias, repetition penalty, then frequency and presence penalty as OpenAI defines them.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.types import SamplingParams


class History:
    """A penalised sequence's committed text, on the device.

    `tokens`: prompt and output, for the repetition penalty (as in transformers and vLLM). `counts` [vocab]: how often a
    token is in the output, for presence and frequency penalties (as OpenAI defines them).
    """

    def __init__(self, params: SamplingParams, num_prompt: int, vocab_size: int, device: torch.device) -> None:
        self.params = params
        self._num_prompt = num_prompt
        self._counted = 0
        self.tokens = torch.empty(0, dtype=torch.int64, device=device)
        self.counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)

    def sync(self, tokens: Seq[int]) -> None:
        """Count the tokens that were committed since the last call."""
        new = torch.tensor(tokens[self._counted :], dtype=torch.int64, device=self.tokens.device)
        self.tokens = torch.cat([self.tokens, new])
        output = new[max(0, self._num_prompt - self._counted) :]
        self.counts.index_add_(0, output, torch.ones(len(output), device=output.device))
        self._counted = len(tokens)


def biased(logits: Tensor, params: Seq[SamplingParams]) -> Tensor:
    """Logits [A, vocab'] plus each row's logit_bias; vocab' may be a draft model's smaller vocabulary."""
    vocab = logits.shape[-1]
    entries = [(row, t, value) for row, p in enumerate(params) for t, value in p.logit_bias if t < vocab]
    if not entries:
        return logits
    rows, ids, values = zip(*entries, strict=True)
    index = torch.tensor([rows, ids], device=logits.device)
    bias = torch.tensor(values, dtype=logits.dtype, device=logits.device)
    return logits.index_put((index[0], index[1]), bias, accumulate=True)


def penalised(logits: Tensor, histories: Seq[History], drafted: Tensor, owners: Tensor) -> Tensor:
    """Logits [A, vocab'] with the penalties of each row's history; vocab' may be a draft model's smaller vocabulary.

    drafted [D]: draft tokens that rows see besides their history; owners [D]: the row that sees each of them. Position
    j of a round sees the committed tokens and the first j drafts.
    """
    vocab = logits.shape[-1]
    own = torch.tensor([len(h.tokens) for h in histories], device=logits.device)
    rows = torch.cat([torch.arange(len(histories), device=logits.device).repeat_interleave(own), owners])
    tokens = torch.cat([*(h.tokens for h in histories), drafted])
    committed = torch.cat([*(h.counts[h.tokens] for h in histories), _counts_of(histories, drafted, owners)])
    # A token that a row sees twice gets the same logit twice.
    places, drafts = rows * len(histories[0].counts) + tokens, owners * len(histories[0].counts) + drafted
    in_order = drafts.sort().values
    seen = torch.searchsorted(in_order, places, right=True) - torch.searchsorted(in_order, places)
    counts = (committed + seen).to(logits.dtype)

    def column(name: str) -> Tensor:
        values = [getattr(h.params, name) for h in histories]
        return torch.tensor(values, dtype=logits.dtype, device=logits.device)[rows]

    known = tokens < vocab
    old = logits[rows, tokens.clamp(max=vocab - 1)]
    repetition = column("repetition_penalty")
    new = torch.where(old > 0, old / repetition, old * repetition)
    new = new - (column("frequency_penalty") * counts + column("presence_penalty") * (counts > 0))
    return logits.index_put((rows[known], tokens[known]), new[known])


def _counts_of(histories: Seq[History], tokens: Tensor, owners: Tensor) -> Tensor:
    """How often each token [D] is in the output of the history that `owners` [D] tells."""
    if not len(tokens):
        return tokens.float()
    numbers = {id(h): n for n, h in enumerate(dict.fromkeys(histories))}  # rows of a sequence share its history
    of_row = torch.tensor([numbers[id(h)] for h in histories], device=tokens.device)
    return torch.stack([h.counts for h in dict.fromkeys(histories)])[of_row[owners], tokens]
