"""The identity benchmark: its counts, and a pair in float64, where nothing may differ."""

import json
from functools import cache, partial

import pytest

from benchmarks import identity, reference
from benchmarks.common import Spec


def test_no_mismatch_in_float64(small_pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    identity.main([*small_pair, "--dtype=float64", "--json", "--max-tokens=5", "--prompts-count=2"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = report["results"]
    assert {(r["T"], r["mode"], r["k"]) for r in rows} == {
        (t, mode, k)
        for t in (0.0, 0.8)
        for mode in ("alone", "batch")
        for k in (0, 1, 4, 8, "goodput")
        if (mode, k) != ("alone", 0)
    }
    assert all(r["requests"] == 2 and r["mismatched"] == 0 for r in rows)


def test_compare_counts_requests_and_tokens_up_to_the_first_difference() -> None:
    row = identity.compare([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 9, 6]])
    assert (row["mismatched"], row["mismatch rate"], row["tokens compared"]) == (1, 0.5, 5)
    assert row["per million"] == pytest.approx(200_000)


def test_a_changed_text_is_found_with_its_margin() -> None:
    """Outputs of which one greedy text and one sampled text were changed in one token."""
    prompts, base = [[23, 871, 15], [402, 77]], [[5, 6, 7], [8, 9, 10]]
    changed = [[5, 6, 7], [8, 3000, 10]]
    outputs: dict[tuple[float, str, Spec], list[list[int]]]
    outputs = {(0.0, "alone", 0): base, (0.0, "batch", 4): changed, (0.8, "alone", 0): base, (0.8, "alone", 4): changed}
    greedy, sampled = identity.rows(
        outputs, prompts, cache(partial(reference.load, "models/demo/target", "float64", "cpu"))
    )
    assert (greedy["T"], greedy["mode"], greedy["k"], greedy["mismatched"]) == (0.0, "batch", 4, 1)
    assert float(str(greedy["widest top-2 gap"])) > 0
    assert (sampled["T"], sampled["mismatched"], sampled["widest top-2 gap"]) == (0.8, 1, None)
