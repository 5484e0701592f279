"""Ends a draft where the draft model becomes unsure.

Like transformers' assistant_confidence_threshold, but with the joint probability of the draft, and decided before a
position is drawn. The decision looks at the law, never at the token drawn from it: keeping a token because its own
probability is high would change the law of the kept tokens, and with it the text.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor


class ConfidenceLimit:
    """Compares, per sequence, the product of the largest probabilities of the draft's positions with a limit."""

    def __init__(self, limits: Seq[float], device: torch.device) -> None:
        """limits: one per sequence of the batch, in [0, 1]; 0: no limit."""
        self._limits = torch.tensor(limits, dtype=torch.float64, device=device).log()
        self._joint = torch.zeros_like(self._limits)  # log of the product so far

    @classmethod
    def of(cls, limits: Seq[float], device: torch.device) -> "ConfidenceLimit | None":
        """The limit of a batch; None if no sequence has one. Without it no law is computed and nothing is copied to the
        host."""
        return cls(limits, device) if any(limits) else None

    def sure_rows(self, logits: Tensor, indices: Tensor) -> list[int]:
        """Rows of the raw logits [n, vocab], of sequences `indices` [n], whose drafts go on. One copy to the host.

        A NaN does not end a draft: the verifier handles it.
        """
        wide = logits if logits.dtype.itemsize >= 4 else logits.float()
        highest = wide.amax(1) - wide.logsumexp(1)
        self._joint.index_add_(0, indices, highest.double())
        unsure: list[bool] = (self._joint[indices] < self._limits[indices]).tolist()
        return [n for n, stop in enumerate(unsure) if not stop]
