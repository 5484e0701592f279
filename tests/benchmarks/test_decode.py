"""The decode benchmark: its ratios on scripted runs, and the whole of it on a small pair."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import decode
from benchmarks.decode import Cell, Decoding
from benchmarks.measure import Run
from benchmarks.stats import predicted_speedup
from engine.types import REASONS, SamplingParams
from tests.benchmarks.scripted import record, step


def run(
    busy_s: float, k: int = 0, accepted: int = 0, draft_us: int = 0, target_us: int = 1000, step_us: int = 0
) -> Run:
    """A run of two sequences whose every round is alike.

    Their prompts are read in what the rounds leave of the busy seconds; a slow step of a single sequence follows.
    """
    emitted, rounds, round_us = accepted + 1, 10, step_us or draft_us + target_us
    told = record([k] * rounds, [accepted] * rounds, [emitted] * rounds, "acceptance")
    drafts = {"drafted": 2 * k, "accepted": 2 * accepted, "draft_us": draft_us}
    forwards = {"draft_steps": k, "draft_forward_us": draft_us, "score_us": target_us, "target_forward_us": target_us}
    chosen = {"decoding": 2, "predicted_us": 500, "predicted_tokens": 4.0 * emitted}
    alike = step(sequences=2, emitted=2 * emitted, step_us=round_us, **drafts, **forwards, **chosen)
    prompts = step(sequences=2, prefill_tokens=6, emitted=0, step_us=round(busy_s * 1e6) - rounds * round_us)
    tail = step(sequences=1, emitted=0, step_us=9_000_000)
    return Run(busy_s + 9, [[1] * emitted * rounds] * 2, [told] * 2, [prompts, *[alike] * rounds, tail])


def cell(*variants: Decoding, batch: int = 1) -> Cell:
    """Turns of even and of odd repeats alternate; `off again` is `off` itself."""
    again = Decoding("off again", 0, variants[0].runs)
    return Cell(batch, [*variants, again], [turn % 2 for turn in range(len(variants[0].runs))])


def test_ratios_are_taken_within_turns() -> None:
    plain = Decoding("off", 0, [run(1.0), run(30.0), run(1.0)])  # a disturbed second turn
    fast = Decoding("4", 4, [run(s, 4, 3, 500, 1500, 2500) for s in (1.0, 30.0, 1.0)])
    off, four, again = decode.speed_rows([cell(plain, fast)])
    assert (four["tok/s"], four["over off"], four["over best"], four["best k"]) == (80.0, (4, 4, 4), (1, 1, 1), "4")
    assert four["decode over off"] == pytest.approx((4 / 2.5,) * 3)
    assert off["over off"] == again["over off"] == (1, 1, 1)
    assert off["over best"] == again["over best"] == (0.25, 0.25, 0.25)


def test_the_best_is_a_fixed_k_and_plain_is_one() -> None:
    plain = Decoding("off", 0, [run(1.0)] * 4)
    slow, quick = Decoding("4", 4, [run(2.0)] * 4), Decoding("goodput", "goodput", [run(0.5)] * 4)
    rows = {row["spec"]: row for row in decode.speed_rows([cell(plain, slow, quick)])}
    assert rows["goodput"]["best k"] == "off"
    assert rows["goodput"]["over best"] == (2, 2, 2)
    assert rows["4"]["over best"] == (0.5, 0.5, 0.5)


def test_a_single_repeat_has_no_other_turns_to_choose_the_best_on() -> None:
    plain, fast = Decoding("off", 0, [run(1.0)] * 2), Decoding("4", 4, [run(0.5)] * 2)
    alone = Cell(1, [plain, fast, Decoding("off again", 0, plain.runs)], [0, 0])
    rows = decode.speed_rows([alone])
    assert [(row["over off"], row["over best"]) for row in rows] == [((r, r, r), None) for r in (1, 2, 1)]
    assert {row["figure"] for row in decode.mean_rows([alone])} == {"over off", "decode over off"}


def test_means_are_over_cells_and_show_the_lowest() -> None:
    cells = [
        cell(
            Decoding("off", 0, [run(1.0)] * 2),
            Decoding("goodput", "goodput", [run(1.0 / speed)] * 2),
            batch=batch,
        )
        for batch, speed in ((1, 4.0), (8, 0.25))
    ]
    means = {(row["spec"], row["figure"]): row for row in decode.mean_rows(cells)}
    goodput = means["goodput", "over off"]
    assert (goodput["geometric mean"], goodput["lowest"], goodput["lowest bound"]) == ((1, 1, 1), 0.25, 0.25)
    assert means["goodput", "over best"]["geometric mean"] == (1, 1, 1)  # where off is the only fixed k
    assert means["off again", "over off"]["cells"] == 2
    assert ("off again", "over best") not in means


def test_rounds_are_explained_by_their_forwards() -> None:
    plain = Decoding("off", 0, [run(1.0)] * 2)
    fast = Decoding("4", 4, [run(1.0, 4, 3, 500, 1500, 2500)] * 2)
    row = decode.round_row(cell(plain, fast), fast)
    assert row["alpha"] == 0.75
    predicted = predicted_speedup(0.75, 4, plain_s=1.0, draft_step_s=0.125, verify_s=1.5)
    assert row["predicted"] == pytest.approx(predicted)
    assert row["achieved/predicted"] == pytest.approx(4 / 2.5 / predicted)
    assert row["overhead"] == pytest.approx(1.25)
    assert (row["draft ms"], row["target ms"]) == (0.125, 1.5)


def test_off_the_cpu_nothing_is_derived_from_the_time_of_a_launch() -> None:
    plain, fast = Decoding("off", 0, [run(1.0)]), Decoding("4", 4, [run(1.0, 4, 3, 500, 1500)])
    on_cpu, on_gpu = (decode.round_row(cell(plain, fast), fast, device) for device in ("cpu", "cuda:0"))
    assert on_gpu.keys() == on_cpu.keys()
    assert None not in on_cpu.values()
    left_out = {"draft ms", "target ms", "overhead", "predicted", "achieved/predicted"}
    assert {name for name, value in on_gpu.items() if value is None} == left_out


@pytest.mark.parametrize(
    "variant", [Decoding("off", 0, [run(1.0)]), Decoding("goodput", "goodput", [run(1.0, 4, 3, 500)])]
)
def test_what_has_no_one_k_predicts_nothing(variant: Decoding) -> None:
    row = decode.round_row(cell(Decoding("off", 0, [run(1.0)]), variant), variant)
    assert (row["predicted"], row["achieved/predicted"]) == (None, None)


def test_policies_tell_their_k_their_reasons_and_their_errors() -> None:
    chose = Decoding("goodput", "goodput", [run(1.0, 4, 3, 500, 500), run(1.0, 2, 1, 500, 500)])
    row = decode.policy_row(cell(Decoding("off", 0, [run(1.0)] * 2), chose), chose)
    assert (row["mean k"], row["acceptance"], row["load"]) == (3.0, 1.0, 0.0)
    assert (row["seconds pred/real"], row["tokens pred/real"], row["median error"]) == (0.5, 2.0, 0.5)


def test_scaling_is_per_variant_over_the_smallest_batch() -> None:
    one = cell(Decoding("off", 0, [run(1.0)]), Decoding("4", 4, [run(1.0, 4, 3)]))
    eight = cell(Decoding("off", 0, [run(0.25)]), Decoding("4", 4, [run(0.5, 4, 3)]), batch=8)
    rows = decode.scaling([one, eight])
    assert [(r["batch"], r["over batch"], r["spec"], r["throughput ratio"]) for r in rows] == [
        (8, 1, "off", 4.0),
        (8, 1, "4", 2.0),
        (8, 1, "off again", 4.0),
    ]


def test_groups_cover_the_prompts_once() -> None:
    prompts = [[i] for i in range(10)]
    assert [len(group) for group in decode.split(prompts, 2)] == [6, 4]
    assert [prompt for group in decode.split(prompts, 1) for prompt in group] == prompts


def test_turns_are_of_whole_groups() -> None:
    prompts = [[i] for i in range(10)]
    assert decode.whole_groups(prompts, 1) == [prompts[:3], prompts[3:6], prompts[6:9]]
    assert decode.whole_groups(prompts, 8) == [prompts]


def test_lengths_are_spread_evenly_about_what_was_asked_for() -> None:
    params = SamplingParams(temperature=0.5, seed=3, max_tokens=48)
    given = decode.spread(params, 7)
    lengths = [each.max_tokens for each in given]
    assert all(mean(lengths[i : i + 5]) == 48 for i in range(3))
    assert (min(lengths), max(lengths)) == (24, 72)
    assert len({*lengths[:5]}) == 5
    assert {(each.temperature, each.seed) for each in given} == {(0.5, 3)}


def test_the_shortest_text_has_a_token() -> None:
    assert min(each.max_tokens for each in decode.spread(SamplingParams(max_tokens=1), 5)) == 1


def test_a_turn_asks_all_variants_for_the_same_spread_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    order: list[str] = []

    class Choosing:
        def use(self, name: str, spec: object) -> None:
            order.append(name)

    def timed_run(llm: object, group: object, params: Sequence[SamplingParams], k: int | None) -> Run:
        asked.append([each.max_tokens for each in params])
        return run(float(len(asked)))

    monkeypatch.setattr(decode, "timed_run", timed_run)
    nothing: Any = None
    choosing: Any = Choosing()
    variants = decode.make_variants([0, 4])
    runs = decode.run_turn(nothing, choosing, [[1], [2], [3]], SamplingParams(max_tokens=8), variants, 1)
    assert asked == [[8, 4, 10]] * 3
    assert order == ["4", "off again", "off"]
    assert [turn.seconds - 9 for turn in runs] == [3, 1, 2]  # in the order of the variants, whoever began


def test_the_benchmark_on_a_small_pair(
    small_pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "plot.svg"
    size = ["--concurrency=2,1", "--max-tokens=4", "--prompts-count=4", "--repeats=2", "--groups=1"]
    decode.main([*small_pair, "--json", *size, "--spec=goodput,3,off", f"--plot={plot}"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["benchmark"] == "decode"
    assert all(model["name"].endswith(f"/{role}") for role, model in report["models"].items())
    assert report["models"]["target"]["parameters"] > 0
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
