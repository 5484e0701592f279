"""The cost model reproduces a profile, is corrected by measured rounds, and never says that drafts are free."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import corrections
from policies.cost import MOST_GAP_TOKENS, CostModel
from policies.observation import FEW, STALE, RoundCost, Timing
from tests.examples import examples

DEPTH = 16
KS = (0, 1, 2, 4, 8, 16)
BATCHES = (1, 2, 4, 8, 16)


def cliffs(tokens: float) -> float:
    """A pass in seconds: it doubles from one token to two, and climbs a step for every 16."""
    return 1e-3 * (1 if tokens <= 1 else 2 + 0.3 * (tokens // 16) + 0.01 * tokens)


@dataclass(frozen=True)
class Machine:
    """True seconds of rounds: `verify` by tokens, and a share `padding` of padded attention."""

    verify: Callable[[float], float] = cliffs
    padding: float = 0.0
    draft: tuple[float, float, float] = (3e-4, 1e-4, 2e-5)  # once, per forward and sequence-dependent, per token
    slow: float = 1.0
    gap_s: float = 0.0  # of a round with any gap

    def round(self, ks: Iterable[int], prefill: int = 0, gap: int = 1) -> Timing:
        ks = tuple(ks)
        drafts, depth = sum(ks), max(ks)
        own, even = self.verify(len(ks) + drafts + prefill), self.verify(len(ks) * (1 + depth) + prefill)
        read = sum(gap + k - 1 for k in ks if k)
        once, step, token = self.draft
        once += self.gap_s * (read > drafts + len(ks))
        return Timing(
            batch=len(ks),
            drafts=drafts,
            depth=depth,
            prefill=prefill,
            forwards=depth,
            read=read,
            draft_s=self.slow * (once + depth * step * len(ks) ** 0.5 + read * token) if drafts else 0.0,
            score_s=self.slow * ((1 - self.padding) * own + self.padding * even),
            host_s=1e-4 + 1e-5 * len(ks) + (5e-5 if drafts else 0.0),
        )

    def profile(self, batches: Iterable[int] = BATCHES, ks: Iterable[int] = KS) -> list[Timing]:
        """As at start-up: even rounds, uneven ones, and some in which the draft model has more to read."""
        rounds = [self.round((k,) * batch) for batch in batches for k in ks]
        rounds += [self.round([(4, 0, 2, 1)[i % 4] for i in range(batch)]) for batch in batches if batch > 1]
        rounds += [self.round((1,) * batch, gap=gap) for batch in batches for gap in (8, 24)]
        return [replace(timing, host_s=0.0) for timing in rounds]


def score(cost: RoundCost, drafts: int, depth: int) -> float:
    return float(cost.verify_s[drafts] + cost.padding_s[depth])


def draft(cost: RoundCost, timing: Timing) -> float:
    return cost.model_s + timing.forwards * cost.step_s + timing.read * cost.token_s


def score_error(model: CostModel, timing: Timing) -> float:
    """Relative error; negative if the prediction is too low."""
    return score(model.round_cost(timing.batch, timing.prefill), timing.drafts, timing.depth) / timing.score_s - 1


def test_even_rounds_of_the_profile_are_predicted_as_they_were_measured() -> None:
    machine = Machine(padding=0.4)
    model = CostModel(DEPTH, machine.profile())
    for batch in BATCHES:
        for k in KS:
            timing = machine.round((k,) * batch)
            assert score_error(model, timing) == pytest.approx(0, abs=1e-9), f"{batch} sequences with {k} drafts"


def test_a_cliff_stays_a_cliff() -> None:
    cost = CostModel(DEPTH, Machine().profile()).round_cost(1, 0)
    assert cost.verify_s[1] / cost.verify_s[0] == pytest.approx(cliffs(2) / cliffs(1))
    assert cost.verify_s[2] / cost.verify_s[1] < 1.01


@pytest.mark.parametrize("batch", [3, 6, 12])
@pytest.mark.parametrize("k", [0, 3, 6, 12])
def test_rounds_between_the_profiled_ones_lie_between_them(batch: int, k: int) -> None:
    machine = Machine(lambda n: 2e-3 + 3e-5 * n)
    assert score_error(CostModel(DEPTH, machine.profile()), machine.round((k,) * batch)) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("batch", "prefill"), [(32, 0), (1, 300), (16, 64), (40, 500)])
def test_beyond_the_profile_the_last_slope_goes_on(batch: int, prefill: int) -> None:
    machine = Machine(lambda n: 2e-3 + 3e-5 * n)
    model = CostModel(DEPTH, machine.profile())
    for k in (0, 4, 16):  # the length of prompts is rounded by up to 9 %
        assert score_error(model, machine.round((k,) * batch, prefill)) == pytest.approx(
            0, abs=0.1 if prefill else 1e-9
        )


@pytest.mark.parametrize("padding", [0.0, 0.3, 0.6, 1.0])
def test_what_uneven_rounds_cost_is_recovered(padding: float) -> None:
    machine = Machine(lambda n: 2e-3 + 3e-5 * n, padding)
    model = CostModel(DEPTH, machine.profile())
    for ks in ((4, 0, 4, 0, 4, 0, 4, 0), (8, 0, 0, 0), (16, 1, 1, 1, 1, 1, 1, 1)):
        assert score_error(model, machine.round(ks)) == pytest.approx(0, abs=1e-6)
    ragged = model.round_cost(8, 0).padding_s
    assert (ragged[-1] > 0) == (padding > 0)


def test_without_uneven_rounds_nothing_is_added_for_them() -> None:
    timings = [t for t in Machine(padding=0.6).profile() if t.drafts == t.batch * t.depth]
    assert not CostModel(DEPTH, timings).round_cost(8, 0).padding_s.any()


def test_a_draft_model_is_fitted_by_batch() -> None:
    """Its forwards cost as the square root of the batch, so no plane fits all batches."""
    machine = Machine()
    model = CostModel(DEPTH, machine.profile())
    for batch in BATCHES:
        for ks in ((1,) * batch, (3,) * batch, (6,) + (1,) * (batch - 1)):
            timing = machine.round(ks, gap=2)
            assert draft(model.round_cost(batch, 0), timing) == pytest.approx(timing.draft_s, rel=0.05)


@pytest.mark.parametrize("gap_s", [0.0, 1e-2])
def test_what_gaps_cost_whatever_their_length_is_told_from_their_tokens(gap_s: float) -> None:
    """Where rounds without gaps are captured graphs, a round with one runs operation by operation."""
    machine = Machine(gap_s=gap_s)
    model = CostModel(DEPTH, machine.profile())
    for batch in BATCHES:
        cost = model.round_cost(batch, 0)
        for gap in (1, 2, 12, 24):
            timing = machine.round((2,) * batch, gap=gap)
            predicted = draft(cost, timing) + timing.has_gap * cost.gap_tokens * cost.token_s
            assert predicted == pytest.approx(timing.draft_s, rel=0.08), f"{batch} {gap}"


def test_gaps_may_cost_nothing_by_length() -> None:
    cost = CostModel(DEPTH, Machine(draft=(3e-4, 0.0, 0.0), gap_s=1e-2).profile()).round_cost(1, 0)
    assert cost.gap_tokens * cost.token_s == pytest.approx(1e-2, rel=0.1)
    assert cost.gap_tokens == MOST_GAP_TOKENS


def test_a_few_interrupted_drafts_change_little() -> None:
    machine = Machine()
    interrupted = {(1, 16), (2, 2), (4, 8), (8, 4), (16, 1)}
    timings = [
        replace(t, draft_s=t.draft_s + 5e-3) if (t.batch, t.depth) in interrupted and t.read == t.batch * t.depth else t
        for t in machine.profile()
    ]
    model = CostModel(DEPTH, timings)
    for batch in BATCHES:
        for k in (1, 2, 4, 8, 16):
            timing = machine.round((k,) * batch)
            assert draft(model.round_cost(batch, 0), timing) == pytest.approx(timing.draft_s, rel=0.1), (batch, k)


MEASURED = [  # microseconds on two cores: batch, k, draft, score
    *((1, 0, 0, 1800), (1, 1, 415, 2430), (1, 2, 518, 2600), (1, 4, 840, 2870), (1, 8, 1470, 3130)),
    *((8, 0, 0, 3240), (8, 1, 730, 4000), (8, 2, 1110, 4690), (8, 4, 1880, 6130), (8, 8, 3150, 7700)),
]


def test_a_measured_machine_is_fitted_within_a_tenth() -> None:
    even = [Timing(b, b * k, k, 0, k, b * k, draft * 1e-6, score * 1e-6, 0.0) for b, k, draft, score in MEASURED]
    uneven = Timing(8, 16, 4, 0, 4, 16, 1560e-6, 5540e-6, 0.0)
    model = CostModel(8, [*even, uneven])
    for timing in (*even, uneven, replace(uneven, draft_s=1570e-6, score_s=5580e-6)):
        assert score_error(model, timing) == pytest.approx(0, abs=0.1)
        if timing.drafts:
            assert draft(model.round_cost(timing.batch, 0), timing) == pytest.approx(timing.draft_s, rel=0.1)


@pytest.mark.parametrize("rounds", [48, STALE + 16])
def test_a_machine_that_slows_down_is_followed_by_all_kinds_of_rounds(rounds: int) -> None:
    """Also by those that do not run since: otherwise they would look cheap. In the end it is as fast as before."""
    model = CostModel(DEPTH, Machine().profile())
    for _ in range(20):
        model.observe(Machine().round((1,) * 8))
        model.observe(Machine().round((4,) * 8))
    for machine in (Machine(slow=1.6), Machine()):
        for _ in range(rounds):
            model.observe(machine.round((4,) * 8))
        for ks in ((4,) * 8, (1,) * 8, (2,) * 4, (0,) * 2):
            timing = machine.round(ks)
            assert score_error(model, timing) == pytest.approx(0, abs=0.05), f"{ks}"
            if timing.drafts:
                predicted = draft(model.round_cost(timing.batch, 0), timing)
                assert predicted == pytest.approx(timing.draft_s, rel=0.05)
        assert model.misfit == pytest.approx(1, abs=0.05)


def test_what_a_kind_differs_by_stays_its_own_while_the_machine_slows_down() -> None:
    """Passes of nine tokens take twice the profiled seconds, on a fast machine and on a slow one."""
    profile = Machine().profile()
    model = CostModel(DEPTH, profile)
    dear = Machine().round((8,))
    for slow, ran in ((1.0, (0, 8)), (1.5, (0,)), (1.5, (0, 8)), (1.0, (8,))):
        for _ in range(32):
            for k in ran:
                timing = Machine(slow=slow).round((k,))
                model.observe(replace(timing, score_s=timing.score_s * (2 if k else 1)))
        cost = model.round_cost(1, 0)
        assert score(cost, 8, 8) == pytest.approx(slow * 2 * dear.score_s, rel=0.03)
        assert score(cost, 0, 0) == pytest.approx(slow * Machine().round((0,)).score_s, rel=0.03)
        assert model.misfit == pytest.approx(2, rel=0.03)


def test_what_is_not_visited_is_not_below_smaller_passes_that_are() -> None:
    """Small passes take twice the profiled seconds; all others take what was profiled."""
    flat = Machine(lambda n: 2e-3 + 1e-6 * n)
    surprise = Machine(lambda n: (2 if 6 <= n <= 9 else 1) * (2e-3 + 1e-6 * n))
    model = CostModel(DEPTH, flat.profile())
    for _ in range(32):
        model.observe(surprise.round((0,) * 8))
        model.observe(surprise.round((0,)))
        model.observe(surprise.round((0,)))
    verify = model.round_cost(8, 0).verify_s
    assert verify[0] == pytest.approx(surprise.verify(8), rel=0.02)
    assert (verify >= verify[0]).all()


def test_a_profiled_round_that_was_interrupted_does_not_count() -> None:
    """It took longer than a larger round. For uneven rounds the majority decides."""
    machine = Machine(lambda n: 2e-3 + 3e-5 * n, padding=0.5)
    interrupted = {(2, 4, 2), (4, 64, 16), (4, 7, 4)}
    timings = [
        replace(t, score_s=5 * t.score_s) if (t.batch, t.drafts, t.depth) in interrupted else t
        for t in machine.profile()
    ]
    model = CostModel(DEPTH, timings)
    for ks in ((2,) * 2, (3,) * 3, (8,) * 4, (16,) * 4, (4, 0, 2, 1), (4, 0) * 4):
        assert score_error(model, machine.round(ks)) == pytest.approx(0, abs=0.06), f"{ks}"


def test_what_was_learned_on_both_sides_of_a_step_holds_on_both() -> None:
    """The profile steps up between 8 and 12 tokens. Passes of 4 take longer than profiled, passes of 12 less."""
    profile = [Timing(4, 4 * k, k, 0, 0, 0, 0.0, ms * 1e-3, 0.0) for k, ms in enumerate((1.0, 1.0, 2.0, 3.0))]
    model = CostModel(3, profile)
    for _ in range(16):
        model.observe(replace(profile[0], score_s=1.5e-3))
        model.observe(replace(profile[2], score_s=1.6e-3))
    verify = model.round_cost(4, 0).verify_s
    assert verify[[0, 8]] == pytest.approx([1.5e-3, 1.6e-3], rel=1e-3)
    assert (np.diff(verify) >= -1e-12).all()


def test_reading_a_prompt_teaches_nothing_about_drafting() -> None:
    model = CostModel(DEPTH, Machine().profile())
    for _ in range(16):
        model.observe(replace(Machine().round((2,) * 4, gap=60), draft_s=1.0))
    assert model.round_cost(4, 0).step_s == CostModel(DEPTH, Machine().profile()).round_cost(4, 0).step_s


def outliers_follow(model: CostModel) -> float:
    """The error after rounds of which every third is interrupted."""
    rng = np.random.default_rng(0)
    usual = Machine().round((2,) * 4)
    for n in range(160):
        noise = 1 + 0.02 * rng.standard_normal()
        interrupted = 5.0 if n >= 32 and n % 3 == 0 else 1.0
        model.observe(replace(usual, score_s=usual.score_s * noise * interrupted))
    return score_error(model, usual)


def test_interrupted_rounds_are_not_taken_for_slow_ones() -> None:
    assert outliers_follow(CostModel(DEPTH, Machine().profile())) == pytest.approx(0, abs=0.03)


def test_by_their_mean_they_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(corrections, "median", fmean)
    assert outliers_follow(CostModel(DEPTH, Machine().profile())) > 0.3


def test_host_work_is_learned_with_and_without_drafts() -> None:
    model = CostModel(DEPTH, Machine().profile())
    assert model.round_cost(4, 0).base_s == model.round_cost(4, 0).drafting_s == 0
    for _ in range(16):
        for ks in ((0,) * 4, (2,) * 4, (0,) * 8, (1,) * 16):  # 16 sequences never ran without
            model.observe(Machine().round(ks))
    for batch in (4, 6, 8, 16):
        cost = model.round_cost(batch, 0)
        assert cost.base_s == pytest.approx(1e-4 + 1e-5 * batch)
        assert cost.drafting_s == pytest.approx(5e-5)


def test_what_drafts_cost_the_host_stays_known_while_all_rounds_draft() -> None:
    """Otherwise rounds without drafts would seem to pay for it as soon as the last of them are forgotten."""
    model = CostModel(DEPTH, Machine().profile())
    for _ in range(16):
        model.observe(Machine().round((0,) * 4))
        model.observe(Machine().round((2,) * 4))
    for _ in range(STALE + 32):
        model.observe(Machine().round((2,) * 4))
    cost = model.round_cost(4, 0)
    assert (cost.base_s, cost.drafting_s) == pytest.approx((1e-4 + 4e-5, 5e-5))


@pytest.mark.parametrize(("rounds", "known"), [(FEW - 1, False), (FEW, True)])
def test_a_few_rounds_count_and_fewer_do_not(rounds: int, known: bool) -> None:
    """Host work counts from its fourth round on, and so does the factor of a kind without rounds."""
    host, factors = corrections.HostWork(), corrections.Corrections()
    for _ in range(rounds):
        host.observe(Machine().round((0,) * 4))
        factors.observe((4, 0), realised=3e-3, profiled=2e-3)
    host.refresh()
    factors.refresh()
    assert (host.seconds(4)[0] > 0) == known
    assert factors.factor((8, 1)) == pytest.approx(1.5 if known else 1.0)


def test_drafts_that_no_model_made_cost_the_host_time() -> None:
    model = CostModel(DEPTH, Machine().profile())
    looked_up = replace(Machine().round((2,) * 4), forwards=0, read=0, draft_s=7e-5)
    for _ in range(16):
        model.observe(Machine().round((0,) * 4))
        model.observe(looked_up)
    assert model.round_cost(4, 0).drafting_s == pytest.approx(5e-5 + 7e-5)


def test_prompts_beside_a_round_teach_nothing_about_rounds_without() -> None:
    """A prompt's token costs a tenth of a verified one here."""
    model = CostModel(DEPTH, Machine().profile())
    before = model.round_cost(4, 0)
    for _ in range(32):
        model.observe(replace(Machine().round((2,) * 4, prefill=100), score_s=1.5e-3))
    after = model.round_cost(4, 0)
    assert after.verify_s.tolist() == before.verify_s.tolist()


def test_without_a_profile_drafts_are_not_free_and_rounds_teach() -> None:
    model = CostModel(DEPTH)
    cost = model.round_cost(8, 0)
    assert cost.step_s > 0
    assert cost.token_s > 0
    assert (np.diff(cost.verify_s) > 0).all()
    rng = np.random.default_rng(0)
    for _ in range(400):
        model.observe(Machine().round((int(rng.integers(0, 9)),) * 8))
    for k in (0, 2, 4, 8):
        timing = Machine().round((k,) * 8)
        assert score_error(model, timing) == pytest.approx(0, abs=0.15)
        if k:
            assert draft(model.round_cost(8, 0), timing) == pytest.approx(timing.draft_s, rel=0.5)


def test_without_a_profiled_draft_model_its_forwards_are_not_free() -> None:
    silent = [replace(t, forwards=0, read=0, draft_s=0.0) for t in Machine().profile()]
    cost = CostModel(DEPTH, silent).round_cost(1, 0)
    assert cost.step_s == pytest.approx(0.1 * cliffs(1))


TIMES = st.floats(1e-6, 1.0)


@st.composite
def any_timing(draw: st.DrawFn) -> Timing:
    batch = draw(st.integers(1, 9))
    ks = draw(st.lists(st.integers(0, 5), min_size=batch, max_size=batch))
    drafts, depth = sum(ks), max(ks)
    forwards = draw(st.sampled_from((0, depth)))
    read = drafts + draw(st.integers(0, 9)) if forwards else 0
    prefill = draw(st.sampled_from((0, 0, 3, 100)))
    rest = draw(st.sampled_from((0.0, 1e-4)))
    return Timing(batch, drafts, depth, prefill, forwards, read, draw(TIMES) if drafts else 0.0, draw(TIMES), rest)


@examples(15)
@given(
    st.lists(any_timing(), max_size=12),
    st.lists(any_timing(), max_size=40),
    st.integers(1, 20),
    st.sampled_from((0, 1, 7, 500)),
)
def test_whatever_was_measured_more_tokens_never_cost_less(
    profiled: list[Timing], seen: list[Timing], batch: int, prefill: int
) -> None:
    model = CostModel(5, profiled)
    for timing in seen:
        model.observe(timing)
    cost = model.round_cost(batch, prefill)
    assert cost.verify_s.shape == (1 + 5 * batch,)
    assert cost.padding_s.shape == (6,)
    assert np.isfinite(cost.verify_s).all()
    assert cost.verify_s[0] > 0
    assert (np.diff(cost.verify_s) >= -1e-12).all()
    assert cost.padding_s[0] == 0
    assert (np.diff(cost.padding_s) >= -1e-12).all()
    scalars = (cost.base_s, cost.drafting_s, cost.model_s, cost.step_s, cost.token_s)
    assert np.isfinite(scalars).all()
    assert min(scalars) >= 0
