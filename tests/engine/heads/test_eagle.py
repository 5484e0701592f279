"""An EAGLE head drafts what a slow reference drafts, in every round and whatever happened to its sequence before."""

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import engine.loading.model_runners as model_runners
from engine.drafters.base import Draft, DraftBatch
from engine.engine import Engine
from engine.heads.eagle import EagleHead
from engine.heads.eagle_drafter import EagleDrafter
from engine.heads.eagle_runner import HeadRunner
from engine.heads.states import TargetStates
from engine.models.feeds import Feed
from engine.types import DrafterName, Request, SamplingParams
from policies.config import PolicyConfig
from tests.engine.driving import Drive, drive, load, make_sequence, model_drafter
from tests.engine.heads.eagles import FORMATS, SlowHead, save_eagle_pair
from tests.engine.pairs import VOCAB, Pair
from tests.examples import in_proofs, usual_and_proofs
from tests.kv import kv_kind

pytestmark = pytest.mark.usefixtures("shared_weights", "unprofiled")

LENGTH = 20


@pytest.fixture(scope="module", params=usual_and_proofs(FORMATS, ("eagle", "small vocabulary")))
def any_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_eagle_pair(tmp_path_factory.mktemp("eagle"), request.param)


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_eagle_pair(tmp_path_factory.mktemp("eagle"))


def runners(pair: Pair) -> tuple[Any, HeadRunner]:
    """A target's runner and its head's, fp64."""
    engine = load(pair, max_running=4, max_step_tokens=64, max_spec_length=8)
    runner = model_drafter(engine).runner
    assert isinstance(runner, HeadRunner)
    return engine.target, runner


# --- one pass --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(3, 1, 9, 7), *in_proofs((LENGTH,))])
def test_logits_are_those_of_the_reference(any_pair: Pair, cuts: tuple[int, ...]) -> None:
    """Behind the committed text, along a chain, and behind each node of a tree; the text in one piece or in several."""
    target, head = runners(any_pair)
    slow = SlowHead(any_pair)
    draw = random.Random(3)
    tokens = [draw.randrange(2, VOCAB) for _ in range(LENGTH + 1)]
    sequence = make_sequence(1, tokens, k=4)
    sequence.drafter = "model"
    with torch.inference_mode():
        for count in cuts:
            target.run([Feed(sequence, count, outputs=0)])
        head.allocate(sequence)
        for count in cuts:
            logits = head.run([Feed(sequence, count)])
        assert torch.allclose(logits[-1], slow.logits(tokens, 0)[0], atol=1e-6)
        chain = [7, 31, 5]
        for n, token in enumerate(chain):
            logits = head.step([sequence], torch.tensor([token]))
            assert torch.allclose(logits[0], slow.logits(tokens, 0, chain[: n + 1])[-1], atol=1e-6)
        head.cache.truncate_to(1, LENGTH - 1)
        head.imagine_inputs(sequence)  # what was read is gone: the last row reads the true state below
        head.states.drop(1)
        head.states.read([Feed(sequence, LENGTH)], [0], slow.states(tokens[:-1]))
        head.run([Feed(sequence, 1)])
        parents, nodes = (-1, -1, 0, 1, 1), [9, 11, 13, 15, 17]
        want = slow.logits(tokens, 0, nodes, parents)
        ids = torch.tensor([nodes])
        first = head.run([Feed(sequence, 0, 2, 2, parents=parents[:2])], ids[:, :2])
        rest = head.run([Feed(sequence, 0, 3, 3, parents=parents)], ids[:, 2:])
    assert torch.allclose(torch.cat([first, rest]), want[1:], atol=1e-6)


def test_negative_control_wrong_state(eagle: Pair) -> None:
    """Rows that read the states of a neighbouring position do not give the reference's logits."""
    target, head = runners(eagle)
    tokens = list(range(5, 5 + LENGTH + 1))
    sequence = make_sequence(1, tokens, k=4)
    sequence.drafter = "model"
    with torch.inference_mode():
        target.run([Feed(sequence, LENGTH, outputs=0)])
        states = head.states.take(torch.tensor(head.states.row_numbers(1, 0, LENGTH))).roll(1, 0)
        head.states.drop(1)
        head.states.read([Feed(sequence, LENGTH)], [0], states)
        head.allocate(sequence)
        logits = head.run([Feed(sequence, LENGTH)])
    assert not torch.allclose(logits[-1], SlowHead(eagle).logits(tokens, 0)[0], atol=1e-3)


# --- whole runs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Proposed:
    tokens: list[int]  # committed before
    start: int  # the first position that the head has read
    drafts: list[int]


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> list[Proposed]:
    """Every chain that the head proposes from now on."""
    heard: list[Proposed] = []
    propose = EagleDrafter.propose

    def listen(self: EagleDrafter, batch: DraftBatch, ks: Any) -> Draft:
        draft = propose(self, batch, ks)
        for i, (sequence, k) in enumerate(zip(batch.sequences, draft.ks, strict=True)):
            if k and i not in draft.trees and draft.tokens is not None:
                start = self.runner._texts[sequence.handle].offset
                heard.append(Proposed(list(sequence.tokens), start, draft.tokens[i, :k].tolist()))
        return draft

    monkeypatch.setattr(EagleDrafter, "propose", listen)
    return heard


def assert_as_reference(pair: Pair, heard: list[Proposed], most: int = 5) -> None:
    slow = SlowHead(pair)
    for one in heard[:: 1 + len(heard) // most]:
        assert one.drafts == slow.chain(one.tokens, one.start, len(one.drafts))


def make_requests(k: int | None, temperature: float = 0.0, count: int = 8, **params: Any) -> list[Request]:
    """Half of the prompts share 24 tokens."""
    rng = random.Random(11)
    shared = [rng.randrange(2, VOCAB) for _ in range(24)]
    requests = []
    for i in range(count):
        own = [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 20))]
        tokens = tuple(shared + own if i % 2 else own)
        sampling = SamplingParams(temperature=temperature, seed=i, max_tokens=10, ignore_eos=True, **params)
        requests.append(Request(f"r{i}", tokens, sampling, k=k))
    return requests


def start(pair: Pair, **config: Any) -> Engine:
    return load(pair, **{"max_running": 4, "max_spec_length": 6, "max_step_tokens": 28, **config})


@pytest.fixture(scope="module")
def greedy_texts(eagle: Pair) -> dict[str, list[int]]:
    """The texts of make_requests at temperature 0, without drafts. All pairs have the same target."""
    return drive(start(eagle), make_requests(0)).tokens


def test_every_proposal_is_the_reference_s(
    any_pair: Pair, proposed: list[Proposed], greedy_texts: dict[str, list[int]]
) -> None:
    """Chunked prompts, several sequences, and prefix hits."""
    engine = start(any_pair)
    run = drive(engine, {0: make_requests(4)[:4], 9: make_requests(4)[4:]})
    assert 0.05 < run.accepted / run.drafted < 0.95
    assert run.tokens == greedy_texts
    assert len(proposed) > 24
    assert_as_reference(any_pair, proposed)


def test_heads_begin_behind_prefixes_that_only_the_target_knows(eagle: Pair, proposed: list[Proposed]) -> None:
    """The first sequence drafts nothing, so the head's index does not hold the prefix that the target's does."""
    engine = start(eagle)
    shared = tuple(range(40, 80))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    drive(engine, [Request("a", (*shared, 7), params, k=0)])
    drive(engine, [Request("b", (*shared, 9), params, k=3)])
    assert {one.start for one in proposed} == {{"mapped": 32, "gathered": 40, "slotted": 0}[kv_kind()]}
    drive(engine, [Request("c", tuple(range(100, 142)), params, k=3)])
    drive(engine, [Request("d", (*range(100, 142), 3), params, k=3)])
    assert {one.start for one in proposed[-3:]} == {0}  # here both indices hold it
    assert_as_reference(eagle, proposed)


def test_preempted_sequences(eagle: Pair, proposed: list[Proposed], greedy_texts: dict[str, list[int]]) -> None:
    engine = start(eagle, cache="paged", block_size=16, kv_tokens=128, prefix_cache=False)
    requests = make_requests(3)
    run = drive(engine, requests)
    assert sum(step.preempted for step in run.steps) > 0
    assert run.tokens == greedy_texts
    assert_as_reference(eagle, proposed)


def test_rounds_without_drafts_and_dropped_states(
    eagle: Pair, proposed: list[Proposed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a sequence is not drafted for, its states wait. Beyond the bound they are dropped: the head begins anew."""
    monkeypatch.setattr(model_runners, "KEPT_PER_SEQUENCE", 0)
    engine = start(eagle, max_running=2, max_step_tokens=14)
    ks = [3, 3, None, *[0] * 20, 3, 3, 3]

    def switch() -> None:
        for sequence in engine.scheduler.running:
            sequence.k = ks[engine.steps % len(ks)] or (2 if ks[engine.steps % len(ks)] is None else None)
            sequence.max_k = None if sequence.k else 0

    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    run = drive(engine, [Request("r", tuple(range(9, 20)), params, k=3)], after_step=switch)
    assert run.tokens == drive(engine, [Request("r", tuple(range(9, 20)), params, k=0)]).tokens
    assert len({one.start for one in proposed}) > 1
    assert_as_reference(eagle, proposed)


def test_negative_control_states_of_rejected_drafts(
    eagle: Pair, proposed: list[Proposed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If rejected drafts' states stay, later ones replace them only in part, and the proposals differ."""
    monkeypatch.setattr(TargetStates, "settle", lambda self, handle, base, accepted: None)
    take = TargetStates.row_numbers

    def shifted(self: TargetStates, handle: int, first: int, stop: int) -> list[int]:
        held = self.positions(handle)
        surplus = held.stop - stop
        return take(self, handle, first + surplus, stop + surplus) if surplus > 0 else take(self, handle, first, stop)

    monkeypatch.setattr(TargetStates, "row_numbers", shifted)
    drive(start(eagle), make_requests(4))
    with pytest.raises(AssertionError):
        assert_as_reference(eagle, proposed)


@pytest.mark.parametrize("verifier", ["match", *in_proofs("rejection")])
@pytest.mark.parametrize("temperature", [*in_proofs(0.0), 0.8])
def test_trees(eagle: Pair, verifier: Any, temperature: float) -> None:
    """Trees change no coupled text, and their accepted paths lead the head on as a chain's do."""
    engine = start(eagle)

    def run(**fields: Any) -> Drive:
        requests = make_requests(None, temperature)
        return drive(engine, [Request(r.id, r.prompt_ids, r.params, verifier=verifier, **fields) for r in requests])

    trees = run(tree=(2, 1, 1))
    assert trees.accepted > 10
    if verifier == "match" or not temperature:
        assert trees.tokens == run(k=0).tokens


def test_a_failing_head_costs_drafts_only(
    eagle: Pair, greedy_texts: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, calls = start(eagle), 0
    forward = type(model_drafter(engine).runner._pass.head).forward  # type: ignore[attr-defined]

    def sometimes(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 5 == 3:
            raise RuntimeError("a fault of the head")
        return forward(*args)

    monkeypatch.setattr("engine.heads.eagle.EagleHead.forward", sometimes)
    run = drive(engine, make_requests(4))
    assert run.tokens == greedy_texts
    assert sum(step.draft_faults for step in run.steps) > 2
    assert run.accepted > 0


def test_failing_states_cost_drafts_only(
    eagle: Pair, greedy_texts: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, calls = start(eagle), 0
    append = TargetStates._append

    def sometimes(self: TargetStates, *args: Any) -> list[int]:
        nonlocal calls
        calls += 1
        if calls % 7 == 3:
            raise RuntimeError("no memory")
        return append(self, *args)

    monkeypatch.setattr(TargetStates, "_append", sometimes)
    run = drive(engine, make_requests(4))
    assert run.tokens == greedy_texts
    assert run.accepted > 0


def test_idle_heads_read_nothing(eagle: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass whose sequences never draft keeps no states."""
    engine, passes, read = start(eagle), 0, TargetStates.read

    def count(self: TargetStates, *args: Any) -> None:
        nonlocal passes
        passes += 1
        read(self, *args)

    monkeypatch.setattr(TargetStates, "read", count)
    drive(engine, make_requests(0))
    assert passes == 0
    drive(engine, make_requests(2))
    assert passes > 0


OFF, FIXED = PolicyConfig("off"), PolicyConfig("fixed", k=3)


def test_a_policy_that_never_drafts_keeps_no_states(
    eagle: Pair, greedy_texts: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain decoding costs what it costs without a head. Requests that fix their own k are served beside it."""
    engine, kept = start(eagle), 0
    copy = TargetStates._copy

    def count(self: TargetStates, *args: Any) -> None:
        nonlocal kept
        kept += 1
        copy(self, *args)

    monkeypatch.setattr(TargetStates, "_copy", count)
    engine.configure(OFF)
    assert drive(engine, make_requests(None)).tokens == greedy_texts
    assert kept == 0
    run = drive(engine, [replace(r, k=3 if i % 2 else None) for i, r in enumerate(make_requests(None))])
    assert run.tokens == greedy_texts
    assert run.accepted > 0
    assert kept > 0


@pytest.mark.parametrize("first", [OFF, *in_proofs(FIXED)], ids=lambda policy: policy.name)
def test_a_policy_that_comes_later_drafts_behind_a_hole(
    eagle: Pair, proposed: list[Proposed], first: PolicyConfig
) -> None:
    """The head lacks what was read while nothing was drafted. It begins anew behind that."""
    engine = start(eagle)
    policies = {1: first, 9: OFF, 15: FIXED, 21: OFF, 30: FIXED}

    def switch() -> None:
        if engine.steps in policies:
            engine.configure(policies[engine.steps])

    requests = [replace(r, params=replace(r.params, max_tokens=50)) for r in make_requests(None, count=3)]
    engine.configure(first)
    run = drive(engine, requests, after_step=switch)
    assert run.tokens == drive(engine, [replace(r, k=0) for r in requests]).tokens
    assert len({one.start for one in proposed}) > 3
    assert run.accepted > 0
    assert_as_reference(eagle, proposed, most=8)


@pytest.mark.parametrize(("k", "drafter"), [pytest.param(0, None, marks=pytest.mark.proofs), (3, "ngram")])
def test_texts_that_never_ask_the_head_are_not_copied(eagle: Pair, k: int, drafter: DrafterName | None) -> None:
    engine = start(eagle)
    head = model_drafter(engine).runner
    assert isinstance(head, HeadRunner)

    def look() -> None:
        assert head._texts.keys() <= {s.handle for s in engine.scheduler.running if s.drafter == "model"}

    drive(engine, [replace(request, drafter=drafter) for request in make_requests(k)], after_step=look)
    drive(engine, make_requests(3), after_step=look)


def test_no_states_wait_for_a_sequence_that_was_given_up(
    eagle: Pair, greedy_texts: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's memory of it held numbers that are not finite, so the head drafts nothing more for it."""
    engine = start(eagle)
    drafter = model_drafter(engine)
    assert isinstance(drafter, EagleDrafter)
    project, given_up, looks = EagleHead.project, set[int](), 0
    monkeypatch.setattr(EagleHead, "project", lambda self, states: project(self, states) * torch.inf)

    def look() -> None:
        nonlocal looks
        for handle in given_up & drafter._given_up:
            assert not drafter.runner.states.positions(handle)
            looks += 1
        given_up.update(drafter._given_up)

    assert drive(engine, make_requests(3), after_step=look).tokens == greedy_texts
    assert looks > 25


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.8, marks=pytest.mark.proofs)])
def test_chains_and_trees_in_one_batch(eagle: Pair, proposed: list[Proposed], temperature: float) -> None:
    """They are drawn in the same passes."""
    engine = start(eagle)
    plain = make_requests(None, temperature)
    shapes = ((2, 1, 1), None, (3,), None)
    mixed = [replace(r, k=None if tree else 4, tree=tree) for r, tree in zip(plain, shapes * 2, strict=True)]
    run = drive(engine, mixed)
    assert not sum(step.draft_faults for step in run.steps)
    assert run.tokens == drive(engine, make_requests(0, temperature)).tokens
    if not temperature:
        assert_as_reference(eagle, proposed)
