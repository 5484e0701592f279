"""The estimator against recorded rounds of the demo pair, in a closed loop with a drafter that fails, and its laws."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import acceptance
from policies.acceptance import BASE_RATE, Estimator
from policies.observation import Candidate, Drafted, Floats

RECORDING = Path(__file__).parent / "data" / "demo_rounds.json"
DEPTH = 8
ERROR = 0.008
Round = list[Drafted]
Pairs = tuple[Floats, Floats]  # predicted chance that a reached position is accepted; whether it was


class Predictor(Protocol):
    def survival(self, candidates: Sequence[Candidate]) -> Floats: ...
    def observe(self, outcomes: Sequence[Drafted], idle: Mapping[int, int] | None = None) -> None: ...
    def forget(self, handle: int) -> None: ...


def candidate(handle: int, source: str | None = "model") -> Candidate:
    return Candidate(handle, None, 99, 99, 99, source, 99, 0)


def drafted(handle: int, k: int, n: int, source: str = "model") -> Drafted:
    return Drafted(handle, source, k, n)


def first(estimator: Predictor, handle: int, source: str = "model") -> float:
    """Predicted chance that the first draft is accepted."""
    return float(estimator.survival([candidate(handle, source)])[0, 0])


# --- against recorded rounds -----------------------------------------------------------------------------------------


def recorded(slots: int) -> Iterator[Round]:
    """The rounds of an engine that runs `slots` requests at once, greedy and sampled ones by turns."""
    requests = json.loads(RECORDING.read_text("utf-8"))["requests"]
    kinds = list(requests.values())
    waiting = [request for both in zip(*kinds, strict=True) for request in both]
    handles = iter(range(len(waiting)))
    running: list[Iterator[Drafted]] = []
    while True:
        running += [rounds_of(handle, *waiting[handle]) for handle in islice(handles, slots - len(running))]
        outcomes = [(rounds, next(rounds, None)) for rounds in running]
        running = [rounds for rounds, outcome in outcomes if outcome]
        if not outcomes:
            return
        yield [outcome for _, outcome in outcomes if outcome]


def rounds_of(handle: int, ks: str, accepted: str) -> Iterator[Drafted]:
    return (drafted(handle, int(k), int(n)) for k, n in zip(ks, accepted, strict=True) if int(k))


def replay(estimator: Predictor, slots: int = 8, seen: Callable[[Round], Round] = lambda outcomes: outcomes) -> Pairs:
    """seen: maps a round to what the estimator learns from it."""
    predicted, realised = [], []
    for outcomes in recorded(slots):
        told = seen(outcomes)
        survival = estimator.survival([candidate(outcome.handle) for outcome in told])
        chances = survival / np.hstack([np.ones((len(survival), 1)), survival[:, :-1]])
        for row, outcome in zip(chances, outcomes, strict=True):
            reached = min(outcome.accepted + 1, outcome.drafted)
            predicted.append(row[:reached])
            realised.append(np.arange(reached) < outcome.accepted)
        estimator.observe(told)
    return np.concatenate(predicted), np.concatenate(realised).astype(np.float64)


@cache
def own_law() -> Pairs:
    """Replay eight requests at once with the unchanged estimator."""
    return replay(Estimator(DEPTH))


def worst_decile(pairs: Pairs) -> float:
    """Largest difference between mean prediction and realised share among the tenths of the predictions."""
    predicted, realised = pairs
    tenths = np.array_split(np.argsort(predicted, kind="stable"), 10)
    assert min(len(tenth) for tenth in tenths) > 4000  # one standard error is below ERROR
    return max(abs(float(predicted[tenth].mean() - realised[tenth].mean())) for tenth in tenths)


def log_likelihood(pairs: Pairs) -> float:
    """Per reached position, in nats."""
    predicted, realised = pairs
    chances = np.clip(np.where(realised > 0, predicted, 1 - predicted), 0.005, 1.0)
    return float(np.log(chances).mean())


def all_failures(outcomes: Round) -> Round:
    """A naive count: every draft that was not accepted is a failure."""
    return [o._replace(overlaps=(1.0,) * o.accepted + (0.0,) * (o.drafted - o.accepted)) for o in outcomes]


class Strangers:
    """Makes each round a new request's, so that only the population's law is left."""

    def __init__(self) -> None:
        self.rounds = 0

    def __call__(self, outcomes: Round) -> Round:
        self.rounds += 1
        return [o._replace(handle=o.handle + 1000 * self.rounds) for o in outcomes]


class OwnCounts:
    """No population: each request's own share of successes, counted from one success and one failure on."""

    def __init__(self, memory: float) -> None:
        self.memory = memory
        self.counts: dict[int, tuple[float, float]] = {}

    def survival(self, candidates: Sequence[Candidate]) -> Floats:
        counts = [self.counts.get(candidate.handle, (0.0, 0.0)) for candidate in candidates]
        shares = [(1 + accepted) / (2 + accepted + rejected) for accepted, rejected in counts]
        return np.array(shares)[:, None] ** np.arange(1, DEPTH + 1)

    def observe(self, outcomes: Sequence[Drafted], idle: Mapping[int, int] | None = None) -> None:
        for o in outcomes:
            accepted, rejected = self.counts.get(o.handle, (0.0, 0.0))
            self.counts[o.handle] = (
                self.memory * accepted + o.accepted,
                self.memory * rejected + (o.accepted < o.drafted),
            )

    def forget(self, handle: int) -> None:
        self.counts.pop(handle, None)


@pytest.mark.parametrize("slots", [8, *(pytest.param(slots, marks=pytest.mark.proofs) for slots in (4, 16))])
def test_predicted_and_realised_acceptance_agree_within_3_points_per_decile(slots: int) -> None:
    """Chance adds to the worst of ten."""
    assert worst_decile(own_law() if slots == 8 else replay(Estimator(DEPTH), slots)) < 0.03 + ERROR


def test_counting_unobserved_positions_as_failures_is_not_calibrated() -> None:
    """Negative control."""
    assert worst_decile(replay(Estimator(DEPTH), seen=all_failures)) > 0.1


@pytest.mark.parametrize("memory", [0.98, *(pytest.param(memory, marks=pytest.mark.proofs) for memory in (0.9, 1.0))])
def test_counts_without_a_population_are_not_calibrated(memory: float) -> None:
    """Negative control."""
    assert worst_decile(replay(OwnCounts(memory))) > 0.05


def test_what_a_request_did_says_more_than_what_all_did() -> None:
    own, common = own_law(), replay(Estimator(DEPTH), seen=Strangers())
    assert log_likelihood(own) > log_likelihood(common) + 0.02
    assert log_likelihood(own) > log_likelihood(replay(OwnCounts(0.9))) + 0.01


# --- in a closed loop ------------------------------------------------------------------------------------------------

GOOD, BROKEN = 0.7, 0.0
BREAKS, REPAIRED, END = 200, 600, 900  # rounds
LENGTH, WORTH, PROBE_EVERY, PROBE = 128, 0.4, 40, 4


def closed_loop(estimator: Predictor, batch: int, breaks: int = BREAKS, seed: int = 0) -> Floats:
    """[END] share of sequences that draft in each round, by a policy that drafts where acceptance seems worth it.

    After PROBE_EVERY rounds without drafts one sequence probes. A new sequence replaces one of LENGTH tokens.
    """
    random = np.random.default_rng(seed)
    left = {handle: int(random.integers(1, LENGTH)) for handle in range(batch)}
    shares, quiet = np.zeros(END), 0
    for now in range(END):
        handles = list(left)
        wanted = estimator.survival([candidate(handle) for handle in handles])[:, 0] >= WORTH
        shares[now] = wanted.mean()
        quiet = 0 if wanted.any() else quiet + 1
        if quiet >= PROBE_EVERY:
            wanted[random.integers(batch)], quiet = True, 0
        alpha = BROKEN if breaks <= now < REPAIRED else GOOD
        accepted = (random.random((batch, PROBE)) < alpha).cumprod(1).sum(1) * wanted
        pairs = list(zip(handles, accepted.tolist(), wanted, strict=True))
        estimator.observe([drafted(h, PROBE, n) for h, n, w in pairs if w], Counter(h for h, _, w in pairs if not w))
        for handle, n, _ in pairs:
            left[handle] -= n + 1
            if left[handle] <= 0:
                estimator.forget(handle)
                del left[handle]
                left[max(handles) + 1 + handle] = LENGTH
    return shares


@pytest.mark.parametrize("batch", [4, *(pytest.param(batch, marks=pytest.mark.proofs) for batch in (1, 16))])
def test_a_drafter_gone_bad_is_abandoned_within_20_rounds_and_found_again_within_200(batch: int) -> None:
    for seed in range(2):
        shares = closed_loop(Estimator(DEPTH), batch, seed=seed)
        assert shares[50:BREAKS].mean() > 0.75  # one unlucky request is all of a batch of 1
        assert shares[BREAKS + 20 : BREAKS + 120].mean() < 0.15  # newcomers try for a few rounds
        assert shares[BREAKS + 120 : REPAIRED].mean() < 0.05  # and then stop
        assert shares[REPAIRED + 200 :].mean() > 0.8


def test_a_good_drafter_is_not_abandoned() -> None:
    assert closed_loop(Estimator(DEPTH), 4, breaks=REPAIRED)[50:].mean() > 0.95


def test_counts_that_never_fade_neither_abandon_in_time_nor_find_again() -> None:
    """Negative control of the closed loop: one long request, with its whole past."""
    estimator = OwnCounts(1.0)
    estimator.forget = lambda handle: None  # type: ignore[method-assign]
    estimator.counts = dict.fromkeys(range(10_000), (300.0, 130.0))
    assert closed_loop(estimator, 4)[BREAKS + 20 : BREAKS + 120].mean() > 0.5


def test_rounds_without_drafts_do_not_make_hopeful() -> None:
    def broken() -> Estimator:
        estimator = Estimator(DEPTH)
        for _ in range(200):
            estimator.observe([drafted(handle, 4, 0) for handle in range(8)])
        return estimator

    fresh, waited = broken(), broken()
    for _ in range(500):
        waited.observe([], idle=Counter(range(8)))
    assert first(waited, 200) <= first(fresh, 200) + 0.01 < 0.1


def test_one_success_convinces_nobody_however_old_the_rest_is() -> None:
    estimator = Estimator(DEPTH)
    for _ in range(50):
        estimator.observe([drafted(0, 4, 0)])
    for _ in range(2000):
        estimator.observe([])
    estimator.observe([drafted(1, 4, 4)])
    assert first(estimator, 2) < 0.35


# --- laws ------------------------------------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> list[Round]:
    def outcome() -> Drafted:
        k = draw(st.integers(0, DEPTH + 3))
        n = draw(st.integers(0, k))
        overlaps = draw(st.lists(st.floats(-0.1, 1.1), min_size=min(n + 1, k), max_size=min(n + 1, k)))
        known = tuple(overlaps) if draw(st.booleans()) else ()
        source = draw(st.sampled_from(("model", "ngram")))
        return Drafted(draw(st.integers(0, 5)), source, k, n, known)

    return [[outcome() for _ in range(draw(st.integers(0, 4)))] for _ in range(draw(st.integers(0, 12)))]


@settings(deadline=None)
@given(history=histories(), repeat=st.sampled_from((1, 30)))
def test_survival_is_a_chance_and_never_rises_with_depth(history: list[Round], repeat: int) -> None:
    estimator = Estimator(DEPTH)
    for _ in range(repeat):
        for outcomes in history:
            estimator.observe(outcomes, idle=Counter(range(4, 8)))
    everyone = [candidate(h, source) for h in range(7) for source in ("model", "ngram", None)]
    survival = estimator.survival(everyone)
    assert survival.shape == (len(everyone), DEPTH)
    assert np.isfinite(survival).all()
    assert (survival >= 0).all()
    assert (survival <= 1).all()
    assert (np.diff(survival, axis=1) <= 0).all()
    for who, row in zip(everyone, survival, strict=True):
        assert row.any() == (who.source is not None)


def test_a_drafter_that_nothing_is_known_of_is_expected_to_be_middling() -> None:
    assert first(Estimator(DEPTH), 0) == pytest.approx(BASE_RATE, abs=0.05)


def test_an_empty_batch_has_no_predictions() -> None:
    assert Estimator(DEPTH).survival([]).shape == (0, DEPTH)


def after(*rounds: Round, depth: int = DEPTH) -> Floats:
    """[2, depth] predictions for handle 0 and for a stranger after these rounds."""
    estimator = Estimator(depth)
    for outcomes in rounds:
        estimator.observe(outcomes)
    return estimator.survival([candidate(0), candidate(9)])


def test_positions_behind_the_first_rejection_say_nothing() -> None:
    assert after([drafted(0, 8, 2)]) == pytest.approx(after([drafted(0, 3, 2)]))
    assert after([drafted(0, 3, 2)])[0, 0] < after([drafted(0, 2, 2)])[0, 0]  # the rejection itself lowers it


def test_overlaps_take_the_place_of_outcomes() -> None:
    accepted_two = Drafted(0, "model", 8, 2)
    assert after([accepted_two._replace(overlaps=(1.0, 1.0, 0.0))]) == pytest.approx(after([accepted_two]))
    likely, unlikely = (after([accepted_two._replace(overlaps=(b, b, b))]) for b in (0.95, 0.3))
    assert likely[0, 0] > after([accepted_two])[0, 0] > unlikely[0, 0]
    mixed = [accepted_two._replace(overlaps=(0.4, 0.5, 0.6)), drafted(1, 4, 1)]
    assert after(mixed) == pytest.approx(after(mixed[::-1]))


def test_overlaps_give_the_mean_with_less_variance() -> None:
    random = np.random.default_rng(0)

    def spread(told: bool) -> tuple[float, float]:
        ends = []
        for _ in range(60):
            estimator = Estimator(1)
            for beta in random.uniform(0.4, 0.8, 20):
                overlaps = (float(beta),) if told else ()
                estimator.observe([Drafted(0, "model", 1, int(random.random() < beta), overlaps)])
            ends.append(first(estimator, 0))
        return float(np.mean(ends)), float(np.std(ends))

    (known_mean, known_spread), (mean, sd) = spread(True), spread(False)
    assert known_mean == pytest.approx(mean, abs=0.03)
    assert known_spread < 0.6 * sd


def test_drafts_beyond_the_depth_are_left_out() -> None:
    assert after([drafted(0, 8, 6)], depth=3) == pytest.approx(after([drafted(0, 3, 3)], depth=3))


def test_a_round_without_drafts_is_none() -> None:
    assert after([drafted(0, 0, 0)]) == pytest.approx(after([]))


def test_requests_are_told_apart_and_strangers_are_like_all() -> None:
    estimator = Estimator(DEPTH)
    for _ in range(30):
        estimator.observe([drafted(0, 8, 8), drafted(1, 8, 0)])
    assert first(estimator, 0) > 0.9
    assert first(estimator, 1) < 0.15
    assert 0.3 < first(estimator, 2) < 0.7


def first_of_a_stranger_behind_a_bad_text() -> float:
    """Eight texts accept all drafts for 15 rounds each, and the next one rejects them for 30 rounds."""
    estimator = Estimator(DEPTH)
    for handle, (rounds, n) in enumerate([*[(15, 4)] * 8, (30, 0)]):
        for _ in range(rounds):
            estimator.observe([drafted(handle, 4, n)])
        estimator.forget(handle)
    return first(estimator, 99)


def test_one_bad_text_says_little_about_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    assert first_of_a_stranger_behind_a_bad_text() > 0.7
    monkeypatch.setattr(acceptance, "LAW_SWITCH", acceptance.SWITCH)
    assert first_of_a_stranger_behind_a_bad_text() < 0.6


def test_further_drafts_are_likelier_once_the_first_was_accepted() -> None:
    """An accepted draft indicates the better of two kinds of requests."""
    estimator = Estimator(DEPTH)
    random = np.random.default_rng(0)
    for _ in range(200):
        runs = random.geometric([0.05, 0.05, 0.7, 0.7]) - 1
        estimator.observe([drafted(handle, 8, int(min(8, run))) for handle, run in enumerate(runs)])
    survival = estimator.survival([candidate(9)])[0]
    assert survival[3] / survival[2] > survival[0] + 0.15


def test_who_gets_no_drafts_becomes_like_all() -> None:
    estimator = Estimator(DEPTH)
    for _ in range(20):
        estimator.observe([drafted(0, 4, 0), *(drafted(handle, 4, 4) for handle in range(1, 5))])
    low, common = first(estimator, 0), first(estimator, 9)
    for _ in range(150):
        estimator.observe([], idle={0: 1})
    assert low < 0.2 < common - 0.2
    assert first(estimator, 0) == pytest.approx(first(estimator, 9), abs=0.05)


def test_several_rounds_at_once_teach_what_they_teach_one_after_the_other() -> None:
    """Except for the drift towards the population between them."""
    random = np.random.default_rng(1)
    single, several = Estimator(DEPTH), Estimator(DEPTH)
    for _ in range(60):
        rounds = [[drafted(n, 4, int(random.geometric(0.4)) - 1 if n else 0) for n in range(3)] for _ in range(4)]
        rounds = [[o._replace(accepted=min(4, o.accepted)) for o in outcomes] for outcomes in rounds]
        for outcomes in rounds:
            single.observe(outcomes, {7: 1})
        several.observe([o for outcomes in rounds for o in outcomes], {7: 4})
        asked = [candidate(handle) for handle in (0, 1, 2, 7, 9)]
        differences = np.abs(single.survival(asked) - several.survival(asked))
        assert differences.mean() < 0.03
        assert differences.max() < 0.2


def test_many_rounds_at_once_forget_as_many_siblings() -> None:
    """Rounds of chains drive out the counts of a tree's siblings, one by one or together."""
    single, several = Estimator(DEPTH), Estimator(DEPTH)
    for estimator in (single, several):
        estimator.observe([drafted(0, 4, 2)._replace(sibling_counts=((40, 30),))])
    for _ in range(400):
        single.observe([drafted(0, 4, 4)])
    for _ in range(25):
        several.observe([drafted(0, 4, 4)] * 16)
    one, other = (e._populations["model"]._sibling_counts[0, 0] for e in (single, several))
    assert one == pytest.approx(other)
    assert one < 20


def test_many_rounds_at_once_are_believed() -> None:
    """Beliefs that moved towards the law for all of the rounds behind them would be .86 and .15."""
    estimator = Estimator(DEPTH)
    for _ in range(5):
        estimator.observe([drafted(n, 4, 4 if n == 0 else 0) for _ in range(16) for n in range(2)])
    assert first(estimator, 0) > 0.95
    assert first(estimator, 1) < 0.08


def test_sources_are_told_apart() -> None:
    estimator = Estimator(DEPTH)
    for _ in range(50):
        estimator.observe([drafted(0, 4, 0, source="ngram")])
    assert first(estimator, 0, source="model") == pytest.approx(first(Estimator(DEPTH), 0), abs=1e-9)
    assert first(estimator, 0, source="ngram") < 0.1


def test_a_forgotten_sequence_is_a_stranger_and_leaves_nothing_behind() -> None:
    estimator = Estimator(DEPTH)
    for start in range(0, 1024, 64):
        handles = range(start, start + 64)
        for _ in range(3):
            estimator.observe([drafted(handle, 4, 4 * (handle % 2)) for handle in handles])
        assert first(estimator, start) < first(estimator, start + 1)
        for handle in handles:
            estimator.forget(handle)
        assert first(estimator, start) == first(estimator, start + 1) == first(estimator, -1)
    estimator.forget(12345)
    assert not any(population.beliefs for population in estimator._populations.values())


def test_what_is_known_of_each_of_many_sequences_is_kept() -> None:
    estimator = Estimator(DEPTH)
    for batch in (64, 320):
        for _ in range(10):
            estimator.observe([drafted(handle, 4, 4 * (handle % 2)) for handle in range(batch)])
    survival = estimator.survival([candidate(handle) for handle in range(320)])[:, 0]
    assert survival[::2].max() < 0.3
    assert survival[1::2].min() > 0.7
