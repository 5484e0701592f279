"""The rounds as a table of text on the request's span, for viewers that show columns as lists of numbers."""

import random
from typing import Any

import pytest

from app.telemetry.rounds_table import MAX_LENGTH, MAX_ROWS, rounds_table
from engine.types import DRAFTERS, REASONS, RoundRecord
from tests.app.harness import PROMPT, call
from tests.app.telemetry.tracing import ROUNDS, Traced, round_of, told


def cells(table: str) -> list[list[str]]:
    """The rows below the heading, split at spaces."""
    return [line.split() for line in table.splitlines()[1:]]


def test_each_round_is_a_row() -> None:
    table = rounds_table([round_of(7, *facts) for facts in ROUNDS])
    assert cells(table) == [
        ["0", "-", "0/0", "1", "1.0", "-", "-"],
        ["1", "4", "4/4", "5", "1.5", "model", "policy", "++++"],
        ["2", "4", "0/3", "1", "1.6", "ngram", "acceptance", "xxx"],
        ["3", "0", "0/0", "1", "1.0", "-", "load"],
        ["4", "2", "1/2", "1", "1.2", "model", "cap", "+x"],
    ]
    heading, *rows = table.splitlines()
    for word, cell in (("k ", "4 "), ("accepted", "4/4"), ("tokens", "5"), ("ms", "1.5"), ("drafter", "model")):
        assert heading.index(word) <= rows[1].index(cell, rows[1].index("4/4") if cell == "5" else 0) + len(cell)
    assert [heading.index(word) for word in ("drafter", "reason", "drafts:")] == [
        rows[1].index(cell) for cell in ("model", "policy", "++++")
    ]
    assert {line.rstrip() for line in rows} == set(rows), "no blanks at the ends"


@pytest.mark.parametrize("count", [MAX_ROWS - 1, MAX_ROWS, MAX_ROWS + 1, 500])
def test_a_long_request_shows_both_ends_and_the_sum_between(count: int) -> None:
    rng = random.Random(count)
    rounds = [
        RoundRecord(4, 0, 500, drafted := rng.randint(0, 4), rng.randint(0, drafted), 1, 0, step_us=1000)
        for _ in range(count)
    ]
    rows = cells(rounds_table(rounds))
    shown = [int(row[0]) for row in rows if row[0] != "..."]
    assert shown[-1] == count - 1
    gaps = [row for row in rows if row[0] == "..."]
    if count <= MAX_ROWS:
        assert (shown, gaps) == (list(range(count)), [])
        return
    assert len(shown) == MAX_ROWS
    (gap,) = gaps
    hidden = [rounds[i] for i in set(range(count)) - set(shown)]
    accepted, drafted = sum(part.accepted for part in hidden), sum(part.drafted for part in hidden)
    assert gap[1:] == [
        f"{accepted}/{drafted}",
        str(len(hidden)),
        f"{len(hidden):.1f}",
        *f"sum of {len(hidden)} rounds".split(),
    ]


@pytest.mark.parametrize("count", [1, MAX_ROWS, 100_000])
def test_no_table_is_longer_than_a_viewer_shows(count: int) -> None:
    longest = RoundRecord(64, REASONS.index("acceptance"), 1, 64, 63, 64, DRAFTERS.index("prediction"), step_us=10**8)
    assert len(rounds_table([longest] * count)) <= MAX_LENGTH
    assert len(cells(rounds_table([longest] * count))) == min(count, MAX_ROWS + 1)


@pytest.mark.parametrize("level", ["request", "packed"])
def test_a_request_of_several_choices_shows_the_first(level: Any) -> None:
    traced = Traced(level=level)
    call(traced.app, PROMPT | {"n": 3})
    said = traced.attributes()["specdec.rounds.table"]
    assert said == rounds_table([round_of(7, *facts) for facts in ROUNDS])


def test_viewers_show_every_choices_rounds_as_the_output_of_its_decoding() -> None:
    """Viewers such as Phoenix read a span's output from these two attributes."""
    traced = Traced(level="packed")
    call(traced.app, PROMPT | {"n": 3})
    decodes = [told(span) for span in traced.spans("specdec.decode")]
    shown = [(decode["output.mime_type"], decode["output.value"]) for decode in decodes]
    assert shown == [("text/plain", rounds_table([round_of(7, *facts) for facts in ROUNDS]))] * 3


def test_the_branches_of_a_tree_are_told_apart() -> None:
    """Also the rank of an accepted draft, and what was rejected from what nobody tried."""
    shape = (-1, 0, 0, -1, 3, 3)
    drawn = {
        (): "x././x./.",
        (3,): "x././2x/x",
        (3, 4): "x././2+/.",
        (0, 2): "+x/2/../.",
    }
    for path, drawing in drawn.items():
        part = RoundRecord(6, 0, 500, 6, len(path), 1 + len(path), 0, tree=shape, path=path)
        assert rounds_table([part]).splitlines()[1].split()[-1] == drawing
    wide = RoundRecord(12, 0, 500, 12, 1, 2, 0, tree=(-1,) * 12, path=(10,))
    assert rounds_table([wide]).splitlines()[1].split()[-1] == "x/x/x/x/x/x/x/x/"  # the row draws no more
