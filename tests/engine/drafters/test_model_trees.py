"""Chains and trees of one round: the draft model reads them in the same passes, and each draft is what it is alone."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import pytest
import torch

from engine import trees
from engine.drafters.base import Draft, DraftBatch
from engine.drafters.model import ModelDrafter
from engine.engine import Engine
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence
from engine.trees import Parents
from engine.types import Request, SamplingParams, Verifier
from tests.engine.driving import drive, load, make_sequence, model_drafter
from tests.engine.heads.eagles import save_eagle_pair
from tests.engine.law.tables import table_engine
from tests.engine.pairs import Pair

PARAMS = SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True)
TREE = (2, 1, 1)


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one round drafted for a chain (0) and a tree (1)."""

    draft: Draft
    gaps: tuple[int, int]  # tokens that the model had to read first

    @property
    def depths(self) -> list[int]:
        return [max(trees.depths(self.draft.trees.get(i, trees.chain(k)))) for i, k in enumerate(self.draft.ks)]


def propose_both(engine: Engine, monkeypatch: pytest.MonkeyPatch, chain: int, **changes: object) -> list[Proposal]:
    """The proposals for a chain and a tree that share their rounds, once the prompts are read."""
    heard: list[Proposal] = []
    drafter = model_drafter(engine)
    propose = drafter.propose

    def listen(batch: DraftBatch, ks: Seq[int]) -> Draft:
        gaps = [drafter.runner.uncached(s) for s in batch.sequences]
        draft = propose(batch, ks)
        if len(gaps) == 2 and all(draft.ks) and all(s.num_output > 1 for s in batch.sequences):
            heard.append(Proposal(draft, (gaps[0], gaps[1])))
        return draft

    monkeypatch.setattr(drafter, "propose", listen)
    params = replace(PARAMS, **changes)  # type: ignore[arg-type]
    requests = [Request("chain", (5, 6, 7), replace(params, seed=1), k=chain)]
    requests.append(Request("tree", (8, 9), replace(params, seed=2), tree=TREE))
    run = drive(engine, requests)
    assert not sum(step.draft_faults for step in run.steps)
    assert len(heard) > 2
    return heard


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_eagle_pair(tmp_path_factory.mktemp("eagle"))


@pytest.mark.parametrize("chain", [2, 3, 5])
@pytest.mark.parametrize("which", ["pair", "twins", "eagle"])
def test_a_round_takes_as_many_passes_as_its_deepest_path(
    which: str, chain: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(request.getfixturevalue(which), max_running=2, max_spec_length=8)
    for proposal in propose_both(engine, monkeypatch, chain):
        assert set(proposal.draft.trees) == {1}, "the other draft is a chain for whoever looks at it"
        assert proposal.draft.steps == max(proposal.depths)


def test_a_chain_beside_a_tree_keeps_what_was_accepted(twins: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """All drafts are right, so the model has only its last draft and the target's own token to read."""
    engine = load(twins, max_running=2, max_spec_length=8)
    for proposal in propose_both(engine, monkeypatch, 4, temperature=0.0):
        assert proposal.gaps == (2, 2)


def ask(engine: Engine, sequences: Seq[Sequence], shapes: Seq[Parents | None], confidences: tuple[float, ...]) -> Draft:
    """Chains of three drafts where there is no shape."""
    ks = [len(shape or (0,) * 3) for shape in shapes]
    sampler = Sampler(sequences, ks, engine.target.vocab_size, torch.device("cpu"))
    batch = DraftBatch(tuple(sequences), sampler, confidences, tuple(shapes) if any(shapes) else ())
    with torch.inference_mode():
        return model_drafter(engine).propose(batch, ks)


@pytest.mark.parametrize("verifier", ["match", "rejection", "block"])
@pytest.mark.parametrize("limits", [(), (0.0, 0.5, 0.0)], ids=["no limit", "limits"])
def test_a_chain_beside_trees_is_what_it_is_alone(verifier: Verifier, limits: tuple[float, ...]) -> None:
    """Its tokens, and the laws that they were drawn from; also beside a chain that its confidence ends."""
    count = 27
    sequences = [make_sequence(i, [i % 3, i // 3 % 3, i // 9 % 3], key=i * 7919) for i in range(count)]
    is_tree = [i % 2 == 0 for i in range(count)]
    for sequence, branches in zip(sequences, is_tree, strict=True):
        sequence.verifier = "rejection" if branches else verifier
    confidences = tuple(limits[i % 3] for i in range(count)) if limits else ()
    shapes = [trees.branching((2, 1)) if branches else None for branches in is_tree]
    alone = ask(table_engine(), sequences, [None] * count, confidences)
    mixed = ask(table_engine(), sequences, shapes, confidences)
    assert set(mixed.trees) == {i for i, branches in enumerate(is_tree) if branches}
    assert alone.tokens is not None
    assert mixed.tokens is not None
    for i in (i for i, branches in enumerate(is_tree) if not branches):
        k = alone.ks[i]
        assert mixed.ks[i] == k
        assert mixed.tokens[i, :k].tolist() == alone.tokens[i, :k].tolist()
        assert (i in mixed.logq_rows) == (i in alone.logq_rows) == (verifier != "match" and k > 0)
        if i in alone.logq_rows:
            assert alone.logq is not None
            assert mixed.logq is not None
            assert mixed.logq[mixed.logq_rows[i], :k].equal(alone.logq[alone.logq_rows[i], :k])
    assert (len(set(mixed.ks[1::2])) > 1) == bool(limits), "some confidence ended a chain"


def test_chains_alone_take_their_own_way(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are drawn column by column, which is cheaper than the general tree."""
    drawn = 0
    draw_trees = ModelDrafter._draw_trees

    def counting(self: ModelDrafter, *args: object) -> Draft:
        nonlocal drawn
        drawn += 1
        return draw_trees(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelDrafter, "_draw_trees", counting)
    engine = load(pair, max_running=2, max_spec_length=8)
    requests = [Request(f"r{n}", (5, 6 + n), replace(PARAMS, seed=n), k=3 + n) for n in range(2)]
    assert drive(engine, requests).drafted
    assert drawn == 0
    drive(engine, [replace(requests[0], id="tree", k=None, tree=TREE)])
    assert drawn > 0
