"""The prefix index by example, and against a list of texts."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.prefix import PrefixIndex, PrefixNode
from tests.examples import examples

TEXTS = st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=9), st.sampled_from(["", "other"])), max_size=8)


def put(index: PrefixIndex, tokens: list[int], salt: str, first: int) -> None:
    """Index the full blocks of a text as blocks first, first + 1, …"""
    node: PrefixNode | None = None
    for n in range(len(tokens) // index.block_size):
        key = tuple(tokens[n * index.block_size : (n + 1) * index.block_size])
        node = index.insert(node, salt, key, first + n)


def blocks(index: PrefixIndex, tokens: list[int], salt: str = "", limit: int = 99) -> list[int]:
    return [node.block for node in index.match(tokens, salt, limit)]


def two_texts() -> PrefixIndex:
    index = PrefixIndex(2)
    put(index, [1, 2, 3, 4, 5, 6, 7], "", 10)  # the 7 fills no block
    put(index, [1, 2, 8, 8], "", 20)
    return index


def test_the_longest_path_of_full_blocks_is_found() -> None:
    index = two_texts()
    assert blocks(index, [1, 2, 3, 4, 5, 6, 7, 8]) == [10, 11, 12]
    assert blocks(index, [1, 2, 3, 4, 5]) == [10, 11]
    assert blocks(index, [1, 2, 3, 4, 5, 6], limit=2) == [10, 11]
    assert blocks(index, [1, 2, 8, 8, 9, 9]) == [10, 21]
    assert blocks(index, [1]) == blocks(index, [2, 1]) == blocks(index, [3, 4]) == []
    assert blocks(index, [1, 2, 3, 4], limit=-1) == []


def test_the_first_block_of_a_text_stays_its_block() -> None:
    index = two_texts()
    assert sorted(index.nodes) == [10, 11, 12, 21]  # 20 came second
    assert index.insert(None, "", (1, 2), 30) is index.nodes[10]


def test_nothing_is_found_under_another_salt() -> None:
    index = two_texts()
    assert blocks(index, [1, 2, 3, 4], "other") == []
    put(index, [1, 2], "other", 40)
    assert blocks(index, [1, 2, 3, 4], "other") == [40]
    assert blocks(index, [1, 2, 3, 4]) == [10, 11]


def test_a_removed_leaf_is_gone_from_its_parent_and_an_empty_root_from_the_index() -> None:
    index = two_texts()
    for block in (12, 21, 11):
        assert index.remove(block) == [block]
        index.audit([0] * 50)
        assert block not in index.nodes
    assert blocks(index, [1, 2, 3, 4]) == [10]
    assert index.remove(10) == [10]
    assert (index.nodes, index._roots, index._salts) == ({}, {}, {})


def test_what_is_below_a_removed_block_goes_with_it_deepest_first() -> None:
    index = two_texts()
    removed = index.remove(10)
    assert sorted(removed) == [10, 11, 12, 21]
    assert removed.index(12) < removed.index(11) < removed.index(10) == 3
    assert (index.nodes, index._roots) == ({}, {})


def test_texts_are_compared_token_by_token() -> None:
    """-1 and -2 have the same hash in CPython, and so have the tuples made of them."""
    assert hash((-1, 5)) == hash((-2, 5))
    index = PrefixIndex(2)
    put(index, [-1, 5], "", 1)
    assert blocks(index, [-2, 5]) == []
    put(index, [-2, 5], "", 2)
    assert blocks(index, [-2, 5]) == [2]


@examples(80)
@given(TEXTS, st.lists(st.integers(0, 1), max_size=9))
def test_a_match_is_the_longest_common_beginning_with_any_text(
    texts: list[tuple[list[int], str]], asked: list[int]
) -> None:
    index = PrefixIndex(2)
    for i, (tokens, salt) in enumerate(texts):
        put(index, tokens, salt, 10 * i)
    index.audit([0] * 100)
    for salt in ("", "other"):
        known = {tuple(t[:n]) for t, s in texts if s == salt for n in range(2, len(t) + 1, 2)}
        longest = max((n for n in range(0, len(asked) + 1, 2) if tuple(asked[:n]) in known), default=0)
        assert 2 * len(blocks(index, asked, salt)) == longest


def _lost_from_table(index: PrefixIndex) -> None:
    del index.nodes[12]


def _moved(index: PrefixIndex) -> None:
    index.nodes[11].parent = index.nodes[21]


def _renamed(index: PrefixIndex) -> None:
    index.nodes[12].key = (6, 5)


def _cut_short(index: PrefixIndex) -> None:
    node = index.nodes[10]
    node.key = (1,)


def _empty_root(index: PrefixIndex) -> None:
    index._root("nobody")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_lost_from_table, r"in the tree \[10, 11, 12, 21\], in its table \[10, 11, 21\]"),
        (_moved, "block 11 does not know its parent 10"),
        (_renamed, "block 12 has another key than its own tokens"),
        (_cut_short, "block 10 has a key of 1 tokens"),
        (_empty_root, "an empty root"),
    ],
)
def test_the_audit_finds(damage: Callable[[PrefixIndex], None], says: str) -> None:
    index = two_texts()
    index.audit([0] * 50)
    damage(index)
    with pytest.raises(AssertionError, match=says):
        index.audit([0] * 50)


def test_the_audit_finds_a_referenced_block_below_an_unreferenced_one() -> None:
    counts = [0] * 50
    counts[10] = counts[11] = 1
    two_texts().audit(counts)
    counts[10] = 0
    with pytest.raises(AssertionError, match="block 11 is referenced, but its parent 10 is not"):
        two_texts().audit(counts)
