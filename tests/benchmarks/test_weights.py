"""The benchmark of weights: all tables on the demo pair, with figures that must hold on any machine."""

import json

import pytest

from benchmarks import weights
from engine.models.int8_products import int8_forms

PAIR = ["--target=models/demo/target", "--draft=models/demo/draft", "--threads=1", "--json"]


def test_the_tables_of_models(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if not int8_forms():  # asked here, because this module's engines find no Numba
        pytest.skip("no library has an exact int8 product for this CPU")
    monkeypatch.setattr(weights, "COPIED_BYTES", 2**20)
    monkeypatch.setattr(weights, "TEMPERATURES", (0.8,))
    monkeypatch.setattr(weights, "KS", (0, 4))
    weights.main([*PAIR, "--prompts-count=3", "--max-tokens=6", "--turns=1", "--parts", *weights.PARTS[:5]])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    passes = {row["weights"]: row for row in report["passes"]}
    # A product that is compiled multiplies weights as the files have them, in 16 bits; any other widens them to 32.
    assert 2 <= passes["float32"]["MB"] / passes["int8"]["MB"] <= 4
    assert passes["int8"]["MB"] < passes["int8, head as is"]["MB"]
    assert passes["float32"]["over float32"] == 1
    assert {row["weights"] for row in report["bits"]} == set(passes)
    assert passes["int4"]["MB"] == passes["int8"]["MB"] / 2
    plain, rounded = (row["bits per token"] for row in report["bits"] if row["weights"] in ("float32", "int8"))
    assert plain != rounded == pytest.approx(plain, rel=0.01)
    assert [(row["T"], row["draft"]) for row in report["acceptance"]] == [(0.8, "as_is"), (0.8, "int8")]
    assert all(0 < row["alpha"] < 1 for row in report["acceptance"])
    assert {(row["deterministic"], row["batch"], row["k"]) for row in report["texts"]} == {
        (deterministic, *run) for deterministic in (False, True) for run in ((1, 4), (8, 0), (8, 4))
    }
    assert not any(row["mismatched"] for row in report["texts"] if row["deterministic"])
    assert [row["rows"] for row in report["adapter"]] == [1, 9]
    assert all(row["adapter over native"] > 0 for row in report["adapter"])


def test_too_little_text_is_refused(tmp_path: object) -> None:
    with pytest.raises(SystemExit, match="the prompts must have 137 tokens together"):
        weights.main([*PAIR, "--prompts-count=1"])


def test_the_load_is_timed_beside_plain_reading() -> None:
    """In this process, whose memory other tests have filled: the table has a process for each load."""
    load = weights.measure_load("models/demo/draft", "models/demo/draft", weights.FORMS[0], threads=None)
    assert min(load.reading_s, load.cached_reading_s) > 0
    assert min(load.seconds, load.cached_seconds) > 0
    assert load.weight_bytes > 2**20
    assert 0 <= load.peak_bytes <= 8 * load.weight_bytes
