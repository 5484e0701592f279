"""The best tree is as good as any, and trees are worth what is accepted of them."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lab.tree_shapes import best_shape, value
from engine.trees import ROOT, branching, chain, check

SHARES = st.lists(st.floats(0, 0.9), min_size=1, max_size=4).map(lambda row: sorted(row, reverse=True))
CHANCES = st.lists(SHARES, min_size=1, max_size=4)


@given(CHANCES, st.integers(1, 5))
def test_no_tree_of_as_many_nodes_is_better(chances: list[list[float]], nodes: int) -> None:
    best = best_shape(chances, nodes)
    check(best)
    assert len(best) <= nodes
    others = product(*(range(ROOT, node) for node in range(nodes)))
    assert value(best, chances) == pytest.approx(max(value(parents, chances) for parents in others))


def test_the_value_of_a_chain_and_of_siblings() -> None:
    chances = [[0.5, 0.25], [0.4]]
    assert value(chain(3), chances) == pytest.approx(0.5 + 0.5 * 0.4)
    assert value(branching([2]), chances) == pytest.approx(0.75)
    assert value(branching([2, 1]), chances) == pytest.approx(0.75 * 1.4)


def test_a_chain_where_second_guesses_are_worth_less() -> None:
    assert best_shape([[0.9, 0.05]] * 8, 4) == chain(4)


def test_first_children_come_right_behind_their_parents() -> None:
    assert best_shape([[0.5, 0.4], [0.5, 0.4]], 6) == branching([2, 2])
