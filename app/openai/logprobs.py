"""Log-probabilities in OpenAI's completions shape: columns over tokens, with each token's place in the text."""

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from app.client import Token
from app.openai.pauses import PIECE, Pauses
from engine.types import TokenLogprob

LEAST = -9999.0  # said for a probability of 0, whose logarithm JSON cannot say (as vLLM does)


class LogprobColumns:
    """Writes one choice's tokens down as they come. Parts that are taken one after another join to the whole.

    A token's text_offset is that of the character which its first byte begins or goes on with, so the tokens that share
    a character share an offset. Text that a stop string cut away has offsets as if it were there.
    """

    def __init__(self, token: Callable[[int], Token]) -> None:
        self._token = token
        self._at = 0  # characters of the text so far, those still incomplete not counted
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._start()

    async def prompt(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob], text: str) -> None:
        """The echoed prompt: `logprobs` of its tokens from the second on; nothing precedes the first, which has none.
        A long one is written in pieces, with pauses.

        `text` is what counts: some tokenizers put a space before it and drop that again when they decode, and the names
        of special tokens stand in the text of a client that wrote them.
        """
        spelt = b"".join(self._token(i).data for i in ids).decode("utf-8", "replace")
        self._at = len(text) - len(spelt) if spelt.endswith(text) or text.endswith(spelt) else 0
        self._write(ids[0], None)
        pauses = Pauses()
        for first in range(0, len(logprobs), PIECE):
            if first:
                await pauses.rest()
            self.add(logprobs[first : first + PIECE])
        self._at = len(text)
        self._utf8.reset()

    def add(self, logprobs: Sequence[TokenLogprob]) -> None:
        """The next tokens."""
        for logprob in logprobs:
            self._write(logprob.token, logprob)

    def take(self) -> dict[str, Any]:
        """What was written since the last take."""
        taken = {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }
        self._start()
        return taken

    def _start(self) -> None:
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def _write(self, token_id: int, logprob: TokenLogprob | None) -> None:
        token = self._token(token_id)
        self._tokens.append(token.text)
        self._offsets.append(max(0, self._at))
        self._at += len(self._utf8.decode(token.data))
        self._logprobs.append(None if logprob is None else max(LEAST, logprob.logprob))
        self._top.append(None if logprob is None else self._alternatives(logprob))

    def _alternatives(self, logprob: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and, if it is not among them, the token itself. Of two that look alike the likelier."""
        top: dict[str, float] = {}
        for token_id, value in (*logprob.top, (logprob.token, logprob.logprob)):
            top.setdefault(self._token(token_id).text, max(LEAST, value))
        return top
