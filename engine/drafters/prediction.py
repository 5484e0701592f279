"""The client's prediction of the output as the draft: followed, and found again after the output departs from it."""

from bisect import bisect_left

from engine.drafters.guess import GuessDrafter, Guesser
from engine.sequence import Sequence

MIN_MATCH = 2  # last tokens of the output that must occur in the prediction to go on from there
MAX_MATCH = 8  # tokens; matches as long as this count as equally long
CANDIDATES = 32  # occurrences that are compared on either side of the last known position


class PredictionFollower(Guesser):
    """A position in the prediction that moves along with the output.

    At the first token that differs, it assumes that the output skipped one predicted token, if that fits; otherwise
    that the output replaced one. If the next token differs as well, the position is lost. It is found again by the
    longest end of the output, of 2 to 8 tokens, that occurs in the prediction. Among equals the nearest position at or
    after the last agreement wins, then the nearest before it; on each side the CANDIDATES nearest are compared. A
    position after a difference or a search is in doubt: if the next token differs, it is lost again. So a doubt costs
    at most one draft.
    """

    def __init__(self, prediction: tuple[int, ...], num_prompt: int) -> None:
        self._prediction = prediction
        self._prompt_left = num_prompt  # tokens of the prompt that are still to be pushed; they are not compared
        self._next: int | None = 0  # position of the next predicted token; None: lost
        self._doubt = False  # whether the token before `_next` is not known to agree
        self._agreed = 0  # the position after the last token that agreed
        self._output_end: tuple[int, ...] = ()  # the last MAX_MATCH tokens of the output
        self._followed = bytearray(len(prediction))  # 1 for each predicted token that the output followed
        self._positions: dict[tuple[int, ...], list[int]] = {}  # run of MIN_MATCH tokens → positions after it
        for position in range(MIN_MATCH, len(prediction)):
            self._positions.setdefault(prediction[position - MIN_MATCH : position], []).append(position)

    @property
    def accepted(self) -> int:
        """Number of predicted tokens that the output followed, each counted once."""
        return sum(self._followed)

    def push(self, token: int) -> None:
        if self._prompt_left:
            self._prompt_left -= 1
            return
        self._output_end = (*self._output_end, token)[-MAX_MATCH:]
        position, self._next = self._next, None
        if position is not None and self._prediction[position : position + 1] == (token,):
            self._followed[position] = True
            self._next = self._agreed = position + 1
            self._doubt = False
        elif position is not None and not self._doubt:
            skipped = self._prediction[position + 1 : position + 2] == (token,)
            self._next, self._doubt = position + 1 + skipped, True
        else:
            self._next, self._doubt = self._find(), True

    def guess(self, k: int) -> list[int]:
        return [] if self._next is None else list(self._prediction[self._next : self._next + k])

    def _find(self) -> int | None:
        positions = self._positions.get(self._output_end[-MIN_MATCH:], [])
        middle = bisect_left(positions, self._agreed)
        nearest = positions[middle : middle + CANDIDATES] + positions[max(0, middle - CANDIDATES) : middle][::-1]
        return max(nearest, key=self._match_length, default=None)  # the first among equals

    def _match_length(self, position: int) -> int:
        """How many tokens before the position equal the end of the output, up to MAX_MATCH."""
        length, limit = MIN_MATCH, min(len(self._output_end), position)
        while length < limit and self._prediction[position - 1 - length] == self._output_end[-1 - length]:
            length += 1
        return length


class PredictionDrafter(GuessDrafter[PredictionFollower]):
    """Proposes the rest of the prediction while its position is known. A lost position has no offer, so it needs no
    pauses. When the sequence ends, its record gets the number of predicted tokens that came true."""

    def __init__(self) -> None:
        super().__init__(lambda s: PredictionFollower(s.prediction, s.num_prompt), max_pause=0)

    def forget(self, sequence: Sequence) -> None:
        """Write the record from the committed tokens alone: the numbers do not depend on what was drafted."""
        try:
            if sequence.prediction:
                sequence.record.prediction_tokens = len(sequence.prediction)
                sequence.record.prediction_accepted = self.catch_up(sequence).accepted
        finally:
            super().forget(sequence)
