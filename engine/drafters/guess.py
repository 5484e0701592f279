"""Drafters without a model: what a sequence's own tokens, or its client, suggest as the next ones.

A guess is a function of committed tokens, so every verifier takes it as a one-hot q: `Draft.logq` stays empty.
"""

from collections.abc import Callable, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Protocol, TypeVar

import torch

from engine.drafters.base import Draft, DraftBatch, Offer
from engine.sampling.acceptance import Verdict
from engine.sequence import Sequence

MAX_PAUSE = 32  # rounds


class Guesser(Protocol):
    """What is known of one sequence. Pure Python: its few lookups cost less than one small tensor."""

    def push(self, token: int) -> None:
        """The next committed token, from the first one within the guesser's reach on."""
        ...

    def guess(self, k: int) -> list[int]:
        """At most k tokens that may come next; none if there is nothing to go by. The same until the next push."""
        ...


G = TypeVar("G", bound=Guesser)


@dataclass(slots=True)
class _GuesserState(Generic[G]):
    guesser: G
    seen: int = 0  # of the sequence's tokens, those pushed or beyond the guesser's reach
    pause: int = 0  # rounds to sit out after a draft of which nothing is accepted; doubles from 1
    left: int = 0  # of these, still to come
    offered_at: int = -1  # tokens of the sequence when an offer was made that no proposal has taken up; −1: none
    offer: list[int] = field(default_factory=list)


class GuessDrafter(Generic[G]):
    """Keeps a guesser per sequence and feeds it `tokens[seen:]` whenever it is asked: one rule, no second counter (R1).

    A draft of which nothing is accepted makes it sit out 1, 2, 4, … up to `max_pause` of the rounds in which it is
    asked for that sequence, and any acceptance ends that: on text with nothing to copy it costs next to nothing. What
    it offers thus depends on committed tokens and past rounds only, never on the tokens being drafted, so it keeps
    every verifier lossless. max_pause 0: it always offers what it has.

    reach: how many of the latest tokens a guesser's guesses depend on; None if on all. It is not fed what lies farther
    back, so that the first look at a long prompt costs no more than one at a short one.

    To be asked for an offer is to be asked in that round, whether or not a proposal follows: one that never did would
    leave a pause where it is. A proposal of the same round is cut from the offer.
    """

    needs_hidden: ClassVar[tuple[int, ...]] = ()

    def __init__(
        self,
        make: Callable[[Sequence], G],
        device: torch.device,
        max_pause: int = MAX_PAUSE,
        reach: int | None = None,
    ) -> None:
        self._make = make
        self._device = device
        self._reach = reach
        self._max_pause = max_pause
        self._states: dict[int, _GuesserState[G]] = {}  # by handle
        self._asked: DraftBatch | None = None  # the round that was proposed for and not yet observed
        self._offered: list[int] = []  # its sequences with an offer

    def offer(self, sequence: Sequence, k: int) -> Offer:
        """Makes the round's guess now; asked again in the same round, it goes by the same."""
        if k <= 0:
            return Offer(sequence.drafter, 0, 0)
        held = self._hold(sequence)
        if held.offered_at != len(sequence.tokens):
            held.offer, held.offered_at = self._guess(sequence, k), len(sequence.tokens)
        return Offer(sequence.drafter, min(k, len(held.offer)), 0)

    def propose(self, batch: DraftBatch, ks: Seq[int]) -> Draft:
        guesses = [self._take(s, k) if k else [] for s, k in zip(batch.sequences, ks, strict=True)]
        self._asked, self._offered = batch, [i for i, guess in enumerate(guesses) if guess]
        if not self._offered:
            return Draft.none(len(guesses))
        depth = max(map(len, guesses))
        rows = [guess + [0] * (depth - len(guess)) for guess in guesses]
        return Draft(tuple(map(len, guesses)), torch.tensor(rows, dtype=torch.int64, device=self._device))

    def observe(self, batch: DraftBatch, verdict: Verdict) -> None:
        asked, self._asked = self._asked, None
        if asked is not batch:
            return  # nothing was offered, or the pass with the offers failed and this is the one without
        for i in self._offered:
            held = self._states[batch.sequences[i].handle]
            held.pause = 0 if verdict.accepted[i] else min(max(1, 2 * held.pause), self._max_pause)
            held.left = held.pause

    def forget(self, sequence: Sequence) -> None:
        self._states.pop(sequence.handle, None)

    def audit(self, live: Set[int]) -> None:
        leaked = self._states.keys() - live
        assert not leaked, f"guesses are held for sequences that are gone: {sorted(leaked)}"

    def catch_up(self, sequence: Sequence) -> G:
        """Its guesser, made if there is none, with every committed token pushed that is within its reach."""
        held, length = self._hold(sequence), len(sequence.tokens)
        for token in sequence.tokens[max(held.seen, 0 if self._reach is None else length - self._reach) :]:
            held.guesser.push(token)
        held.seen = length
        return held.guesser

    def _take(self, sequence: Sequence, k: int) -> list[int]:
        """What was offered for this round, or else a guess made now."""
        held = self._hold(sequence)
        offered_at, held.offered_at = held.offered_at, -1
        return held.offer[:k] if offered_at == len(sequence.tokens) else self._guess(sequence, k)

    def _guess(self, sequence: Sequence, k: int) -> list[int]:
        held = self._hold(sequence)
        if held.left:
            held.left -= 1
            return []
        return self.catch_up(sequence).guess(k)

    def _hold(self, sequence: Sequence) -> _GuesserState[G]:
        held = self._states.get(sequence.handle)
        if held is None:
            held = self._states[sequence.handle] = _GuesserState(self._make(sequence))
        return held
