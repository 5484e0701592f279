"""Where emitted tokens become text: append, detokenise, check stops, token by token, in one place."""

from dataclasses import dataclass

from engine.sequence import Sequence
from engine.types import FinishReason


@dataclass(frozen=True, slots=True)
class Committed:
    tokens: tuple[int, ...]  # what the request really gets of the round's tokens
    text: str
    finish_reason: FinishReason | None


def commit(sequence: Sequence, emitted: list[int]) -> Committed:
    """Append a round's tokens in order until one of them ends the text; those after it never existed.

    What ends the text, an end token or a stop string, counts as tokens, and is part of the text only if its request
    says so (include_stop_str_in_output).
    """
    params = sequence.params
    if params.max_tokens == 0:
        return Committed((), "", "length")
    pieces: list[str] = []
    reason: FinishReason | None = None
    first = len(sequence.tokens)
    for token in emitted:
        sequence.tokens.append(token)
        may_stop = sequence.num_output >= params.min_tokens
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
        if sequence.remaining <= 0:
            reason = "length"
            pieces.append(sequence.text.flush())
            break
    return Committed(tuple(sequence.tokens[first:]), "".join(pieces), reason)
