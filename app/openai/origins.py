"""The origin of each token of a text, round by round: an accepted draft, or the target model."""

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
    tokens: list[tuple[Source, int]]  # (source, offset in the choice's text at which the token's text ends, characters)


class TokenOrigins:
    """The rounds of one choice. `add` takes outputs; `take` returns the rounds whose text has been shown completely.

    The texts of all tokens join to the choice's text without an echoed prompt. A character made of several tokens
    belongs to the first of them; the others have an empty text, as special tokens have. Elsewhere a token's text is
    the vocabulary's own.

    Text that may still change is not shown: an incomplete character, or what may begin a stop string. Its round waits
    for a later chunk. When the text ends, the remaining rounds come without the tokens that were removed from the text.
    A token that a stop string cut keeps the part before the cut. The end token stays only with keeps_end.

    Every round that drafted or added a token is returned exactly once, even if a stop left it no tokens. Rounds are
    numbered from 0, which is the round that ends the prompt. Rejected drafts have the vocabulary's texts.
    """

    def __init__(self, token: Callable[[int], Token], *, keeps_end: bool) -> None:
        """keeps_end: whether the text keeps the stop string or end token (include_stop_str_in_output)."""
        self._token = token
        self._keeps_end = keeps_end
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoded = 0  # characters in the text of all tokens so far, complete ones only
        self._waiting: list[_Round] = []  # rounds that `take` has not returned yet
        self._first_number = 0  # number of the first waiting round
        self._start = 0  # offset in the choice's text, characters, at which the first waiting round begins
        self._text = ""  # the shown text from there on

    def add(self, output: Output) -> None:
        self._text += output.text
        if output.token_ids or output.drafts:
            self._waiting.append(self._round(output))
        if output.finish_reason is not None:
            self._end(output.finish_reason)

    def take(self) -> list[dict[str, Any]]:
        """Return the rounds whose text was completed since the last `take`, ready for JSON."""
        text_start, shown = self._start, self._shown
        ready = list(takewhile(lambda waiting: all(end <= shown for _, end in waiting.tokens), self._waiting))
        entries = [self._entry(number, done, text_start) for number, done in enumerate(ready, self._first_number)]
        self._text = self._text[self._start - text_start :]
        self._waiting = self._waiting[len(ready) :]
        self._first_number += len(ready)
        return entries

    @property
    def _shown(self) -> int:
        """The length of the choice's text that was shown so far, in characters."""
        return self._start + len(self._text)

    def _round(self, output: Output) -> _Round:
        rejected = [self._vocabulary_text(token) for token in output.drafts[output.accepted :]]
        new_round = _Round(len(output.drafts), output.accepted, rejected, [])
        for i, token in enumerate(output.token_ids):
            self._decoded += len(self._utf8.decode(self._token(token).data))
            # The bytes that the decoder keeps begin a character, or half of a surrogate, which would be shown as two.
            kept = len(self._utf8.getstate()[0].decode("utf-8", "replace"))
            new_round.tokens.append((_source(i, output), self._decoded + kept))
        return new_round

    def _end(self, reason: FinishReason) -> None:
        """Drop the tokens that the text does not hold. The last token that it holds ends where the text ends."""
        keep_all = reason != "stop" or self._keeps_end
        begin, last = self._start, None
        for waiting in self._waiting:
            tokens, waiting.tokens = waiting.tokens, []
            for i, (source, end) in enumerate(tokens):
                ends_text = waiting is self._waiting[-1] and i == len(tokens) - 1
                in_text = begin < self._shown if end > begin else end <= self._shown and not ends_text
                if keep_all or in_text:
                    waiting.tokens.append((source, min(end, self._shown)))
                    last = waiting.tokens
                begin = end
        if last is not None:
            last[-1] = (last[-1][0], self._shown)

    def _entry(self, number: int, done: _Round, text_start: int) -> dict[str, Any]:
        """Return a round as JSON. text_start: offset in the choice's text at which self._text begins, characters."""
        tokens = []
        for source, end in done.tokens:
            tokens.append({"text": self._text[self._start - text_start : end - text_start], "source": source})
            self._start = end
        return {
            "round": number,
            "drafted": done.drafted,
            "accepted": done.accepted,
            "tokens": tokens,
            "rejected": done.rejected,
        }

    def _vocabulary_text(self, token: int) -> str:
        try:
            return self._token(token).text
        except (OverflowError, ValueError):  # a broken drafter may propose an invalid id
            return f"token_id:{token}"


def _source(i: int, output: Output) -> Source:
    """Return the source of the i-th token that a round added."""
    if i < output.accepted:
        return "draft"
    if not output.drafts:
        return "plain"
    return "bonus" if output.accepted == len(output.drafts) else "recovered"
