"""Where a text's tokens came from: drafts that were accepted, or the target; told round by round beside the text."""

import codecs
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

from app.client import Token
from engine.types import FinishReason, Output

Source = Literal["draft", "recovered", "bonus", "plain"]


@dataclass(slots=True)
class _Round:
    drafted: int
    accepted: int
    rejected: list[str]
    tokens: list[tuple[Source, int]]  # the int: characters of the choice's text up to the end of this token's own


class TokenOrigins:
    """One choice's rounds. Outputs go in; a round comes out once all of its text has been shown.

    A token's text is the part of the choice's text that begins with it: a character of several tokens is the first
    one's, the others' texts are empty, and so are those of special tokens. So the texts of all tokens join to the
    choice's text, without an echoed prompt, and are the vocabulary's own wherever tokens are whole characters.

    While a character is incomplete, or may begin a stop string, it is not shown, and its round waits for a later chunk.
    When the text ends, the rest comes, less what was removed from the text: tokens of which a stop string left nothing
    (one that it cut keeps what it left), and the end token unless the text was to keep what ended it. Every round that
    drafted or added a token is told exactly once, with its number (the first that reads a prompt to its end is 0),
    though a stop may have left it no tokens. Rejected drafts are told as the vocabulary has them.
    """

    def __init__(self, token: Callable[[int], Token], *, keeps_end: bool) -> None:
        """keeps_end: whether the text keeps what ended it, as include_stop_str_in_output says."""
        self._token = token
        self._keeps_end = keeps_end
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._spelt = 0  # characters that the tokens so far complete
        self._rounds: list[_Round] = []  # that are not told
        self._number = 0  # of the first of them
        self._start = 0  # where the text begins that no told round has
        self._text = ""  # what was shown of it

    def add(self, output: Output) -> None:
        self._text += output.text
        if output.token_ids or output.drafts:
            self._rounds.append(self._round(output))
        if output.finish_reason is not None:
            self._end(output.finish_reason)

    def take(self) -> list[dict[str, Any]]:
        """The rounds whose text was shown since the last take, as JSON."""
        begin, shown = self._start, self._shown
        ready = list(takewhile(lambda made: all(end <= shown for _, end in made.tokens), self._rounds))
        told = [self._tell(number, made, begin) for number, made in enumerate(ready, self._number)]
        self._text = self._text[self._start - begin :]
        self._rounds = self._rounds[len(ready) :]
        self._number += len(ready)
        return told

    @property
    def _shown(self) -> int:
        """Characters of the choice's text so far."""
        return self._start + len(self._text)

    def _round(self, output: Output) -> _Round:
        rejected = [self._name(token) for token in output.drafts[output.accepted :]]
        made = _Round(len(output.drafts), output.accepted, rejected, [])
        for i, token in enumerate(output.token_ids):
            self._spelt += len(self._utf8.decode(self._token(token).data))
            begun = bool(self._utf8.getstate()[0])  # a character of which bytes are still to come
            made.tokens.append((_source(i, output), self._spelt + begun))
        return made

    def _end(self, reason: FinishReason) -> None:
        """Drop the tokens that the text does not hold; the last that it holds ends where the text does."""
        whole = reason != "stop" or self._keeps_end
        begin, last = self._start, None
        for made in self._rounds:
            tokens, made.tokens = made.tokens, []
            for i, (source, end) in enumerate(tokens):
                ends_text = made is self._rounds[-1] and i == len(tokens) - 1
                held = begin < self._shown if end > begin else end <= self._shown and not ends_text
                if whole or held:
                    made.tokens.append((source, min(end, self._shown)))
                    last = made.tokens
                begin = end
        if last is not None:
            last[-1] = (last[-1][0], self._shown)

    def _tell(self, number: int, made: _Round, begin: int) -> dict[str, Any]:
        """begin: of the text at hand."""
        tokens = []
        for source, end in made.tokens:
            tokens.append({"text": self._text[self._start - begin : end - begin], "source": source})
            self._start = end
        return {
            "round": number,
            "drafted": made.drafted,
            "accepted": made.accepted,
            "tokens": tokens,
            "rejected": made.rejected,
        }

    def _name(self, token: int) -> str:
        try:
            return self._token(token).text
        except (OverflowError, ValueError):  # a broken drafter may propose what is no id at all
            return f"token_id:{token}"


def _source(i: int, output: Output) -> Source:
    """Of the i-th token that a round added."""
    if i < output.accepted:
        return "draft"
    if not output.drafts:
        return "plain"
    return "bonus" if output.accepted == len(output.drafts) else "recovered"
