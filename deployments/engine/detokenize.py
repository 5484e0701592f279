"""Token ids → text, piece by piece: never half a character, never a part of a stop string that may still complete."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
REPLACEMENT = "\ufffd"
CONTEXT = 4  # tokens before the output that are decoded along: some tokenizers' text depends on the token before


class Detokenizer:
    """Incremental decoding. Concatenated pieces and flush() equal the text that the tokens add to their context.

    A piece is held back while it ends in U+FFFD, i.e. while the bytes so far may be the beginning of a character.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(context[-CONTEXT:])  # tokens still needed to decode the next piece
        if decode(self._window).endswith(REPLACEMENT):
            self._window = []  # the context itself ends inside a character, which is then not ours to complete
        self._given = len(self._window)  # of these, how many are in text already given
        self._given_text = decode(self._window)

    def push(self, token: int) -> str:
        """The text that became certain with this token; may be empty."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            return ""
        piece = text[len(self._given_text) :]
        self._window = self._window[self._given :]
        self._given = len(self._window)
        self._given_text = self._decode(self._window)
        return piece

    def flush(self) -> str:
        """What was held back, as it is: an unfinished character reads U+FFFD."""
        piece = self._decode(self._window)[len(self._given_text) :]
        self._given, self._given_text = len(self._window), self._decode(self._window)
        return piece


class TextStream:
    """A sequence's output text: detokenised, cut at the first stop string."""

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._held = ""  # text that may be the beginning of a stop string

    def push(self, token: int, *, may_stop: bool) -> tuple[str, bool]:
        """(text to send now, whether a stop string was completed; then the text ends before it)."""
        text = self._held + self._detokenizer.push(token)
        if not self._stop:
            return text, False
        if may_stop:
            found = [at for at in (text.find(s) for s in self._stop) if at >= 0]
            if found:
                self._held = ""
                return text[: min(found)], True
        # A stop string that came too early does not count later either, so nothing of it may be held.
        over = max((text.rfind(s) + len(s) for s in self._stop if s in text), default=0)
        keep = min(len(text) - over, max(_overlap(text, s) for s in self._stop))
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The rest, when the text ends for another reason than a stop string."""
        text = self._held + self._detokenizer.flush()
        self._held = ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends in."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
