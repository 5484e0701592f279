"""The simulator: its bookkeeping on scripted rounds, its exactness, and that it tells better policies from worse."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise

import numpy as np
import pytest

from benchmarks.lab.clairvoyant import Clairvoyant
from benchmarks.lab.scenarios import (
    RAMP,
    branching,
    cpu,
    drawn,
    drifting,
    easy_and_hard,
    gpu,
    head,
    mixed,
    profile,
    recovery,
)
from benchmarks.lab.simulator import Controller, Job, Report, SimRound, World, make_job, simulate
from engine.trees import ROOT, chain
from policies.config import PolicyConfig
from policies.control import SpecControl
from policies.held_choice import Decision
from policies.observation import Candidate, Drafted, Prefill, RoundCost, Timing
from tests.examples import usual_and_proofs

DEPTH = 8
GPU, CPU = partial(gpu, DEPTH), partial(cpu, DEPTH)


class Script:
    """The same k for every sequence in every round, within the limits; it records its arguments."""

    def __init__(self, ks: Iterable[int], confidence: float = 0.0) -> None:
        self.ks = iter(ks)
        self.confidence = confidence
        self.candidates: list[list[Candidate]] = []
        self.prefills: list[Prefill] = []
        self.timings: list[Timing] = []
        self.drafted: list[list[Drafted]] = []
        self.idle: list[list[int]] = []
        self.gone: list[int] = []

    def rest(self, fixed: Mapping[int, int | None], drafters: Sequence[str | None]) -> Decision | None:
        return None

    def rested(self, round_s: float) -> None:
        raise AssertionError("it never rests")

    def plan(self, candidates: Sequence[Candidate], prefill: Prefill) -> Decision:
        self.candidates.append(list(candidates))
        self.prefills.append(prefill)
        k = next(self.ks)
        ks = [min(k, c.left) for c in candidates]
        return Decision(
            ks, [None] * len(ks), ["policy"] * len(ks), [0.5] * len(ks), self.confidence, 0.01, float(len(ks))
        )

    def observe(self, timing: Timing, drafted: Sequence[Drafted], idle: Iterable[int]) -> None:
        self.timings.append(timing)
        self.drafted.append(list(drafted))
        self.idle.append(list(idle))

    def forget(self, handle: int) -> None:
        self.gone.append(handle)


def text(bits: str, **fields: object) -> Job:
    return make_job([bit == "1" for bit in bits], [0.5] * len(bits), **fields)  # type: ignore[arg-type]


def forever(k: int) -> Iterable[int]:
    return iter(lambda: k, None)


def rounds(world: World, control: Controller) -> list[SimRound]:
    done = []
    while not world.over:
        done.append(world.step(control))
    return done


def control(name: str = "goodput", k: int = 5, machine: Callable[..., object] = GPU, batch: int = 16) -> SpecControl:
    return SpecControl(PolicyConfig(name, k=k), DEPTH, profile(machine, DEPTH, batch))  # type: ignore[arg-type]


def test_a_text_knows_how_many_drafts_are_right_from_each_place() -> None:
    assert text("1101110").runs == (2, 1, 0, 3, 2, 1, 0)


@pytest.mark.parametrize("fields", [{"length": 4}, {"length": 0}, {"length": 3, "allowed": 2}, {"beside": 0}])
def test_impossible_jobs_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="no job can emit"):
        text("111", **fields)


def test_rounds_accept_up_to_the_first_wrong_draft() -> None:
    world = World([text("0110111111")], GPU)
    script = Script([3, 2, 0, 4])
    done = rounds(world, script)
    # position 0 is the prompt's pass; then 1, 2 right and 3 wrong; 4, 5 right and a bonus token; 7; and 8, 9
    assert [(r.accepted, r.emitted, r.joined) for r in done] == [
        ([], [], 1),
        ([2], [3], 0),
        ([2], [3], 0),
        ([0], [1], 0),
        ([1], [2], 0),
    ]
    assert [c.left for (c,) in script.candidates] == [8, 5, 2, 1]
    assert script.gone == [0]


def test_what_the_draft_model_has_not_read_grows_until_it_drafts() -> None:
    world = World([text("0110111111", prompt=20)], GPU)
    script = Script([0, 0, 2, 2, 1, 0])
    rounds(world, script)
    # prompt and first token; two more; after "0", all read but the corrected token; after all right, two are left
    assert [c.gap for (c,) in script.candidates] == [21, 22, 23, 1, 2, 2]
    assert [t.read for t in script.timings] == [0, 0, 0, 23 + 1, 1 + 1, 2, 0]
    assert [t.forwards for t in script.timings] == [0, 0, 0, 2, 2, 1, 0]


class Resting(Script):
    """It rests in two of three rounds, once a sequence decodes."""

    asked, seconds = 0, 0.0

    def rest(self, fixed: Mapping[int, int | None], drafters: Sequence[str | None]) -> Decision | None:
        self.asked += 1
        return Decision([0], [None], ["load"], [0.5], 0.0, 0.01, 1.0) if self.asked % 3 else None

    def rested(self, round_s: float) -> None:
        self.seconds += round_s


def test_a_rest_asks_for_no_choice_and_is_not_observed() -> None:
    script, world = Resting(forever(0)), World([text("0" * 20)], GPU)
    for _ in range(7):  # one reads the prompt
        world.step(script)
    assert (script.asked, len(script.candidates), len(script.timings)) == (6, 2, 3)
    observed_s = sum(t.draft_s + t.score_s + t.host_s for t in script.timings)
    assert script.seconds == pytest.approx(world.clock_s - observed_s)


class Mixed(Script):
    """Chains of k drafts, and for the last sequence a tree of two such chains."""

    def plan(self, candidates: Sequence[Candidate], prefill: Prefill) -> Decision:
        decision = super().plan(candidates, prefill)
        k = decision.ks[-1]
        decision.ks[-1], decision.shapes[-1] = 2 * k, (*chain(k), ROOT, *range(k, 2 * k - 1))
        return decision


def test_chains_and_trees_share_forwards() -> None:
    """As the engine draws them: as many as the deepest path has, and each one reads the nodes of one depth."""
    script = Mixed([3])
    world = World([text("0" * 20, beside=2), text("0" * 20, beside=2)], GPU)
    for _ in range(2):
        world.step(script)
    timing, gaps = script.timings[-1], [candidate.gap for candidate in script.candidates[-1]]
    assert (timing.drafts, timing.forwards, timing.read) == (3 + 6, 3, sum(gaps) + 2 + 4)  # the last ones are not read


def test_a_source_without_a_model_runs_no_forward() -> None:
    script = Script(forever(2))
    rounds(World([text("0111111", source="ngram")], GPU), script)
    assert {t.forwards for t in script.timings} == {0}
    assert all(t.draft_s == GPU(1, 0).drafting_s for t in script.timings[1:])
    assert {told.source for tell in script.drafted for told in tell} == {"ngram"}


def test_a_stop_cuts_the_last_round() -> None:
    done = rounds(World([text("011111", length=3, allowed=6)], GPU), Script([4]))
    assert (done[-1].accepted, done[-1].emitted) == ([4], [2])


def test_prompts_are_read_beside_the_others() -> None:
    jobs = [text("000", prompt=9, beside=2), text("00", prompt=7, beside=2), text("00", prompt=5, beside=2)]
    script = Script(forever(0))
    done = rounds(World(jobs, GPU), script)
    assert [r.joined for r in done] == [2, 0, 1, 0]
    assert [len(r.handles) for r in done] == [0, 2, 1, 1]
    assert script.prefills == [Prefill(), Prefill(tokens=5, sequences=1, passes=1), Prefill()]
    assert [(t.batch, t.prefill) for t in script.timings] == [(2, 14), (2, 0), (2, 4), (1, 0)]
    assert script.idle == [[0, 1], [0, 1], [0, 2], [2]]


def test_the_clock_goes_on_to_the_next_arrival() -> None:
    world = World([text("00"), text("00", arrived_s=5.0, beside=2)], GPU)
    done = rounds(world, Script(forever(0)))
    assert [r.joined for r in done] == [1, 0, 1, 0]
    assert world.clock_s == pytest.approx(5.0 + sum(r.seconds for r in done[2:]))


def test_a_broken_drafter_is_always_wrong_and_only_then() -> None:
    done = rounds(World([text("0" + "1" * 30)], GPU, broken=range(2, 4)), Script(forever(4)))
    assert [r.accepted for r in done[1:5]] == [[4], [0], [0], [4]]
    assert [r.alphas for r in done[1:5]] == [[0.5], [0.0], [0.0], [0.5]]


def test_noise_is_in_what_is_measured_and_not_on_the_clock() -> None:
    runs = {}
    for noise in (0.0, 0.2):
        script = Script(forever(2))
        world = World([text("0" * 20)], GPU, noise)
        simulate(world, script)
        runs[noise] = world.clock_s, [t.score_s for t in script.timings]
    assert runs[0.0][0] == runs[0.2][0]
    assert len(set(runs[0.0][1][1:-2])) == 1
    assert len(set(runs[0.2][1])) == len(runs[0.2][1])


def test_phases_are_in_what_is_measured_and_not_on_the_clock() -> None:
    runs = {}
    for slow in (1.0, 1.5):
        script = Script(forever(2))
        world = World([text("0" * 2000)], GPU, slow=slow)
        simulate(world, script)
        runs[slow] = world.clock_s, [timing.score_s for timing in script.timings[1:-2]]
    assert runs[1.0][0] == runs[1.5][0]
    (steady,) = set(runs[1.0][1])
    factors = [seconds / steady for seconds in runs[1.5][1]]
    changes = sum(a != b for a, b in pairwise(factors))
    assert {round(factor, 6) for factor in factors} == {1.0, 1.5}
    assert 3 < changes < 30


def test_a_tree_is_walked_by_the_ranks_of_what_is_right() -> None:
    """Two guesses for each of two positions. Right are the second and then the first; none; twice the first."""
    tree = (ROOT, 0, 0, ROOT, 3, 3)
    job = Job((0,) * 8, (0.5,) * 8, 8, 8, prompt=5, ranks=(9, 1, 0, 9, 9, 0, 1, 0))

    class Trees(Script):
        def plan(self, candidates: Sequence[Candidate], prefill: Prefill) -> Decision:
            return replace(super().plan(candidates, prefill), ks=[len(tree)], shapes=[tree])

    script = Trees(forever(0))
    done = rounds(World([job], partial(slow_trees, DEPTH)), script)
    assert [r.accepted for r in done[1:]] == [[2], [0], [2]]
    assert [[told.sibling_counts for told in tell] for tell in script.drafted[1:]] == [
        [((1, 1),)],
        [((1, 0),)],
        [((1, 1),)],
    ]
    assert [tell[0].overlaps for tell in script.drafted[1:]] == [(0.0, 1.0), (0.0,), (1.0, 0.0)]
    assert [(t.forwards, t.read, t.branched_drafts) for t in script.timings[1:]] == [
        (2, 6 + 2, 3),
        (2, 2 + 2, 3),
        (2, 1 + 2, 3),
    ]
    plain = slow_trees(DEPTH, 1, 0)
    assert script.timings[2].score_s == pytest.approx(1.5 * plain.verify_s[6])


def slow_trees(depth: int, batch: int, prefill: int) -> RoundCost:
    return replace(gpu(depth, batch, prefill), tree=1.5)


@pytest.mark.parametrize("batch", [1, 4])
def test_good_drafts_of_a_head_are_used_as_far_as_they_pay(batch: int) -> None:
    """Within 3 % of the best fixed k, which nobody knows beforehand, the first rounds included."""
    machine = partial(head, 16)

    def rate(name: str, k: int = 5) -> float:
        policy = SpecControl(PolicyConfig(name, k=k), 16, profile(machine, 16, batch))  # type: ignore[arg-type]
        return simulate(World(easy_and_hard(batch, 0), machine, 0.05), policy, 300).tokens_per_s

    best = max(rate("fixed", k) for k in (4, 8))
    assert best > 1.4 * rate("off")
    assert rate("goodput") >= 0.97 * best


def test_trees_gain_where_further_guesses_are_often_right() -> None:
    chains, trees = (
        simulate(World(branching(1, 0), GPU), SpecControl(PolicyConfig(trees=may), DEPTH, profile(GPU, DEPTH, 1)), 300)
        for may in (False, True)
    )
    assert trees.tokens_per_s > 1.03 * chains.tokens_per_s


def test_policies_that_cut_by_confidence_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be simulated"):
        simulate(World([text("000")], GPU), Script(forever(1), confidence=0.4))


def test_every_policy_emits_the_same_texts() -> None:
    jobs = list(islice(drifting(4, seed=3, tokens=40), 12))
    for name, k in (("off", 0), ("fixed", 3), ("goodput", 5)):
        emitted: dict[int, int] = {}
        for done in rounds(World(jobs, GPU), control(name, k, batch=4)):
            for handle, tokens in zip(done.handles, done.emitted, strict=True):
                emitted[handle] = emitted.get(handle, 1) + tokens
        assert emitted == {i: job.length for i, job in enumerate(jobs)}


def steady(alpha: float, batch: int) -> list[Job]:
    rng = np.random.default_rng(7)
    return [drawn(rng, np.full(200, alpha), beside=batch) for _ in range(2 * batch)]


@pytest.mark.parametrize(("alpha", "batch", "better"), [(0.1, 2, "off"), (0.95, 2, "fixed"), (0.5, 256, "off")])
def test_what_is_worse_is_reported_worse(alpha: float, batch: int, better: str) -> None:
    rates = {
        name: simulate(World(steady(alpha, batch), GPU), control(name, 8, batch=batch)).tokens_per_s
        for name in ("off", "fixed", "goodput")
    }
    worse = {"off": "fixed", "fixed": "off"}[better]
    assert rates[worse] < 0.9 * rates[better]
    assert rates["goodput"] > rates[worse]


def clairvoyant(world: World, bits: bool = False) -> Report:
    return simulate(world, Clairvoyant(world, DEPTH, bits))


@pytest.mark.parametrize(("machine", "batch"), [pytest.param(GPU, 8, marks=pytest.mark.proofs), (CPU, 4)])
def test_nobody_beats_the_clairvoyant_in_the_mean(machine: Callable[..., object], batch: int) -> None:
    rates: dict[str, list[float]] = {}
    for seed in range(3):
        jobs = list(islice(drifting(batch, seed, tokens=100), 4 * batch))
        new = partial(World, jobs, machine)  # type: ignore[arg-type]
        for name, k in (("off", 0), ("fixed", 2), ("fixed", 4), ("heuristic", 5), ("goodput", 5)):
            report = simulate(new(), control(name, k, machine, batch))
            rates.setdefault(f"{name} {k}", []).append(report.tokens_per_s)
        rates.setdefault("chances", []).append(clairvoyant(new()).tokens_per_s)
        rates.setdefault("bits", []).append(clairvoyant(new(), bits=True).tokens_per_s)
    means = {name: float(np.mean(found)) for name, found in rates.items()}
    assert means["bits"] > means["chances"] >= max(rate for name, rate in means.items() if name[-1].isdigit())


def test_prompts_do_not_mislead_the_clairvoyant() -> None:
    """Every round has a prompt and too many sequences for drafts. Counting the prompts' time costs a tenth."""
    off = simulate(World(drifting(256, 0), GPU), control("off", batch=256), 120, skip=50)
    world = World(drifting(256, 0), GPU)
    knowing = simulate(world, Clairvoyant(world, DEPTH), 120, skip=50)
    assert knowing.tokens_per_s >= 0.99 * off.tokens_per_s


def test_the_clairvoyant_knows() -> None:
    world = World(islice(drifting(4, 1), 12), GPU)
    report = clairvoyant(world)
    assert report.alpha_error == 0
    assert report.seconds_error < 0.01  # a request that joins is a row of the prompts' to it
    other = simulate(World(islice(drifting(4, 1), 12), GPU), control())
    assert other.alpha_error > 0.02


def test_the_clairvoyant_counts_prompts_once() -> None:
    """Every request but the first is read beside others. A prompt takes about as long as the rest of its round."""
    jobs = [replace(job, prompt=300) for job in islice(drifting(4, 1, tokens=12), 24)]
    assert clairvoyant(World(jobs, GPU)).seconds_error < 0.03


def test_runs_repeat_by_their_seed() -> None:
    def run(seed: int) -> Report:
        return simulate(World(drifting(8, seed), CPU, noise=0.1, seed=seed), control(machine=CPU), 60)

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_a_report_adds_up() -> None:
    script = Script([3, 2, 0, 4])
    report = simulate(World([text("0110111111")], GPU), script)
    assert (report.tokens, report.rounds, report.plans, report.drafted, report.accepted) == (10, 4, 4, 6, 5)
    assert report.mean_ks == [0, 3, 2, 0, 1]
    assert report.mean_k == 1.5
    assert report.tokens_bias == pytest.approx(4 / 9 - 1)
    assert report.seconds == pytest.approx(sum(t.draft_s + t.score_s + t.host_s for t in script.timings))


def test_the_beginning_may_be_left_out() -> None:
    jobs = list(islice(drifting(4, 0, tokens=30), 8))
    whole, late = (simulate(World(jobs, GPU), control("fixed", 2), skip=skip) for skip in (0, 5))
    early = World(jobs, GPU)
    first = simulate(early, control("fixed", 2), 5)
    assert (late.tokens + first.tokens, late.rounds + first.rounds) == (whole.tokens, whole.rounds)
    assert late.seconds + first.seconds == pytest.approx(whole.seconds)


def test_the_largest_batch_runs() -> None:
    report = simulate(World(drifting(512, 0), GPU), control(batch=512), 3)
    assert report.plans == 2 * 512


def test_loads_ramp() -> None:
    world = World(mixed(0, tokens=8, each=2), CPU)
    batches = [len(done.handles) for done in rounds(world, Script(forever(0)))]
    assert max(batches) == max(RAMP)
    assert batches[1] == batches[-1] == 1
    chances = [job.alphas[0] for job in mixed(0)]
    assert chances.count(0.95) == chances.count(0.5)


def test_a_gpu_pass_has_a_plateau_steps_and_a_cliff() -> None:
    verify = GPU(128, 0).verify_s  # by drafts beyond 128 tokens
    assert verify[20] < 1.02 * verify[0]  # reads the weights
    assert verify[160] > 1.3 * verify[80]  # computes
    assert verify[145] == verify[160]  # 273 to 288 tokens replay one graph
    assert verify[385] - verify[384] > 5 * (verify[384] - verify[368])  # 513 tokens are too many for any


@pytest.mark.parametrize(("k", "score", "draft"), [(0, 3240, 0), (1, 4000, 730), (2, 4690, 1110), (4, 6130, 1880)])
def test_the_cpu_is_the_demo_pairs(k: int, score: float, draft: float) -> None:
    (timing,) = [t for t in profile(CPU, DEPTH, 8) if (t.batch, t.drafts, t.depth, t.read) == (8, 8 * k, k, 8 * k)]
    assert timing.score_s * 1e6 == pytest.approx(score, rel=0.05)
    assert timing.draft_s * 1e6 == pytest.approx(draft, rel=0.15)


def test_recovery_counts_rounds() -> None:
    level, gone, probe = [4.0] * 20, [0.0] * 30, [0.0, 1.0]
    ks = [*level, 3.0, 2.0, *gone, *probe, *level]
    broken = range(20, 44)
    assert recovery(ks, broken) == (2, 5)  # five of the ten rounds from there on are at the old level
    assert recovery([*level, *level, *gone], range(20, 40)) == (None, None)


@pytest.mark.parametrize("seed", usual_and_proofs(range(4), [0]))
def test_a_broken_drafter_is_left_alone_and_found_again(seed: int) -> None:
    broken = range(150, 270)

    def used(policy: SpecControl) -> tuple[int | None, int | None]:
        return recovery(simulate(World(drifting(4, seed), GPU, broken=broken), policy, 480).mean_ks, broken)

    left, found = used(control(batch=4))
    assert left is not None
    assert found is not None
    assert left <= 30
    assert found <= 200
    assert used(control("fixed", 4, batch=4))[0] is None
