"""Several drafts for the same position: tokens of which each is drawn without those before it."""

import torch
from torch import Tensor


class Siblings:
    """Tokens that are drawn one after the other for the same rows, each without those before it."""

    def __init__(self) -> None:
        self._columns: list[Tensor] = []

    @property
    def first(self) -> Tensor:
        return self._columns[0]

    def add(self, left: Tensor, drawn: Tensor) -> Tensor:
        """Take what was drawn [R] from scores [R, vocab] out of them. Returns whether there was a token to draw [R]."""
        found = left.gather(1, drawn[:, None])[:, 0] > -torch.inf
        left.scatter_(1, drawn[:, None], -torch.inf)
        self._columns.append(torch.where(found, drawn, self.first) if self._columns else drawn)
        return found

    def tokens(self) -> Tensor:
        return torch.stack(self._columns, 1)
