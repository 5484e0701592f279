"""What a run derives from the engine's records, against an engine that replays a script."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from benchmarks.measure import Run, timed_run
from deployments.engine.types import RequestRecord, SamplingParams, StepStats


@dataclass
class Scripted:
    token_ids: list[int]
    record: RequestRecord


def record(drafted: list[int], accepted: list[int], emitted: list[int]) -> RequestRecord:
    return RequestRecord("r", 0, 3, 4, 0.0, drafted=drafted, accepted=accepted, emitted=emitted)


def round_step(draft_us: int, draft_steps: int, target_us: int, step_us: int, prefill: int = 0) -> StepStats:
    """A step whose proposing and scoring took ten microseconds more than their forwards."""
    return StepStats(
        0, 2, prefill, 8, 4, 6, draft_us + 10, draft_steps, target_us + 10, target_us, draft_us, step_us, 2, 0
    )


class ScriptedEngine:
    """Emits `length` tokens per prompt, whatever is asked for."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.steps: list[StepStats] = []
        self.calls: list[object] = []

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        k: int | Sequence[int | None] | None = None,
    ) -> list[Scripted]:
        self.calls.append(k)
        self.steps = [round_step(0, 0, 900, 999, prefill=9), round_step(500, 4, 900, 1500)]
        self.steps += [round_step(400, 4, 1000, 1540), round_step(600, 4, 1000, 1760)]
        return [Scripted([1] * self.length, record([0, 4, 4], [0, 4, 1], [1, 5, 2])) for _ in prompts]


def test_run_derives_its_figures_from_settled_decode_steps() -> None:
    engine = ScriptedEngine(8)
    run = timed_run(engine, [[1, 2, 3], [4, 5, 6]], SamplingParams(max_tokens=8), 4)
    assert engine.calls == [4]
    assert run.alpha == 5 / 6
    assert run.tokens_per_round == 3.5  # (5 + 2) / 2; the plain round is not speculative
    assert run.draft_step_s == pytest.approx(125e-6)  # of the last two steps: the one after the prompt is left out
    assert run.target_s == pytest.approx(1000e-6)
    assert run.overhead == pytest.approx(3300 / 3000)
    assert run.decode_tokens_per_s == pytest.approx(12 / 3300e-6)


def test_tokens_per_s_counts_all_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10.0, 12.0])
    monkeypatch.setattr("benchmarks.measure.time.perf_counter", lambda: next(ticks))
    assert timed_run(ScriptedEngine(8), [[1], [2]], SamplingParams(max_tokens=8), 4).tokens_per_s == 8.0


def test_a_plain_run_has_no_draft_figures() -> None:
    steps = [round_step(0, 0, 900, 999)] * 2
    run = Run(1.0, [[1]], [record([0], [0], [1])], steps)
    assert (run.alpha, run.tokens_per_round, run.draft_step_s) == (None, None, None)


def test_outputs_of_another_length_are_refused() -> None:
    with pytest.raises(RuntimeError, match="7 were asked for"):
        timed_run(ScriptedEngine(8), [[1]], SamplingParams(max_tokens=7), 4)
