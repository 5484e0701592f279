"""n-gram counts: those of the window and no others."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import trees
from engine.drafters.ngram import NGrams, ngram_drafter
from tests.engine.drafters.grown import Path, all_values, check_filled, check_grown, shapes
from tests.engine.drafters.rounds import play
from tests.engine.driving import make_sequence
from tests.examples import examples

ORDERS = (4, 3, 2)
TEXTS = st.lists(st.integers(0, 3), max_size=80) | st.lists(st.integers(0, 2), min_size=15, max_size=60)
WINDOWS = st.integers(4, 20)


def pushed(tokens: list[int], window: int = 512) -> NGrams:
    ngrams = NGrams(window)
    for token in tokens:
        ngrams.push(token)
    return ngrams


def counted(tokens: list[int], window: int) -> Counter[tuple[int, ...]]:
    last = tokens[-window:]
    return Counter(tuple(last[i : i + n]) for n in ORDERS for i in range(len(last) - n + 1))


def branch_shares(tokens: list[int], window: int, path: Path) -> list[tuple[int, float]]:
    """The relative counts of what follows the longest context that occurs, from the text alone."""
    last, text = tokens[-window:], [*tokens, *path]
    for n in ORDERS:
        context = text[len(text) - n + 1 :] if len(text) >= n - 1 else None
        seen = Counter(last[i + n - 1] for i in range(len(last) - n + 1) if last[i : i + n - 1] == context)
        if seen and len(path) < 4:
            return [(token, count / seen.total()) for token, count in seen.items()]
    return []


def reference(tokens: list[int], window: int, k: int) -> list[int]:
    """The rule, from the text alone."""
    last, guess = tokens[-window:], list[int]()
    while len(guess) < min(k, 4):
        text = tokens + guess
        for n in ORDERS:
            context = text[len(text) - n + 1 :] if len(text) >= n - 1 else None
            where = [i for i in range(len(last) - n + 1) if last[i : i + n - 1] == context]
            if where:
                seen = Counter(last[i + n - 1] for i in where)
                latest = {last[i + n - 1]: i for i in where}
                guess.append(max(seen, key=lambda token: (seen[token], latest[token])))
                break
        else:
            break
    return guess


@given(TEXTS, WINDOWS)
@settings(examples(120), derandomize=True)
def test_the_counts_are_those_of_the_window(tokens: list[int], window: int) -> None:
    held = pushed(tokens, window)._counts
    counts = {(*context, token): n for context, following in held.items() for token, n in following.items()}
    assert counts == counted(tokens, window)
    assert all(held.values())  # no context is kept without a continuation


@given(TEXTS, WINDOWS, st.integers(1, 12), shapes())
@settings(deadline=None, derandomize=True, max_examples=100)
def test_a_tree_has_the_most_frequent_continuations(
    tokens: list[int], window: int, size: int, shape: trees.Parents
) -> None:
    ngrams = pushed(tokens, window)
    tree = ngrams.guess_tree(size)
    check_grown(tree, size, all_values(lambda path: branch_shares(tokens, window, path)))
    assert tree[0][:1] == ngrams.guess(1)
    check_filled(ngrams.guess_tree(len(shape), shape), shape, lambda path: branch_shares(tokens, window, path))


@given(TEXTS, WINDOWS, st.integers(0, 6))
@settings(examples(120), derandomize=True)
def test_a_guess_follows_the_rule(tokens: list[int], window: int, k: int) -> None:
    ngrams = pushed(tokens, window)
    assert ngrams.guess(k) == reference(tokens, window, k)
    assert ngrams.guess(k) == reference(tokens, window, k)  # guessing changes nothing


@given(TEXTS, TEXTS, WINDOWS, st.integers(1, 6))
@settings(examples(120), derandomize=True)
def test_what_lies_beyond_the_window_makes_no_difference(
    first: list[int], second: list[int], window: int, k: int
) -> None:
    """To what is pushed at the first look, nor after a gap: counts, their order and the guesses."""
    whole, parts = pushed(first + second, window), pushed(first[-window:], window)
    for token in second[-window:]:
        parts.push(token)
    if len(second) >= window:
        parts_only = pushed(second[-window:], window)
        assert whole.guess(k) == parts_only.guess(k) == parts.guess(k)
        assert whole._counts == parts_only._counts == parts._counts
    elif len(first) <= window or len(second) == 0:
        assert whole._counts == parts._counts
        assert whole.guess(k) == parts.guess(k)


def test_the_first_look_at_a_long_prompt_is_one_at_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    pushes, push = list[int](), NGrams.push

    def counted(self: NGrams, token: int) -> None:
        pushes.append(token)
        push(self, token)

    monkeypatch.setattr(NGrams, "push", counted)
    prompt = [i % 97 for i in range(5000)]
    offer = ngram_drafter().offer(make_sequence(0, prompt), 3)
    assert pushes == prompt[-512:]
    assert offer.max_k == 3


def test_memory_is_bounded() -> None:
    """Text without any repetition, the worst case: one count per order and place."""
    ngrams = NGrams(16)
    for token in range(1000):
        ngrams.push(token)
        assert sum(map(len, ngrams._counts.values())) <= len(ORDERS) * 16
        assert len(ngrams._window) <= 16
    assert sum(map(len, ngrams._counts.values())) == 13 + 14 + 15


def test_what_left_the_window_is_not_guessed() -> None:
    text = [1, 2, 3, 4, *range(100, 110), 1]
    assert pushed(text, 16).guess(4) == [2, 3, 4, 100]
    assert pushed(text, 12).guess(4) == []


@pytest.mark.parametrize(
    ("tokens", "k", "guess"),
    [
        ([1, 2, 1, 3, 1, 3, 1, 2, 1], 1, [3]),  # after (1, 2, 1), though 1 alone was followed by 2 as often, and later
        ([5, 1, 2, 5, 1, 2, 9, 1, 3, 5, 1], 1, [2]),  # the longer context outweighs the later continuation
        ([1, 2, 8, 1, 3, 7, 1], 1, [3]),  # equally often: the one seen last
        ([1, 2, 5, 1, 3, 6, 1, 3, 7, 1, 2, 8, 1], 1, [2]),  # whoever was seen first
        ([1, 2, 8, 1, 2, 9, 1, 3, 7, 1], 1, [2]),  # more often before later
        ([1, 2, 3, 4, 5, 6, 1], 9, [2, 3, 4, 5]),  # chained, at most four
        ([1, 2, 3, 1], 9, [2, 3, 1, 2]),  # round and round
        ([1, 2, 1], 1, [2]),
        ([1, 2, 3], 4, []),
        ([], 4, []),
        ([1, 1], 0, []),
    ],
)
def test_guesses(tokens: list[int], k: int, guess: list[int]) -> None:
    assert pushed(tokens).guess(k) == guess


def test_a_window_without_room_for_the_longest_n_gram() -> None:
    NGrams(4)
    with pytest.raises(ValueError, match="the window must hold at least 4 tokens"):
        NGrams(3)


def test_the_drafter_on_a_refrain() -> None:
    sequence = make_sequence(0, [7, 8, 9, 10, 11, 12])
    played = play(ngram_drafter(), sequence, [7, 8, 9, 10, 11, 12] * 5, k=6)
    assert played[:2] == [(0, 0), (4, 4)]
    assert all(accepted == drafted > 0 for drafted, accepted in played[1:-1])
