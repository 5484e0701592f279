"""n-gram frequencies of a sequence's latest tokens: proposes what most often followed its last three, two or one."""

from collections import deque
from itertools import islice

from engine.drafters.branching import draw_tree
from engine.drafters.guess import GuessDrafter, Guesser
from engine.trees import Parents

ORDERS = (4, 3, 2)  # order n: n − 1 tokens of context; the longest context with a continuation decides
COUNTED_TOKENS = 512  # latest tokens that are counted
MAX_DRAFT = 4  # tokens; guesses that build on guesses are soon wrong


NgramPath = tuple[tuple[int, ...], int]  # the last tokens, depth


def ngram_drafter() -> GuessDrafter["NGrams"]:
    return GuessDrafter(lambda _: NGrams(), lookback=COUNTED_TOKENS)


class NGrams(Guesser):
    """Counts the n-grams within the last `window` tokens: at most 3 · window counts, whatever the text.

    Raises ValueError for a window that is shorter than the longest n-gram.
    """

    def __init__(self, window: int = COUNTED_TOKENS) -> None:
        if window < max(ORDERS):
            raise ValueError(f"the window must hold at least {max(ORDERS)} tokens, the longest n-gram, not {window}")
        self._size = window
        self._window: deque[int] = deque()
        self._context: tuple[int, ...] = ()  # the last tokens, as many as the longest context
        # Context (of any order) → continuation → count; the continuation that was seen last comes last.
        self._counts: dict[tuple[int, ...], dict[int, int]] = {}

    def push(self, token: int) -> None:
        for order in ORDERS:
            context = self._context[1 - order :]
            if len(context) == order - 1:
                counts = self._counts.get(context)
                if counts is None:
                    self._counts[context] = {token: 1}
                else:
                    counts[token] = counts.pop(token, 0) + 1
        self._context = _extended(self._context, token)
        self._window.append(token)
        if len(self._window) > self._size:
            self._evict()

    def guess(self, k: int) -> list[int]:
        """The most frequent continuation, then the one that follows it, and so on. Among equals the one seen last
        wins."""
        context, guess = self._context, list[int]()
        while len(guess) < min(k, MAX_DRAFT):
            token = self._next(context)
            if token is None:
                break
            guess.append(token)
            context = _extended(context, token)
        return guess

    def guess_tree(self, nodes: int, shape: Parents | None = None) -> tuple[list[int], Parents]:
        """The same with the less frequent continuations, at most MAX_DRAFT deep. Shares are relative counts."""
        return draw_tree((self._context, 0), self._following, nodes, shape)

    def _following(self, node: NgramPath) -> list[tuple[int, float, NgramPath]]:
        context, depth = node
        counts = self._continuations(context)
        if depth == MAX_DRAFT or counts is None:
            return []
        total = sum(counts.values())
        best_first = list(reversed(counts))  # among equals the one seen last
        best_first.sort(key=counts.__getitem__, reverse=True)
        return [(token, counts[token] / total, (_extended(context, token), depth + 1)) for token in best_first]

    def _next(self, context: tuple[int, ...]) -> int | None:
        counts = self._continuations(context)
        return None if counts is None else max(reversed(counts), key=counts.__getitem__)

    def _continuations(self, context: tuple[int, ...]) -> dict[int, int] | None:
        """The counts behind the longest context that has any."""
        for order in ORDERS:
            counts = self._counts.get(context[1 - order :])
            if counts:
                return counts
        return None

    def _evict(self) -> None:
        """Drop the oldest token and uncount the n-grams that begin with it."""
        oldest = tuple(islice(self._window, max(ORDERS)))
        for order in ORDERS:
            context, token = oldest[: order - 1], oldest[order - 1]
            counts = self._counts[context]
            counts[token] -= 1
            if not counts[token]:
                del counts[token]
                if not counts:
                    del self._counts[context]
        self._window.popleft()


def _extended(context: tuple[int, ...], token: int) -> tuple[int, ...]:
    return (*context, token)[1 - max(ORDERS) :]
