"""A growing text that finds where its runs of tokens occurred."""

from collections import Counter

RUNS = (3, 1)  # lengths of the runs that are indexed, in tokens, the longest first
CANDIDATES = 32  # latest occurrences that are found
END = -1  # behind each document; an illegal id


class IndexedText:
    """Documents behind each other. A push takes O(1) time. Runs do not cross documents."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._dropped = 0  # tokens before `tokens` that are gone
        self._start = 0  # where the last document starts; this and all positions count the dropped tokens
        self._ends: dict[tuple[int, ...], list[int]] = {}  # run → the positions behind its occurrences

    def push(self, token: int) -> None:
        """Extend the last document."""
        tokens = self.tokens
        tokens.append(token)
        position = self._dropped + len(tokens)
        for run in RUNS:
            if position - self._start >= run:
                key = tuple(tokens[-run:])
                ends = self._ends.get(key)
                if ends is None:
                    self._ends[key] = [position]
                else:
                    ends.append(position)

    def end_document(self) -> None:
        self.tokens.append(END)
        self._start = self._dropped + len(self.tokens)

    def drop_document(self) -> None:
        """Drop the first document, which has ended."""
        length = self.tokens.index(END)
        for run in RUNS:
            counts = Counter(tuple(self.tokens[end - run : end]) for end in range(run, length + 1))
            for key, count in counts.items():  # one deletion for each run: a list may hold all positions
                ends = self._ends[key]
                del ends[:count]
                if not ends:
                    del self._ends[key]
        del self.tokens[: length + 1]
        self._dropped += length + 1

    def occurrences(self, text: list[int]) -> list[int]:
        """The indices in `tokens` behind the occurrences of the last tokens of `text`, the latest first.

        The longest run in RUNS that occurs counts. An occurrence at the end of the last document does not count,
        because nothing follows it yet.
        """
        for run in RUNS:
            ends = self._ends.get(tuple(text[-run:]))
            if ends:
                stop = len(ends) - (ends[-1] == self._dropped + len(self.tokens))
                if stop:
                    return [end - self._dropped for end in reversed(ends[max(0, stop - CANDIDATES) : stop])]
        return []
