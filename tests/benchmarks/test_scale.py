"""The benchmark of scale: every cell that the memory holds, with contexts as asked for."""

import json

import pytest

from benchmarks import scale

ARGS = ["--target=models/demo/target", "--seconds=0", "--json"]


def test_a_row_for_each_cell_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    scale.main([*ARGS, "--sequences=1,2,4", "--contexts=16,200", "--kv-tokens=600"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["context"], row["sequences"]) for row in report["rows"]] == [
        (16, 1),
        (16, 2),
        (16, 4),
        (200, 1),
        (200, 2),
    ]
    assert all(row["ms"] > 0 for row in report["rows"])
    assert [row["growth"] is None for row in report["rows"]] == [True, False, False, True, False]


def test_ragged_contexts_spread_from_an_eighth_to_all() -> None:
    contexts = scale.contexts_of(8, 800, ragged=True)
    assert sorted(contexts) == [100 + 100 * i for i in range(8)]
    assert contexts != sorted(contexts)
    assert scale.contexts_of(3, 800, ragged=False) == [800, 800, 800]


def test_without_contexts_those_that_the_target_allows_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    scale.main([*ARGS, "--sequences=1"])  # the embedded target has 2,048 positions
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["context"] for row in report["rows"]] == [128, 512, 2046]
