"""The covering array covers, and the product is whole."""

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import astuple
from itertools import combinations, product

from engine.types import DRAFTERS
from tests.engine.law.configurations import (
    FACTORS,
    SETTINGS,
    SMALL_FACTORS,
    covering_array,
    everything,
    pairwise,
    small_design,
)


def pairs(rows: list[tuple[object, ...]]) -> set[tuple[int, object, int, object]]:
    return {(i, row[i], j, row[j]) for row in rows for i, j in combinations(range(len(row)), 2)}


def wanted(factors: Seq[Seq[object]]) -> set[tuple[int, object, int, object]]:
    return pairs(list(product(*factors)))


def test_every_pair_of_levels_occurs() -> None:
    rows = [astuple(c) for c in pairwise()]
    assert pairs(rows) == wanted(FACTORS)
    assert len(set(rows)) == len(rows)
    assert len(rows) <= 132  # at least 14 · 9 for the two largest factors


def test_the_small_design_has_the_pairs_that_matter_most() -> None:
    rows = [astuple(c) for c in small_design()]
    assert wanted(SMALL_FACTORS[1:]) <= pairs([row[1:] for row in rows])
    assert {(row[0], row[2]) for row in rows} >= set(product(SETTINGS, ("rejection", "block")))
    assert all(min(Counter(row[n] for row in rows).values()) >= 2 for n in range(len(FACTORS)))
    assert len(set(rows)) == len(rows) <= 40  # at least 14 · 2 for the settings under both verifiers


def test_the_array_is_small_where_that_is_possible() -> None:
    """Four factors of three levels: 9 rows are the least; a pair at a time would take 54."""
    factors = (("a", "b", "c"),) * 4
    rows = list(covering_array(factors))
    assert pairs(rows) == wanted(factors)
    assert len(rows) <= 13
    assert pairs(rows[:-1]) != wanted(factors)


def test_everything_holds_every_combination_that_means_something() -> None:
    rows = everything()
    assert len(rows) == len(SETTINGS) * (len(DRAFTERS) * 3 + 1) * 3 * 2
    assert len({str(c) for c in rows}) == len(rows)
    assert not any(c.drafter is None and c.k > 1 for c in rows)
