"""Two drafts merged against each alone: the same texts, and the figures that follow from their rounds."""

import json

import pytest

from benchmarks import merged


def test_the_report(small_pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    second = small_pair[1].replace("--draft", "--second")
    merged.main([*small_pair, second, "--prompts-count", "2", "--max-tokens", "16", "--rows", "4", "--json"])
    greedy, warm = json.loads(capsys.readouterr().out.splitlines()[-1])["merged"]
    assert (greedy["T"], warm["T"]) == (0.0, 0.8)
    for row in (greedy, warm):  # twice the same draft: the same chain
        assert row["tok/round merged"] == row["tok/round first"] == row["tok/round second"]
        assert row["merged over best"] == pytest.approx(row["tok/round merged"] / row["tok/round first"])
