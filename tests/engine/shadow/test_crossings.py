"""How often a steady decode round of eight sequences with four drafts each makes host and device meet, and how many
operations it runs and kernels it launches outside of the models. The budgets only fall: a count below its budget fails
too, so that the table is tightened."""

from dataclasses import astuple, dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engine.shadow.counting import Counts
from tests.engine.shadow.report import KINDS, main, measure, pair_of
from tests.examples import usual_and_proofs


@dataclass(frozen=True, slots=True)
class Budget:
    uploads: int
    downloads: int
    stalls: int  # how often the host waits for the device
    outside: int  # operations outside of the models
    launches: int  # what they launch: a kernel that one of them launches several times counts each time


BUDGETS = {
    "greedy": Budget(1, 1, 1, 17, 22),
    "match": Budget(1, 1, 1, 17, 22),
    "rejection": Budget(1, 1, 1, 34, 51),
    "block, top-p, penalties": Budget(1, 1, 1, 50, 154),
    "bias, bad words": Budget(1, 1, 1, 91, 96),
    "match, logprobs": Budget(2, 2, 2, 32, 37),
    "lookup": Budget(1, 1, 1, 5, 6),
    "tree": Budget(1, 1, 1, 27, 31),
    "tree, rejection": Budget(1, 1, 1, 45, 58),
    "eagle": Budget(1, 1, 1, 20, 25),
    "eagle, tree": Budget(1, 1, 1, 29, 33),
    "medusa": Budget(1, 1, 1, 18, 23),
    "medusa, tree": Budget(1, 1, 1, 24, 28),
    "tree, chains": Budget(1, 1, 1, 41, 47),
    "tree, chains, rejection": Budget(1, 1, 1, 64, 81),
    "eagle, tree, chains": Budget(1, 1, 1, 47, 53),
}


def check_budget(kind: str, counts: Counts) -> None:
    """Raise AssertionError unless the counts are exactly those of the table."""
    budget = BUDGETS[kind]
    launches = counts.launched_outside if find_spec("triton") else budget.launches
    found = Budget(counts.uploads, counts.downloads, counts.stalls, counts.outside, launches)
    if found == budget:
        return
    over = any(n > most for n, most in zip(astuple(found), astuple(budget), strict=True))
    advice = "the round asks more of the device than before" if over else "write the smaller counts into BUDGETS"
    raise AssertionError("\n".join([f"{kind}: {found}, not {budget}: {advice}", *counts.lines()]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pairs")


# The test of the report has the budget of lookup.
USUAL = (
    *("greedy", "match", "rejection", "block, top-p, penalties", "bias, bad words", "match, logprobs"),
    *("tree", "tree, rejection", "tree, chains", "eagle", "medusa"),
)


@pytest.mark.parametrize("kind", usual_and_proofs(KINDS, USUAL))
def test_a_round_keeps_to_its_budget(folder: Path, kind: str) -> None:
    check_budget(kind, measure(pair_of(KINDS[kind], folder), KINDS[kind]))


def test_a_count_beside_its_budget_is_told_by_line() -> None:
    counts = Counts()
    counts.cross("H2D copy", "an upload")
    with pytest.raises(AssertionError, match=r"smaller counts(.|\n)*H2D copy .*test_crossings.py:\d+"):
        check_budget("greedy", counts)
    for _ in range(BUDGETS["greedy"].outside + 1):
        counts.operate("an operation")
    with pytest.raises(AssertionError, match=r"asks more of the device(.|\n)*\d+ operations .*test_crossings.py:\d+"):
        check_budget("greedy", counts)


def test_the_report_prints_the_counts_and_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    main(["lookup"])
    header, cells, *lines = capsys.readouterr().out.splitlines()
    budget = BUDGETS["lookup"]
    assert header.split()[:6] == ["round", "uploads", "downloads", "stalls", "outside", "launches"]
    assert cells.split()[:6] == ["lookup", *(str(n) for n in astuple(budget))]
    assert sum("D2H copy" in line and "engine/verification.py" in line for line in lines) == budget.downloads
