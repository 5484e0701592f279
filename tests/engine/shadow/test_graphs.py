"""Rounds that are captured graphs say what the engine on the CPU says, while lengths, members and drafts change. One
graph is captured per bucket. Faults that only a replay would show are put in one by one, and each is seen."""

import random
from collections import Counter
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cache.gathered import GatheredStorage
from cache.paged import PagedCache
from cache.transfer import index_tensor
from engine import rescue as rescue_module
from engine import round as round_module
from engine import verification
from engine.device import captured_round
from engine.device.captured_round import CapturedVerdict
from engine.device.graphs import Graphs, graph_room
from engine.device.staging import Staging
from engine.drafters.base import Draft, DraftBatch
from engine.drafters.captured_chains import CapturedChains
from engine.drafters.model import ModelDrafter
from engine.engine import Engine
from engine.models.feeds import Feed
from engine.models.runner import Runner
from engine.sampling.device_bans import most_bans
from engine.sampling.device_bias import is_biased
from engine.sampling.filters import truncates
from engine.scheduler import Plan
from engine.sequence import Sequence
from engine.trees import Growth
from engine.types import DrafterName, Request, SamplingParams, Typical, Verifier
from policies.config import PolicyConfig
from policies.control import SpecControl
from policies.observation import Timing
from tests.engine.driving import load
from tests.engine.models.families import CASES, random_checkpoint
from tests.engine.pairs import Pair
from tests.engine.shadow.both import Arrivals, Both, run_both, without_measurements
from tests.engine.shadow.counting import Counts
from tests.engine.shadow.cuda import shadow_cuda
from tests.engine.shadow.device import active
from tests.engine.shadow.emulator import Emulator

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.usefixtures("unmeasured")
PARAMS = SamplingParams(temperature=0.8, max_tokens=16, seed=1, ignore_eos=True)
PADDED = {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}  # sequences → those of their graph
SETTINGS: dict[str, Any] = {
    "policy": PolicyConfig("fixed", k=3),
    "cache": "paged",
    "block_size": 16,
    "kv_tokens": 800,
    "max_running": 3,
    "max_spec_length": 4,
    "max_model_len": 64,
    "prefill_chunk": 40,  # or the schedule would depend on the device
}


def run(pair: Pair, arrivals: Arrivals, **options: Any) -> Both:
    config = {name: value for name, value in options.items() if name != "act"}
    acts = {"act": options["act"]} if "act" in options else {}
    return run_both(
        lambda device: load(pair, device=device, graphs=device != "cpu", **{**SETTINGS, **config}), arrivals, **acts
    )


# --- a long run ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Watch:
    """The rounds of an engine, and the parts of them that may be captured."""

    captured: list[bool] = field(default_factory=list)  # by round in which every sequence decodes
    keys: list[tuple[str, Hashable]] = field(default_factory=list)  # of each part
    buckets: dict[Hashable, set[Hashable]] = field(default_factory=dict)  # what a part's work depends on → its keys
    sizes: dict[int, set[int]] = field(default_factory=dict)  # rounded number of sequences → their numbers

    def install(self, patch: Patch) -> None:
        can_capture = captured_round.can_capture

        def watching(plan: Plan, target: Runner) -> bool:
            captured = can_capture(plan, target)
            if all(s.emits and s.committed == 1 for s in plan.slices) and target.staging.graphs is not None:
                self.captured.append(captured)
            return captured

        patch.setattr(round_module, "can_capture", watching)
        begin_verdict, begin_chains = CapturedVerdict.__init__, CapturedChains.__init__

        def verdict(part: CapturedVerdict, batch: DraftBatch, ks: Seq[int], target: Runner, shapes: Any) -> None:
            begin_verdict(part, batch, ks, target, shapes)
            logprobs = any(s.params.logprobs is not None for s in batch.sequences)
            truncated = any(truncates(s.params) for s in batch.sequences)
            size = PADDED[len(ks)]
            adjusted = _adjusted(batch.sequences, max(ks))
            self._note("verdict", part._key, size, _bucket(batch.sequences, ks, target), truncated, logprobs, adjusted)
            self.sizes.setdefault(size, set()).add(len(ks))

        def chains(
            part: CapturedChains, runner: Runner, batch: DraftBatch, ks: Seq[int], vocab: int, rank: int
        ) -> None:
            active = [s for s, k in zip(batch.sequences, ks, strict=True) if k]
            gap = max(map(runner.uncached, active))
            before = runner.staging.layout  # the verdict's numbers lie before the chains'
            begin_chains(part, runner, batch, ks, vocab, rank)
            self._note("chains", part._key, before, _bucket(active, ks, runner), gap)

        patch.setattr(CapturedVerdict, "__init__", verdict)
        patch.setattr(CapturedChains, "__init__", chains)

    def _note(self, part: str, key: Hashable, *bucket: Hashable) -> None:
        self.keys.append((part, key))
        self.buckets.setdefault((part, *bucket), set()).add(key)


def _bucket(sequences: Seq[Sequence], ks: Seq[int], runner: Runner) -> Hashable:
    """(most drafts, blocks of the longest of these sequences up to a power of two)."""
    cache = runner.cache
    assert isinstance(cache, PagedCache)
    most = max(len(cache.slot_table(cache.slot(s.handle))) for s in sequences)
    return max(ks), next(2**n for n in range(20) if 2**n >= most)


def _adjusted(sequences: Seq[Sequence], depth: int) -> Hashable:
    """(whether a sequence has a bias, tokens that rows must not give at most, up to a power of two)."""
    bans = (1 + depth) * sum(map(most_bans, sequences))
    return any(is_biased(s.params) for s in sequences), bans and next(2**n for n in range(20) if 2**n >= bans)


def random_requests(count: int) -> dict[int, list[Request]]:
    """Requests of all kinds. One in twelve is of a kind that is never captured."""
    choose, step = random.Random(7), 0
    shared = tuple(range(30, 47))  # a block, which its readers must not write to, and a token
    arrivals: dict[int, list[Request]] = {}
    for i in range(count):
        params = SamplingParams(
            temperature=choose.choice([0.0, 0.7, 1.3]),
            top_p=choose.choice([1.0, 1.0, 0.8]),
            logprobs=choose.choice([None, None, None, 2]),
            max_tokens=choose.choice([12, 36]),
            seed=i,
            ignore_eos=True,
        )
        if i % 6 == 5:
            words = (20, 21), (22, 20, 21)
            more: dict[str, Any] = {"logit_bias": ((20, 9.0), (1, 9.0)), "bad_word_ids": words, "min_tokens": 4}
            params = replace(params, ignore_eos=False, max_tokens=6, **more)
        prompt = tuple(choose.randrange(20, 300) for _ in range(choose.randrange(3, 9)))
        drafter, k = choose.choice(["model", "model", "lookup"]), choose.choice([0, 1, 3, 3])
        request = Request(f"r{i}", (shared if i % 3 == 0 else ()) + prompt, params, k=k, drafter=drafter)  # type: ignore[arg-type]
        if i % 12 == 11:
            drawn = replace(params, temperature=0.7)
            request = replace(request, params=drawn, k=None, drafter="model", tree=(2, 1), verifier="rejection")
        arrivals.setdefault(step, []).append(request)
        step += choose.choice([0, 0, 0, 24])
    return arrivals


@pytest.mark.parametrize(
    ("requests", "captured", "replays"), [(24, 80, 50), pytest.param(46, 200, 100, marks=pytest.mark.proofs)]
)
def test_captured_rounds_say_what_the_cpu_says(
    pair: Pair, emulator: Emulator, requests: int, captured: int, replays: int, monkeypatch: Patch
) -> None:
    watch = Watch()
    watch.install(monkeypatch)
    both = run(pair, random_requests(requests), max_running=8, kv_tokens=1600)
    both.check()
    both.check_drafts()
    assert sum(watch.captured) >= captured
    assert not all(watch.captured), "no round had to run operation by operation"
    asked = Counter(watch.keys)
    assert len(emulator.tapes) == sum(n > 1 for n in asked.values()), "a bucket was captured twice, or never"
    assert emulator.replays == sum(n - 1 for n in asked.values())
    assert emulator.replays >= replays
    assert {len(keys) for keys in watch.buckets.values()} == {1}, "a part's work depends on more than its bucket"
    assert len(watch.buckets) == len(asked), "two buckets share a graph"
    assert watch.sizes == {1: {1}, 2: {2}, 4: {3, 4}, 8: {5, 6, 7, 8}}


# --- single properties -----------------------------------------------------------------------------------------------


def steady_requests(count: int = 2, **fields: Any) -> list[Request]:
    """Their drafts have different lengths in every round, and their memory grows by a block."""
    params = replace(PARAMS, **fields)
    return [Request(f"r{i}", tuple(range(20 + i, 31)), replace(params, seed=i), k=3 - i) for i in range(count)]


def test_only_rounds_that_replay_show_what_a_round_takes(pair: Pair, emulator: Emulator, monkeypatch: Patch) -> None:
    told, observe = list[tuple[bool, int]](), SpecControl.observe

    def spy(control: SpecControl, timing: Timing | None, *more: Any) -> None:
        told.append((timing is not None, emulator.replays))
        observe(control, timing, *more)

    monkeypatch.setattr(SpecControl, "observe", spy)
    run(pair, steady_requests(max_tokens=40)).check()
    replayed = [usual for (_, before), (usual, after) in pairwise(told) if after - before == 2]
    assert {usual for usual, _ in told} == {True, False}
    assert replayed[-3:] == [True] * 3, "a draft and a verdict, both captured before"
    assert told[0] == (True, 0), "the CPU's"


def test_a_newcomers_prompt_is_read_before_the_graph_that_drafts_for_all(
    pair: Pair, emulator: Emulator, monkeypatch: Patch
) -> None:
    beside, drafted = list[int](), ModelDrafter._propose_captured

    def spy(drafter: ModelDrafter, batch: DraftBatch, ks: list[int], pieces: list[Feed]) -> Draft:
        before = emulator.replays
        draft = drafted(drafter, batch, ks, pieces)
        if pieces and len(batch.sequences) == 3:
            assert draft.ks == tuple(ks), "the newcomer gets drafts too"
            assert sum(forward.tokens for forward in draft.forwards) == draft.read
            beside.append(emulator.replays - before)
        return draft

    monkeypatch.setattr(ModelDrafter, "_propose_captured", spy)
    short, *long = steady_requests(3, max_tokens=40)
    short = replace(short, params=replace(short.params, max_tokens=12))
    run(pair, {0: [short, *long], 8: [Request("late", tuple(range(30, 41)), PARAMS, k=3)]}).check()
    assert beside[-1] == 1, "the drafts are a replay"


def test_drafts_beside_a_prompt_are_replays(pair: Pair, emulator: Emulator, monkeypatch: Patch) -> None:
    """The target reads the prompt operation by operation. The control: beside `rejection` drafts do so too."""

    def replays(verifier: Verifier) -> list[int]:
        found, run_round = list[int](), round_module.run_round

        def spy(plan: Plan, target: Runner, *more: Any) -> Any:
            before = emulator.replays
            outcome = run_round(plan, target, *more)
            if target.device.type == "cuda" and plan.prefill_tokens and any(outcome.draft.ks):
                found.append(emulator.replays - before)
            return outcome

        with monkeypatch.context() as patch:
            patch.setattr(rescue_module, "run_round", spy)
            prompt, late = tuple(range(30, 41)), replace(PARAMS, max_tokens=4)
            requests = [replace(r, verifier=verifier) for r in steady_requests(2, max_tokens=40)]
            run(pair, {0: requests, **{n: [Request(f"late {n}", prompt, late, k=0)] for n in (6, 8, 10, 12)}}).check()
        return found

    assert replays("match")[-1] == 1
    assert set(replays("rejection")) == {0}


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.proofs), 0.8])
def test_a_replayed_round_crosses_twice_and_asks_for_four_operations(
    pair: Pair, emulator: Emulator, temperature: float
) -> None:
    """The graph of the drafts, two copies of its result, and the graph of the verdict."""
    rounds, before, replays = list[tuple[int, Counts]](), Counts(), 0

    def act(engine: Engine, step: int) -> None:
        nonlocal before, replays
        if engine.config.graphs:
            counts = active().counts.copy()
            rounds.append((emulator.replays - replays, counts.since(before)))
            before, replays = counts, emulator.replays

    run(pair, steady_requests(temperature=temperature, top_p=0.9, max_tokens=22), act=act).check()
    replayed = [counts for graphs, counts in rounds if graphs == 2]
    assert len(replayed) > 2
    found = {(counts.uploads, counts.downloads, counts.stalls, counts.inside, counts.outside) for counts in replayed}
    assert (1, 1, 1, 0, 4) in found  # a round that captures a graph also counts the operations of the capture
    assert all(counts[:3] == (1, 1, 1) for counts in found)


# A token that is counted twice, or a round too late, changes the text.
PENALISED = {"repetition_penalty": 3.0, "frequency_penalty": 2.0, "top_p": 0.9}
GREEDY = {"temperature": 0.0, "frequency_penalty": 0.5}
# What each sequence has beside the seed.
LAWS: dict[str, list[tuple[dict[str, Any], Verifier]]] = {
    "penalties": [(PENALISED, "match"), ({}, "match"), (GREEDY, "match")],
    "rejection": [({}, "rejection"), ({"top_p": 0.9}, "rejection")],
    "block": [({}, "block")] * 3,
    "block, penalties": [(PENALISED, "block"), ({"top_k": 20}, "block")],
    "rejection beside others": [(PENALISED, "rejection"), ({}, "match"), ({"temperature": 0.0}, "rejection")],
}
USUAL_LAWS = ("block, penalties", "rejection beside others")  # which have all of the others' laws


@pytest.mark.parametrize(
    "kind", [kind if kind in USUAL_LAWS else pytest.param(kind, marks=pytest.mark.proofs) for kind in LAWS]
)
def test_laws_and_penalties_are_captured(pair: Pair, emulator: Emulator, kind: str) -> None:
    """With and without drafts. One sequence comes later, and another of the same kind takes an old one's place."""
    requests = [
        Request(
            f"{name}{i}", tuple(range(20 + i, 29)), replace(PARAMS, **{"seed": i, **fields}), verifier=verifier, k=k
        )
        for name, k in (("a", 3), ("b", 2), ("c", 0))
        for i, (fields, verifier) in enumerate(LAWS[kind])
    ]
    rounds, before, replays = list[tuple[int, Counts]](), Counts(), 0

    def act(engine: Engine, step: int) -> None:
        nonlocal before, replays
        if engine.config.graphs:
            counts = active().counts.copy()
            rounds.append((emulator.replays - replays, counts.since(before)))
            before, replays = counts, emulator.replays

    both = run(pair, {0: requests[:1], 1: requests[1:]}, act=act)
    both.check()
    both.check_drafts()
    replayed = [counts for graphs, counts in rounds if graphs == 2]
    assert len(replayed) > 2
    found = {(counts.uploads, counts.downloads, counts.stalls, counts.inside) for counts in replayed}
    assert (1, 1, 1, 0) in found
    # A newcomer's prompt is read before the draft's graph, by operations in the model.
    assert all(counts[:3] == (1, 1, 1) or (counts[:3] == (3, 1, 1) and counts[3]) for counts in found)


@pytest.mark.parametrize(
    "request_",
    [
        Request("tree", (20, 21), PARAMS, tree=(2, 1), verifier="rejection"),
        Request("typical", (20, 21), PARAMS, k=3, verifier="rejection", typical=Typical(0.01, 0.1)),
    ],
    ids=lambda request: request.id,
)
def test_other_rounds_run_operation_by_operation(pair: Pair, emulator: Emulator, request_: Request) -> None:
    both = run(pair, [request_])
    both.check()
    assert both.shadow.run.drafted
    assert not emulator.tapes


def test_no_graph_keeps_logits(pair: Pair, emulator: Emulator, monkeypatch: Patch) -> None:
    """Each of many graphs keeps its results, and logits are as wide as the vocabulary."""
    widths, vocab = list[int](), set[int]()
    run_captured = Runner.run_captured

    def running(runner: Runner, *args: Any) -> Any:
        result = run_captured(runner, *args)
        widths.extend(t.shape[-1] for t in (result if isinstance(result, tuple) else (result,)) if t is not None)
        vocab.add(runner.vocab_size)
        return result

    monkeypatch.setattr(Runner, "run_captured", running)
    run(pair, steady_requests(logprobs=2)).check()
    assert emulator.replays > 4
    assert max(widths) < min(vocab)


def check_replaced_draft(pair: Pair, other: str) -> list[int]:
    """Returns how many graphs there were before and after the exchange."""
    kept: list[int] = []

    def act(engine: Engine, step: int) -> None:
        if step != 6:
            return
        graphs = engine.target.staging.graphs
        kept.append(graphs.count if graphs else 0)
        engine.put_draft(engine.load_draft(other)).release()
        kept.append(graphs.count if graphs else 0)

    both = run(pair, steady_requests(max_tokens=26), act=act)
    both.check()
    both.check_drafts()
    return kept[2:]  # the first two are the CPU's


def test_graphs_are_not_those_of_a_draft_that_was_replaced(
    pair: Pair, drafts: tuple[str, str], emulator: Emulator
) -> None:
    before, after = check_replaced_draft(pair, drafts[1])
    assert emulator.replays > 8
    assert 0 < after < before, "those of the target stay, those of the old draft go"


def test_negative_control_of_a_draft_that_was_replaced(
    pair: Pair, drafts: tuple[str, str], emulator: Emulator, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("engine.models.runner._numbers", repeat(0))
    monkeypatch.setattr(Graphs, "drop", lambda graphs, owner: None)
    with pytest.raises(AssertionError):
        check_replaced_draft(pair, drafts[1])


def test_two_draft_models_keep_their_results_apart(pair: Pair, drafts: tuple[str, str], emulator: Emulator) -> None:
    requests = [replace(r, drafter="merged") for r in steady_requests(max_tokens=24)]
    both = run(pair, requests, drafts=drafts)
    both.check()
    both.check_drafts()
    assert emulator.replays > 8


def test_a_captured_round_is_prepared_once(
    pair: Pair, drafts: tuple[str, str], emulator: Emulator, monkeypatch: Patch
) -> None:
    """Also where drafts may be trees that nobody planned."""
    prepared = Counter[int]()
    batches: list[DraftBatch] = []  # so that no two have the same id

    def note(batch: DraftBatch) -> None:
        if batch.captured:
            batches.append(batch)
            prepared[id(batch.sequences)] += 1

    begin, prepare = CapturedVerdict.__init__, verification.prepare

    def beginning(part: CapturedVerdict, batch: DraftBatch, ks: Seq[int], target: Runner, shapes: Any) -> None:
        note(batch)
        begin(part, batch, ks, target, shapes)

    def preparing(batch: DraftBatch, *args: Any) -> None:
        note(batch)
        prepare(batch, *args)

    monkeypatch.setattr(CapturedVerdict, "__init__", beginning)
    monkeypatch.setattr(verification, "prepare", preparing)
    names: list[DrafterName] = ["merged", "lookahead"]
    requests = [replace(r, id=name, drafter=name) for name in names for r in steady_requests(1)]
    both = run(pair, requests, drafts=drafts)
    both.check()
    both.check_drafts()
    run(pair, [replace(requests[0], drafter="model", k=None, tree=Growth(3, 2))]).check()
    assert len(prepared) > 4
    assert set(prepared.values()) == {1}


def test_the_start_sets_memory_aside(pair: Pair) -> None:
    """Beside the KV memory, whose size is given here."""
    with shadow_cuda(), without_measurements():
        without, engine = (load(pair, device="cuda", graphs=graphs, **SETTINGS) for graphs in (False, True))
        graphs, limits = engine.target.staging.graphs, engine.target.staging.limits
        assert graphs is not None
        assert graphs._room == graph_room(0)
        laws = 3 * 4 * engine.target.vocab_size  # of 64 bits: one for each draft of a round
        assert without._room - engine._room == graph_room(0) + 8 * (limits.numbers + laws)
        assert without.target.staging.graphs is None


@pytest.mark.proofs
def test_the_fixed_memory_holds_the_largest_round(pair: Pair, emulator: Emulator, monkeypatch: Patch) -> None:
    """All sequences, the longest context, the most drafts, and every filter."""
    used, copy = list[int](), Staging._copy

    def copying(staging: Staging, numbers: Any) -> Tensor:
        tensor = copy(staging, numbers)
        used.append(staging._used or 0)
        return tensor

    monkeypatch.setattr(Staging, "_copy", copying)
    engines: list[Engine] = []
    requests = [
        replace(r, k=4) for r in steady_requests(3, top_p=0.9, top_k=5, min_p=0.01, max_tokens=50)
    ]  # texts of 64 tokens at most
    both = run(pair, requests, act=lambda engine, step: engines.append(engine))
    both.check()
    staging = engines[-1].target.staging
    assert staging.graphs is not None
    assert staging.graphs.replays > 4
    assert "the fixed memory is too small" not in staging.graphs.eager
    assert 0 < max(used) <= staging.limits.numbers


@pytest.mark.parametrize(
    ("family", "captured"),
    [
        ("gemma2", True),
        *(pytest.param(*case, marks=pytest.mark.proofs) for case in (("mistral", True), ("mixtral", False))),
    ],
)
def test_windows_and_caps_are_captured_and_experts_are_not(
    tmp_path: Path, emulator: Emulator, family: str, captured: bool
) -> None:
    case = CASES[family]
    target = random_checkpoint(case, tmp_path / "target")
    pair = Pair(target, random_checkpoint(case, tmp_path / "draft", seed=8, like=target))
    run(pair, steady_requests(temperature=0.3, max_tokens=18), block_size=5).check()
    assert (emulator.replays > 4) is captured


def cut_drafts(patch: Patch) -> None:
    """The first sequence gets one draft less than the planned ones. Those behind it would be accepted."""
    propose = ModelDrafter.propose

    def proposing(drafter: ModelDrafter, batch: DraftBatch, ks: Seq[int]) -> Draft:
        draft = propose(drafter, batch, ks)
        return replace(draft, ks=(max(0, draft.ks[0] - 1), *draft.ks[1:]))

    patch.setattr(ModelDrafter, "propose", proposing)


def test_drafts_beyond_a_sequences_own_are_not_accepted(twins: Pair, emulator: Emulator, monkeypatch: Patch) -> None:
    cut_drafts(monkeypatch)
    both = run(twins, steady_requests(max_tokens=24))
    both.check()
    assert both.shadow.run.accepted == both.shadow.run.drafted
    assert emulator.replays > 4


def test_negative_control_of_drafts_beyond_a_sequences_own(twins: Pair, emulator: Emulator, monkeypatch: Patch) -> None:
    cut_drafts(monkeypatch)
    decide = CapturedVerdict._decide

    def deciding(part: CapturedVerdict) -> Any:
        part._limits.tensor.fill_(part._depth)
        return decide(part)

    monkeypatch.setattr(CapturedVerdict, "_decide", deciding)
    with pytest.raises(AssertionError, match="the texts differ"):
        run(twins, steady_requests()).check()


@pytest.mark.parametrize("verifier", [pytest.param("rejection", marks=pytest.mark.proofs), "block"])
def test_drafts_without_memory_are_verified_by_their_own_laws(
    pair: Pair, emulator: Emulator, monkeypatch: Patch, verifier: Verifier
) -> None:
    """In some rounds the draft model has memory for fewer drafts than are planned."""
    reserve, most = ModelDrafter._reserve, set[int]()

    def reserving(drafter: ModelDrafter, sequence: Sequence, k: int) -> int:
        most.add(k := reserve(drafter, sequence, min(k, 1 + len(sequence.tokens) % 3)))
        return k

    monkeypatch.setattr(ModelDrafter, "_reserve", reserving)
    params = replace(PARAMS, max_tokens=30)
    requests = [Request(f"r{i}", (20 + i, 21), replace(params, seed=i), verifier=verifier, k=3) for i in range(2)]
    both = run(pair, requests)
    both.check()
    both.check_drafts()
    assert most == {1, 2, 3}
    assert emulator.replays > 4


# --- faults ----------------------------------------------------------------------------------------------------------


def an_upload(patch: Patch) -> None:
    with_region(patch, lambda part: index_tensor([1], part._target.device))


def a_download(patch: Patch) -> None:
    with_region(patch, lambda part: part._limits.tensor.tolist())


def work_on_the_host(patch: Patch) -> None:
    with_region(patch, lambda part: torch.zeros(1))


def with_region(patch: Patch, ask: Callable[[CapturedVerdict], object]) -> None:
    decide = CapturedVerdict._decide

    def deciding(part: CapturedVerdict) -> Any:
        ask(part)
        return decide(part)

    patch.setattr(CapturedVerdict, "_decide", deciding)


def a_number_of_the_host(patch: Patch) -> None:
    """The graph keeps the number that it was captured with."""
    decide = CapturedVerdict._decide

    def deciding(part: CapturedVerdict) -> Any:
        part._ids.tensor.fill_(part._batch.sequences[0].tokens[-1])
        return decide(part)

    patch.setattr(CapturedVerdict, "_decide", deciding)


def numbers_behind_those_of_the_last_round(patch: Patch) -> None:
    begin = Staging.begin

    def beginning(staging: Staging, *, fixed: bool = False) -> None:
        used = staging._used
        begin(staging, fixed=fixed)
        staging._used = used if fixed and used else staging._used

    patch.setattr(Staging, "begin", beginning)


def numbers_in_memory_of_their_own(patch: Patch) -> None:
    patch.setattr(Staging, "_copy", lambda staging, numbers: index_tensor(numbers, staging.device))


def a_key_without_the_layout(patch: Patch) -> None:
    patch.setattr(Staging, "layout", property(lambda staging: None if staging._used is None else "one for all"))


def padding_in_a_block_of_a_sequence(patch: Patch) -> None:
    begin = GatheredStorage.__init__

    def beginning(storage: GatheredStorage, *args: Any) -> None:
        begin(storage, *args)
        storage.spare_row = 0

    patch.setattr(GatheredStorage, "__init__", beginning)


REFUSED, OTHER = "cannot be captured", "the texts differ"
FAULTS: list[tuple[Callable[[Patch], None], str]] = [
    (an_upload, REFUSED),
    (a_download, REFUSED),
    (work_on_the_host, REFUSED),
    (a_number_of_the_host, OTHER),
    (numbers_behind_those_of_the_last_round, OTHER),
    (numbers_in_memory_of_their_own, OTHER),
    (padding_in_a_block_of_a_sequence, OTHER),
    (a_key_without_the_layout, "IndexError"),
]


def check_steady_rounds(pair: Pair) -> None:
    both = run(pair, steady_requests())
    both.check()
    both.check_drafts()


USUAL_FAULTS = (a_download, a_number_of_the_host, padding_in_a_block_of_a_sequence, a_key_without_the_layout)


@pytest.mark.parametrize(
    ("fault", "told"),
    [pytest.param(*fault, marks=() if fault[0] in USUAL_FAULTS else pytest.mark.proofs) for fault in FAULTS],
)
def test_a_fault_is_seen(
    pair: Pair, emulator: Emulator, fault: Callable[[Patch], None], told: str, monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=told):
        check_steady_rounds(pair)


def test_without_a_fault_the_check_passes(pair: Pair, emulator: Emulator) -> None:
    check_steady_rounds(pair)
    assert emulator.replays > 4
