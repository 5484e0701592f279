"""Prompt lookup: find the end of the text earlier in the text, and propose what followed there.

After prompt lookup decoding (Saxena 2023), over prompt and output alike, with the longest match instead of a fixed one.
"""

from engine.drafters.branching import draw_tree
from engine.drafters.guess import GuessDrafter, Guesser
from engine.trees import Parents

MIN_MATCH = 3  # tokens that must occur again
MAX_MATCH = 32  # tokens; matches as long as this count as equally long
CANDIDATES = 64  # earlier occurrences that are compared
MAX_SOURCES = 16  # occurrences whose continuations make a tree

LookupPath = tuple[list[int], tuple[int, ...]]  # indices behind the occurrences that go on with the path, the path


def lookup_drafter() -> GuessDrafter["Lookup"]:
    return GuessDrafter(lambda _: Lookup())


class Lookup(Guesser):
    """Finds earlier occurrences of the last `min_match` tokens in a dictionary of all runs of that many tokens.

    It compares the CANDIDATES latest occurrences and takes the one with the longest match before it, up to MAX_MATCH
    tokens; among equals the most recent. A push takes O(1) time. A guess takes at most CANDIDATES comparisons, most of
    which end at the first token.
    """

    def __init__(self, min_match: int = MIN_MATCH) -> None:
        self._min_match = min_match
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
        """The k tokens that followed the match. A copy that reaches the end of the text goes on with itself: its tokens
        repeat with the distance of the match as their period."""
        source = self._source()
        if source is None:
            return []
        period = len(self._tokens) - source
        return (self._tokens[source : source + k] * (k // period + 1))[:k]

    def guess_tree(self, nodes: int, shape: Parents | None = None) -> tuple[list[int], Parents]:
        """The continuations of several occurrences. The better the occurrence, as in `guess`, the larger is the share
        of its continuation: twice that of the next distinct one."""
        root: LookupPath = (sorted(self._candidates(), key=self._match_length, reverse=True)[:MAX_SOURCES], ())
        return draw_tree(root, self._following, nodes, shape)

    def _following(self, node: LookupPath) -> list[tuple[int, float, LookupPath]]:
        sources, path = node
        depth, length = len(path), len(self._tokens)
        groups: dict[int, list[int]] = {}
        for source in sources:
            index = source + depth
            token = self._tokens[index] if index < length else path[index - length]
            groups.setdefault(token, []).append(source)
        total = 2 - 2 ** (1 - len(groups))
        return [
            (token, 2**-rank / total, (group, (*path, token))) for rank, (token, group) in enumerate(groups.items())
        ]

    def _candidates(self) -> list[int]:
        """The indices behind the earlier occurrences that are compared, the latest first."""
        ends = self._ends.get(tuple(self._tokens[-self._min_match :]), [])
        return ends[-2 : -2 - CANDIDATES : -1]

    def _source(self) -> int | None:
        """The index of the token after the match."""
        best, length = None, 0
        for end in self._candidates():
            # A longer match must agree at the token where the best one stopped. Near the text's beginning this index
            # wraps around; a match that passes by chance is then too short to be the best.
            if best is None or self._tokens[end - 1 - length] == self._tokens[-1 - length]:
                match_length = self._match_length(end)
                if match_length > length:
                    best, length = end, match_length
            if length == MAX_MATCH:
                break
        return best

    def _match_length(self, end: int) -> int:
        """How many tokens before `end` equal those before the end of the text, up to MAX_MATCH."""
        if end >= MAX_MATCH and self._tokens[end - MAX_MATCH : end] == self._tokens[-MAX_MATCH:]:
            return MAX_MATCH  # the usual case of a long copy, without a loop
        length, limit = self._min_match, min(MAX_MATCH, end)
        while length < limit and self._tokens[end - 1 - length] == self._tokens[-1 - length]:
            length += 1
        return length
