"""The decode benchmark: its ratios on scripted runs, and the whole of it on the demo pair."""

import json

import pytest

from benchmarks import decode
from benchmarks.decode import Variant
from benchmarks.measure import Run
from benchmarks.stats import predicted_speedup
from deployments.engine.types import RequestRecord, StepStats


def run(
    seconds: float, k: int = 0, accepted: int = 0, draft_us: int = 0, target_us: int = 1000, step_us: int = 0
) -> Run:
    """A run of one sequence whose every round is alike, and whose first two steps only read the prompt."""
    emitted, rounds = accepted + 1, 10
    record = RequestRecord("r", 0, 3, k, 0.0)
    record.drafted, record.accepted, record.emitted = [k] * rounds, [accepted] * rounds, [emitted] * rounds
    step_us = step_us or draft_us + target_us
    step = StepStats(0, 1, 0, k, accepted, emitted, draft_us, k, target_us, target_us, draft_us, step_us, 1, 0)
    return Run(seconds, [[1] * emitted * rounds], [record], [step] * rounds)


def test_rows_compare_with_plain_of_the_same_repeat() -> None:
    plain = Variant("off", 0, [run(1.0), run(30.0), run(1.0)])  # a disturbed second repeat
    fast = Variant(
        "4", 4, [run(1.0, 4, 3, 500, 1500, 2500), run(30.0, 4, 3, 500, 1500, 2500), run(1.0, 4, 3, 500, 1500)]
    )
    row = decode.summarise(1, fast, plain)
    assert (row["tok/s"], row["speedup"]) == (40.0, 4.0)
    assert row["decode speedup"] == pytest.approx(4 / 2.5)
    assert row["alpha"] == 0.75
    predicted = predicted_speedup(0.75, 4, plain_s=1.0, draft_step_s=0.125, verify_s=1.5)
    assert row["predicted"] == pytest.approx(predicted)
    assert row["achieved/predicted"] == pytest.approx(4 / 2.5 / predicted)
    assert row["overhead"] == pytest.approx(1.25)


def test_off_the_cpu_nothing_is_derived_from_the_time_of_a_launch() -> None:
    plain, fast = Variant("off", 0, [run(1.0)]), Variant("4", 4, [run(1.0, 4, 3, 500, 1500)])
    on_cpu, on_gpu = (decode.summarise(1, fast, plain, device) for device in ("cpu", "cuda:0"))
    assert on_gpu.keys() == on_cpu.keys()
    assert None not in on_cpu.values()
    left_out = {"draft ms", "target ms", "overhead", "predicted", "achieved/predicted"}
    assert {name for name, value in on_gpu.items() if value is None} == left_out


def test_plain_rows_predict_nothing() -> None:
    plain = Variant("off", 0, [run(1.0)])
    row = decode.summarise(1, Variant("off again", 0, [run(2.0)]), plain)
    assert (row["speedup"], row["predicted"], row["achieved/predicted"]) == (0.5, None, None)


def test_scaling_is_per_variant_over_the_smallest_batch() -> None:
    one = [Variant("off", 0, [run(1.0)]), Variant("4", 4, [run(1.0, 4, 3)])]
    eight = [Variant("off", 0, [run(0.25)]), Variant("4", 4, [run(0.5, 4, 3)])]
    rows = decode.scaling({1: one, 8: eight})
    assert [(r["batch"], r["over batch"], r["spec"], r["throughput ratio"]) for r in rows] == [
        (8, 1, "off", 4.0),
        (8, 1, "4", 2.0),
    ]


def test_groups_cover_the_prompts_once() -> None:
    prompts = [[i] for i in range(10)]
    assert [len(group) for group in decode.split(prompts, 4)] == [8, 2]
    assert [prompt for group in decode.split(prompts, 1) for prompt in group] == prompts


def test_the_benchmark_on_the_demo_pair(capsys: pytest.CaptureFixture[str]) -> None:
    pair = ["--target", "models/demo/target", "--draft", "models/demo/draft", "--threads=1", "--json"]
    decode.main([*pair, "--spec=3,off", "--concurrency=2,1", "--max-tokens=10", "--prompts-count=2", "--repeats=2"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["benchmark"] == "decode"
    assert report["models"]["target"]["parameters"] > report["models"]["draft"]["parameters"] > 0
    assert report["workload"]["prompts"] == 2
    rows = report["results"]
    assert [(r["batch"], r["spec"]) for r in rows] == [(b, s) for b in (1, 2) for s in ("off", "3", "off again")]
    assert all(r["tok/s"] > 0 and r["overhead"] >= 1 for r in rows)
    assert [r["speedup"] for r in rows if r["spec"] == "off"] == [1.0, 1.0]
    assert all(1 <= r["tok/round"] <= 4 and 0 <= r["alpha"] <= 1 for r in rows if r["spec"] == "3")
    assert "repeated_8grams" in report["text"]
