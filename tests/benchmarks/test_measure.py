"""What a run derives from the engine's records, against an engine that replays a script."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks.measure import Run, timed_run
from engine.types import RequestRecord, SamplingParams, StepStats
from tests.benchmarks.scripted import record, step


@dataclass
class Scripted:
    token_ids: list[int]
    record: RequestRecord


def round_step(draft_us: int, draft_steps: int, target_us: int, step_us: int, **more: Any) -> StepStats:
    """A step whose proposing and scoring took ten microseconds more than their forwards."""
    whole = {"draft_us": draft_us + 10, "score_us": target_us + 10, "step_us": step_us, "emitted": 6}
    forwards = {"draft_forward_us": draft_us, "draft_steps": draft_steps, "target_forward_us": target_us}
    return step(**({"sequences": 2, "drafted": 8, "accepted": 4} | whole | forwards | more))


class ScriptedEngine:
    """Emits that many tokens per prompt (one number for all, or one each), whatever is asked for."""

    def __init__(self, lengths: int | Sequence[int]) -> None:
        self.lengths = lengths
        self.steps: list[StepStats] = []
        self.asked: list[object] = []
        self.calls: list[object] = []

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        k: int | Sequence[int | None] | None = None,
    ) -> list[Scripted]:
        self.calls.append(k)
        self.asked.append(params)
        self.steps = [round_step(0, 0, 900, 999, prefill_tokens=9), round_step(500, 4, 900, 1500)]
        self.steps += [round_step(400, 4, 1000, 1540), round_step(600, 4, 1000, 1760)]
        lengths = [self.lengths] * len(prompts) if isinstance(self.lengths, int) else self.lengths
        return [Scripted([1] * length, record([0, 4, 4], [0, 4, 1], [1, 5, 2])) for length in lengths]


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


def test_busy_tokens_per_s_goes_on_as_a_full_batch() -> None:
    """The tail counts at the speed of full batches, in which some have finished and nobody takes their places; not the
    gap before in which somebody was late."""
    steps = [round_step(0, 0, 900, 1000, sequences=n) for n in (1, 4, 3, 4, 2, 1)]
    run = Run(1.0, [[1]], [record([0], [0], [1])], steps)
    emitted = [step.emitted for step in steps]
    full = (emitted[1] + emitted[3]) / 2000e-6  # tokens per second
    assert run.busy_tokens_per_s == pytest.approx(sum(emitted) / (4000e-6 + sum(emitted[4:]) / full))


def test_what_is_left_at_the_end_makes_no_run_slower() -> None:
    """Both read a prompt in 5 ms and emit 4 tokens in a ms, one until its last request ends, the other not."""
    prompts = round_step(0, 0, 900, 5000, sequences=4, prefill_tokens=9)
    full, tail = (round_step(0, 0, 900, 1000, sequences=n) for n in (4, 1))
    whole, early = (Run(1.0, [[1]], [record([0], [0], [1])], [prompts, *[full] * n, *[tail] * (9 - n)]) for n in (9, 5))
    assert full.emitted == tail.emitted
    assert early.busy_tokens_per_s == pytest.approx(whole.busy_tokens_per_s)


def test_tokens_per_s_counts_all_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10.0, 12.0])
    monkeypatch.setattr("benchmarks.measure.time.perf_counter", lambda: next(ticks))
    assert timed_run(ScriptedEngine(8), [[1], [2]], SamplingParams(max_tokens=8), 4).tokens_per_s == 8.0


def test_a_plain_run_has_no_draft_figures() -> None:
    steps = [round_step(0, 0, 900, 999)] * 2
    run = Run(1.0, [[1]], [record([0], [0], [1])], steps)
    assert (run.alpha, run.tokens_per_round, run.draft_step_s) == (None, None, None)


def chosen(predicted_us: int, step_us: int, **more: Any) -> StepStats:
    """A step in which k was chosen, with four tokens expected and five emitted."""
    facts = {"emitted": 5, "predicted_tokens": 4.0, "decoding": 1, "policy_us": 30}
    return step(predicted_us=predicted_us, step_us=step_us, **(facts | more))


def test_predictions_are_compared_where_k_was_chosen_and_no_prompt_was_read() -> None:
    counted = [chosen(900, 1000), chosen(1200, 1000), chosen(1500, 1000)]
    left_out = [chosen(9000, 1000, prefill_tokens=5), step(emitted=99)]
    run = Run(1.0, [[1]], [record([0], [0], [1])], [*counted, *left_out])
    assert run.predicted_over_real == pytest.approx((1.2, 0.8))
    assert run.time_error == pytest.approx(0.2)
    assert run.policy_s == pytest.approx(30e-6)


def test_without_a_choice_there_is_no_prediction() -> None:
    run = Run(1.0, [[1]], [record([0, 4], [0, 2], [1, 3])], [step()])
    assert (run.predicted_over_real, run.time_error, run.policy_s, run.mean_k) == (None, None, 0.0, None)
    assert run.reasons == {}


def test_k_and_its_reasons_are_of_rounds_in_which_it_was_chosen() -> None:
    """The round that ends a prompt chooses nothing, and does not pull the mean down."""
    records = [
        record([0, 4, 0], [0, 2, 0], [1, 3, 1], "acceptance"),
        record([0, 8], [0, 2], [1, 3], "cap"),
    ]
    run = Run(1.0, [[1], [1]], records, [step()])
    assert run.mean_k == 4.0
    assert run.reasons == {"acceptance": 2, "cap": 1}


def test_outputs_of_another_length_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"have \[8\] tokens, not \[7\]"):
        timed_run(ScriptedEngine(8), [[1]], SamplingParams(max_tokens=7), 4)


def test_each_prompt_may_have_its_own_length() -> None:
    engine, params = ScriptedEngine([3, 8]), [SamplingParams(max_tokens=n) for n in (3, 8)]
    assert [len(tokens) for tokens in timed_run(engine, [[1], [2]], params, 4).outputs] == [3, 8]
    assert engine.asked == [params]


@pytest.mark.parametrize("asked", [(8, 3), (3, 3), (3, 8, 8)])
def test_each_length_is_held_against_its_own_prompt(asked: Sequence[int]) -> None:
    params = [SamplingParams(max_tokens=n) for n in asked]
    with pytest.raises(RuntimeError, match="outputs have"):
        timed_run(ScriptedEngine([3, 8]), [[1], [2]], params, 4)
