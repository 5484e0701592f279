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
    def of(cls, timings: Sequence[Timing], most: int) -> "Work":
        """By the passes over the largest batch that was measured, without drafts and with the most. What a row more
        takes in them, a prompt's token takes, and so does each sequence up to `most`."""
        plain = max((t for t in timings if not t.drafts), key=lambda t: t.batch, default=None)
        if plain is None or plain.score_s <= 0:
            return cls()
        longest = max((t for t in timings if t.batch == plain.batch), key=lambda t: t.drafts)
        read_s = plain.score_s / plain.batch
        if longest.drafts and longest.score_s > plain.score_s:
            read_s = (longest.score_s - plain.score_s) / longest.drafts
        return cls(read_s, (plain.score_s + read_s * (most - plain.batch)) / most)

    def seconds(self, prompt_tokens: int, output_tokens: int) -> float:
        return prompt_tokens * self.read_s + output_tokens * self.decode_s
