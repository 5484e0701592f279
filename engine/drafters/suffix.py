"""Suffix decoding: propose what followed the end of the text, in the request itself or in its tenant's earlier outputs.

After SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975, section 4): counts choose the branches and the length of the
match bounds the depth. The counts are over the latest occurrences, so an index of positions replaces the suffix trees.
"""

from collections.abc import Callable, Set
from functools import partial

from engine.drafters.branching import draw_tree, follow
from engine.drafters.finished_outputs import FinishedOutputs
from engine.drafters.guess import GuessDrafter, Guesser
from engine.drafters.indexed_text import END, IndexedText
from engine.sequence import Sequence, State
from engine.trees import Parents

MAX_MATCH = 32  # tokens; matches as long as this count as equally long
DEPTH_FACTOR = 4  # a draft is at most this many times as deep as the match is long: the paper's α

Occurrence = tuple[list[int], int]  # tokens, index in them: what follows the occurrence
SuffixPath = tuple[list[Occurrence], tuple[int, ...]]  # the occurrences that go on with the path, the path


class Suffix(Guesser):
    """Finds the longest end of the text, up to MAX_MATCH tokens, among its latest occurrences in both texts.

    A child's share is the part of the occurrences of its parent that go on with it. Among equals the request's own text
    goes before the shared one, and a later occurrence before an earlier one. An occurrence that reaches the end of the
    request's text goes on with the draft itself.
    """

    def __init__(self, find_shared: Callable[[], IndexedText | None]) -> None:
        self._text = IndexedText()
        self._find_shared = find_shared
        self._guessed_from = 0  # length of the latest guess's match

    def push(self, token: int) -> None:
        self._text.push(token)

    def guess(self, k: int) -> list[int]:
        return self._guess(k, 0)

    def guess_from_longer(self, k: int) -> list[int]:
        """Guess if the match is longer than that of the latest guess."""
        return self._guess(k, self._guessed_from + 1)

    def guess_tree(self, nodes: int, shape: Parents | None = None) -> tuple[list[int], Parents]:
        root, length = self._match()
        return draw_tree(root, partial(self._following, DEPTH_FACTOR * length), nodes, shape)

    def _guess(self, k: int, min_match: int) -> list[int]:
        root, length = self._match()
        if length < min_match:
            return []
        self._guessed_from = length
        return follow(root, partial(self._following, DEPTH_FACTOR * length), k)

    def _match(self) -> tuple[SuffixPath, int]:
        """The places behind the occurrences of the longest match, and its length in tokens."""
        own, best = self._text.tokens, 0
        places: list[Occurrence] = []
        for text in (self._text, self._find_shared()):
            if text is None:
                continue
            tokens = text.tokens
            for index in text.occurrences(own):
                if best and (index < best or tokens[index - best : index] != own[-best:]):
                    continue  # the match is shorter
                length, limit = best or 1, min(MAX_MATCH, index, len(own))
                while length < limit and tokens[index - 1 - length] == own[-1 - length]:
                    length += 1
                if length > best:
                    best, places = length, []
                if length == best:
                    places.append((tokens, index))
        return (places, ()), best

    def _following(self, max_depth: int, node: SuffixPath) -> list[tuple[int, float, SuffixPath]]:
        places, path = node
        depth, own = len(path), self._text.tokens
        if depth == max_depth:
            return []
        groups: dict[int, list[Occurrence]] = {}  # by next token
        for place in places:
            tokens, index = place[0], place[1] + depth
            # Only the request's own text does not end in END.
            token = tokens[index] if index < len(tokens) else path[index - len(own)]
            group = groups.get(token)
            if group is None:
                groups[token] = [place]
            else:
                group.append(place)
        groups.pop(END, None)
        children = [(token, len(group) / len(places), (group, (*path, token))) for token, group in groups.items()]
        if len(children) > 1:
            children.sort(key=_share, reverse=True)
        return children


def _share(child: tuple[int, float, SuffixPath]) -> float:
    return child[1]


class SuffixDrafter(GuessDrafter[Suffix]):
    """Keeps the outputs of the sequences that it guessed for, when they end, and shows them to later sequences of the
    same salt.

    In a pause, which a wrong guess began, a longer match than that guess had is tried.

    A sequence under `rejection` or `block` sees its own text only. With outputs of others, its seeded text would depend
    on what was served before, and a request that repeats a seed would meet drafts that depend on its own coins.
    """

    def __init__(self, max_tokens: int) -> None:
        super().__init__(self._make_guesser)
        self._outputs = FinishedOutputs(max_tokens)

    def forget(self, sequence: Sequence) -> None:
        """Keep the output if the sequence has ended. A sequence that only lost its memory will end later."""
        try:
            if sequence.state is State.FINISHED and self.knows(sequence):
                self._outputs.add(sequence.cache_salt, sequence.tokens[sequence.num_prompt :])
        finally:
            super().forget(sequence)

    def guess_in_pause(self, sequence: Sequence, k: int) -> list[int]:
        return self.catch_up(sequence).guess_from_longer(k)

    def audit(self, live: Set[int]) -> None:
        super().audit(live)
        self._outputs.audit()

    def _make_guesser(self, sequence: Sequence) -> Suffix:
        salt = sequence.cache_salt
        return Suffix(lambda: self._outputs.text(salt) if sequence.coupled else None)
