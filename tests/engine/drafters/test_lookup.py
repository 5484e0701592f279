"""Prompt lookup: the promised match, and what follows it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import trees
from engine.drafters import lookup as lookup_module
from engine.drafters.lookup import Lookup, lookup_drafter
from tests.engine.drafters.grown import Path, all_values, check_filled, check_grown, shapes
from tests.engine.drafters.rounds import play
from tests.engine.driving import make_sequence
from tests.examples import examples


def pushed(tokens: list[int], min_match: int = 3) -> Lookup:
    lookup = Lookup(min_match)
    for token in tokens:
        lookup.push(token)
    return lookup


def agreement(tokens: list[int], end: int) -> int:
    """Tokens before `end` that equal those before the end of the text."""
    length = 0
    while length < end and tokens[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


def reference(tokens: list[int], k: int, min_match: int, candidates: int, max_match: int) -> list[int]:
    """The promise, from the text alone: every place is looked at."""
    places = [end for end in range(len(tokens)) if agreement(tokens, end) >= min_match]
    places = places[::-1][:candidates]
    if not places:
        return []
    source = max(places, key=lambda end: min(agreement(tokens, end), max_match))
    text = list(tokens)
    for j in range(k):
        text.append(text[source + j])
    return text[len(tokens) :]


@pytest.mark.parametrize(("candidates", "max_match"), [(64, 32), (3, 5), (1, 32), (64, 3)])
def test_a_guess_keeps_the_promise(monkeypatch: pytest.MonkeyPatch, candidates: int, max_match: int) -> None:
    monkeypatch.setattr(lookup_module, "CANDIDATES", candidates)
    monkeypatch.setattr(lookup_module, "MAX_MATCH", max_match)

    @given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 6), st.integers(1, 3))
    @settings(examples(80), derandomize=True)
    def check(tokens: list[int], k: int, min_match: int) -> None:
        lookup = pushed(tokens, min_match)
        expected = reference(tokens, k, min_match, candidates, max_match)
        assert lookup.guess(k) == expected
        assert lookup.guess(k) == expected  # guessing changes nothing

    check()


def branch_shares(tokens: list[int], path: Path, sources: int = 16) -> list[tuple[int, float]]:
    """What follows the path in the best `sources` places; each distinct token gets half the share of the one before."""
    places = [end for end in range(len(tokens)) if agreement(tokens, end) >= 3][::-1][:64]
    best = sorted(places, key=lambda end: -min(agreement(tokens, end), 32))[:sources]
    text = [*tokens, *path]
    following = [text[end + len(path)] for end in best if text[end : end + len(path)] == list(path)]
    distinct = list(dict.fromkeys(following))
    total = sum(2.0**-rank for rank in range(len(distinct)))
    return [(token, 2.0**-rank / total) for rank, token in enumerate(distinct)]


@pytest.mark.parametrize("sources", [16, 2])
def test_a_tree_has_the_best_continuations(monkeypatch: pytest.MonkeyPatch, sources: int) -> None:
    monkeypatch.setattr(lookup_module, "MAX_SOURCES", sources)

    @given(st.lists(st.integers(0, 1), max_size=30), st.integers(1, 8), shapes())
    @settings(deadline=None, derandomize=True, max_examples=60)
    def check(tokens: list[int], size: int, shape: trees.Parents) -> None:
        values = all_values(lambda path: branch_shares(tokens, path, sources) if len(path) < size else [])
        tree = pushed(tokens).guess_tree(size)
        check_grown(tree, size, values)
        assert tree[0][:1] == pushed(tokens).guess(1)
        filled = pushed(tokens).guess_tree(len(shape), shape)
        check_filled(filled, shape, lambda path: branch_shares(tokens, path, sources))

    check()


def test_with_the_shipped_limits_the_match_is_the_longest() -> None:
    """As long as the last three tokens occurred at most 64 times and no match is longer than 32."""
    rng = random.Random(4)
    for _ in range(200):
        tokens = [rng.randrange(3) for _ in range(100)]
        assert pushed(tokens).guess(5) == reference(tokens, 5, 3, 1000, 1000)


@pytest.mark.parametrize(
    ("tokens", "k", "guess"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], 3, [4, 5, 6]),
        ([1, 2, 3, 4, 5, 6, 2, 3], 3, []),  # two tokens are no match
        ([1, 2, 3, 4, 8, 1, 2, 3, 5, 9, 1, 2, 3], 1, [5]),  # the recent one
        ([8, 1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 1, 2, 3], 1, [4]),  # the longer one
        ([1, 2, 3, 4, 1, 2, 3], 9, [4, 1, 2, 3, 4, 1, 2, 3, 4]),  # the copy goes on
        ([7, 7, 7, 7], 5, [7] * 5),
        ([7, 7, 7], 5, []),  # occurs once
        ([1, 2, 3, 4, 1, 2, 3], 0, []),
        ([], 3, []),
    ],
)
def test_guesses(tokens: list[int], k: int, guess: list[int]) -> None:
    assert pushed(tokens).guess(k) == guess


def test_the_drafter_on_a_copy_and_on_text_without_any() -> None:
    rng = random.Random(2)
    text = [rng.randrange(4000) for _ in range(120)]
    copied = play(lookup_drafter(), make_sequence(0, text), text, k=4)
    assert copied[:4] == [(0, 0), (0, 0), (0, 0), (4, 4)]
    assert sum(accepted for _, accepted in copied) >= 0.75 * len(text)
    fresh = play(lookup_drafter(), make_sequence(0, text[:60]), text[60:], k=4)
    assert not any(drafted for drafted, _ in fresh)


def test_misleading_text_is_soon_left_alone() -> None:
    """Every fourth token is new, so that each match is wrong about what comes next."""
    output = [token for i in range(100) for token in (1, 2, 3, 100 + i)]
    played = play(lookup_drafter(), make_sequence(0, [1, 2, 3, 9]), output, k=1)
    drafted = [i for i, (offered, _) in enumerate(played) if offered]
    assert not any(accepted for _, accepted in played)
    assert 4 <= len(drafted) <= 20  # of a hundred chances
