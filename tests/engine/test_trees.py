"""The shapes of draft trees."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import trees
from engine.trees import ROOT


@st.composite
def shapes(draw: st.DrawFn) -> trees.Parents:
    return tuple(draw(st.integers(ROOT, node - 1)) for node in range(draw(st.integers(0, 8))))


@given(shapes())
def test_paths_depths_and_ranks_agree(parents: trees.Parents) -> None:
    trees.check(parents)
    for node, parent in enumerate(parents):
        path = trees.path(parents, node)
        assert path == [*trees.path(parents, parent), node]
        assert trees.depths(parents)[node] == len(path)
        assert trees.ranks(parents)[node] == parents[:node].count(parent)


@given(st.lists(st.integers(1, 3), max_size=3))
def test_every_node_of_a_depth_has_as_many_children(widths: list[int]) -> None:
    parents = trees.branching(widths)
    trees.check(parents)
    assert len(parents) == trees.count_nodes(widths, 1000)
    depths = [0, *trees.depths(parents)]
    for node, depth in enumerate(depths, start=ROOT):
        assert parents.count(node) == (widths[depth] if depth < len(widths) else 0)


def test_first_children_come_right_behind_their_parents() -> None:
    assert trees.branching([2, 2]) == (ROOT, 0, 0, ROOT, 3, 3)
    assert trees.is_chain(trees.branching([1, 1, 1]))
    assert not trees.is_chain(trees.branching([2]))


def test_counting_ends_above_the_limit() -> None:
    assert trees.count_nodes([10**9] * 10**5, 16) > 16


@pytest.mark.parametrize("parents", [(0,), (-2,), (-1, 1), (-1, 0, 5)])
def test_a_parent_comes_before_its_children(parents: trees.Parents) -> None:
    with pytest.raises(ValueError, match="are allowed"):
        trees.check(parents)


def test_the_trunk_and_what_a_path_decides() -> None:
    shape = trees.branching([2, 2])
    assert trees.trunk(shape) == [0, 1]
    assert trees.trunk((ROOT, ROOT, 1, 0, 3)) == [0, 3, 4]
    assert trees.trunk(()) == []
    assert trees.decided(shape, [3]) == [3, 4, 5]
    assert trees.decided(shape, [3, 4]) == [3, 4]
    assert trees.decided(shape, []) == [0, 3]


def test_the_nodes_that_were_tried() -> None:
    """The siblings up to the accepted one, level by level, and all children of the last one."""
    shape = (ROOT, ROOT, 0, 1, 1, 1, ROOT, 4)
    assert trees.tried(shape, []) == [0, 1, 6]
    assert trees.tried(shape, [1]) == [0, 1, 3, 4, 5]
    assert trees.tried(shape, [1, 4]) == [0, 1, 3, 4, 7]
    assert trees.tried(shape, [0, 2]) == [0, 2]
    assert trees.tried((), []) == []
    for length in range(4):
        assert trees.tried(trees.chain(3), range(length)) == [0, 1, 2][: length + 1]


def test_fates_are_those_of_the_tried_children() -> None:
    shape = trees.branching([2, 2])  # (−1, 0, 0, −1, 3, 3)
    assert trees.fates(shape, []) == [[False, False]]
    assert trees.fates(shape, [0]) == [[True], [False, False]]
    assert trees.fates(shape, [3, 5]) == [[False, True], [False, True]]
    assert trees.fates(shape, [3, 4]) == [[False, True], [True]]
    assert trees.fates((), []) == []
