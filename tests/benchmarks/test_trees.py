"""Trees against chains: what the probe tells, and that all shapes write the same texts."""

import json

import pytest

from benchmarks import trees
from engine.trees import branching
from engine.types import RoundRecord

SHAPE = branching([2, 1])  # nodes 0 and 2 follow the text, 1 and 3 follow them


def part(*path: int, shape: tuple[int, ...] = SHAPE) -> RoundRecord:
    return RoundRecord(4, 0, 0, 4, len(path), len(path) + 1, 0, tree=shape, path=path)


def test_the_chances_of_siblings() -> None:
    rounds = [[part(), part(0), part(0, 1), part(2)], [part(2), part(0, shape=(-1,))]]
    first, second, *_ = trees.chances_of(rounds, SHAPE)
    assert first == pytest.approx([2 / 5, 2 / 5])
    assert second == pytest.approx([1 / 4, 1 / 4])


def test_the_report(small_pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    trees.main(
        [*small_pair, "--prompts-count", "4", "--max-tokens", "24", "--rows", "4", "--temperatures", "0.8", "--json"]
    )
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["trees"]
    assert len(row["parents"].split()) == 3
    assert row["best chain"] in (1, 2, 3)
    assert row["grown depth"] == 3
    for name in ("tree", "grown"):
        assert row[f"{name} over chain"] == pytest.approx(row[f"tok/round {name}"] / row["tok/round chain"])
        assert row[f"{name} over chain low"] <= row[f"{name} over chain"] <= row[f"{name} over chain high"]
