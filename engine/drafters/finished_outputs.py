"""The latest finished outputs by tenant, under a bound of tokens."""

from collections import Counter, deque
from collections.abc import Sequence as Seq

from engine.drafters.indexed_text import IndexedText


class FinishedOutputs:
    """Keeps the outputs of each salt as one text. If they have more than max_tokens in all, the oldest outputs
    leave."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._held = 0  # tokens
        self._order: deque[tuple[str, int]] = deque()  # (salt, tokens) of each output, the oldest first
        self._texts: dict[str, IndexedText] = {}  # by salt

    def text(self, salt: str) -> IndexedText | None:
        return self._texts.get(salt)

    def add(self, salt: str, output: Seq[int]) -> None:
        """Take in an output. If it is longer than the bound, only its end is kept."""
        kept = output[max(0, len(output) - self._max_tokens) :]
        if not kept:
            return
        while self._held + len(kept) > self._max_tokens:
            self._drop_oldest()
        text = self._texts.setdefault(salt, IndexedText())
        for token in kept:
            text.push(token)
        text.end_document()
        self._order.append((salt, len(kept)))
        self._held += len(kept)

    def audit(self) -> None:
        """Raise AssertionError unless the texts are as long as the books say. It does not look at their tokens: it runs
        whenever the engine becomes idle, before the next request."""
        booked = Counter[str]()
        for salt, length in self._order:
            booked[salt] += length + 1  # with its END
        lengths = {salt: len(text.tokens) for salt, text in self._texts.items()}
        assert lengths == dict(booked), f"texts of {lengths} tokens are held; the books say {dict(booked)}"
        tokens = booked.total() - len(self._order)
        assert self._held == tokens <= self._max_tokens, f"{self._held} of {self._max_tokens} tokens are held"

    def _drop_oldest(self) -> None:
        salt, length = self._order.popleft()
        text = self._texts[salt]
        text.drop_document()
        if not text.tokens:
            del self._texts[salt]
        self._held -= length
