"""Several draft models and one token tree: its shape, its laws, the text, the memory of both, what a failure costs."""

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.drafters import merged_chains
from engine.drafters.base import NO_OFFER, Draft, DraftBatch
from engine.drafters.chain import ChainedDrafter
from engine.drafters.merged import MergedDrafter
from engine.drafters.merged_chains import MergedTree, OwnChain, merge_chains
from engine.engine import Engine
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence
from engine.types import DrafterName, Request, SamplingParams, Verifier
from tests.engine.driving import Drive, drive, load, make_sequence, model_drafters
from tests.engine.fresh import Checker
from tests.engine.law.checking import draw, law_of, refuses
from tests.engine.law.configurations import Configuration
from tests.engine.law.statistics import g_test
from tests.engine.pairs import VOCAB, Pair

pytestmark = pytest.mark.usefixtures("shared_weights", "unprofiled")

LIMITS: dict[str, Any] = {"max_running": 4, "max_spec_length": 9, "max_step_tokens": 40}
REJECTION = Configuration("plain", "merged", "rejection", 3, mixed=False)
PROMPTS = ((5, 6, 7), (8, 9), tuple(range(20, 50)))


@pytest.fixture(scope="module")
def engine(pair: Pair, drafts: tuple[str, str]) -> Engine:
    return load(pair, drafts=drafts, **LIMITS)


# --- the tree --------------------------------------------------------------------------------------------------------


def test_equal_beginnings_are_shared() -> None:
    tree = MergedTree.sharing([[7, 3, 4], [7, 3, 5], [7, 8]], 9)
    assert tree.parents == (-1, 0, 1, 1, 0)
    assert tree.paths == [[0, 1, 2], [0, 1, 3], [0, 4]]
    assert tree.places() == [(0, 0), (0, 1), (0, 2), (1, 2), (2, 1)]


def test_what_does_not_fit_is_cut_at_its_deep_end() -> None:
    tree = MergedTree.sharing([[1, 2, 3], [4, 5, 6]], 4)
    assert tree.parents == (-1, 0, -1, 2)
    assert tree.paths == [[0, 1], [2, 3]]
    assert MergedTree.sharing([[1, 2, 3], [1, 2, 9]], 3).paths == [[0, 1, 2], [0, 1]]
    assert MergedTree.sharing([[], [4, 5]], 4).paths == [[], [0, 1]]


def test_every_tree_of_chains() -> None:
    """Each node has its chain's token, chains that agree share nodes, and no more nodes than allowed are used."""
    rng = random.Random(0)
    for _ in range(300):
        chains = [[rng.randrange(2) for _ in range(rng.randrange(5))] for _ in range(rng.randint(1, 3))]
        if not any(chains):
            continue
        most = rng.randint(1, 8)
        tree = MergedTree.sharing(chains, most)
        texts = [tuple(chain[: n + 1]) for chain in chains for n in range(len(chain))]
        assert len(tree.parents) == min(most, len(set(texts)))
        of_node: dict[int, tuple[int, ...]] = {}
        for tokens, path in zip(chains, tree.paths, strict=True):
            for depth, node in enumerate(path):
                assert of_node.setdefault(node, tuple(tokens[: depth + 1])) == tuple(tokens[: depth + 1])
                assert tree.parents[node] == (path[depth - 1] if depth else -1)
        assert len(set(of_node.values())) == len(of_node) == len(tree.parents)
        assert all(chains[n][column] == of_node[v][-1] for v, (n, column) in enumerate(tree.places()))


def test_chains_with_laws_are_siblings_at_the_root() -> None:
    """A tree under rejection may not depend on the drawn tokens, and each node has its own model's law."""
    sequence = make_sequence(0, [1, 2])
    sequence.verifier, sequence.drafter = "rejection", "merged"
    other = make_sequence(1, [1, 2])
    other.drafter = "merged"
    laws = [torch.randn(1, 2, 4).log_softmax(-1) for _ in range(2)]
    tokens = torch.tensor([[3, 1], [3, 2]]), torch.tensor([[3, 0], [3, 0]])
    drafts = [Draft((2, 2), tokens[n], laws[n], {0: 0}, steps=2, read=3) for n in range(2)]
    sampler: Any = None
    draft, chains = merge_chains(DraftBatch((sequence, other), sampler), drafts, [4, 4])
    assert draft.ks == (4, 3)
    assert draft.trees == {0: (-1, 0, -1, 2), 1: (-1, 0, 0)}
    assert draft.tokens is not None
    assert draft.tokens[0].tolist() == [3, 1, 3, 0]
    assert draft.tokens[1, :3].tolist() == [3, 2, 0]
    assert draft.logq is not None
    assert draft.logq_rows == {0: 0}
    assert torch.equal(draft.logq[0], torch.cat([laws[0][0], laws[1][0]]))
    assert (draft.steps, draft.read) == (4, 6)
    assert chains[0] == (OwnChain([0, 1]), OwnChain([2, 3]))
    assert chains[1] == (OwnChain([0, 1], [3, 2]), OwnChain([0, 2], [3, 0]))


# --- the text and the law --------------------------------------------------------------------------------------------


def requests(drafter: DrafterName | None, k: int, **changes: Any) -> list[Request]:
    params = replace(SamplingParams(temperature=0.8, seed=3, max_tokens=16, ignore_eos=True), **changes)
    return [Request(f"r{n}", p, params, k=k, drafter=drafter) for n, p in enumerate(PROMPTS)]


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}], ids=["noise", "greedy"])
def test_the_text_is_what_it_is_without_drafts(engine: Engine, changes: dict[str, Any]) -> None:
    plain = drive(engine, requests(None, 0, **changes))
    runs = {k: drive(engine, requests("merged", k, **changes)) for k in (4, 9)}
    assert all(run.tokens == plain.tokens for run in runs.values())
    rounds = [part for told in runs[9].received.values() if told.record for part in told.record.rounds]
    assert any(part.path and part.path[-1] >= len(part.path) for part in rounds)  # the second model's, accepted
    assert {len(part.tree) for part in rounds if part.tree} > {9}  # equal beginnings are shared


def test_more_of_two_models_is_accepted_than_of_one(engine: Engine) -> None:
    """With chains as long as the one model's: nodes of their own for the second."""
    one, two = drive(engine, requests("model", 4, seed=5)), drive(engine, requests("merged", 8, seed=5))
    assert two.accepted > one.accepted


@pytest.mark.usefixtures("pruned_races")
def test_the_law_is_the_targets() -> None:
    """The chains are as long as in the test that sees wrong laws; law/test_law.py tests all other lengths."""
    configuration = replace(REJECTION, k=2)
    assert g_test(draw(configuration, 800).counts, law_of(configuration.params)) > 1e-3


@pytest.mark.usefixtures("pruned_races")
def test_nodes_with_the_law_of_the_other_model_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    laws = merged_chains._laws

    def swapped(drafts: Seq[Draft], places: Any) -> tuple[Tensor | None, dict[int, int]]:
        return laws([replace(drafts[0], logq=drafts[1].logq), replace(drafts[1], logq=drafts[0].logq)], places)

    monkeypatch.setattr(merged_chains, "_laws", swapped)
    assert refuses(replace(REJECTION, k=2), 4000)  # chains of one token each


def test_models_draw_with_noise_of_their_own(pair: Pair) -> None:
    """Siblings that the same noise drew are not independent: twice the same model would draw the same token."""
    merged = merged_drafter(load(pair, drafts=(pair.draft, pair.draft), **LIMITS))
    firsts = []
    for key in range(12):
        sequence = make_sequence(key, range(2, 12), key=key)
        sequence.drafter, sequence.verifier = "merged", "rejection"
        draft = propose(merged, sequence, 2)
        assert draft.tokens is not None
        assert draft.trees == {0: (-1, -1)}
        firsts.append(draft.tokens[0].tolist())
        merged.forget(sequence)
    assert sum(a != b for a, b in firsts) > 3


# --- the memory ------------------------------------------------------------------------------------------------------


def fuzz(engine: Engine, checker: Checker, seed: int, count: int = 16) -> Drive:
    """Random prompts, drafters of the models, verifiers, temperatures, trees, arrivals and cancels."""
    rng = random.Random(seed)
    arrivals: dict[int, list[Request]] = {}
    cancels: dict[int, list[str]] = {}
    for i in range(count):
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.7, 1.0)), seed=rng.randrange(1000), max_tokens=rng.randint(1, 24)
        )
        prompt = tuple(rng.randrange(2, VOCAB) for _ in range(rng.choice((1, 2, 5, 17, 40, 60))))
        # The first model drafts alone under block, and where a tree is given.
        verifier: Verifier = rng.choice(("match", "match", "match", "rejection", "rejection", "block"))
        tree = rng.choice((None, None, None, None, (2, 2))) if verifier != "block" else None
        request = Request(f"r{i}", prompt, params, tree=tree, k=rng.choice((0, 4, 9, 9)) if tree is None else None)
        drafter: DrafterName = rng.choice(("merged", "merged", "merged", "merged", "model"))
        arrivals.setdefault(rng.randint(0, 12), []).append(replace(request, verifier=verifier, drafter=drafter))
        if rng.random() < 0.3:
            cancels.setdefault(rng.randint(3, 20), []).append(f"r{i}")
    return drive(engine, arrivals, cancels, checker)


@pytest.mark.parametrize("seed", [n if n == 0 else pytest.param(n, marks=pytest.mark.proofs) for n in range(8)])
def test_all_caches_hold_the_committed_tokens(engine: Engine, seed: int) -> None:
    checker = Checker(engine)
    run = fuzz(engine, checker, seed)
    assert run.accepted
    assert sum(s.draft_faults for s in run.steps) == 0
    assert min(checker.compared.values()) > 100


def test_a_path_of_the_other_chain_that_is_kept_is_noticed(
    pair: Pair, drafts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OwnChain, "count_kept", lambda self, accepted: len(accepted))
    engine = load(pair, drafts=drafts, **LIMITS)
    with pytest.raises(AssertionError, match=r"draft: (keys|values) of layer"):
        fuzz(engine, Checker(engine), 0)


def test_preempted_texts_are_the_same(pair: Pair, drafts: tuple[str, str]) -> None:
    """Memory for two of three: one loses its own in all models and reads its tokens again."""
    asked = requests("merged", 6, max_tokens=36)
    wanted = drive(load(pair, drafts=drafts, **LIMITS), asked)
    engine = load(pair, drafts=drafts, **{**LIMITS, "cache": "paged", "block_size": 8, "kv_tokens": 104})
    run = drive(engine, asked, after_step=Checker(engine, logits=False))
    assert run.tokens == wanted.tokens
    assert sum(told.record.preemptions for told in run.received.values() if told.record) > 0


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [0, 1])
def test_a_model_that_raises_costs_its_own_chain(engine: Engine, monkeypatch: pytest.MonkeyPatch, broken: int) -> None:
    """After it has read a draft of its own: that must not stay in its memory."""
    plain = drive(engine, requests(None, 0))
    runner = model_drafters(engine)[broken].runner
    step = runner.step

    def raising(sequences: Any, tokens: Tensor) -> Tensor:
        step(sequences, tokens)
        raise RuntimeError("half way")

    monkeypatch.setattr(runner, "step", raising)
    run = drive(engine, requests("merged", 6), after_step=Checker(engine))
    assert run.tokens == plain.tokens
    assert run.accepted
    assert sum(s.draft_faults for s in run.steps) > 0
    drafted = [part for told in run.received.values() if told.record for part in told.record.rounds if part.drafted]
    assert max(part.drafted for part in drafted) == (3, 6)[broken]
    assert max(len(part.tree) for part in drafted) <= 3  # chains of one token take no further step


def test_a_model_that_cannot_observe_costs_its_own_memory(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = drive(engine, requests(None, 0))
    first, second = model_drafters(engine)
    monkeypatch.setattr(second, "observe", lambda batch, verdict: 1 / 0)
    held = []

    def after_step() -> None:
        running = engine.scheduler.running
        held.append(tuple(sum(m.runner.cache.holds(s.handle) for s in running) for m in (first, second)))

    run = drive(engine, requests("merged", 6), after_step=after_step)
    assert run.tokens == plain.tokens
    assert run.accepted
    assert max(of_first for of_first, _ in held) == 3
    assert max(of_second for _, of_second in held) == 0


def test_a_model_that_has_no_numbers_is_left_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = drive(engine, requests(None, 0))
    first, second = model_drafters(engine)
    run_pass = second.runner.run
    monkeypatch.setattr(second.runner, "run", lambda feeds: run_pass(feeds) * torch.nan)
    given_up = []
    run = drive(engine, requests("merged", 6), after_step=lambda: given_up.append(set(second._given_up)))
    assert run.tokens == plain.tokens
    assert max(map(len, given_up)) == 3
    assert not first._given_up
    assert run.accepted


# --- what it says ----------------------------------------------------------------------------------------------------


def merged_drafter(engine: Engine) -> MergedDrafter:
    assert isinstance(engine.drafter, ChainedDrafter)
    (merged,) = (part for part in engine.drafter.drafters if isinstance(part, MergedDrafter))
    return merged


def test_its_offer_is_what_it_drafts_and_reads(pair: Pair, drafts: tuple[str, str]) -> None:
    """The gap counts what both models read beyond one token each. The first draws all 4 tokens, the second 2."""
    merged = merged_drafter(load(pair, drafts=drafts, **LIMITS))
    sequence = make_sequence(0, range(2, 12))
    sequence.drafter = "merged"
    assert merged.offer(sequence, 4) == ("merged", 4, 1 + 9 + 9, False)
    draft = propose(merged, sequence, 4)
    assert draft.read == (10 + 3) + (10 + 1)
    assert draft.steps == 4 + 2
    for model in merged.models:
        model.runner.cache.truncate_to(0, 10)
    sequence.tokens += [5, 6]
    assert merged.offer(sequence, 4) == ("merged", 4, 1 + 1 + 1, False)
    sequence.drafter = "model"
    assert merged.offer(sequence, 4) == ("model", 4, 2, True)
    sequence.drafter, sequence.verifier = "merged", "block"
    assert merged.offer(sequence, 4) == ("merged", 4, 2, False)  # it decides about chains: the first model alone
    assert draft_of_first(merged, sequence)


def propose(merged: MergedDrafter, sequence: Sequence, k: int) -> Draft:
    with torch.inference_mode():
        return merged.propose(DraftBatch((sequence,), Sampler((sequence,), [k], VOCAB, torch.device("cpu"))), [k])


def draft_of_first(merged: MergedDrafter, sequence: Sequence) -> bool:
    draft = propose(merged, sequence, 4)
    return draft.ks == (4,) and not draft.trees and merged.models[1].runner.uncached(sequence) == 2


def test_a_model_at_the_end_of_its_memory_leaves_its_nodes_to_the_other(
    pair: Pair, drafts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = merged_drafter(load(pair, drafts=drafts, **LIMITS))
    monkeypatch.setattr(merged.models[1], "offer", lambda sequence, k: NO_OFFER)
    sequence = make_sequence(0, range(2, 12))
    sequence.drafter = "merged"
    assert merged.offer(sequence, 4) == ("merged", 4, 10, False)
    assert propose(merged, sequence, 4).ks == (4,)
