"""Prompt lookup: find the end of the text earlier in the text, and propose what followed there.

After prompt lookup decoding (Saxena 2023), over prompt and output alike, with the longest match instead of a fixed one.
"""

from typing import Literal

import torch

from engine.drafters.guess import GuessDrafter

Occurrence = Literal["recent", "earliest"]

MIN_MATCH = 3  # tokens
MAX_MATCH = 32  # tokens; matches as long as this count as equally long
CANDIDATES = 64


def lookup_drafter(device: torch.device) -> GuessDrafter["Lookup"]:
    return GuessDrafter(lambda _: Lookup(), device)


class Lookup:
    """Where the last `min_match` tokens occurred before, by a dictionary of all runs of that many tokens.

    Promised: of the latest CANDIDATES earlier occurrences of the last min_match tokens, it takes the one whose
    preceding tokens agree with the end of the text for longest, counted up to MAX_MATCH tokens; of equals the most
    recent one. With occurrence "earliest", the same of the earliest ones. A push takes O(1) time and a guess at most
    CANDIDATES comparisons, most of which end at the first token.
    """

    def __init__(self, min_match: int = MIN_MATCH, occurrence: Occurrence = "recent") -> None:
        self._min_match = min_match
        self._recent = occurrence == "recent"
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # run of min_match tokens → where its occurrences end

    def push(self, token: int) -> None:
        tokens = self._tokens
        tokens.append(token)
        if len(tokens) >= self._min_match:
            run = tuple(tokens[-self._min_match :])
            ends = self._ends.get(run)
            if ends is None:
                self._ends[run] = [len(tokens)]
            else:
                ends.append(len(tokens))

    def guess(self, k: int) -> list[int]:
        """The k tokens that followed the match. Where they reach the end of the text, the copy itself goes on:
        tokens repeat with the distance of the match as their period."""
        source = self._source()
        if source is None:
            return []
        period = len(self._tokens) - source
        return (self._tokens[source : source + k] * (k // period + 1))[:k]

    def _source(self) -> int | None:
        """The index of the token after the match."""
        ends = self._ends.get(tuple(self._tokens[-self._min_match :]), [])
        earlier = ends[-2 : -2 - CANDIDATES : -1] if self._recent else ends[:-1][:CANDIDATES]
        best, length = None, 0
        for end in earlier:
            # Only a place that agrees where the best one ended can be better. At the text's beginning this index wraps
            # around, and what passes by chance is no longer than the text before it.
            if best is None or self._tokens[end - 1 - length] == self._tokens[-1 - length]:
                agreed = self._agreement(end)
                if agreed > length:
                    best, length = end, agreed
            if length == MAX_MATCH:
                break
        return best

    def _agreement(self, end: int) -> int:
        """How many tokens before `end` equal those before the end of the text, up to MAX_MATCH."""
        length, most = self._min_match, min(MAX_MATCH, end)
        while length < most and self._tokens[end - 1 - length] == self._tokens[-1 - length]:
            length += 1
        return length
