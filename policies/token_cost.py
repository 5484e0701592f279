"""Seconds that a full engine is expected to spend on a token, by the rounds that it measured at its start."""

from collections.abc import Sequence
from dataclasses import dataclass

from policies.cost import PASS_S
from policies.observation import Timing


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Seconds per token while as many sequences decode as may run. Where nothing was measured, each is a pass."""

    read_s: float = PASS_S  # per token of a prompt
    decode_s: float = PASS_S  # per generated token

    @classmethod
    def measured(cls, timings: Sequence[Timing], most: int) -> "TokenCost":
        """From the passes over the largest batch that was measured: without drafts, and with the most drafts.

        The additional seconds per row of the longer pass are those of a prompt's token, and of each sequence from that
        batch up to `most`.
        """
        undrafted = max((t for t in timings if not t.drafts), key=lambda t: t.batch, default=None)
        if undrafted is None or undrafted.score_s <= 0:
            return cls()
        longest = max((t for t in timings if t.batch == undrafted.batch), key=lambda t: t.drafts)
        read_s = undrafted.score_s / undrafted.batch
        if longest.drafts and longest.score_s > undrafted.score_s:
            read_s = (longest.score_s - undrafted.score_s) / longest.drafts
        return cls(read_s, (undrafted.score_s + read_s * (most - undrafted.batch)) / most)

    def seconds(self, prompt_tokens: int, output_tokens: int) -> float:
        return prompt_tokens * self.read_s + output_tokens * self.decode_s
