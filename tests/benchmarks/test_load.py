"""The load benchmark: its stages and sums on scripted times, a closed loop on a scripted engine, and the demo pair."""

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import load
from benchmarks.load import LoadVariant, PlannedRequest
from benchmarks.stepping import DrivenRequest, greedy
from tests.benchmarks.scripted import record

# The demo pair repeats its own text, as half of the requests must.
PAIR = ["--target", "models/demo/target", "--draft", "models/demo/draft", "--threads=1", "--json"]


def ask(copies: bool = True) -> PlannedRequest:
    return PlannedRequest([1, 2], greedy(4), copies)


def test_half_of_every_stage_copies() -> None:
    asks = load._alternate([[1]], [[2], [3]], 8)
    stages = load.make_stages(asks, [1, 4])
    assert [len(stage) for stage in stages] == [load.MIN_REQUESTS, 8]
    flat = [a for stage in stages for a in stage]
    assert [a.copies for a in flat] == [True, False] * 6
    assert [a.prompt for a in flat[:4]] == [[1], [2], [1], [3]]
    free = [a.params for a in flat if not a.copies]
    assert {p.temperature for p in free} == {1.0}
    assert len({p.seed for p in free}) == len(free)  # the same prompt again is another text


@dataclass
class ScriptedDriver:
    """Every request takes as many steps as it has tokens to emit."""

    running: dict[str, tuple[DrivenRequest, int]] = field(default_factory=dict)
    most: int = 0
    asked: list[tuple[int | None, object]] = field(default_factory=list)

    def submit(self, prompt: object, params: Any, k: int | None, *, drafter: object) -> DrivenRequest:
        self.asked.append((k, drafter))
        told = DrivenRequest(str(len(self.asked)), 0.0)
        self.running[told.request_id] = told, params.max_tokens
        self.most = max(self.most, len(self.running))
        return told

    def step(self) -> None:
        for name, (told, left) in list(self.running.items()):
            told.token_ids.append(7)
            self.running[name] = told, left - 1
            if left == 1:
                told.ended = record([0], [0], [1])
                del self.running[name]


@pytest.mark.parametrize("k", [0, None])
def test_a_stage_keeps_its_places_filled(k: int | None) -> None:
    driver = ScriptedDriver()
    lengths = [1, 5, 2, 2, 3]
    asks = [PlannedRequest([1], greedy(length), copies=True) for length in lengths]
    seconds, told = load.run_stage(driver, asks, 2, k)  # type: ignore[arg-type]
    assert seconds >= 0
    assert [len(each.token_ids) for each in told] == lengths
    assert driver.most == 2
    assert driver.asked == [(k, "cascade")] * 5


def variant(name: str, spec: Any, *stages: list[float]) -> LoadVariant:
    made = LoadVariant(name, spec)
    for place, seconds in enumerate(stages):
        made.seconds[place].extend(seconds)
    for copies in (True, False):
        drafted = 0 if spec == 0 else 8 if copies else 2
        told = DrivenRequest("r", 0.0)
        told.ended = record([0, drafted], [0, drafted // 2], [1, drafted // 2 + 1], "policy")
        made.requests[copies].append(told)
    return made


def test_rates_are_of_all_stages_together() -> None:
    """Half the time in a stage of 1 s and 9 s in the other: 10 over 9.5, against k = 4 which takes 8 s and 4 s."""
    variants = [
        variant("off", 0, [1.0] * 4, [9.0] * 4),
        variant("4", 4, [4.0] * 4, [4.0] * 4),
        variant("goodput", "goodput", [0.5] * 4, [9.0] * 4),
        variant("off again", 0, [1.0] * 4, [9.0] * 4),
    ]
    rows = {row["spec"]: row for row in load.speed_rows(variants, tokens=100)}
    assert rows["goodput"]["tok/s"] == pytest.approx(100 / 9.5)
    assert rows["goodput"]["over off"] == pytest.approx((10 / 9.5,) * 3)
    assert rows["goodput"]["over best"] == pytest.approx((8 / 9.5,) * 3)
    assert {row["best k"] for row in rows.values()} == {"4"}
    assert rows["off again"]["over off"] == (1, 1, 1)
    assert (rows["goodput"]["copy: k"], rows["goodput"]["free: k"]) == (8.0, 2.0)
    assert (rows["goodput"]["copy: tok/round"], rows["goodput"]["free: tok/round"]) == (5.0, 2.0)
    assert rows["off"]["copy: k"] is None


def test_a_single_repeat_chooses_no_best() -> None:
    rows = load.speed_rows([variant("off", 0, [1.0]), variant("4", 4, [0.5]), variant("off again", 0, [1.0])], 10)
    assert [(row["over off"], row["over best"]) for row in rows] == [((r, r, r), None) for r in (1, 2, 1)]


def test_stages_are_shown_apart() -> None:
    rows = load.stage_rows([variant("off", 0, [1.0, 2.0, 4.0], [8.0] * 3)], [[ask()] * 4, [ask()] * 8], [1, 4])
    assert rows == [
        {"stage": 1, "at once": 1, "requests": 4, "off": 8.0},
        {"stage": 2, "at once": 4, "requests": 8, "off": 4.0},
    ]


def test_text_that_is_never_copied_is_refused() -> None:
    class Fresh(ScriptedDriver):
        """Never emits a token twice."""

        @property
        def engine(self) -> Any:
            return SimpleNamespace(config=SimpleNamespace(max_running=2))

        def generate(self, prompts: list[list[int]], params: Any, k: int) -> list[DrivenRequest]:
            return [DrivenRequest("r", 0.0, token_ids=list(range(100, 100 + params.max_tokens))) for _ in prompts]

    with pytest.raises(ValueError, match="none of its 3 texts"):
        load.plan_requests(Fresh(), [[1], [2], [3]], 32)  # type: ignore[arg-type]


def test_the_benchmark_on_the_demo_pair(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--stages=2", "--max-tokens=9", "--prompts-count=3", "--repeats=2"]
    load.main([*PAIR, *size, "--spec=4,goodput"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["benchmark"] == "load"
    rows = {row["spec"]: row for row in report["results"]}
    assert list(rows) == ["off", "4", "goodput", "off again"]
    assert all(row["tok/s"] > 0 and row["over best"][1] <= row["over best"][2] for row in rows.values())
    assert rows["off"]["copy: tok/round"] is None
    assert rows["4"]["copy: tok/round"] > rows["4"]["free: tok/round"]  # the copy-like ones do copy
    assert [(row["at once"], row["requests"]) for row in report["stages"]] == [(2, 4)]
