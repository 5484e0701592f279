"""What a full engine is expected to spend on a token, by the rounds that it measured at its start."""

from collections.abc import Sequence
from dataclasses import dataclass

from policies.observation import Timing

UNKNOWN_S = 1e-3  # for a token, where nothing was measured


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds per token while as many sequences decode as may run."""

    read_s: float = UNKNOWN_S  # of a prompt
    decode_s: float = UNKNOWN_S

    @classmethod
    def of(cls, timings: Sequence[Timing]) -> "Work":
        """By the largest batch without drafts, and by what the most rows more took in its pass."""
        plain = max((t for t in timings if not t.drafts), key=lambda t: t.batch, default=None)
        if plain is None or plain.score_s <= 0:
            return cls()
        longest = max((t for t in timings if t.batch == plain.batch), key=lambda t: t.drafts)
        decode_s = plain.score_s / plain.batch
        if not longest.drafts or longest.score_s <= plain.score_s:
            return cls(decode_s, decode_s)
        return cls((longest.score_s - plain.score_s) / longest.drafts, decode_s)

    def seconds(self, prompt_tokens: int, output_tokens: int) -> float:
        return prompt_tokens * self.read_s + output_tokens * self.decode_s
