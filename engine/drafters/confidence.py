"""When a draft model is no longer sure of what it drafts.

As transformers' assistant_confidence_threshold, but for the joint probability of the draft, and before a position
instead of behind it. What is looked at is the shape of the law, never the token drawn from it: to keep a token only
where its own probability is high would change the law that kept tokens follow, and with it the text.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor


class ConfidenceLimit:
    """Multiplies up, per sequence, the largest probabilities of the draft's positions, and compares with a limit."""

    def __init__(self, limits: Seq[float], device: torch.device) -> None:
        """limits: of every sequence of the batch, in [0, 1]; 0: no limit."""
        self._limits = torch.tensor(limits, dtype=torch.float64, device=device).log()
        self._joint = torch.zeros_like(self._limits)  # log of the product so far

    @classmethod
    def of(cls, limits: Seq[float], device: torch.device) -> "ConfidenceLimit | None":
        """None where nobody has a limit: then no law is looked at, and nothing copied."""
        return cls(limits, device) if any(limits) else None

    def sure(self, logits: Tensor, places: Tensor) -> list[int]:
        """Which of the rows may be drafted from, given the raw logits [n, vocab] of sequences `places` [n]. One copy
        to the host. A draft model's NaN ends nothing: the verifier takes care of that."""
        wide = logits if logits.dtype.itemsize >= 4 else logits.float()
        highest = wide.amax(1) - wide.logsumexp(1)
        self._joint.index_add_(0, places, highest.double())
        unsure: list[bool] = (self._joint[places] < self._limits[places]).tolist()
        return [n for n, stop in enumerate(unsure) if not stop]
