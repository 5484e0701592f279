"""Tells a model's reasoning, which stands between two tags, apart from its answer."""


class ReasoningSplit:
    """Splits one text as it comes. The parts join to the text without the tags."""

    def __init__(self, tags: tuple[str, str], *, inside: bool) -> None:
        """tags: what begins and what ends the reasoning. inside: whether the prompt has begun it already."""
        self._tags = tags
        self._inside = inside
        self._held = ""  # what may be the beginning of the next tag

    def feed(self, text: str, *, ended: bool) -> tuple[str, str]:
        """Return (reasoning, answer) of the text that is certain. ended: no more text comes."""
        parts = {True: "", False: ""}  # by whether it is reasoning
        rest = self._held + text
        while True:
            before, tag, after = rest.partition(self._tags[self._inside])
            if not tag:
                break
            parts[self._inside] += before
            self._inside, rest = not self._inside, after
        certain = len(rest) if ended else len(rest) - self._begun(rest)
        parts[self._inside] += rest[:certain]
        self._held = rest[certain:]
        return parts[True], parts[False]

    def _begun(self, text: str) -> int:
        """Return the length of the longest end of the text that begins the next tag."""
        tag = self._tags[self._inside]
        return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
