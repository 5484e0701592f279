"""The client's guess of the output: followed, lost, found again, and accounted for."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafters.prediction import PredictionDrafter, PredictionFollower
from engine.sequence import Sequence
from tests.engine.drafters.rounds import make_batch, play
from tests.engine.driving import make_sequence
from tests.examples import examples

CPU = torch.device("cpu")
GUESS = tuple(range(10, 30))


def make_predicted(prompt: list[int], prediction: tuple[int, ...]) -> Sequence:
    sequence = make_sequence(0, prompt)
    sequence.prediction = prediction
    return sequence


def after(output: list[int], guess: tuple[int, ...] = GUESS, prompt: int = 0) -> PredictionFollower:
    follower = PredictionFollower(guess, prompt)
    for token in output:
        follower.push(token)
    return follower


def edited(rng: random.Random, text: list[int], edits: list[str]) -> list[int]:
    """Single tokens put in the place of others, left out or put in between, at random places."""
    places = rng.sample(range(len(text)), len(edits))
    kinds = dict(zip(places, edits, strict=True))
    out: list[int] = []
    for i, token in enumerate(text):
        kind = kinds.get(i)
        out += {None: [token], "replace": [-1 - i], "drop": [], "insert": [-1 - i, token]}[kind]
    return out


@pytest.mark.parametrize(
    ("output", "offers"),
    [
        ([], [10, 11, 12]),
        ([10, 11], [12, 13, 14]),
        ([10, 99], [12, 13, 14]),  # a substitution, it seems
        ([10, 99, 12], [13, 14, 15]),  # it was
        ([10, 99, 11], []),  # it was not: an insertion
        ([10, 99, 11, 12], [13, 14, 15]),  # found by two tokens
        ([10, 12], [13, 14, 15]),  # 11 was left out, it seems
        ([10, 12, 13], [14, 15, 16]),
        ([10, 12, 12], []),
        ([10, 15], [12, 13, 14]),
        ([10, 15, 16], [17, 18, 19]),  # five tokens were left out
        ([10, 99, 98, 97, 20, 21], [22, 23, 24]),
        ([10, 99, 98, 97, 20], []),  # one token is no place
        ([20, 21, 22], [23, 24, 25]),  # an output that begins in the middle
        ([*range(20, 30)], []),  # the end
        ([*range(10, 30), 99], []),
        ([*range(10, 30), 99, 12, 13], [14, 15, 16]),  # and from an earlier place again
        ([99, 98, 97, 96], []),
    ],
)
def test_what_is_offered(output: list[int], offers: list[int]) -> None:
    follower = after(output)
    assert follower.guess(3) == offers
    assert follower.guess(3) == offers


def test_a_place_that_was_found_is_left_at_the_first_difference() -> None:
    assert after([99, 98, 15, 16]).guess(1) == [17]
    assert after([99, 98, 15, 16, 97]).guess(1) == []
    assert after([99, 98, 15, 16, 17, 97]).guess(1) == [19]  # confirmed in between: a substitution, it seems


REFRAIN = (1, 2, 50, 1, 2, 51, 9, 1, 2, 52, 1, 2, 53)


@pytest.mark.parametrize(
    ("output", "offers"),
    [
        ([70, 71, 1, 2], 50),  # the nearest after the last agreed place, which is the beginning
        ([1, 2, 70, 71, 1, 2], 50),  # at that place itself
        ([1, 2, 50, 1, 70, 71, 1, 2], 51),
        ([1, 2, 50, 1, 2, 51, 70, 71, 1, 2], 52),
        ([1, 2, 50, 1, 2, 51, 9, 1, 2, 52, 1, 2, 53, 70, 71, 1, 2], 53),  # none after it: the nearest before
        ([1, 2, 50, 1, 2, 51, 70, 71, 50, 1, 2], 51),  # the longer match, though it lies before
    ],
)
def test_which_place_is_found(output: list[int], offers: int) -> None:
    assert after(output, REFRAIN).guess(1) == [offers]


def test_a_match_ends_where_the_guess_begins() -> None:
    """The token before the guess's first is not its last."""
    guess = (1, 2, 50, 60, 61, 1, 2, 51, 77)
    assert after([1, 2, 50, 98, 77, 1, 2], guess).guess(1) == [51]


def test_of_matches_beyond_eight_tokens_the_nearer() -> None:
    run = tuple(range(100, 109))
    near, far = (*run[3:], 98, 97, 1), (*run, 98, 97, 2)  # eight and eleven tokens agree
    output = [*run, 98, 97]
    assert after(output, (*run, 50, 51, 52, *near, *far)).guess(1) == [1]
    assert after(output, (*run, 50, 51, 52, *near[1:], *far)).guess(1) == [2]  # seven and eleven


def test_the_prompt_is_not_compared() -> None:
    assert after([10, 11, 12], prompt=3).guess(2) == [10, 11]
    assert after([10, 11, 12, 10], prompt=3).guess(2) == [11, 12]
    assert after([10, 11, 12], prompt=3).accepted == 0
    assert after([10, 11, 12], prompt=2).guess(2) == [11, 12]  # 12 is output, and seems to stand for 10


@pytest.mark.parametrize("kind", ["replace", "drop", "insert"])
def test_a_guess_with_one_error_in_ten(kind: str) -> None:
    """Each error costs the drafts around it, and everything else is offered: nothing is lost for good."""
    rng = random.Random(kind)
    text = [rng.randrange(1000) for _ in range(600)]
    drafter, sequence = PredictionDrafter(), make_predicted([5], tuple(edited(rng, text, [kind] * 60)))
    played = play(drafter, sequence, text, k=4)
    drafter.forget(sequence)
    assert sequence.tokens == [5, *text]
    assert sequence.record.prediction_accepted >= 0.7 * len(text)
    assert sum(accepted for _, accepted in played) >= 0.5 * len(text)
    wasted = sum(drafted > 0 and not accepted for drafted, accepted in played)
    assert wasted <= 2 * 60


def test_errors_in_blocks() -> None:
    """A tenth of the text differs, in six places: all but a few tokens at each are followed."""
    rng = random.Random(7)
    text = [rng.randrange(1000) for _ in range(600)]
    guess = list(text)
    for place, dropped, inserted in [(550, 10, 0), (450, 0, 10), (350, 10, 10), (250, 10, 3), (150, 3, 10), (50, 7, 7)]:
        guess[place : place + dropped] = [-1 - i for i in range(inserted)]
    drafter, sequence = PredictionDrafter(), make_predicted([5], tuple(guess))
    played = play(drafter, sequence, text, k=8)
    drafter.forget(sequence)
    differing = 10 + 10 + 10 + 3 + 7
    assert len(text) - differing - 6 * 4 <= sequence.record.prediction_accepted <= len(text) - differing
    assert sum(drafted > 0 and not accepted for drafted, accepted in played) <= 2 * 6


def test_a_guess_that_is_right() -> None:
    sequence = make_predicted([5], GUESS)
    drafter = PredictionDrafter()
    assert play(drafter, sequence, list(GUESS), k=4) == [(4, 4)] * 4
    drafter.forget(sequence)
    assert (sequence.record.prediction_tokens, sequence.record.prediction_accepted) == (20, 20)


def test_a_guess_that_is_wrong_costs_one_draft() -> None:
    """The first token differs, then the second: from there on it is lost and says nothing."""
    played = play(PredictionDrafter(), make_predicted([5], GUESS), list(range(100, 140)), k=4)
    assert [drafted for drafted, _ in played] == [4, 4] + [0] * 38


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40), st.integers(0, 3))
@settings(examples(120), derandomize=True)
def test_nothing_is_counted_twice(guess: list[int], output: list[int], prompt: int) -> None:
    """Nor more than there is, and an output that is the guess is accepted whole."""
    followed = after(output, tuple(guess), prompt).accepted
    assert 0 <= followed <= min(len(guess), max(0, len(output) - prompt))
    assert after([0] * prompt + guess, tuple(guess), prompt).accepted == len(guess)


def test_a_place_visited_twice_counts_once() -> None:
    follower = after([10, 11, 12, 13, 99, 98, 10, 11, 12, 13, 14])
    assert follower.accepted == 5
    assert follower.guess(1) == [15]


def test_the_record_does_not_depend_on_drafting() -> None:
    """Neither on rounds without drafts, nor on how often it is forgotten; a sequence never drafted for has one too."""
    output = [10, 11, 99, 13, 14]
    drafted, plain = make_predicted([5], GUESS), make_predicted([5], GUESS)
    drafter = PredictionDrafter()
    play(drafter, drafted, output[:2], k=3)
    drafted.tokens += output[2:]
    plain.tokens += output
    drafter.propose(make_batch(plain), [0])
    for sequence in (drafted, plain, drafted):
        drafter.forget(sequence)
        assert (sequence.record.prediction_tokens, sequence.record.prediction_accepted) == (20, 4)
    drafter.audit(set())


def test_a_sequence_without_a_prediction() -> None:
    sequence, drafter = make_sequence(0, [1, 2, 3]), PredictionDrafter()
    assert play(drafter, sequence, [1, 2, 3, 1, 2, 3], k=4) == [(0, 0)] * 6
    drafter.forget(sequence)
    drafter.audit(set())
    assert (sequence.record.prediction_tokens, sequence.record.prediction_accepted) == (0, 0)


def test_what_cannot_be_counted_is_forgotten_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    sequence, drafter = make_predicted([1], GUESS), PredictionDrafter()
    drafter.propose(make_batch(sequence), [2])
    monkeypatch.setattr(PredictionFollower, "push", lambda *_: 1 / 0)
    sequence.tokens.append(10)
    with pytest.raises(ZeroDivisionError):
        drafter.forget(sequence)
    drafter.audit(set())
