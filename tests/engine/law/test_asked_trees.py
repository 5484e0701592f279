"""Trees that requests ask for: whatever else they ask for, what the engine emits is the target's law.

A penalty sees the drafts on a node's own path, so the laws of siblings' children differ. test_chosen_trees.py shows the
law for trees that the policy chooses.
"""

from collections.abc import Sequence as Seq

import pytest

from engine.engine import Engine
from engine.sampling.adjustments import RoundRows
from tests.engine.law.checking import Sample, check_speculation, draw, law_of, refuses
from tests.engine.law.configurations import Configuration
from tests.engine.law.statistics import benjamini_hochberg, g_test
from tests.engine.law.tables import table_engine

pytestmark = pytest.mark.usefixtures("pruned_races")

LEVEL = 1e-3
MOST = 5  # nodes
# Setting, tree, whether its batches hold chains and other trees too.
CELLS: tuple[tuple[str, tuple[int, ...], bool], ...] = (
    ("top_p", (2, 1), False),
    ("frequency", (1, 2), False),
    ("repetition", (2, 1), True),
    ("combined", (3,), True),
)
PENALISED, SIBLINGS = Configuration("presence", "model", "rejection", MOST, mixed=False), (2, 1)


def asking_engine() -> Engine:
    return table_engine(max_spec_length=MOST, max_running=64)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((CELLS[1:3], 400), id="few"),
        pytest.param((CELLS, 16_000), id="many", marks=pytest.mark.proofs),
    ],
)
def samples(request: pytest.FixtureRequest) -> dict[Configuration, Sample]:
    found, (cells, draws) = {}, request.param
    for setting, tree, mixed in cells:
        configuration = Configuration(setting, "model", "rejection", MOST, mixed)
        found[configuration] = draw(configuration, draws, engine=asking_engine(), k=None, tree=tree)
    return found


def test_the_law_holds_under_penalties_and_filters(samples: dict[Configuration, Sample]) -> None:
    for configuration, sample in samples.items():
        check_speculation(configuration, sample)
        assert sample.beside > len(sample.texts) / 50, f"{configuration}: siblings decide too little"
    found = {str(which): g_test(sample.counts, law_of(which.params)) for which, sample in samples.items()}
    assert len(found) == len(samples)
    assert {name: found[name] for name in benjamini_hochberg(found, LEVEL)} == {}


def test_a_penalty_that_sees_the_drafts_of_another_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees the first drafts of the tree, as a chain's row would."""

    def as_a_chain(self: RoundRows, row: int) -> Seq[int]:
        return range(self.places[row][1])

    monkeypatch.setattr(RoundRows, "seen", as_a_chain)
    assert refuses(PENALISED, 4000, asking_engine(), k=None, tree=SIBLINGS)
