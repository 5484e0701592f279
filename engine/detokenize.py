"""Token ids → text, piece by piece: never half a character, never a part of a stop string that may still complete."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
REPLACEMENT = "\ufffd"
CONTEXT = 4  # tokens before the output that are decoded along: some tokenizers' text depends on the token before
MAX_HELD = 4  # tokens held back at most: a character has at most four bytes, and a token at least one
TAIL = 3  # tokens in which a character that is still possible can have begun


class Detokenizer:
    """Incremental decoding. Concatenated pieces and flush() equal the text that the tokens add to their context.

    A piece is held back while it ends in U+FFFD, i.e. while the bytes so far may be the beginning of a character. When
    more tokens are held than a character can have, its bytes are invalid and all but the last U+FFFD is given: a run of
    invalid bytes costs as much per token as other text.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window: list[int]  # tokens still needed to decode the next piece
        self._given_tokens: int  # of these, those that need not be kept once the next piece is given
        self._text: str  # the window's
        self._given: int  # characters of it that are given
        window = list(context[-CONTEXT:])
        if decode(window).endswith(REPLACEMENT):
            window = []  # the context itself ends inside a character, which is then not ours to complete
        self._restart(window)

    def push(self, token: int) -> str:
        """The text that became certain with this token; may be empty."""
        text = self._decode([*self._window, token])
        # Twice, because the first space of a text may be stripped.
        if text == self._text and not self._decode([token, token]):
            return ""  # a special token: the text continues as if it were not there
        self._window.append(token)
        self._text = text
        held = len(self._window) - self._given_tokens
        if text.endswith(REPLACEMENT):
            return self._give_up_all_but_the_tail() if held > MAX_HELD else ""
        piece = text[self._given :]
        if piece or held > MAX_HELD:
            self._restart(self._window[self._given_tokens :])
        return piece

    def flush(self) -> str:
        """What was held back, as it is: an unfinished character reads U+FFFD."""
        piece = self._text[self._given :]
        self._given = len(self._text)
        return piece

    def _give_up_all_but_the_tail(self) -> str:
        """Everything before the last U+FFFD, which alone may still become a character.

        The tail is decoded anew. It may begin inside a character, whose bytes there then read U+FFFD each; but from the
        next character on it reads as before, so what follows its own last U+FFFD is what is not given yet.
        """
        piece = self._text[self._given : -1]
        self._restart(self._window[-TAIL:])
        self._given -= 1
        return piece

    def _restart(self, window: list[int]) -> None:
        """Go on from these tokens, whose text is given."""
        self._window, self._given_tokens = window, len(window)
        self._text = self._decode(window)
        self._given = len(self._text)


class TextStream:
    """A sequence's output text: detokenised, cut at the first stop string; before it, or behind it if `include`."""

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...], *, include: bool = False) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._include = include
        self._held = ""  # text that may be the beginning of a stop string

    def push(self, token: int, *, may_stop: bool) -> tuple[str, bool]:
        """(text to send now, whether a stop string was completed; then the text ends there)."""
        text = self._held + self._detokenizer.push(token)
        if not self._stop:
            return text, False
        if may_stop:
            found = [(at, len(s)) for s in self._stop if (at := text.find(s)) >= 0]
            if found:
                at, length = min(found)
                self._held = ""
                return text[: at + length if self._include else at], True
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
