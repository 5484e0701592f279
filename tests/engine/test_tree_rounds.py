"""Rounds with trees from the draft model, through the whole engine: the text, the law of the caches, the records."""

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest

from engine import trees
from engine.drafters.growing_trees import Found, GrowingTree
from engine.drafters.model_trees import FedTree
from engine.engine import Engine
from engine.trees import Growth, Parents
from engine.types import DrafterName, InvalidRequest, Request, SamplingParams, Verifier
from tests.engine.driving import Drive, drive, load
from tests.engine.fresh import Checker
from tests.engine.pairs import VOCAB, Pair
from tests.examples import in_proofs

pytestmark = pytest.mark.usefixtures("shared_weights", "unprofiled")

SHAPES: tuple[tuple[int, ...] | Growth, ...] = ((2, 2), (3, 1), (2, 1, 2), (6,), Growth(7, 4))
PROMPTS = ((5, 6, 7), (8, 9), tuple(range(20, 50)))


def requests(tree: tuple[int, ...] | Growth | None, **changes: object) -> list[Request]:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
    params = replace(params, **changes)  # type: ignore[arg-type]
    k = 0 if tree is None else None
    return [Request(f"r{n}", prompt, params, k=k, tree=tree) for n, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize(
    "changes",
    [
        *in_proofs({}, {"temperature": 0.0}, {"top_p": 0.9, "top_k": 20}),
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"logprobs": 2, "min_tokens": 5, "bad_word_ids": ((5, 6), (7,))},
    ],
    ids=["noise", "greedy", "filters", "penalties", "exclusions"],
)
def test_the_text_is_what_it_is_without_a_tree(pair: Pair, changes: dict[str, object]) -> None:
    """Every shape in one batch."""
    engine = load(pair, max_running=16)
    plain = drive(engine, requests(None, max_tokens=16, **changes)).tokens
    asked = [
        replace(request, id=f"{request.id} {shape}")
        for shape in SHAPES
        for request in requests(shape, max_tokens=16, **changes)
    ]
    run = drive(engine, asked)
    assert run.tokens == {f"{name} {shape}": tokens for shape in SHAPES for name, tokens in plain.items()}
    assert run.accepted


@pytest.mark.parametrize("drafter", ["ngram", *in_proofs("lookup", "suffix")])
def test_trees_of_guesses_change_no_text(pair: Pair, drafter: DrafterName) -> None:
    """Texts of three tokens repeat themselves in several ways, so the guesses branch."""
    params = SamplingParams(
        temperature=0.8, max_tokens=40, ignore_eos=True, logit_bias=((5, 12.0), (60, 12.0), (200, 12.0))
    )
    changes: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.9}, {"repetition_penalty": 1.3}, {"temperature": 0.0})
    asked = [
        Request(f"r{n} {shape}", PROMPTS[n % 3], replace(params, seed=n, **how), drafter=drafter, tree=shape)
        for n, how in enumerate(changes)
        for shape in ((2, 2), (3, 1), (1, 2, 1), (6,))
    ]
    engine = load(pair, max_running=16)
    run = drive(engine, asked)
    plain = drive(engine, [replace(request, k=0, tree=None, drafter=None) for request in asked])
    assert run.tokens == plain.tokens
    rounds = [part for told in run.received.values() if told.record for part in told.record.rounds if part.tree]
    assert sum(not trees.is_chain(part.tree) for part in rounds) > 20
    assert sum(part.path != tuple(range(len(part.path))) for part in rounds) > 2, "siblings were accepted"


def fuzz(engine: Engine, checker: Checker, seed: int, count: int = 12) -> Drive:
    """Random prompts, trees, chains, verifiers, temperatures, arrivals and cancels."""
    rng = random.Random(seed)
    arrivals: dict[int, list[Request]] = {}
    cancels: dict[int, list[str]] = {}
    for i in range(count):
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.7, 1.0)), seed=rng.randrange(1000), max_tokens=rng.randint(1, 24)
        )
        prompt = tuple(rng.randrange(2, VOCAB) for _ in range(rng.choice((1, 2, 5, 17, 40, 60))))
        tree = rng.choice((None, *SHAPES))
        request = Request(f"r{i}", prompt, params, tree=tree, k=rng.choice((0, 3)) if tree is None else None)
        verifiers: tuple[Verifier, ...] = ("match", "rejection") if tree else ("match", "rejection", "block")
        verifier: Verifier = "match" if isinstance(tree, Growth) else rng.choice(verifiers)
        arrivals.setdefault(rng.randint(0, 12), []).append(replace(request, verifier=verifier))
        if rng.random() < 0.3:
            cancels.setdefault(rng.randint(3, 20), []).append(f"r{i}")
    return drive(engine, arrivals, cancels, checker)


@pytest.mark.parametrize("seed", [n if n == 0 else pytest.param(n, marks=pytest.mark.proofs) for n in range(8)])
@pytest.mark.parametrize("which", ["pair", *in_proofs("twins")])
def test_caches_hold_the_committed_tokens(which: str, seed: int, request: pytest.FixtureRequest) -> None:
    engine = load(request.getfixturevalue(which), max_running=4, max_spec_length=9, max_step_tokens=40)
    checker = Checker(engine)
    run = fuzz(engine, checker, seed)
    assert run.accepted
    assert min(checker.compared.values()) > 200


def test_a_tree_that_is_always_right_follows_its_first_children(twins: Pair) -> None:
    run = drive(load(twins, max_running=1), requests((2, 2)))
    rounds = [part for told in run.received.values() if told.record for part in told.record.rounds if part.tree]
    assert rounds
    shape = trees.branching((2, 2))
    for part in rounds:
        assert part.tree == shape[: part.drafted]
        assert part.path == (0, 1)[: min(2, part.drafted)]


def test_a_tree_that_grows_follows_the_drafts_own_chances(pair: Pair) -> None:
    """Its shape changes from round to round, within its bounds; and what it is right about, it is deep about."""
    run = drive(load(pair, max_running=2), requests(Growth(7, 4)))
    shapes = [p.tree for told in run.received.values() if told.record for p in told.record.rounds if p.tree]
    whole = [shape for shape in shapes if len(shape) == 7]
    assert len(set(whole)) > 3
    assert max(max(trees.depths(shape)) for shape in whole) <= 4
    for shape in shapes:
        trunk = trees.trunk(shape)
        assert trunk == list(range(len(trunk)))  # first children lie right behind their parents


def test_a_tree_that_grows_is_kept_by_what_was_read_last(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory that takes a node's place for its number is noticed."""
    shape = GrowingTree.shape

    def wrong(self: GrowingTree) -> tuple[Parents, list[Found], list[int]]:
        parents, nodes, numbers = shape(self)
        return parents, nodes, list(range(len(numbers)))

    monkeypatch.setattr(GrowingTree, "shape", wrong)
    engine = load(pair, max_running=4, max_spec_length=9, max_step_tokens=40)
    with pytest.raises(AssertionError):
        drive(engine, requests(Growth(7, 4)), {}, Checker(engine))


def test_a_cut_tree_is_still_one(pair: Pair) -> None:
    """The last rounds of a text have room for fewer drafts than the shape."""
    run = drive(load(pair, max_running=1, max_spec_length=16), requests((3, 2, 1)))
    cut = {len(p.tree) for told in run.received.values() if told.record for p in told.record.rounds if p.tree}
    assert max(cut) == 15
    assert min(cut) < 15


def test_an_accepted_path_kept_in_the_wrong_order_is_noticed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = FedTree.kept

    def wrong(self: FedTree, accepted: Seq[int]) -> list[int]:
        return [*range(len(kept(self, accepted)))]

    monkeypatch.setattr(FedTree, "kept", wrong)
    engine = load(pair, max_running=4, max_spec_length=9, max_step_tokens=40)
    with pytest.raises(AssertionError):
        fuzz(engine, Checker(engine), 0)


def test_a_tree_under_block_is_refused(pair: Pair) -> None:
    engine = load(pair)
    with pytest.raises(InvalidRequest, match="a tree needs verifier"):
        engine.check(Request("r", (5,), tree=(2,), verifier="block"))
