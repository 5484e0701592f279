"""Appends emitted tokens, detokenises them and checks for stops, token by token."""

from typing import NamedTuple

from engine.sequence import Sequence
from engine.types import FinishReason


class Committed(NamedTuple):
    """What a round adds to one request."""

    tokens: tuple[int, ...]  # the round's tokens up to the one that ended the text
    text: str
    finish_reason: FinishReason | None


def commit(sequence: Sequence, emitted: list[int]) -> Committed:
    """Append a round's tokens in order until one of them ends the text. Tokens after that one are dropped.

    The end token or the tokens of the stop string count as output. Their text is kept only if the request says so
    (include_stop_str_in_output).
    """
    params = sequence.params
    if params.max_tokens == 0:
        return Committed((), "", "length")
    pieces: list[str] = []
    reason: FinishReason | None = None
    first, left = len(sequence.tokens), sequence.remaining
    least = sequence.num_prompt + params.min_tokens  # tokens before which nothing ends the text
    for token in emitted:
        sequence.tokens.append(token)
        left -= 1
        may_stop = len(sequence.tokens) >= least
        if token in sequence.end_ids and may_stop:
            reason = "stop"
            if params.include_stop_str_in_output:
                pieces.append(sequence.text.push(token, may_stop=False)[0])
            pieces.append(sequence.text.flush())
            break
        piece, stopped = sequence.text.push(token, may_stop=may_stop)
        pieces.append(piece)
        if stopped:
            reason = "stop"
            break
        if left <= 0:
            reason = "length"
            pieces.append(sequence.text.flush())
            break
    return Committed(tuple(sequence.tokens[first:]), "".join(pieces), reason)
