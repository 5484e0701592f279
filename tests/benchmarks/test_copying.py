"""The copying benchmark: what counts as copied, which predicted tokens are wrong; all variants write the same text."""

import json

import pytest

from benchmarks import copying


def test_copied_share() -> None:
    prompt = list(range(20))
    assert copying.copied_share(prompt, prompt[3:15]) == 1
    assert copying.copied_share(prompt, list(range(100, 120))) == 0
    assert copying.copied_share(prompt, [*prompt[:8], 99]) == pytest.approx(1 / 2)


def test_spoiled_replaces_every_tenth_token() -> None:
    output = list(range(50))
    guess = copying.with_wrong_tokens(output, vocab=64, seed=1)
    assert [i for i, (a, b) in enumerate(zip(output, guess, strict=True)) if a != b] == [9, 19, 29, 39, 49]
    assert all(0 <= token < 64 for token in guess)


def test_the_benchmark_on_a_small_pair(small_pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    copying.main(
        [*small_pair, "--dtype=float64", "--prompts-count=1", "--max-tokens=12", "--repeats=1", "--k=4", "--json"]
    )
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {(row["workload"], row["drafter"]): row for row in report["results"]}
    assert {("predict", "prediction"), ("predict", "cascade"), ("fresh", "lookup"), ("fresh", "off again")} <= set(rows)
    assert all(row["same text"] for row in rows.values())  # the drafters act, and change nothing
    assert rows["predict", "prediction"]["tok/round"] > 2
    assert rows["predict", "off"]["rounds with drafts"] == 0
