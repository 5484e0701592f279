"""Several drafts for the same position. Each token is drawn without the ones before it."""

from collections.abc import Callable

import torch
from torch import Tensor

SPREAD = 0.8  # spread of the difference between the two models' logits, measured on the embedded pair (docs/log.md)
RIVALS = 64  # likeliest other tokens that a chance is compared with
NON_FINITE_LOG_CHANCE = -1e4  # the log of a chance where the scores are not finite


class Siblings:
    """Tokens that are drawn one after the other for the same rows, each without those before it."""

    def __init__(self, scores: Tensor, first: Tensor, width: int) -> None:
        """first [R]: what was drawn from scores [R, vocab]. width: how many are drawn for each row."""
        # Without the tokens that were drawn; once all are drawn, nothing reads it.
        self.left = scores.scatter(1, first[:, None], -torch.inf) if width > 1 else scores
        self.first = first
        self._width = width
        self._columns = [first]

    @classmethod
    def draw(cls, scores: Tensor, width: int, draw: Callable[[Tensor], Tensor]) -> "Siblings":
        """draw: scores [R, vocab] → what is drawn from them [R]."""
        siblings = cls(scores, draw(scores), width)
        for _ in range(1, width):
            siblings.add(draw(siblings.left))
        return siblings

    @classmethod
    def draw_with_laws(cls, laws: Tensor, width: int, draw: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """As draw(), from log-laws [R, vocab]: (siblings [R, width], the log-law [R, width, vocab] of each one given
        those before it; one-hot for a repeated one)."""
        siblings, given = cls(laws, draw(laws), width), [laws]
        for _ in range(1, width):
            law = siblings.left.log_softmax(-1)
            found = siblings.add(draw(siblings.left))
            one_hot = torch.full_like(law, -torch.inf).scatter_(1, siblings.first[:, None], 0.0)
            given.append(torch.where(found[:, None], law, one_hot))
        return siblings.tokens(), torch.stack(given, 1) if width > 1 else laws[:, None]

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


def log_chances(siblings: Siblings, scores: Tensor, noise: Callable[[Tensor], Tensor]) -> Tensor:
    """The log of the chance [R, width] that the target draws each sibling with the same noise; −inf for a repeated one.

    noise: tokens [R, n] → what the race adds to their scores. If the target's scores are the draft's plus independent
    Gumbel errors of scale SPREAD, then the target's winner follows softmax(noisy scores / SPREAD). At temperature 0 and
    with SPREAD 1 that is the draft's own law, which EAGLE-2 takes.
    """
    tokens = siblings.tokens()
    left = scores.scatter(1, tokens, -torch.inf)
    rivals = left.topk(min(RIVALS, left.shape[1]), 1).indices
    values = torch.cat([scores.gather(1, tokens), left.gather(1, rivals)], 1).double()
    values += noise(torch.cat([tokens, rivals], 1))
    values[:, 1 : tokens.shape[1]].masked_fill_(tokens[:, 1:] == tokens[:, :1], -torch.inf)
    return (values / SPREAD).log_softmax(1)[:, : tokens.shape[1]].nan_to_num(NON_FINITE_LOG_CHANCE, neginf=-torch.inf)
