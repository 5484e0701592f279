"""Log-probabilities in OpenAI's two shapes: columns with one entry per token, or a list with one object per token."""

import codecs
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from app.client import Token
from app.openai.pauses import PIECE_TOKENS, Pauses
from engine.types import TokenLogprob

MIN_LOGPROB = -9999.0  # stands for the logarithm of 0, which JSON cannot express (as in vLLM)


class Logprobs(Protocol):
    """Collects the log-probabilities of one choice as its tokens come. The parts that `take` returns join to the
    whole."""

    async def add_prompt(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob], text: str) -> None:
        """Add the echoed prompt."""
        ...

    def add(self, logprobs: Sequence[TokenLogprob]) -> None: ...

    def take(self) -> dict[str, Any]: ...


class LogprobObjects:
    """The shape of chats. `bytes` is null for a special token, which has none."""

    def __init__(self, token: Callable[[int], Token]) -> None:
        self._token = token
        self._objects: list[dict[str, Any]] = []

    async def add_prompt(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob], text: str) -> None:
        raise NotImplementedError("the reply to a chat does not repeat the prompt")

    def add(self, logprobs: Sequence[TokenLogprob]) -> None:
        for logprob in logprobs:
            top = [self._object(token_id, value) for token_id, value in logprob.top]
            self._objects.append(self._object(logprob.token, logprob.logprob) | {"top_logprobs": top})

    def take(self) -> dict[str, Any]:
        """Return the tokens since the last `take`."""
        taken, self._objects = self._objects, []
        return {"content": taken, "refusal": None}

    def _object(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self._token(token_id)
        return {"token": token.text, "logprob": max(MIN_LOGPROB, logprob), "bytes": list(token.data) or None}


class LogprobColumns:
    """The shape of completions: columns.

    A token's text_offset is the offset of the character that holds its first byte, in characters. Tokens that share a
    character share an offset. Tokens that a stop string cut away keep the offsets that they would have had.
    """

    def __init__(self, token: Callable[[int], Token]) -> None:
        self._token = token
        self._offset = 0  # complete characters of the text so far
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._clear()

    async def add_prompt(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob], text: str) -> None:
        """Add the echoed prompt. `logprobs` begins with the second token: the first has no log-probability.

        A long prompt is written in pieces with pauses. Offsets refer to `text`, which may differ from the tokens' own
        text: some tokenizers add a space in front and drop it when they decode, and a client may write the names of
        special tokens into its text.
        """
        token_text = b"".join(self._token(i).data for i in ids).decode("utf-8", "replace")
        aligned = token_text.endswith(text) or text.endswith(token_text)
        self._offset = len(text) - len(token_text) if aligned else 0
        self._write(ids[0], None)
        pauses = Pauses()
        for first in range(0, len(logprobs), PIECE_TOKENS):
            if first:
                await pauses.rest()
            self.add(logprobs[first : first + PIECE_TOKENS])
        self._offset = len(text)
        self._utf8.reset()

    def add(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Add the next tokens."""
        for logprob in logprobs:
            self._write(logprob.token, logprob)

    def take(self) -> dict[str, Any]:
        """Return the columns since the last `take`."""
        taken = {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }
        self._clear()
        return taken

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def _write(self, token_id: int, logprob: TokenLogprob | None) -> None:
        token = self._token(token_id)
        self._tokens.append(token.text)
        self._offsets.append(max(0, self._offset))
        self._offset += len(self._utf8.decode(token.data))
        self._logprobs.append(None if logprob is None else max(MIN_LOGPROB, logprob.logprob))
        self._top.append(None if logprob is None else self._alternatives(logprob))

    def _alternatives(self, logprob: TokenLogprob) -> dict[str, float]:
        """Return the likeliest tokens and the token itself. Where two have the same text, the likelier one counts."""
        top: dict[str, float] = {}
        for token_id, value in (*logprob.top, (logprob.token, logprob.logprob)):
            top.setdefault(self._token(token_id).text, max(MIN_LOGPROB, value))
        return top
