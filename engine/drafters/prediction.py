"""The client's guess of the output as the draft, followed and found again where the output departs from it."""

from bisect import bisect_left

import torch

from engine.drafters.guess import GuessDrafter
from engine.sequence import Sequence

MIN_MATCH = 2  # tokens of the output that must be found in the guess to go on from there
MAX_MATCH = 8  # tokens; matches as long as this count as equally long
CANDIDATES = 32  # places looked at on either side


class PredictionFollower:
    """A place in the guess that moves along with the output.

    At the first token that differs it assumes that the output left one of the guess's tokens out, if that fits, else
    that it put another in its place. If the next token differs as well, the place is lost. It is found again by the
    longest end of the output, of 2 to 8 tokens, that occurs in the guess; of equals the nearest at or after the last
    place where both agreed, else the nearest before it. On each side the CANDIDATES nearest places are looked at. A
    place found in this way is in doubt like one after a difference: if the next token differs, it is lost again, so
    no doubt costs more than one draft.
    """

    def __init__(self, guess: tuple[int, ...], num_prompt: int) -> None:
        self._guess = guess
        self._prompt_left = num_prompt  # the guess is one of the output, so the prompt is not compared
        self._at: int | None = 0  # the guess's next token; None: lost
        self._doubt = False  # whether the token before that is not known to agree
        self._agreed = 0  # the place after the last token that agreed
        self._end: tuple[int, ...] = ()  # of the output
        self._followed = bytearray(len(guess))
        self._places: dict[tuple[int, ...], list[int]] = {}  # run of MIN_MATCH tokens → places after it
        for place in range(MIN_MATCH, len(guess)):
            self._places.setdefault(guess[place - MIN_MATCH : place], []).append(place)

    @property
    def accepted(self) -> int:
        """Tokens of the guess that the output followed, each counted once."""
        return sum(self._followed)

    def push(self, token: int) -> None:
        if self._prompt_left:
            self._prompt_left -= 1
            return
        self._end = (*self._end, token)[-MAX_MATCH:]
        at, self._at = self._at, None
        if at is not None and self._guess[at : at + 1] == (token,):
            self._followed[at] = True
            self._at = self._agreed = at + 1
            self._doubt = False
        elif at is not None and not self._doubt:
            left_out = self._guess[at + 1 : at + 2] == (token,)
            self._at, self._doubt = at + 1 + left_out, True
        else:
            self._at, self._doubt = self._find(), True

    def guess(self, k: int) -> list[int]:
        return [] if self._at is None else list(self._guess[self._at : self._at + k])

    def _find(self) -> int | None:
        places = self._places.get(self._end[-MIN_MATCH:], [])
        middle = bisect_left(places, self._agreed)
        nearest = places[middle : middle + CANDIDATES] + places[max(0, middle - CANDIDATES) : middle][::-1]
        return max(nearest, key=self._agreement, default=None)  # the first of equals

    def _agreement(self, place: int) -> int:
        """How many tokens before the place equal the end of the output, up to MAX_MATCH."""
        length, most = MIN_MATCH, min(len(self._end), place)
        while length < most and self._guess[place - 1 - length] == self._end[-1 - length]:
            length += 1
        return length


class PredictionDrafter(GuessDrafter[PredictionFollower]):
    """Offers the rest of the prediction while its place is known. A place that is lost offers nothing, so there is no
    pause on top of that. Tells the sequence's record how much of the prediction came true, when the sequence ends."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(lambda s: PredictionFollower(s.prediction, s.num_prompt), device, max_pause=0)

    def forget(self, sequence: Sequence) -> None:
        """What the record says follows from the tokens alone: the same however often and for whomever it drafted."""
        try:
            if sequence.prediction:
                sequence.record.prediction_tokens = len(sequence.prediction)
                sequence.record.prediction_accepted = self.catch_up(sequence).accepted
        finally:
            super().forget(sequence)
