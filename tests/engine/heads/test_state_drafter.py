"""Heads without memory in the engine: their drafts, the text, and what becomes of the states that they read.

Drafts are compared with a reference that computes the target's state of a text anew. So a state of another position, of
a rejected draft or of another sequence is noticed.
"""

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import engine.round as round_module
from engine.drafters.base import NO_TOKEN, Draft, DraftBatch
from engine.engine import Engine
from engine.heads.state_drafter import StateDrafter
from engine.heads.state_heads import HeadRun
from engine.heads.states import TargetStates
from engine.models.feeds import Feed
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence
from engine.trees import branching, chain, depths
from engine.types import Request, SamplingParams, Verifier
from engine.verification import verify
from tests.engine.driving import Drive, drive, load, make_sequence
from tests.engine.fresh import memory
from tests.engine.heads.fitted import CPU, HIDDEN, Fitted, Recorder, make_requests, randn
from tests.engine.late_device import LateDevice
from tests.engine.pairs import VOCAB, Pair
from tests.examples import in_proofs
from tests.kv import without_prefixes

pytestmark = pytest.mark.usefixtures("pruned_races", "shared_weights", "unprofiled")

SHAPES = ((2, 2), (3, 1), (2, 1, 2), (6,))
FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.9, "top_k": 20},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"logprobs": 2, "min_tokens": 5, "bad_word_ids": ((5, 6), (7,))},
    {"allowed_token_ids": tuple(range(2, 60))},
)


Plain = Callable[[float], dict[str, list[int]]]


@pytest.fixture(scope="module")
def plain(pair: Pair, pruned_races: None) -> Plain:
    """The texts of make_requests at a temperature, without drafts."""
    return cache(lambda temperature: drive(load(pair), make_requests(temperature, k=0, drafter=None)).tokens)


def drafter_of(engine: Engine) -> StateDrafter:
    assert isinstance(engine.drafter, StateDrafter)
    return engine.drafter


def with_filters(requests: Seq[Request]) -> list[Request]:
    """Each request with the next of the filters."""
    filters = [FILTERS[n % len(FILTERS)] for n in range(len(requests))]
    return [replace(r, params=replace(r.params, **params)) for r, params in zip(requests, filters, strict=True)]


def mixed_ks(requests: Seq[Request]) -> list[Request]:
    rng = random.Random(8)
    return [replace(r, k=rng.choice((0, 1, 2, 3, 8))) for r in requests]


def assert_partial(run: Drive) -> None:
    assert 0.05 * run.drafted < run.accepted < 0.95 * run.drafted


# Their time


def test_they_take_the_time_of_a_device_that_works_while_the_host_goes_on(
    fitted: Fitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, device = fitted.engine(max_running=2), LateDevice()
    kind, step_us = type(drafter_of(engine).heads), 3000
    start = kind.start

    class LateRun:
        def __init__(self, run: HeadRun) -> None:
            self._run = run

        def step(self, *arguments: Any) -> Tensor:
            device.launch(1000 * step_us)
            return self._run.step(*arguments)

    monkeypatch.setattr(kind, "start", lambda *arguments: LateRun(start(*arguments)))
    device.install(monkeypatch)
    run = drive(engine, make_requests(0.8)[:2])
    assert sum(step.draft_steps for step in run.steps) > 2
    assert all(step.draft_forward_us == step.draft_us == step.draft_steps * step_us for step in run.steps)


# The text


@pytest.mark.parametrize("temperature", [*in_proofs(0.0), 0.8])
def test_the_text_is_that_without_drafts(each_fitted: Fitted, plain: Plain, temperature: float) -> None:
    engine = each_fitted.engine(max_running=4, max_spec_length=8)
    run = drive(engine, mixed_ks(make_requests(temperature)))
    assert run.tokens == plain(temperature)
    assert_partial(run)


def test_the_text_is_that_without_drafts_for_all_parameters(fitted: Fitted) -> None:
    """Each of the filters beside chains and beside trees."""
    engine = fitted.engine(max_running=16)
    chains = with_filters(make_requests(0.8, max_tokens=24))
    trees = [replace(r, id=f"{r.id} as a tree", k=None, tree=(2, 2)) for r in chains]
    plain = drive(engine, [replace(r, k=0) for r in chains]).tokens
    run = drive(engine, [*chains, *trees])
    assert run.tokens == plain | {tree.id: plain[chain.id] for chain, tree in zip(chains, trees, strict=True)}
    assert all(sum(told.record.column("accepted")) for told in run.received.values() if told.record)
    assert not sum(s.draft_faults for s in run.steps)


def test_the_text_is_that_without_trees(fitted: Fitted, plain: Plain) -> None:
    """test_chains_and_trees_share_rounds says so at temperature 0."""
    engine = fitted.engine(max_running=8)
    requests = make_requests(0.8, k=None)
    run = drive(engine, [replace(r, tree=SHAPES[n % len(SHAPES)]) for n, r in enumerate(requests)])
    assert run.tokens == plain(0.8)
    assert run.accepted


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_other_verifiers_accept_drafts_too(fitted: Fitted, plain: Plain, verifier: Verifier) -> None:
    """Their law is in test_law.py; at temperature 0 their text is the plain one."""
    sampled, greedy = (make_requests(temperature, verifier=verifier) for temperature in (0.8, 0.0))
    run = drive(fitted.engine(max_running=8), [*sampled[::2], *greedy[1::2]])
    accepted = {name: sum(told.record.column("accepted")) for name, told in run.received.items() if told.record}
    assert sum(accepted[r.id] for r in sampled[::2]) > 5
    assert run.accepted < run.drafted
    assert all(run.tokens[r.id] == plain(0.0)[r.id] for r in greedy[1::2])


def test_lenience_accepts_more(fitted: Fitted) -> None:
    engine = fitted.engine(max_running=8)
    strict, lenient = (
        drive(engine, make_requests(0.8, max_tokens=24, verifier="rejection", lenience=lenience))
        for lenience in (None, 0.1)
    )
    assert lenient.accepted / lenient.drafted > 1.1 * strict.accepted / strict.drafted


# The drafts


def test_a_greedy_chain_is_the_most_likely_token_of_each_head(each_fitted: Fitted) -> None:
    """With Medusa heads this is blockwise parallel decoding (Stern et al. 2018)."""
    engine = each_fitted.engine(max_running=8)
    recorder = Recorder(engine)
    drive(engine, make_requests(0.0))
    assert recorder.check(each_fitted) > 75


def test_chains_and_trees_share_rounds(fitted: Fitted, plain: Plain) -> None:
    engine = fitted.engine(max_running=8)
    recorder = Recorder(engine)
    requests = make_requests(0.0)
    mixed = [r if n % 2 else replace(r, k=None, tree=SHAPES[n // 2 % 4]) for n, r in enumerate(requests)]
    propose = engine.drafter.propose

    def counting(batch: DraftBatch, ks: Seq[int]) -> Draft:
        draft = propose(batch, ks)
        deepest = [max(depths(draft.trees.get(i, chain(k)))) for i, k in enumerate(draft.ks) if k]
        assert draft.steps == max(deepest, default=0), "a round takes as many steps as its deepest path"
        return draft

    engine.drafter.propose = counting  # type: ignore[method-assign]
    run = drive(engine, mixed)
    assert not any(step.draft_faults for step in run.steps)
    assert recorder.check(fitted) > 75
    assert run.tokens == plain(0.0)


def test_a_prefix_from_the_index_changes_no_draft(fitted: Fitted) -> None:
    """The second time the target does not compute the states of a prompt again."""
    if without_prefixes() == {}:
        pytest.skip("this cache has no prefix index")
    engine = fitted.engine(max_running=8)
    first = drive(engine, make_requests(0.0))
    recorder = Recorder(engine)
    again = drive(engine, make_requests(0.0))
    assert sum(told.record.cached_tokens for told in again.received.values() if told.record) > 50
    assert again.tokens == first.tokens
    assert recorder.check(fitted) > 75


def test_preempted_sequences_draft_as_before(fitted: Fitted, plain: Plain) -> None:
    engine = fitted.engine(max_running=4, max_model_len=56, **memory("mapped", 64))
    recorder = Recorder(engine)
    run = drive(engine, make_requests(0.0))
    assert sum(s.preempted for s in run.steps)
    assert run.tokens == plain(0.0)
    assert recorder.check(fitted) > 75


def test_a_prompt_in_pieces_leaves_the_right_state(fitted: Fitted) -> None:
    engine = fitted.engine(max_running=2, max_spec_length=4, max_step_tokens=12, prefill_chunk=5)
    recorder = Recorder(engine)
    drive(engine, make_requests(0.0, count=4))
    assert recorder.check(fitted) > 35


def test_states_that_had_to_be_dropped_cost_drafts_and_change_none(fitted: Fitted, plain: Plain) -> None:
    engine = fitted.engine(max_running=8)
    states = drafter_of(engine).states
    TargetStates.__init__(states, states.layers, frozenset({"model"}), 6)
    recorder = Recorder(engine)
    run = drive(engine, make_requests(0.0))
    assert run.tokens == plain(0.0)
    assert 15 < recorder.check(fitted) == run.drafted


def test_a_round_that_is_tried_again_changes_no_draft(
    fitted: Fitted, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed round has left states of drafts that nobody decided on."""
    engine = fitted.engine(max_running=4)
    calls = [0]

    def failing(batch: DraftBatch, draft: Draft, logits: Tensor) -> Any:
        calls[0] += 1
        if calls[0] % 4 == 0:
            raise RuntimeError("a fault")
        return verify(batch, draft, logits)

    monkeypatch.setattr(round_module, "verify", failing)
    recorder = Recorder(engine)
    chains, trees = make_requests(0.0), make_requests(0.0, k=None, tree=(2, 2))
    mixed = [(trees if n % 2 else chains)[n] for n in range(len(chains))]
    assert drive(engine, mixed).tokens == plain(0.0)
    assert calls[0] > 12
    assert recorder.check(fitted) > 75


def test_states_of_a_rejected_path_are_noticed(fitted: Fitted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `settle` the states of a tree's nodes stay where they were computed, accepted or not."""
    monkeypatch.setattr(TargetStates, "settle", lambda self, handle, base, accepted: None)
    engine = fitted.engine(max_running=3)
    recorder = Recorder(engine)
    drive(engine, make_requests(0.0, k=None, count=3, tree=(2, 2)))
    with pytest.raises(AssertionError, match="behind"):
        recorder.check(fitted)


def test_the_state_of_a_rejected_draft_is_noticed(fitted: Fitted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last state that the target computed in place of the last one of the text."""

    def last_computed(self: TargetStates, handle: int, start: int, stop: int) -> list[int]:
        return self._held[handle].rows[-1:]

    monkeypatch.setattr(TargetStates, "settle", lambda self, handle, base, accepted: None)
    monkeypatch.setattr(TargetStates, "row_numbers", last_computed)
    engine = fitted.engine(max_running=3)
    recorder = Recorder(engine)
    drive(engine, make_requests(0.0, count=3))
    with pytest.raises(AssertionError, match="behind"):
        recorder.check(fitted)


# What it offers


def ask(drafter: StateDrafter, sequences: Seq[Sequence], ks: Seq[int], **batch: Any) -> Draft:
    sampler = Sampler(sequences, ks, VOCAB, CPU)
    with torch.inference_mode():
        return drafter.propose(DraftBatch(tuple(sequences), sampler, **batch), ks)


def known(
    drafter: StateDrafter, count: int = 1, *, temperature: float = 0.0, verifier: Verifier = "match"
) -> list[Sequence]:
    """Sequences whose states are there."""
    sequences = []
    for handle in range(count):
        params = SamplingParams(temperature=temperature)
        sequence = make_sequence(handle, range(2 + handle, 12 + handle), params)
        sequence.k, sequence.drafter, sequence.verifier = None, "model", verifier
        drafter.states.read([Feed(sequence, 9)], [0], randn(9, HIDDEN, seed=handle))
        sequences.append(sequence)
    return sequences


def test_it_offers_a_draft_per_head_once_there_is_a_state(each_fitted: Fitted) -> None:
    drafter, most = drafter_of(each_fitted.engine()), each_fitted.heads.most
    (sequence,) = known(drafter)
    assert drafter.offer(sequence, 8) == ("model", most, 1, True)
    assert drafter.offer(sequence, 2).max_k == 2
    assert drafter.offer(sequence, 0).max_k == 0
    sequence.tokens.append(3)  # whose state the target has not computed
    assert drafter.offer(sequence, 8).max_k == 0
    assert ask(drafter, [sequence], [3]).ks == (0,)
    assert drafter.offer(make_sequence(7, [5]), 8).max_k == 0


def test_a_draft_is_as_deep_as_there_are_heads(fitted: Fitted) -> None:
    drafter, most = drafter_of(fitted.engine()), fitted.heads.most
    one, two, three = known(drafter, 3)
    draft = ask(drafter, [one, two, three], [9, 2, 0])
    assert draft.ks == (most, 2, 0)
    assert (draft.steps, draft.read) == (most, most + 2)
    deep = branching((1,) * most + (2,))
    draft = ask(drafter, [one, two], [len(deep), 1], shapes=(deep, None))
    assert draft.ks == (most, 1)
    assert draft.trees == {0: tuple(range(-1, most - 1))}


def test_the_laws_are_those_of_the_heads(each_fitted: Fitted) -> None:
    """As given to the verifier, for drafts of a chain and for first children of a tree."""
    drafter = drafter_of(each_fitted.engine())
    sequences = known(drafter, 2, temperature=0.7, verifier="rejection")
    draft = ask(drafter, sequences, [3, 6], shapes=(None, branching((2, 2))))
    assert draft.tokens is not None
    assert draft.logq is not None
    for i, path in ((0, [0, 1, 2]), (1, [0, 1])):
        state, tokens = randn(9, HIDDEN, seed=i)[-1], [sequences[i].tokens[-1]]
        for node in path:
            wanted = (each_fitted.heads.path_logits(state, tokens) / 0.7).log_softmax(-1)
            assert (draft.logq[draft.logq_rows[i], node] - wanted).abs().max() < 1e-6
            tokens.append(int(draft.tokens[i, node]))


def test_confidence_ends_a_chain(fitted: Fitted) -> None:
    """Before the position at which the product of the largest probabilities falls below the limit."""
    drafter = drafter_of(fitted.engine())
    (sequence,) = known(drafter)
    state, tokens, joint = randn(9, HIDDEN)[-1], [sequence.tokens[-1]], [1.0]
    for _ in range(3):
        law = fitted.heads.path_logits(state, tokens).softmax(-1)
        joint.append(joint[-1] * float(law.max()))
        tokens.append(int(law.argmax()))
    for length in range(3):
        limit = (joint[length] * joint[length + 1]) ** 0.5
        assert ask(drafter, [sequence], [3], confidences=(limit,)).ks == (length,)


# Faults


def test_heads_that_fail_cost_drafts_and_nothing_else(
    fitted: Fitted, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fitted.engine(max_running=4)
    start, calls = drafter_of(engine)._start, [0]

    def failing(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] % 3 == 0:
            raise RuntimeError("a fault")
        return start(*args)

    monkeypatch.setattr(drafter_of(engine), "_start", failing)
    run = drive(engine, make_requests(0.8))
    assert run.tokens == plain(0.8)
    assert run.accepted
    assert 1 < sum(s.draft_faults for s in run.steps) == calls[0] // 3


def spoil(engine: Engine, spoils: Callable[[Sequence], bool]) -> None:
    """Let the states of some sequences reach the heads as NaN."""
    reader = drafter_of(engine).states
    read = reader.read

    def spoiling(feeds: Seq[Feed], starts: Seq[int], states: Tensor) -> None:
        counts = [feed.committed + feed.drafts for feed in feeds]
        parts = zip(feeds, states.split(counts), strict=True)
        read(feeds, starts, torch.cat([part * torch.nan if spoils(feed.sequence) else part for feed, part in parts]))

    reader.read = spoiling  # type: ignore[method-assign]


@pytest.mark.parametrize("verifier", ["match", *in_proofs("rejection", "block")])
def test_laws_that_are_not_finite_end_the_drafts_of_their_sequence(
    fitted: Fitted, plain: Plain, verifier: Verifier, caplog: pytest.LogCaptureFixture
) -> None:
    engine = fitted.engine(max_running=8)
    requests = make_requests(0.8 if verifier == "match" else 0.7, verifier=verifier)
    spoil(engine, lambda sequence: sequence.request_id in ("r1", "r4"))
    run = drive(engine, requests)
    for name, told in run.received.items():
        assert told.error is None
        assert told.record is not None
        drafted = sum(told.record.column("drafted"))
        assert (drafted <= 3) == (name in ("r1", "r4"))
        if verifier == "match":
            assert told.tokens == plain(0.8)[name]
    assert sum("no valid distribution" in record.message for record in caplog.records) == 2


def test_an_illegal_draft_of_a_neighbour_gives_nobody_up(fitted: Fitted) -> None:
    """Only the sequences that these heads drafted for are looked at."""
    drafter = drafter_of(fitted.engine())
    one, two = known(drafter, 2)
    ask(drafter, [one, two], [2, 0])
    verdict: Any = type("Verdict", (), {"paths": {}, "accepted": [0, 0], "drafts": [[5, 6], [NO_TOKEN]]})
    drafter.observe(DraftBatch((one, two), Sampler([one, two], [2, 1], VOCAB, CPU)), verdict)
    assert not drafter._given_up


def test_nothing_is_kept_of_sequences_that_have_ended(fitted: Fitted) -> None:
    engine = fitted.engine(max_running=4)
    cancels = {5: ["r1"], 9: ["r6"]}
    drive(engine, make_requests(0.8), cancels)
    drafter = drafter_of(engine)
    drafter.audit(set())
    known(drafter)
    with pytest.raises(AssertionError, match="states of ended sequences"):
        drafter.audit(set())
    drafter.audit({0})
    drafter._given_up.add(3)
    with pytest.raises(AssertionError, match="not forgotten"):
        drafter.audit({0})
    drafter.forget(make_sequence(3, [5]))
    drafter.audit({0})


def test_a_sequence_that_asks_for_no_drafts_keeps_no_states(fitted: Fitted) -> None:
    engine = fitted.engine(max_running=4)
    drive(engine, make_requests(0.0, k=0), after_step=lambda: drafter_of(engine).audit(set()))
