"""What a request's record says of its rounds: when they were, how long they took, and beside whom."""

from dataclasses import replace
from itertools import pairwise

import pytest

from engine.types import Request, SamplingParams
from tests.engine.driving import Drive, check_steps, drive, load
from tests.engine.pairs import Pair

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def run(pair: Pair, **changes: object) -> Drive:
    """Two places for three requests, the second of which has a long prompt."""
    engine = load(pair, max_running=2, **changes)
    prompts = (tuple(range(5, 9)), tuple(range(5, 45)), tuple(range(9, 14)))
    return drive(engine, [Request(f"r{n}", prompt, PARAMS) for n, prompt in enumerate(prompts)])


def test_rounds_are_timed_within_their_request(pair: Pair) -> None:
    done = run(pair)
    steps = {stats.step: stats for stats in done.steps}
    for told in done.received.values():
        record = told.record
        assert record is not None
        assert record.admitted is not None
        assert record.finished is not None
        assert record.column("began_us")[0] <= 1e6 * (record.finished - record.arrived)
        assert all(before < after for before, after in pairwise(record.column("began_us")))
        for part in record.rounds:
            stats = steps[part.step]
            assert (part.draft_us, part.score_us, part.step_us) == (stats.draft_us, stats.score_us, stats.step_us)
            assert part.step_us >= part.draft_us + part.score_us > 0
            assert abs(part.began_us - 1e6 * (stats.began - record.arrived)) < 2
            assert part.batch == len(stats.parts)


def test_who_ran_and_who_waited(pair: Pair) -> None:
    done = run(pair)
    first, second, third = (done.received[f"r{n}"].record for n in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert [record.waiting_ahead for record in (first, second, third)] == [0, 1, 2]
    assert set(first.column("batch")) == {1, 2} or set(first.column("batch")) == {2}
    assert set(third.column("batch")) <= {1, 2}
    assert done.steps[0].requests == ("r0", "r1")


def test_a_step_that_breaks_down_leaves_whole_records(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing for the next one."""
    engine = load(pair, max_running=2)
    engine.submit(Request("a", (5, 6, 7), PARAMS))
    engine.submit(Request("b", (5, 6, 7), replace(PARAMS, max_tokens=2)))  # which this step finishes
    delivered = {output.request_id: list(output.token_ids) for output in engine.step().outputs}

    def fail(*_: object) -> None:
        raise RuntimeError("the step breaks down after its tokens were committed")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_learn", fail)
        with pytest.raises(RuntimeError, match="breaks down"):
            engine.step()
    for output in engine.abort("gone"):
        delivered[output.request_id] += output.token_ids
        record = output.record
        assert record is not None
        assert len(delivered[record.request_id]) == record.output_tokens == sum(record.column("emitted"))
        assert [part.step_us > 0 for part in record.rounds] == [True, True]
    assert {name: len(tokens) for name, tokens in delivered.items()} == {"a": 1, "b": 2}
    check_steps(drive(engine, [Request("c", (5, 6, 7), PARAMS)]))


def test_passes_that_only_read_the_prompt_are_counted(pair: Pair) -> None:
    whole, chunked = run(pair), run(pair, max_step_tokens=20, max_spec_length=4)
    passes = [
        [told.record.prefill_passes for told in done.received.values() if told.record] for done in (whole, chunked)
    ]
    assert passes[0] == [0, 0, 0]
    assert passes[1][1] > 1
