"""The peers benchmark on the demo pair in float64, where no text may differ."""

import json

import pytest

from benchmarks import peers
from benchmarks.peers import System

PAIR = [
    "--target",
    "models/demo/target",
    "--draft",
    "models/demo/draft",
    "--dtype",
    "float64",
    "--threads",
    "1",
    "--json",
]


def test_ratios_pair_equal_k_and_show_the_spread() -> None:
    ours = [
        System("ours", k, lambda prompt: [], seconds) for k, seconds in ((0, [1.0, 1.0, 2.0]), (4, [0.5, 0.5, 0.5]))
    ]
    theirs = [System("transformers assisted", 4, lambda prompt: [], [2.0, 1.0, 1.5])]
    (row,) = peers.ratio_rows(ours, theirs, emitted=100)
    assert (row["k"], row["ours/theirs"], row["lowest"], row["highest"]) == ("4", 3.0, 2.0, 4.0)
    assert row["our tok/s"] == 200.0


def test_a_system_that_stops_early_is_refused() -> None:
    system = System("short", 0, lambda prompt: [1, 2])
    with pytest.raises(RuntimeError, match="emitted 2 tokens, not 3"):
        peers.run_repeat([system], [[5]], 3)


def test_every_system_agrees_in_float64(capsys: pytest.CaptureFixture[str]) -> None:
    peers.main([*PAIR, "--spec=3", "--max-tokens=10", "--prompts-count=2", "--repeats=1"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(r["peer"], r["k"]) for r in report["results"]] == [
        ("transformers plain", "off"),
        ("transformers assisted", "3"),
        ("transformers lookup", "3"),
    ]
    assert {(r["system"], r["k"]): r["agree"] for r in report["agreement"]} == {
        ("ours", "off"): 1.0,
        ("ours", "3"): 1.0,
        ("transformers assisted", "3"): 1.0,
        ("transformers lookup", "3"): 1.0,
    }


def test_peers_compares_greedy_text_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.main([*PAIR, "--temperature", "0.5"])
    assert "temperature must be 0" in capsys.readouterr().err
