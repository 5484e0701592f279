"""Profiling: real rounds of every kind are timed, and nothing of it is left."""

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from cache.paged import PagedCache
from engine.device.graphs import Graphs
from engine.drafters.chain import ChainedDrafter
from engine.drafters.model import ModelDrafter
from engine.engine import Engine
from engine.models.feeds import Feed
from engine.models.runner import Runner
from engine.profiling import round_profile
from engine.profiling.profile_cache import ProfileFile
from engine.profiling.round_profile import profile
from engine.round import Outcome, run_round
from engine.types import Request, SamplingParams
from policies.cost import CostModel
from policies.observation import Timing
from tests.engine.driving import drive, load, model_drafter
from tests.engine.pairs import VOCAB, Pair
from tests.examples import in_proofs

pytestmark = pytest.mark.usefixtures("shared_weights")

DEPTH = 4
AGES = 60.0  # seconds, more than any of these profiles takes


@pytest.fixture(scope="module")
def pair(thin: Pair) -> Pair:
    return thin


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And two runs of each shape in a row in place of four: what is timed here is scripted, or not looked at."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(round_profile, "RUNS", 2)
    monkeypatch.setattr(round_profile, "MOST_RUNS", 4)


def small(pair: Pair, **config: Any) -> Engine:
    return load(pair, **{"max_running": 6, "max_spec_length": DEPTH, **config})


def runners(engine: Engine) -> list[Runner]:
    assert isinstance(engine.drafter, ChainedDrafter)
    models = [part.runner for part in engine.drafter.drafters if isinstance(part, ModelDrafter)]
    return [engine.target, *models]


def check_nothing_is_left(engine: Engine) -> None:
    engine.target.cache.audit(set())
    engine.drafter.audit(set())
    for runner in runners(engine):
        cache = runner.cache
        assert cache.free_slots == engine.config.max_running
        assert cache.used == 0
        if isinstance(cache, PagedCache):
            cache.allocate(0, [], round_profile.SALT)
            assert cache.room(0) == min(cache.max_len, cache.num_blocks * cache.block_size)
            cache.release(0)
            assert not list(indexed(cache)), "some of it can be found"


def indexed(cache: PagedCache) -> Iterator[int]:
    """Blocks that hold the beginning of a text of the profile's salt."""
    for first in range(VOCAB):
        yield from (node.block for node in cache._index.match([first] * cache.block_size, round_profile.SALT, 1))
    yield from cache._index.nodes


def uniform(timings: list[Timing]) -> dict[int, list[int]]:
    """k of even rounds, by batch, each once where the draft model had one token to read."""
    found: dict[int, list[int]] = {}
    for t in timings:
        if t.drafts == t.batch * t.depth and t.read in (0, t.drafts):
            found.setdefault(t.batch, []).append(t.depth)
    return {batch: sorted(ks) for batch, ks in found.items()}


def requests() -> list[Request]:
    return [
        Request(f"r{i}", tuple(range(2 + i, 32 + i)), SamplingParams(temperature=t, seed=i, max_tokens=20), k=k)
        for i, (t, k) in enumerate(((0.0, 3), (0.9, 4), (0.0, 0), (0.7, 2)))
    ]


@pytest.fixture(scope="module")
def profiled(pair: Pair) -> tuple[Engine, list[Timing]]:
    engine = small(pair)
    return engine, profile(engine.target, engine.drafter, 6, DEPTH, AGES)


def test_the_timings_cover_the_grid(profiled: tuple[Engine, list[Timing]]) -> None:
    _, timings = profiled
    assert uniform(timings) == {batch: [0, 1, 2, 4] for batch in (1, 2, 4, 6)}
    for t in timings:
        assert t.score_s > 0
        assert (t.draft_s > 0) == (t.forwards > 0) == (t.drafts > 0)
        assert t.forwards == t.depth
        assert t.prefill == t.host_s == 0
    uneven = [t for t in timings if t.drafts < t.batch * t.depth]
    assert [t.batch for t in uneven] == [2, 4, 6]
    assert all(t.read == t.drafts for t in uneven)
    behind = [t for t in timings if t.read > t.drafts]
    # Half of the first one, and a third of that where it is more than other rounds read.
    assert [(t.batch, t.read) for t in behind] == [(1, 5), (1, 15), (2, 6), (2, 16), (4, 18), (6, 20)]


def test_a_cost_model_can_be_made_of_them(profiled: tuple[Engine, list[Timing]]) -> None:
    _, timings = profiled
    cost = CostModel(DEPTH, timings).round_cost(6, 0)
    assert cost.step_s + cost.token_s > 0
    assert math.isfinite(cost.seconds(24, DEPTH, DEPTH, 24))


def test_nothing_is_left_of_it(profiled: tuple[Engine, list[Timing]]) -> None:
    engine, _ = profiled
    check_nothing_is_left(engine)


@pytest.mark.parametrize("forgotten", ["release", *in_proofs("discard")])
def test_what_is_left_would_be_noticed(pair: Pair, forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a profile that keeps its slots, or that can be found again."""
    engine = small(pair)
    draft = model_drafter(engine).runner.cache
    if not isinstance(draft, PagedCache) and forgotten == "discard":
        pytest.skip("nothing is ever found in a slotted cache")
    monkeypatch.setattr(draft, forgotten, lambda handle: None)
    profile(engine.target, engine.drafter, 6, DEPTH, AGES)
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        check_nothing_is_left(engine)


def test_a_failure_leaves_nothing_either(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small(pair)
    rounds = iter(range(20))

    def failing(*args: Any) -> Any:
        if next(rounds, None) is None:
            raise RuntimeError("out of order")
        return run_round(*args)

    monkeypatch.setattr(round_profile, "run_round", failing)
    with pytest.raises(RuntimeError, match="out of order"):
        profile(engine.target, engine.drafter, 6, DEPTH, AGES)
    check_nothing_is_left(engine)


def test_generations_are_the_same_after_it(pair: Pair) -> None:
    before = drive(small(pair), requests()).tokens
    engine = small(pair)
    profile(engine.target, engine.drafter, 4, DEPTH, AGES)
    assert drive(engine, requests()).tokens == before


def test_without_a_draft_model_the_target_is_profiled_all_the_same(pair: Pair) -> None:
    engine = small(Pair(pair.target, pair.draft), drafter="lookup")
    alone = ChainedDrafter({"lookup": ()}, engine.target.device)
    timings = profile(engine.target, alone, 6, DEPTH, AGES)
    assert uniform(timings) == {batch: [0, 1, 2, 4] for batch in (1, 2, 4, 6)}
    assert [t.batch for t in timings if t.drafts < t.batch * t.depth] == [2, 4, 6]
    assert all(t.forwards == t.read == t.draft_s == 0 for t in timings)
    check_nothing_is_left(engine)


def test_with_little_memory_fewer_sequences_are_profiled(pair: Pair) -> None:
    engine = small(pair, cache="paged", block_size=16, kv_tokens=200, max_model_len=96)
    timings = profile(engine.target, engine.drafter, 6, DEPTH, AGES)
    assert uniform(timings) == {batch: [0, 1, 2, 4] for batch in (1, 2, 4, 5)}  # of 13 blocks
    check_nothing_is_left(engine)


@pytest.mark.parametrize("max_model_len", [2, 3, 6])
def test_a_short_context_leaves_room_for_fewer_drafts(pair: Pair, max_model_len: int) -> None:
    engine = small(pair, max_model_len=max_model_len)
    timings = profile(engine.target, engine.drafter, 2, DEPTH, AGES)
    assert max(t.depth for t in timings) == min(DEPTH, max_model_len - 2)
    assert {t.batch for t in timings} == {1, 2}
    check_nothing_is_left(engine)


def test_without_speculation_plain_rounds_are_profiled(pair: Pair) -> None:
    engine = small(pair)
    timings = profile(engine.target, engine.drafter, 3, 0, AGES)
    assert [(t.batch, t.drafts) for t in timings] == [(1, 0), (2, 0), (3, 0)]
    check_nothing_is_left(engine)


@pytest.mark.parametrize(("looks", "kept"), [(0, {1: [0]}), (11 + 10, {1: [0, 1, 2, 4], 2: [0, 1, 2]})])
def test_when_time_is_up_the_largest_batches_are_left_out(
    pair: Pair, looks: int, kept: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small(pair)
    # Looked at once to begin with, before each of the two models reads each of the six sequences, and before each
    # round; not before the target reads the first sequence, nor before the first round.
    clock = itertools.count()
    monkeypatch.setattr(round_profile, "perf_counter", lambda: next(clock))
    assert uniform(profile(engine.target, engine.drafter, 6, DEPTH, float(looks))) == kept
    check_nothing_is_left(engine)


@pytest.mark.parametrize(("looks", "batches", "read"), [(0, {1}, (1, 0)), (2, {1}, (2, 1)), (3, {1, 2}, (2, 2))])
def test_when_time_is_up_no_more_sequences_are_read(
    pair: Pair, looks: int, batches: set[int], read: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any time the target still reads one: a plain round of it is always measured."""
    engine = small(pair)
    passes = {id(runner): 0 for runner in runners(engine)}
    run = Runner.run

    def counted(self: Runner, feeds: list[Feed], *rest: Any) -> Any:
        passes[id(self)] += sum(not feed.outputs for feed in feeds)
        return run(self, feeds, *rest)

    monkeypatch.setattr(Runner, "run", counted)
    clock = itertools.chain(range(looks + 2), itertools.repeat(looks or 1))  # it stands while rounds run
    monkeypatch.setattr(round_profile, "perf_counter", lambda: next(clock))
    timings = profile(engine.target, engine.drafter, 6, DEPTH, float(looks))
    assert {t.batch for t in timings} == batches
    assert tuple(passes.values()) == read
    check_nothing_is_left(engine)


def test_a_drafter_that_fails_costs_the_rounds_with_drafts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small(pair)

    def fail(*args: Any) -> Any:
        raise RuntimeError("no drafts today")

    monkeypatch.setattr(model_drafter(engine), "propose", fail)
    timings = profile(engine.target, engine.drafter, 6, DEPTH, AGES)
    assert [(t.batch, t.drafts) for t in timings] == [(1, 0), (2, 0), (4, 0), (6, 0)]
    check_nothing_is_left(engine)


def test_a_slow_phase_hits_all_rounds_alike(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds come kind after kind, a few of each in a row, and then again."""
    engine = small(pair)
    asked = scripted({}, monkeypatch)
    profile(engine.target, engine.drafter, 2, DEPTH, AGES)
    sweep = asked[: len(asked) // round_profile.SWEEPS]
    assert asked == sweep * round_profile.SWEEPS
    assert sweep == [drafts for drafts in sweep[:: round_profile.RUNS] for _ in range(round_profile.RUNS)]


def test_the_first_run_of_a_row_does_not_count(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It warms up. Here it is the fastest, so its time would be told if it counted."""
    engine = small(pair)
    numbers = itertools.count()

    def first_is_fast(*args: Any) -> Outcome:
        return replace(run_round(*args), score_us=10**3 if next(numbers) % 2 else 1)

    monkeypatch.setattr(round_profile, "run_round", first_is_fast)
    assert {t.score_s for t in profile(engine.target, engine.drafter, 2, DEPTH, AGES)} == {1e-3}


@pytest.mark.parametrize(("most", "plain_s"), [(16, 1e-3), (2, 1.8e-3)])
def test_a_shape_is_run_until_it_becomes_no_faster(
    pair: Pair, most: int, plain_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain rounds come back to 1 ms over ten rounds. Rounds with drafts become faster for ever. The second case does
    not wait for either."""
    engine, plain, drafting = small(pair), itertools.count(), itertools.count()

    def settling(plan: Any, *args: Any) -> Outcome:
        drafts = sum(s.k for s in plan.slices)
        took_us = 10**6 * 0.95 ** next(drafting) if drafts else 1000 + 100 * max(0, 9 - next(plain))
        return replace(run_round(plan, *args), score_us=int(took_us))

    monkeypatch.setattr(round_profile, "run_round", settling)
    monkeypatch.setattr(round_profile, "MOST_RUNS", most)
    monkeypatch.setattr(round_profile, "SWEEPS", 1)
    timings = profile(engine.target, engine.drafter, 1, 1, AGES)
    assert timings[0].score_s == plain_s
    assert next(drafting) == sum(t.drafts > 0 for t in timings) * most


def test_rounds_that_something_interrupted_do_not_count(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of each kind in a row, when everything is cold, and one in six of the others."""
    engine = small(pair)
    rounds = itertools.count()

    def interrupted(*args: Any) -> Outcome:
        sweep, place = divmod(next(rounds) % (2 * round_profile.RUNS), round_profile.RUNS)
        slow = not place or (not sweep and place == 1)
        return replace(run_round(*args), score_us=10**6 if slow else 10**3)

    monkeypatch.setattr(round_profile, "RUNS", 4)
    monkeypatch.setattr(round_profile, "run_round", interrupted)
    assert {t.score_s for t in profile(engine.target, engine.drafter, 2, DEPTH, AGES)} == {1e-3}


def scripted(seconds: dict[int, float], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rounds take as long as they are said to, by their drafts. Returns the drafts of the rounds that will be run."""
    ran: list[int] = []

    def run(plan: Any, *args: Any) -> Outcome:
        drafts = sum(s.k for s in plan.slices)
        ran.append(drafts)
        factor = seconds.get(drafts, 1.0)
        return replace(run_round(plan, *args), draft_us=int(factor * (1 + 100 * drafts)), score_us=int(factor * 1000))

    monkeypatch.setattr(round_profile, "run_round", run)
    return ran


@pytest.mark.parametrize(
    ("later", "factor"),
    [
        ({0: 1.1}, 1.0),
        pytest.param({0: 1.9, 4: 1.75, 16: 1.7}, 1.75, marks=pytest.mark.proofs),  # a busier machine
        pytest.param({4: 0.7}, None, marks=pytest.mark.proofs),
        ({16: 1.3}, None),
        pytest.param({}, 1.0, marks=pytest.mark.proofs),
        pytest.param({0: 1.3}, None, marks=pytest.mark.proofs),
    ],
)
def test_a_kept_profile_is_confirmed_by_a_few_rounds_or_measured_again(
    pair: Pair, later: dict[int, float], factor: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """factor: that of all seconds, the median of the measured shapes'; None: the profile does not hold."""
    engine = small(pair)
    ran = scripted({}, monkeypatch)
    first = profile(engine.target, engine.drafter, 6, DEPTH, AGES)
    whole = len(ran)
    ran = scripted(later, monkeypatch)
    second = profile(engine.target, engine.drafter, 6, DEPTH, AGES)
    assert (len(ran) < whole / 3) == (factor is not None)
    for before, after in zip(first, second, strict=True):
        expected = later.get(before.drafts, 1.0) if factor is None else factor
        assert [after.draft_s, after.score_s] == pytest.approx(
            [expected * before.draft_s, expected * before.score_s], 0.01
        )
    ran = scripted(later, monkeypatch)
    again = profile(engine.target, engine.drafter, 6, DEPTH, AGES)
    assert [t.score_s for t in again] == pytest.approx([t.score_s for t in second])
    assert len(ran) < whole / 3, "what was measured again is kept"
    assert len(profile(engine.target, engine.drafter, 6, DEPTH, AGES, kept=False)) == len(first)
    assert len(ran) > whole
    check_nothing_is_left(engine)


@pytest.mark.parametrize("threads", [1, 2])
def test_one_thread_is_timed_by_its_own_processor_time(
    pair: Pair, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes that hold the processor, here a sleep, do not count. Several threads wait for each other, and
    that counts."""
    engine, run, asleep_s = small(pair), Runner.run, 0.05

    def held_up(*args: Any) -> Any:
        time.sleep(asleep_s)
        return run(*args)

    before = torch.get_num_threads()
    monkeypatch.setattr(Runner, "run", held_up)
    try:
        torch.set_num_threads(threads)
        (timing,) = profile(engine.target, engine.drafter, 1, 0, AGES)
    finally:
        torch.set_num_threads(before)
    assert (timing.score_s >= asleep_s) == (threads == 2)


def test_another_load_has_another_file(pair: Pair, tmp_path: Path) -> None:
    engine = small(pair)
    for count, depth in ((2, 1), (2, 2), (1, 1), (2, 1)):
        profile(engine.target, engine.drafter, count, depth, AGES)
    assert len(list(tmp_path.rglob("rounds-*.json"))) == 3
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".json"]


def test_another_amount_of_free_memory_has_the_same_file(pair: Pair) -> None:
    """It differs from start to start, and no round takes longer for it."""
    engines = [small(pair, cache="paged", block_size=16, kv_tokens=tokens) for tokens in (256, 272)]
    assert len({ProfileFile(runners(engine), 2, 2).path for engine in engines}) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"depth": 2', '"depth": 3', 1),
        lambda text: text.replace('"batch": 1', '"batch": 0', 1),
        lambda text: text.replace('"score_s": ', '"score_s": -', 1),
        lambda text: text.replace('"host_s": 0.0', '"host_s": NaN', 1),
        lambda text: text.replace('"read"', '"reed"', 1),
        lambda text: text.replace('"batch": 1', '"batch": 1' + "0" * 400, 1),
        lambda text: "[" * 100_000,
    ],
)
def test_a_broken_file_is_refused(pair: Pair, spoil: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = ProfileFile(runners(small(pair)), 2, 2)
    kept = [Timing(1, 0, 0, 0, 0, 0, 0.0, 1e-3, 0.0), Timing(1, 2, 2, 0, 2, 2, 1e-4, 2e-3, 0.0)]
    file.write(kept, whole=True)
    assert file.read() == kept
    file.path.write_text(spoil(file.path.read_text("utf-8")), "utf-8")
    assert file.read() == []
    assert "cannot be used" in caplog.text


def test_a_cache_that_cannot_be_written_is_no_fault(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    file = ProfileFile(runners(small(pair)), 2, 2)
    file.write([Timing(1, 0, 0, 0, 0, 0, 0.0, 1e-3, 0.0)], whole=True)
    assert file.read() == []


@pytest.mark.parametrize(
    "config",
    [
        {"max_model_len": 4},  # no four drafts fit
        {"cache": "paged", "block_size": 16, "kv_tokens": 112},  # no four sequences fit
    ],
)
def test_a_kept_profile_is_confirmed_by_rounds_that_fit(
    pair: Pair, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small(pair, **config)
    ran = scripted({}, monkeypatch)
    first = profile(engine.target, engine.drafter, 6, DEPTH, AGES)
    assert max(t.drafts for t in first) < 16
    assert profile(engine.target, engine.drafter, 6, DEPTH, AGES) == first
    assert ran
    check_nothing_is_left(engine)


def test_an_interrupted_profile_ends_after_the_running_round(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small(pair)
    ran = scripted({}, monkeypatch)
    assert profile(engine.target, engine.drafter, 6, DEPTH, AGES, interrupted=lambda: len(ran) >= 6) == []
    assert len(ran) == 6
    check_nothing_is_left(engine)


def test_a_profile_of_fewer_shapes_is_not_kept_in_place_of_more(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefixes of requests left memory for one sequence when rounds were measured again."""
    engine, reserve = small(pair), round_profile._reserve
    scripted({}, monkeypatch)
    first = profile(engine.target, engine.drafter, 6, DEPTH, AGES)
    with monkeypatch.context() as patch:
        patch.setattr(round_profile, "_reserve", lambda r, s, k: s.handle == -1 and reserve(r, s, k))
        assert 1 < len(profile(engine.target, engine.drafter, 6, DEPTH, AGES, kept=False)) < len(first)
    assert ProfileFile(runners(engine), 6, DEPTH).read() == first


def kept(engine: Engine) -> tuple[ProfileFile, list[Timing], bool]:
    """The file, its timings, and whether these are all."""
    file = ProfileFile(runners(engine), 6, DEPTH)
    return file, file.read(), file.whole


def test_a_later_profile_beside_requests_is_completed_by_the_next_start(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a file, as after a change of the draft, it cannot know which shapes a start has memory for."""
    engine, reserve = small(pair), round_profile._reserve
    scripted({}, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(round_profile, "_reserve", lambda r, s, k: s.handle == -1 and reserve(r, s, k))
        alone = profile(engine.target, engine.drafter, 6, DEPTH, AGES, kept=False)
    assert {t.batch for t in alone} == {1}
    assert kept(engine)[1:] == (alone, False)
    whole = profile(engine.target, engine.drafter, 6, DEPTH, AGES)
    assert {t.batch for t in whole} == {1, 2, 4, 6}
    assert len(profile(engine.target, engine.drafter, 6, DEPTH, AGES, kept=False)) == len(whole)
    assert kept(engine)[2], "as many as a whole profile are all"


def test_what_a_slow_start_could_measure_is_completed_by_the_next(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small(pair)
    whole = profile(engine.target, engine.drafter, 6, DEPTH, AGES)
    kept(engine)[0].path.unlink()
    ran = scripted({}, monkeypatch)
    monkeypatch.setattr(round_profile, "perf_counter", lambda: float(len(ran)))  # a second for each round
    first = profile(engine.target, engine.drafter, 6, DEPTH, 40.0)
    assert 1 < len(first) < len(whole)
    assert kept(engine)[1:] == (first, False)
    second = profile(engine.target, engine.drafter, 6, DEPTH, 40.0)
    kinds = [list(map(round_profile._kind, timings)) for timings in (first, second, whole)]
    assert sorted(kinds[1]) == sorted(kinds[2])
    assert set(kinds[0]) < set(kinds[1])
    assert kept(engine)[1:] == (second, True)
    rounds = len(ran)
    assert profile(engine.target, engine.drafter, 6, DEPTH, 40.0) == second
    assert len(ran) - rounds <= 2 * round_profile.RUNS * round_profile.SWEEPS * len(round_profile.CHECKED_KS)
    check_nothing_is_left(engine)


@pytest.mark.parametrize(("budget_s", "starts"), [(20.0, None), pytest.param(40.0, 6, marks=pytest.mark.proofs)])
def test_each_start_measures_what_the_profile_lacks(
    pair: Pair, budget_s: float, starts: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """starts: how many a whole profile takes, if each round takes a second; None: the check leaves no time for it."""
    engine = small(pair)
    ran = scripted({}, monkeypatch)
    monkeypatch.setattr(round_profile, "RUNS", 4)
    monkeypatch.setattr(round_profile, "perf_counter", lambda: float(len(ran)))
    counts = [len(profile(engine.target, engine.drafter, 6, DEPTH, budget_s))]
    while len(counts) < (starts or 3):
        assert not kept(engine)[2]
        counts.append(len(profile(engine.target, engine.drafter, 6, DEPTH, budget_s)))
    assert kept(engine)[2] == (starts is not None)
    assert all(a < b for a, b in pairwise(counts)) == (starts is not None)


def test_where_rounds_are_captured_they_are_measured_for_longer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small(pair)
    ran, staging = scripted({}, monkeypatch), engine.target.staging

    def clock() -> float:
        """A second for each round. What is scripted is not captured."""
        staging.graphs = None
        return float(len(ran))

    def count(budget_s: float, graphs: Graphs | None) -> int:
        ran.clear()
        staging.graphs = graphs
        return len(profile(engine.target, engine.drafter, 6, DEPTH, budget_s, kept=False))

    monkeypatch.setattr(round_profile, "perf_counter", clock)
    plain, longer = count(8.0, None), count(8.0 * round_profile.CAPTURING, None)
    assert plain < longer == count(8.0, Graphs(torch.device("cpu")))


def test_a_start_that_reaches_fewer_shapes_leaves_the_file(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the check of a good profile may fail. The next start checks it again."""
    engine = small(pair)
    scripted({}, monkeypatch)
    whole = profile(engine.target, engine.drafter, 6, DEPTH, AGES)
    ran = scripted({16: 1.3}, monkeypatch)
    monkeypatch.setattr(round_profile, "perf_counter", lambda: float(len(ran)))  # a second for each round
    assert 1 < len(profile(engine.target, engine.drafter, 6, DEPTH, 40.0)) < len(whole)
    assert kept(engine)[1:] == (whole, True)


def test_a_repeat_that_reaches_few_shapes_rescales_the_others() -> None:
    def timing(batch: int, seconds: float) -> Timing:
        return Timing(batch, 2 * batch, 2, 0, 2, 2 * batch, seconds / 4, seconds, 0.0)

    known = [timing(1, 1e-3), timing(2, 2e-3), timing(8, 4e-3)]
    few = round_profile.renewed(known, [timing(1, 3e-3), timing(2, 6e-3)])
    assert few[:2] == [timing(1, 3e-3), timing(2, 6e-3)]
    assert (few[2].batch, few[2].score_s, few[2].draft_s) == pytest.approx((8, 12e-3, 3e-3))
    assert round_profile.renewed(known, [timing(16, 1.0)]) == [timing(16, 1.0)]
