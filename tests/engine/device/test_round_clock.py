"""Times of rounds on a device that works while the host goes on: they are the device's, and cost no further wait."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.profiling import round_profile
from engine.profiling.round_profile import profile
from engine.types import Request, SamplingParams
from policies.observation import Drafted, Timing
from tests.engine.driving import Drive, drive, load, model_drafter
from tests.engine.late_device import LateDevice
from tests.engine.pairs import Pair
from tests.kv import without_prefixes

TARGET_US, DRAFT_US = 30_000, 4_000  # of a forward on the device
K = 3
REQUESTS = [
    Request("short", (5, 6, 7), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)),
    Request("drawn", tuple(range(5, 45)), SamplingParams(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True)),
]


def late_engine(
    pair: Pair, patch: pytest.MonkeyPatch, *, events: bool = True, chunk: int = 512
) -> tuple[Engine, LateDevice]:
    config = {"max_running": 2, "max_spec_length": K, "max_step_tokens": chunk, **without_prefixes()}
    engine, device = load(pair, **config), LateDevice()
    device.install(patch, events=events)
    device.run(engine.target, 1000 * TARGET_US)
    device.run(model_drafter(engine).runner, 1000 * DRAFT_US)
    return engine, device


def check_times(run: Drive) -> None:
    """Each part of each round took as long as the device worked for it."""
    assert sum(step.draft_steps for step in run.steps) > K
    for step in run.steps:
        assert step.draft_us == step.draft_forward_us == step.draft_steps * DRAFT_US
        assert step.score_us == step.target_forward_us == TARGET_US


def test_rounds_take_the_time_of_the_device(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, device = late_engine(pair, monkeypatch)
    timings = list[Timing]()
    observe = engine.speculator.control.observe

    def spy(timing: Timing, drafted: Seq[Drafted], idle: Iterable[int]) -> None:
        timings.append(timing)
        observe(timing, drafted, idle)

    monkeypatch.setattr(engine.speculator.control, "observe", spy)
    run = drive(engine, {0: REQUESTS[:1], 2: REQUESTS[1:]})
    check_times(run)
    assert 1000 * sum(step.draft_us + step.score_us for step in run.steps) == device.now_ns == device.idle_ns
    assert [round(1e6 * t.draft_s) for t in timings] == [t.forwards * DRAFT_US for t in timings]
    assert device.waits == 0  # beside the download of each round
    assert device.downloads == len(run.steps)
    assert 1e6 * engine.target.pass_s(1) == TARGET_US


def test_negative_control_the_clock_of_the_host(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes drafts whose work is only queued for free."""
    run = drive(late_engine(pair, monkeypatch, events=False)[0], REQUESTS)
    assert [step.draft_us for step in run.steps] == [0] * len(run.steps)
    with pytest.raises(AssertionError):
        check_times(run)


def test_a_round_without_a_download_waits_for_its_own_work(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, device = late_engine(pair, monkeypatch, chunk=16)
    run = drive(engine, REQUESTS[1:])
    assert [step.drafted > 0 or step.emitted > 0 for step in run.steps[:3]] == [False, False, True]
    check_times(run)
    assert (device.waits, device.downloads) == (2, len(run.steps) - 2)


def test_negative_control_nobody_waits(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, device = late_engine(pair, monkeypatch, chunk=16)
    monkeypatch.setattr(device, "synchronize", lambda: None)
    with pytest.raises((RuntimeError, AssertionError)):
        check_times(drive(engine, REQUESTS[1:]))


@pytest.mark.parametrize("waits", [True, False])
def test_a_profile_measures_the_device(
    pair: Pair, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """waits: False for the control. Then the first rounds also take the time in which the models read their texts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(round_profile, "SWEEPS", 1)
    monkeypatch.setattr(round_profile, "RUNS", 1)
    monkeypatch.setattr(round_profile, "MOST_RUNS", 1)
    engine, device = late_engine(pair, monkeypatch)
    monkeypatch.setattr(round_profile, "perf_counter", lambda: device.now_ns / 1e9)
    if not waits:
        monkeypatch.setattr(round_profile, "wait", lambda of: None)
        monkeypatch.setattr(type(engine.target), "read_forwards", lambda self: 0)
    budget_s = 8.5 * (TARGET_US + DRAFT_US) / 1e6
    timings = profile(engine.target, engine.drafter, 2, 1, budget_s)
    exact = [(round(1e6 * t.draft_s), round(1e6 * t.score_s)) == (t.forwards * DRAFT_US, TARGET_US) for t in timings]
    assert timings
    assert all(exact) == waits
