"""The live page's figures of engine steps: sums over the last minutes, in bounded memory."""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from app.fake_engine import FakeEngineClient
from app.main import create_app
from app.page import step_window
from app.page.live import REASON_TEXTS, LivePage
from engine.types import REASONS, EngineStats, RoundRecord, StepStats

BASE = StepStats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


def part(k: int, accepted: int, *, drafted: int | None = None, reason: str = "policy") -> RoundRecord:
    made = k if drafted is None else drafted
    return RoundRecord(k, REASONS.index(reason), 500, made, accepted, accepted + 1, 0 if made else -1)


def step(began: float, parts: Iterable[RoundRecord], step_us: int = 1000, **more: Any) -> StepStats:
    had = tuple(parts)
    sums = {name: sum(getattr(p, name) for p in had) for name in ("drafted", "accepted", "emitted")}
    return replace(BASE, sequences=len(had), began=began, parts=had, step_us=step_us, **sums, **more)


class Played:
    """A LivePage whose clock is set by hand, in a server of its own."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.client = FakeEngineClient()
        self.live = LivePage(self.client, clock=lambda: self.now)
        self.app = create_app(self.client, live_page=self.live)

    def step(self, *steps: StepStats) -> None:
        self.client.stepped(steps)

    @property
    def told(self) -> dict[str, Any]:
        """As a page reads it."""
        now: dict[str, Any] = json.loads(json.dumps(self.live.state()["now"], allow_nan=False))
        return now

    @property
    def series(self) -> dict[str, list[Any]]:
        series: dict[str, list[Any]] = self.live.state()["series"]
        return series


def test_a_server_that_did_nothing_says_so_without_figures() -> None:
    now = Played().told
    assert (now["tokens_per_s"], now["acceptance"], now["speedup"], now["ttft_ms"]) == (0, None, None, None)
    assert (now["positions"], now["decisions"]) == ({"drafted": [], "accepted": []}, {})
    assert now["speculation"]["state"] == "ready"


def test_steps_become_a_series_of_quarter_seconds() -> None:
    played = Played()
    first = step(1000.0, [part(4, 3), part(2, 0)], 1000, draft_us=200, score_us=700)
    played.step(first, step(1000.2, [part(0, 0)], 3000, draft_us=0, score_us=2900), step(1000.5, [part(1, 1)]))
    played.now = 1000.5
    series = played.series
    (t,) = series.pop("t")
    assert series == {
        "steps": [2],
        "emitted": [4 + 1 + 1],
        "rounds": [2],
        "accepted": [3],
        "draft_us": [200],
        "verify_us": [3600],
        "step_us": [4000],
    }, "the quarter that has not ended is left out, and so is one without steps"
    played.now = 1000.75
    assert played.series["t"] == [t, round(t + 0.5, 2)]


def test_steps_that_take_long_are_counted_when_they_end() -> None:
    """The page hears of a step only when it ends; the quarter of a second in which it began is over by then."""
    played = Played()
    for second in range(1000, 1010):
        played.now = second + 1.0
        played.step(step(second, [part(9, 9)], 1_000_000))
    played.now = 1010.3
    assert played.told["tokens_per_s"] == 10.0


def test_a_series_is_dated_by_the_wall_clock() -> None:
    played = Played()
    played.step(step(1000.0, [part(1, 1)]))
    played.now = 1002.0
    assert played.told["t"] - played.series["t"][0] == pytest.approx(2.0, abs=0.02)


def test_tokens_per_second_are_those_of_the_last_two_seconds() -> None:
    played = Played()
    played.step(*(step(990 + i / 4, [part(4, 4)]) for i in range(40)))
    assert played.told["tokens_per_s"] == 8 * 5 / 2
    played.now += 2
    assert played.told["tokens_per_s"] == 0


def test_acceptance_is_counted_by_position() -> None:
    played = Played()
    played.step(step(1000, [part(4, 4), part(4, 1), part(2, 0), part(3, 2, drafted=2), part(0, 0)]))
    now = played.told
    assert now["positions"] == {"drafted": [4, 4, 2, 2], "accepted": [3, 2, 1, 1]}
    assert now["acceptance"] == round(7 / 12, 4)
    assert now["accepted_per_round"] == 7 / 4


def test_a_position_of_a_tree_is_a_depth() -> None:
    played = Played()
    played.step(step(1000, [part(3, 1)._replace(tree=(-1, 0, -1), path=(2,))]))
    assert played.told["positions"] == {"drafted": [1, 1], "accepted": [1, 0]}


def test_k_and_reasons_are_told_by_batch_size() -> None:
    played = Played()
    nobody = RoundRecord(0, -1, 500, 0, 0, 1, -1)
    played.step(step(1000, [part(4, 0)]), step(1000, [part(1, 0), part(2, 0, reason="load"), nobody]))
    now = played.told
    assert (now["batches"]["batch"], now["batches"]["k"]) == ([1, 3], [4, 1.5])
    assert now["decisions"] == {"policy": 2, "load": 1}


def speedups(played: Played) -> dict[int, float | None]:
    batches = played.told["batches"]
    return dict(zip(batches["batch"], batches["speedup"], strict=True))


def test_the_speedup_is_the_time_without_drafts_over_the_time_it_took() -> None:
    played = Played()
    played.step(step(1000, [part(0, 0)], 1000, plain_us=1000))
    assert speedups(played) == {1: 1.0}
    played.step(step(1000, [part(4, 3)], 2000, plain_us=4000), step(1000, [part(4, 3)] * 2, 9000, plain_us=4500))
    assert speedups(played) == {1: round(5 / 3, 3), 2: 0.5}
    assert played.told["speedup"] == round(9500 / 12_000, 3)


def test_the_speedup_is_unknown_without_a_step_that_only_decodes() -> None:
    played = Played()
    played.step(step(1000, [part(4, 3)], 2000, prefill_tokens=64))
    assert (speedups(played), played.told["speedup"]) == ({1: None}, None)


def test_a_step_that_reads_prompts_tells_nothing_of_the_speedup() -> None:
    played = Played()
    played.step(step(1000, [part(4, 3)], 2000, plain_us=4000))
    played.step(step(1000, [part(4, 3)], 99_000, prefill_tokens=64), step(1000, [part(0, 0)], 99_000, prefill_tokens=9))
    assert (speedups(played), played.told["speedup"]) == ({1: 2.0}, 2.0)


def test_drafts_that_fail_lower_the_speedup() -> None:
    played = Played()
    played.step(step(1000, [part(0, 0)], 5000, plain_us=1000, draft_faults=1))
    assert played.told["speedup"] == 0.2


def test_faults_of_the_drafter_are_counted() -> None:
    played = Played()
    played.step(step(1000, [part(4, 0)], draft_faults=2), step(1000, [part(4, 0)]), step(1000, [], draft_faults=1))
    assert played.told["faults"] == 3


def test_what_left_the_window_is_no_longer_told() -> None:
    played = Played()
    played.step(step(1000, [part(4, 3), part(4, 4)]))
    played.now = 1200
    played.step(step(1200, [part(2, 1)]))
    assert played.told["positions"]["drafted"] == [3, 3, 2, 2]
    played.now = 1300
    assert played.told["positions"]["drafted"] == [1, 1], "the first left"
    played.now = 1500
    assert played.told["positions"]["drafted"] == [], "the last left too"
    played.step(step(1500, [part(1, 1)]))
    assert played.told["positions"] == {"drafted": [1], "accepted": [1]}


def test_the_window_is_bounded() -> None:
    played = Played()
    for i in range(2 * step_window.BINS):
        played.step(step(1000 + i / 4, [part(i % 5, 0)]))
    played.now = 1000 + 2 * step_window.BINS / 4
    assert len(played.series["t"]) == step_window.BINS - 1
    assert sum(played.told["batches"]["rounds"]) == step_window.BINS - 1


def test_steps_without_a_time_are_counted_when_they_are_told() -> None:
    played = Played()
    played.step(replace(step(0.0, [part(1, 1)])))
    played.now += 0.25
    assert played.series["emitted"] == [2]


@pytest.mark.parametrize(
    ("parts", "state", "why"),
    [
        ([part(4, 0)], "on", ""),
        ([part(0, 0, reason="load")] * 2 + [part(0, 0, reason="acceptance")], "paused", "beside"),
        ([part(0, 0, reason="user")], "paused", "asked for no drafts"),
        ([part(4, 0, drafted=0)], "paused", "offer nothing"),
        ([part(4, 0, reason="probe"), part(0, 0, reason="acceptance")], "paused", "rejected too often"),
    ],
)
def test_speculation_says_why_it_is_off(parts: list[RoundRecord], state: str, why: str) -> None:
    played = Played()
    played.step(step(1000, [part(4, 0)]), step(1020, parts))
    played.now = 1021
    said = played.told["speculation"]
    assert (said["state"], why in said["why"], bool(said["why"])) == (state, True, bool(why))


@pytest.mark.parametrize(
    ("card", "state"),
    [
        ({"policy": "off"}, "off"),
        ({"drafters": (), "drafter": None}, "none"),
        ({"drafter": None}, "off"),
        ({}, "ready"),
    ],
)
def test_a_server_that_cannot_draft_by_itself_says_why(card: dict[str, Any], state: str) -> None:
    played = Played()
    played.client.model = replace(played.client.model, **card)
    said = played.told["speculation"]
    assert said["state"] == state
    assert said["why"]
    assert said["unasked"] == (state == "ready")


def test_every_reason_has_words() -> None:
    assert tuple(REASON_TEXTS) == REASONS


def test_load_and_health_are_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played()
    stats = EngineStats(False, "no step for 12 s", 9, 3, 2, 8, 5, 12.0, "goodput", 0.25)
    monkeypatch.setattr(played.client, "stats", lambda: stats)
    now = played.told
    assert (now["healthy"], now["reason"]) == (False, "no step for 12 s")
    assert (now["running"], now["waiting"], now["max_running"], now["kv_used"]) == (3, 2, 8, 0.25)
