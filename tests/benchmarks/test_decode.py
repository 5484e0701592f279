"""The decode benchmark: its ratios on scripted runs, and the whole of it on the demo pair."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import decode
from benchmarks.decode import Cell, Variant
from benchmarks.measure import Run
from benchmarks.stats import predicted_speedup
from policies.reasons import REASONS
from tests.benchmarks.scripted import record, step

PAIR = ["--target", "models/demo/target", "--draft", "models/demo/draft", "--threads=1", "--json"]


def run(
    seconds: float, k: int = 0, accepted: int = 0, draft_us: int = 0, target_us: int = 1000, step_us: int = 0
) -> Run:
    """A run of one sequence whose every round is alike, and whose first two steps only read the prompt."""
    emitted, rounds = accepted + 1, 10
    told = record([k] * rounds, [accepted] * rounds, [emitted] * rounds, "acceptance")
    drafts = {"drafted": k, "accepted": accepted, "draft_us": draft_us, "draft_steps": k, "draft_forward_us": draft_us}
    target = {"score_us": target_us, "target_forward_us": target_us, "step_us": step_us or draft_us + target_us}
    chosen = {"decoding": 1, "predicted_us": 500, "predicted_tokens": 2.0 * emitted}
    return Run(
        seconds, [[1] * emitted * rounds], [told], [step(emitted=emitted, **drafts, **target, **chosen)] * rounds
    )


def cell(*variants: Variant, batch: int = 1) -> Cell:
    """Turns of even and of odd repeats alternate; `off again` is `off` itself."""
    again = Variant("off again", 0, variants[0].runs)
    return Cell(batch, [*variants, again], [turn % 2 for turn in range(len(variants[0].runs))])


def test_ratios_are_taken_within_turns() -> None:
    plain = Variant("off", 0, [run(1.0), run(30.0), run(1.0)])  # a disturbed second turn
    fast = Variant("4", 4, [run(s, 4, 3, 500, 1500, 2500) for s in (1.0, 30.0, 1.0)])
    off, four, again = decode.speed_rows([cell(plain, fast)])
    assert (four["tok/s"], four["over off"], four["over best"], four["best k"]) == (40.0, (4, 4, 4), (1, 1, 1), "4")
    assert four["decode over off"] == pytest.approx((4 / 2.5,) * 3)
    assert off["over off"] == again["over off"] == (1, 1, 1)
    assert off["over best"] == again["over best"] == (0.25, 0.25, 0.25)


def test_the_best_is_a_fixed_k_and_plain_is_one() -> None:
    plain = Variant("off", 0, [run(1.0)] * 4)
    slow, quick = Variant("4", 4, [run(2.0)] * 4), Variant("goodput", "goodput", [run(0.5)] * 4)
    rows = {row["spec"]: row for row in decode.speed_rows([cell(plain, slow, quick)])}
    assert rows["goodput"]["best k"] == "off"
    assert rows["goodput"]["over best"] == (2, 2, 2)
    assert rows["4"]["over best"] == (0.5, 0.5, 0.5)


def test_a_single_repeat_has_no_other_turns_to_choose_the_best_on() -> None:
    plain, fast = Variant("off", 0, [run(1.0)] * 2), Variant("4", 4, [run(0.5)] * 2)
    alone = Cell(1, [plain, fast, Variant("off again", 0, plain.runs)], [0, 0])
    rows = decode.speed_rows([alone])
    assert [(row["over off"], row["over best"]) for row in rows] == [((r, r, r), None) for r in (1, 2, 1)]
    assert {row["figure"] for row in decode.mean_rows([alone])} == {"over off", "decode over off"}


def test_means_are_over_cells_and_show_the_lowest() -> None:
    cells = [
        cell(Variant("off", 0, [run(1.0)] * 2), Variant("goodput", "goodput", [run(1.0 / speed)] * 2), batch=batch)
        for batch, speed in ((1, 4.0), (8, 0.25))
    ]
    means = {(row["spec"], row["figure"]): row for row in decode.mean_rows(cells)}
    goodput = means["goodput", "over off"]
    assert (goodput["geometric mean"], goodput["lowest"], goodput["lowest bound"]) == ((1, 1, 1), 0.25, 0.25)
    assert means["goodput", "over best"]["geometric mean"] == (1, 1, 1)  # where off is the only fixed k
    assert means["off again", "over off"]["cells"] == 2
    assert ("off again", "over best") not in means


def test_rounds_are_explained_by_their_forwards() -> None:
    plain = Variant("off", 0, [run(1.0)] * 2)
    fast = Variant("4", 4, [run(1.0, 4, 3, 500, 1500, 2500)] * 2)
    row = decode.round_row(cell(plain, fast), fast)
    assert row["alpha"] == 0.75
    predicted = predicted_speedup(0.75, 4, plain_s=1.0, draft_step_s=0.125, verify_s=1.5)
    assert row["predicted"] == pytest.approx(predicted)
    assert row["achieved/predicted"] == pytest.approx(4 / 2.5 / predicted)
    assert row["overhead"] == pytest.approx(1.25)
    assert (row["draft ms"], row["target ms"]) == (0.125, 1.5)


def test_off_the_cpu_nothing_is_derived_from_the_time_of_a_launch() -> None:
    plain, fast = Variant("off", 0, [run(1.0)]), Variant("4", 4, [run(1.0, 4, 3, 500, 1500)])
    on_cpu, on_gpu = (decode.round_row(cell(plain, fast), fast, device) for device in ("cpu", "cuda:0"))
    assert on_gpu.keys() == on_cpu.keys()
    assert None not in on_cpu.values()
    left_out = {"draft ms", "target ms", "overhead", "predicted", "achieved/predicted"}
    assert {name for name, value in on_gpu.items() if value is None} == left_out


@pytest.mark.parametrize(
    "variant", [Variant("off", 0, [run(1.0)]), Variant("goodput", "goodput", [run(1.0, 4, 3, 500)])]
)
def test_what_has_no_one_k_predicts_nothing(variant: Variant) -> None:
    row = decode.round_row(cell(Variant("off", 0, [run(1.0)]), variant), variant)
    assert (row["predicted"], row["achieved/predicted"]) == (None, None)


def test_policies_tell_their_k_their_reasons_and_their_errors() -> None:
    chose = Variant("goodput", "goodput", [run(1.0, 4, 3, 500, 500), run(1.0, 2, 1, 500, 500)])
    row = decode.policy_row(cell(Variant("off", 0, [run(1.0)] * 2), chose), chose)
    assert (row["mean k"], row["acceptance"], row["load"]) == (3.0, 1.0, 0.0)
    assert (row["seconds pred/real"], row["tokens pred/real"], row["median error"]) == (0.5, 2.0, 0.5)


def test_scaling_is_per_variant_over_the_smallest_batch() -> None:
    one = cell(Variant("off", 0, [run(1.0)]), Variant("4", 4, [run(1.0, 4, 3)]))
    eight = cell(Variant("off", 0, [run(0.25)]), Variant("4", 4, [run(0.5, 4, 3)]), batch=8)
    rows = decode.scaling([one, eight])
    assert [(r["batch"], r["over batch"], r["spec"], r["throughput ratio"]) for r in rows] == [
        (8, 1, "off", 4.0),
        (8, 1, "4", 2.0),
        (8, 1, "off again", 4.0),
    ]


def test_groups_cover_the_prompts_once() -> None:
    prompts = [[i] for i in range(10)]
    assert [len(group) for group in decode.split(prompts, 4)] == [8, 2]
    assert [prompt for group in decode.split(prompts, 1) for prompt in group] == prompts


def test_turns_are_of_whole_groups() -> None:
    prompts = [[i] for i in range(10)]
    assert [len(group) for group in decode.whole_groups(prompts, 2)] == [4, 4]
    assert decode.whole_groups(prompts, 8) == [prompts]


def test_the_benchmark_on_the_demo_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.svg"
    size = ["--concurrency=2,1", "--max-tokens=12", "--prompts-count=4", "--repeats=2", "--groups=1"]
    decode.main([*PAIR, *size, "--spec=goodput,3,off", f"--plot={plot}"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["benchmark"] == "decode"
    assert report["models"]["target"]["parameters"] > report["models"]["draft"]["parameters"] > 0
    assert report["workload"]["prompts"] == 4
    rows = report["results"]
    names = ["off", "3", "goodput", "off again"]
    assert [(r["batch"], r["spec"]) for r in rows] == [(b, s) for b in (1, 2) for s in names]
    assert all(r["tok/s"] > 0 and r["over best"][1] <= r["over best"][0] <= r["over best"][2] for r in rows)
    assert [r["over off"] for r in rows if r["spec"] == "off"] == [[1.0] * 3] * 2
    rounds = {(r["batch"], r["spec"]): r for r in report["rounds"]}
    assert all(1 <= rounds[batch, "3"]["tok/round"] <= 4 and 0 <= rounds[batch, "3"]["alpha"] <= 1 for batch in (1, 2))
    assert all(rounds[batch, name]["alpha"] is None for batch in (1, 2) for name in ("off", "off again"))
    for row in report["policies"]:
        assert row["spec"] == "goodput"
        assert 0 <= row["mean k"] <= 16
        assert sum(row[reason] for reason in REASONS) == pytest.approx(1)
        assert row["seconds pred/real"] > 0
    assert len(report["policies"]) == 2
    assert {row["figure"] for row in report["means"]} == {
        "over off",
        "over best",
        "decode over off",
        "decode over best",
    }
    assert "repeated_8grams" in report["text"]
    assert len(ElementTree.parse(plot).findall("{http://www.w3.org/2000/svg}g")) == 3  # all but off
