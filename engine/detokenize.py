"""Token ids → text, in pieces that never end in half a character or in the beginning of a stop string."""

from collections.abc import Callable, Sequence, Set
from itertools import islice

Decode = Callable[[Sequence[int]], str]
REPLACEMENT = "\ufffd"
CONTEXT = 4  # tokens before the output that are decoded with it: a token's text may depend on the token before
MAX_HELD = 4  # tokens that are held back: a character has at most four bytes, a token at least one
TAIL = 3  # tokens in which an incomplete character can have begun, and the most U+FFFD that it is shown as


class Detokenizer:
    """Incremental decoding. All pieces and flush() together are the text that the tokens add to their context.

    A piece is held back while it ends in U+FFFD: its last bytes may be the beginning of a character. If more tokens are
    held than a character can have, the bytes are invalid, and all but the last three U+FFFD are returned. So a run of
    invalid bytes costs as much per token as other text.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = (), hidden: Set[int] = frozenset()) -> None:
        """context: the tokens before the output. hidden: those that `decode` leaves out wherever they stand."""
        self._decode = decode
        self._window: list[int]  # tokens still needed to decode the next piece
        self._returned_tokens: int  # tokens of the window whose text is returned
        self._text: str  # the text of the window
        self._returned: int  # characters of it that are returned
        visible = (token for token in reversed(context) if token not in hidden)
        window = list(islice(visible, CONTEXT))[::-1]
        if decode(window).endswith(REPLACEMENT):
            window = []  # the context ends inside a character, which does not belong to the output
        self._restart(window)

    def push(self, token: int) -> str:
        """The text that is certain after this token; may be empty."""
        text = self._decode([*self._window, token])
        # Decoded twice in a row, because the first space of a text may be stripped.
        if text == self._text and not self._decode([token, token]):
            return ""  # a special token: it is left out of the window
        self._window.append(token)
        self._text = text
        held = len(self._window) - self._returned_tokens
        if text.endswith(REPLACEMENT):
            return self._return_all_but_the_tail() if held > MAX_HELD else ""
        piece = text[self._returned :]
        if piece or held > MAX_HELD:
            self._restart(self._window[self._returned_tokens :])
        return piece

    def flush(self) -> str:
        """The text that was held back. An incomplete character is U+FFFD."""
        piece = self._text[self._returned :]
        self._returned = len(self._text)
        return piece

    def _return_all_but_the_tail(self) -> str:
        """The text before the last U+FFFD, which may still become a character: byte-level decoders show an incomplete
        character as one U+FFFD, those with byte tokens each of its bytes.

        The last TAIL tokens become the window. Their text may begin inside a character and then differ at its
        beginning, but it ends in as many U+FFFD as are not returned yet.
        """
        text, returned = self._text, self._returned
        self._restart(self._window[-TAIL:])
        tail = min(TAIL, _trailing(text[returned:]), _trailing(self._text))
        self._returned -= tail
        return text[returned : len(text) - tail]

    def _restart(self, window: list[int]) -> None:
        """Go on from these tokens, whose text is returned."""
        self._window, self._returned_tokens = window, len(window)
        self._text = self._decode(window)
        self._returned = len(self._text)


def _trailing(text: str) -> int:
    """How many U+FFFD the text ends in."""
    return len(text) - len(text.rstrip(REPLACEMENT))


class TextStream:
    """A sequence's output text, which ends before the first stop string, or after it if `include`."""

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...], *, include: bool = False) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._include = include
        self._held = ""  # text that may be the beginning of a stop string

    def push(self, token: int, *, may_stop: bool) -> tuple[str, bool]:
        """(text to send, whether a stop string ends the text). may_stop: False before min_tokens, where no stop string
        ends the text."""
        text = self._held + self._detokenizer.push(token)
        if not self._stop:
            return text, False
        if may_stop:
            found = [(start, len(s)) for s in self._stop if (start := text.find(s)) >= 0]
            if found:
                start, length = min(found)
                self._held = ""
                return text[: start + length if self._include else start], True
        # A stop string that came before min_tokens never stops the text, so no part of it is held.
        ignored_end = max((text.rfind(s) + len(s) for s in self._stop if s in text), default=0)
        keep = min(len(text) - ignored_end, max(_overlap(text, s) for s in self._stop))
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The rest of the text, if it ends without a stop string."""
        text = self._held + self._detokenizer.flush()
        self._held = ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` with which `text` ends."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
