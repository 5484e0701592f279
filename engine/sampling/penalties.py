"""Bias and penalties: the first part of the one transform (R4).

In transformers' order: logit_bias, repetition penalty, then frequency and presence penalty as OpenAI defines them.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.types import SamplingParams


class History:
    """The token counts of a penalised sequence's committed text, on the device, [vocab] each.

    `seen`: whether a token is in prompt or output, for the repetition penalty (as in transformers and vLLM). `counts`:
    how often it is in the output, for presence and frequency penalties (as OpenAI defines them).
    """

    def __init__(self, params: SamplingParams, num_prompt: int, vocab_size: int, device: torch.device) -> None:
        self.params = params
        self._num_prompt = num_prompt
        self._counted = 0
        self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)

    def sync(self, tokens: Seq[int]) -> None:
        """Count the tokens that were committed since the last call."""
        new = torch.tensor(tokens[self._counted :], dtype=torch.int64, device=self.seen.device)
        self.seen[new] = True
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
    seen = torch.stack([h.seen for h in histories])
    counts = torch.stack([h.counts for h in histories])
    seen[owners, drafted] = True
    counts.index_put_((owners, drafted), counts.new_ones(()), accumulate=True)
    seen, counts = seen[:, :vocab], counts[:, :vocab].to(logits.dtype)

    def column(name: str) -> Tensor:
        values = [getattr(h.params, name) for h in histories]
        return torch.tensor(values, dtype=logits.dtype, device=logits.device)[:, None]

    repetition = column("repetition_penalty")
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - (column("frequency_penalty") * counts + column("presence_penalty") * (counts > 0))
