"""Drafters without a model: they guess the next tokens from a sequence's own tokens or from its client's prediction.

A guess is a function of committed tokens, so its q is one-hot and `Draft.logq` stays empty.
"""

from collections.abc import Callable, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from engine.device.staging import Staging
from engine.drafters.base import Draft, DraftBatch, Offer
from engine.sampling.acceptance import Verdict
from engine.sequence import Sequence
from engine.trees import Parents, chain, is_chain, trunk

MAX_PAUSE = 32  # rounds without a guess after guesses that were rejected


class Guesser(Protocol):
    """Guesses for one sequence. Pure Python: its few lookups cost less than one small tensor."""

    def push(self, token: int) -> None:
        """Take in the next committed token."""
        ...

    def guess(self, k: int) -> list[int]:
        """At most k tokens that may come next, possibly none. The answer is the same until the next push."""
        ...

    def guess_tree(self, nodes: int, shape: Parents | None = None) -> tuple[list[int], Parents]:
        """At most `nodes` tokens that may come next, and their parents, in a tree of this shape or of any. A guesser
        that knows one continuation only keeps this chain."""
        tokens = self.guess(nodes if shape is None else len(trunk(shape)))
        return tokens, chain(len(tokens))


G = TypeVar("G", bound=Guesser)


@dataclass(slots=True)
class _GuesserState(Generic[G]):
    guesser: G
    seen: int = 0  # tokens of the sequence that were pushed or lie before the guesser's lookback
    pause: int = 0  # rounds of the latest pause; doubles from 1
    pause_left: int = 0  # rounds of the pause that are still to come
    offer: list[int] = field(default_factory=list)  # the guess that was made before the round
    offered_at: int = -1  # tokens of the sequence when the offer was made; −1: no open offer


class GuessDrafter(Generic[G]):
    """Keeps a guesser per sequence and feeds it `tokens[seen:]` whenever a guess is needed (R1).

    Pauses: after a draft that is rejected as a whole it makes no guess for that sequence in 1, 2, 4, … up to
    `max_pause` rounds. Any acceptance ends that. On text with nothing to copy it costs next to nothing. With max_pause
    0 there are no pauses. A round counts if an offer or a proposal is requested in it.

    Its guesses depend on committed tokens and past rounds only, never on the tokens being drafted, so every verifier
    stays lossless. A proposal in the same round is cut from the offer.

    lookback: the number of latest tokens that the guesses depend on; None: all. Tokens before them are not pushed, so
    that a long prompt costs no more than a short one.
    """

    def __init__(
        self,
        make: Callable[[Sequence], G],
        max_pause: int = MAX_PAUSE,
        lookback: int | None = None,
    ) -> None:
        self._make = make
        self._lookback = lookback
        self._max_pause = max_pause
        self._states: dict[int, _GuesserState[G]] = {}  # by handle
        self._unobserved: DraftBatch | None = None  # the batch of the latest proposal
        self._drafted: list[int] = []  # its sequences with a draft

    def offer(self, sequence: Sequence, k: int) -> Offer:
        """Make the round's guess now; a second call in the same round uses the same guess."""
        if k <= 0:
            return Offer(sequence.drafter, 0, 0)
        state = self._state(sequence)
        if state.offered_at != len(sequence.tokens):
            state.offer, state.offered_at = self._guess(sequence, k), len(sequence.tokens)
        if state.offer and sequence.tree is not None:
            return Offer(sequence.drafter, k, 0)  # a tree may have more nodes than a chain
        return Offer(sequence.drafter, min(k, len(state.offer)), 0)

    def propose(self, batch: DraftBatch, ks: Seq[int]) -> Draft:
        guesses, trees = list[list[int]](), dict[int, Parents]()
        for i, (sequence, k) in enumerate(zip(batch.sequences, ks, strict=True)):
            guess = self._take_guess(sequence, k) if k else []
            if guess and batch.wants_tree(i):
                guess, parents = self.catch_up(sequence).guess_tree(k, batch.shape(i))
                if not is_chain(parents):
                    trees[i] = parents
            guesses.append(guess)
        self._unobserved, self._drafted = batch, [i for i, guess in enumerate(guesses) if guess]
        if not self._drafted:
            return Draft.none(len(guesses))
        tokens = send_tokens(guesses, batch.sampler.numbers.staging)
        return Draft(tuple(map(len, guesses)), tokens, trees=trees)

    def observe(self, batch: DraftBatch, verdict: Verdict) -> None:
        unobserved, self._unobserved = self._unobserved, None
        if unobserved is not batch:
            return  # no proposal was requested, or its pass failed and this is the retry without drafts
        for i in self._drafted:
            state = self._states[batch.sequences[i].handle]
            state.pause = 0 if verdict.accepted[i] else min(max(1, 2 * state.pause), self._max_pause)
            state.pause_left = state.pause

    def forget(self, sequence: Sequence) -> None:
        self._states.pop(sequence.handle, None)

    def audit(self, live: Set[int]) -> None:
        leaked = self._states.keys() - live
        assert not leaked, f"guessers are held for sequences that are gone: {sorted(leaked)}"

    def guess_in_pause(self, sequence: Sequence, k: int) -> list[int]:
        """At most k tokens that are worth a round of a pause."""
        return []

    def knows(self, sequence: Sequence) -> bool:
        """Whether a guesser is held for the sequence."""
        return sequence.handle in self._states

    def catch_up(self, sequence: Sequence) -> G:
        """Push the committed tokens that the sequence's guesser has not seen; returns the guesser."""
        state, length = self._state(sequence), len(sequence.tokens)
        for token in sequence.tokens[max(state.seen, 0 if self._lookback is None else length - self._lookback) :]:
            state.guesser.push(token)
        state.seen = length
        return state.guesser

    def _take_guess(self, sequence: Sequence, k: int) -> list[int]:
        """The guess that was offered for this round or, without an offer, a new one."""
        state = self._state(sequence)
        offered_at, state.offered_at = state.offered_at, -1
        return state.offer[:k] if offered_at == len(sequence.tokens) else self._guess(sequence, k)

    def _guess(self, sequence: Sequence, k: int) -> list[int]:
        state = self._state(sequence)
        if state.pause_left:
            state.pause_left -= 1
            return self.guess_in_pause(sequence, k)
        return self.catch_up(sequence).guess(k)

    def _state(self, sequence: Sequence) -> _GuesserState[G]:
        """The sequence's state; made at the first call."""
        state = self._states.get(sequence.handle)
        if state is None:
            state = self._states[sequence.handle] = _GuesserState(self._make(sequence))
        return state


def send_tokens(guesses: Seq[Seq[int]], staging: Staging) -> Tensor:
    """The guesses [B, longest] on the device, int64, filled up with zeros. They go there with all else that waits."""
    width = max(map(len, guesses))
    numbers = [token for guess in guesses for token in (*guess, *[0] * (width - len(guess)))]
    return staging.ints(numbers).tensor.view(len(guesses), width)
