"""Several drafts for the same position: tokens of which each is drawn without those before it."""

import torch
from torch import Tensor


class Siblings:
    """Tokens that are drawn one after the other for the same rows, each without those before it."""

    def __init__(self, scores: Tensor, first: Tensor, width: int) -> None:
        """first [R]: what was drawn from scores [R, vocab]. width: how many are drawn for each row."""
        # Without the tokens that were drawn; once all are drawn, nothing reads it.
        self.left = scores.scatter(1, first[:, None], -torch.inf) if width > 1 else scores
        self.first = first
        self._width = width
        self._columns = [first]

    def add(self, drawn: Tensor) -> Tensor:
        """Take what was drawn [R] from `left` out of it. Returns whether there was a token to draw [R]."""
        found = self.left.gather(1, drawn[:, None])[:, 0] > -torch.inf
        self._columns.append(torch.where(found, drawn, self.first))
        if len(self._columns) < self._width:
            self.left.scatter_(1, drawn[:, None], -torch.inf)
        return found

    def tokens(self) -> Tensor:
        """[R, width]."""
        return torch.stack(self._columns, 1) if self._width > 1 else self.first[:, None]
