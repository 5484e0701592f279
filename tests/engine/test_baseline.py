"""The estimate of what plain decoding would have taken: learned from steps, and told with every step."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.baseline import plain_seconds
from engine.types import Request, SamplingParams, acceptance_of
from policies.config import PolicyConfig
from policies.cost import CostModel
from policies.observation import Timing
from tests.engine.driving import Drive, drive, load
from tests.engine.pairs import Pair

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def timing(batch: int, k: int, draft_s: float, score_s: float) -> Timing:
    return Timing(batch, batch * k, k, 0, k, batch * k, draft_s, score_s, 0.0)


def estimate(
    cost: CostModel,
    ks: Sequence[int],
    emitted: float,
    step_s: float,
    policy_s: float = 0.0,
    faulty: bool = False,
    branched: bool = False,
) -> float:
    forwards, read = max(ks), sum(ks)
    return plain_seconds(
        cost,
        batch=len(ks),
        ks=ks,
        branched=branched,
        forwards=forwards,
        read=read,
        emitted=emitted,
        step_s=step_s,
        policy_s=policy_s,
        faulty=faulty,
    )


@pytest.fixture
def cost() -> CostModel:
    """Timings of a machine where a plain step takes 10 ms and one with three drafts 20 ms, whatever the batch."""
    cost = CostModel(8)
    for _ in range(100):
        for batch in (1, 4):
            cost.observe(timing(batch, 0, 0.0, 0.010))
            cost.observe(timing(batch, 3, 0.009, 0.011))
    return cost


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(("accepted", "speedup"), [(3, 2.0), (0, 0.5)])
def test_the_speedup_is_known_without_running_plain(cost: CostModel, batch: int, accepted: int, speedup: float) -> None:
    assert estimate(cost, [3] * batch, 1 + accepted, 0.020) / 0.020 == pytest.approx(speedup, rel=0.03)


def test_a_machine_that_is_busy_slows_both(cost: CostModel) -> None:
    assert estimate(cost, [3], 4, 0.060) == pytest.approx(3 * estimate(cost, [3], 4, 0.020))


def test_a_step_without_drafts_took_what_it_took(cost: CostModel) -> None:
    assert estimate(cost, [0, 0], 1, 0.123) == 0.123


def test_choosing_k_counts_against_drafts(cost: CostModel) -> None:
    assert estimate(cost, [3], 4, 0.020, policy_s=0.005) < estimate(cost, [3], 4, 0.020)


def test_a_tree_takes_its_share_of_the_step(cost: CostModel) -> None:
    """A step with a tree takes a quarter longer than one of chains: plain decoding would have been that much faster."""
    for _ in range(32):
        cost.observe(replace(timing(1, 3, 0.009, 0.015), branched_drafts=1, host_s=0.001))
    assert estimate(cost, [3], 4, 0.025, branched=True) == pytest.approx(estimate(cost, [3], 4, 0.020), rel=0.02)


def test_drafts_that_fail_cost_time(cost: CostModel) -> None:
    """The step stands for one plain step, however long the drafter took to fail."""
    assert estimate(cost, [0], 1, 0.060, faulty=True) == pytest.approx(0.010, rel=0.03)


def run(pair: Pair, policy: PolicyConfig, **changes: object) -> Drive:
    engine = load(pair, policy=policy, max_running=2, **changes)
    return drive(engine, [Request(f"r{n}", (5, 6, 7 + n), PARAMS) for n in range(2)])


def test_every_step_that_only_decodes_has_an_estimate(pair: Pair) -> None:
    done = run(pair, PolicyConfig("fixed", k=3))
    assert any(stats.drafted for stats in done.steps)
    for stats in done.steps:
        assert (stats.plain_us > 0) == stats.decode_only
        if stats.decode_only and not stats.drafted:
            assert stats.plain_us == stats.step_us


def test_steps_without_drafts_have_a_speedup_of_one(pair: Pair) -> None:
    done = run(pair, PolicyConfig("off"))
    records = [told.record for told in done.received.values() if told.record is not None]
    assert acceptance_of(*records).drafted == 0
    decoded = [stats for stats in done.steps if stats.decode_only]
    assert sum(stats.plain_us for stats in decoded) == sum(stats.step_us for stats in decoded) > 0
