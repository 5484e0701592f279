"""The inputs of the passes inside a captured chain of drafts (engine/drafters/captured_chains.py)."""

from collections.abc import Sequence as Seq

from torch import Tensor

from engine.models.decoder import LanguageModel
from engine.models.paged_attention import PagedAttention
from engine.sequence import Sequence


class ChainPasses:
    """The passes of a draft model, which read tokens only."""

    def __init__(self, decoder: LanguageModel) -> None:
        self._decoder = decoder

    @property
    def most_gap(self) -> int:
        """Tokens of a sequence that the first pass reads at most: one after a rejection, two after a full
        acceptance."""
        return 2

    def rows(self, gaps: Seq[int]) -> int:
        """Rows of each sequence in the first pass, whose tokens are the last ones of them."""
        return max(gaps)

    def put(self, sequences: Seq[Sequence], gaps: Seq[int], size: int) -> None:
        """Put what the first pass reads beside tokens on its way to the device. size: sequences of the pass. The given
        ones are the first of these."""

    def run(
        self, ids: Tensor, attention: PagedAttention, rows: slice, before: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(states of these rows of a pass, what rows behind them read beside tokens). before: what the pass before has
        left for the rows of this one; None: this is the first. A part of the region of a graph."""
        return self._decoder.forward(ids, attention)[rows], None

    def end(self, sequences: Seq[Sequence]) -> None:
        """All passes over these sequences are asked for."""
