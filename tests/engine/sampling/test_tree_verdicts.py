"""The verdict on draft trees: the walk against plain Python, mixed batches in one copy, scores that are not finite."""

import itertools
import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import inf, nan

import pytest
import torch
from torch import Tensor

from engine import trees, verification
from engine.drafters.base import Draft, DraftBatch
from engine.kernels.verdict import match_verdict
from engine.round import _logprobs
from engine.sampling.acceptance import OVERLAP_SCALE, DeviceVerdict, Verdict
from engine.sampling.matching import match
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence
from engine.trees import ROOT, Parents
from engine.types import SamplingParams, Verifier
from engine.verification import copy_to_host, verify
from tests.engine.driving import make_sequence
from tests.engine.tree_enumeration import all_orders

CPU = torch.device("cpu")
VOCAB = 5


def walked(drawn: Seq[int], drafts: Seq[int], shape: Parents) -> list[int]:
    """The nodes that equal what the target drew at their parents, from the root on."""
    row, path = 0, list[int]()
    while True:
        below = [v for v, parent in enumerate(shape) if parent + 1 == row and drafts[v] == drawn[row]]
        if not below:
            return path
        path.append(below[0])
        row = below[0] + 1


def by_operation(drawn: list[int], drafts: list[list[int]], shapes: dict[int, Parents]) -> Verdict:
    ks = [len(tokens) for tokens in drafts]
    fill = [[0] * (max(ks) - k) for k in ks]
    table = torch.tensor([tokens + more for tokens, more in zip(drafts, fill, strict=True)])
    parents = torch.tensor([[*(p + 1 for p in shapes[i]), *(-1 for _ in fill[i])] for i in range(len(ks))])
    first_rows = torch.tensor([*itertools.accumulate((k + 1 for k in ks), initial=0)])
    found = match_verdict(torch.tensor(drawn), torch.ones(len(drawn)).bool(), table, first_rows, parents)
    rows, tokens, finite = found[:, :3].unbind(1)
    decided = DeviceVerdict(rows, tokens, finite, table=found)
    return copy_to_host(decided, Draft(tuple(ks), table, trees=shapes), 2)


@pytest.mark.parametrize("way", ["host", "operation"])
def test_match_walks_down_every_shape(way: str) -> None:
    """All shapes of up to four nodes in every order, with all drafts and draws of two tokens, as one ragged batch."""
    cases = [
        (drawn, drafts, shape)
        for size in range(1, 5)
        for shape in all_orders(size, height=4)
        for drawn in itertools.product(range(2), repeat=size + 1)
        for drafts in itertools.product((0, 1, VOCAB), repeat=size)
        if size < 4 or sum(drawn) + sum(drafts) in (3, 8)
    ]
    drawn = [token for row, _, _ in cases for token in row]
    shapes = {i: shape for i, (_, _, shape) in enumerate(cases)}
    verdict = match(drawn, [True] * len(drawn), [list(drafts) for _, drafts, _ in cases], shapes, 2)
    if way == "operation":
        verdict = by_operation(drawn, [list(drafts) for _, drafts, _ in cases], shapes)
    for i, (row, drafts, shape) in enumerate(cases):
        path = walked(row, drafts, shape)
        assert verdict.paths[i] == path
        assert verdict.accepted[i] == len(path)
        assert verdict.emitted[i] == [*(drafts[v] for v in path), row[path[-1] + 1 if path else 0]]
    assert len(set(verdict.accepted)) == 5


# Whole batches

KINDS: list[tuple[Verifier, float, float | None]] = [
    ("match", 1.0, None), ("rejection", 0.8, None), ("rejection", 1.0, 0.6), ("rejection", 0.0, None),
    ("block", 0.0, None), ("match", 0.0, None),
]  # fmt: skip


def batch_of(kinds: Seq[tuple[Verifier, float, float | None]], seed: int = 0) -> tuple[list[Sequence], Draft, Tensor]:
    """A tree for two in three sequences, with laws for every other one; drafts that are often accepted; the logits."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sequences, shapes = [], []
    for i, (verifier, temperature, lenience) in enumerate(kinds):
        sequence = make_sequence(i, [0] * (2 + i % 3), SamplingParams(temperature=temperature), key=i * 7919 + seed)
        sequence.verifier, sequence.lenience = verifier, lenience
        sequences.append(sequence)
        size = rng.randint(0, 6)
        shapes.append(trees.chain(size) if i % 3 == 2 else tuple(rng.randrange(ROOT, node) for node in range(size)))
    ks = tuple(map(len, shapes))
    drafts = torch.randint(3, (len(kinds), max(ks) + 1), generator=generator)
    laws = torch.randn(len(kinds), max(ks), VOCAB, generator=generator, dtype=torch.float64).log_softmax(-1)
    rows = {i: i for i in range(0, len(kinds), 2)}
    logits = torch.randn(sum(ks) + len(ks), VOCAB, generator=generator, dtype=torch.float64)
    logits[:, :3] += 2
    given = {i: shape for i, shape in enumerate(shapes) if i % 3 != 2}
    return sequences, Draft(ks, drafts, laws, rows, trees=given), logits


def verdict_of(sequences: Seq[Sequence], draft: Draft, logits: Tensor) -> Verdict:
    return verify(DraftBatch(tuple(sequences), Sampler(sequences, draft.ks, VOCAB, CPU)), draft, logits)


def alone(i: int, sequences: Seq[Sequence], draft: Draft, logits: Tensor) -> Verdict:
    first, k = sum(draft.ks[:i]) + i, draft.ks[i]
    assert draft.tokens is not None
    assert draft.logq is not None
    laws = {0: 0} if i in draft.logq_rows else {}
    shapes = {0: draft.trees[i]} if i in draft.trees else {}
    own = Draft((k,), draft.tokens[i : i + 1], draft.logq[i : i + 1], laws, trees=shapes)
    return verdict_of([sequences[i]], own, logits[first : first + k + 1])


def test_a_batch_of_trees_and_chains_is_its_sequences() -> None:
    """Each sequence gets what it gets alone, whoever else is in the batch."""
    accepted = set()
    for seed in range(6):
        sequences, draft, logits = batch_of([*KINDS, ("block", 1.0, None)][seed % 2 :] * 3, seed)
        for i, sequence in enumerate(sequences):
            if sequence.verifier == "block":
                draft = replace(draft, trees={n: shape for n, shape in draft.trees.items() if n != i})
        verdict = verdict_of(sequences, draft, logits)
        assert verdict.paths.keys() == draft.trees.keys()
        for i in range(len(sequences)):
            own = alone(i, sequences, draft, logits)
            assert (verdict.accepted[i], verdict.emitted[i]) == (own.accepted[0], own.emitted[0])
            assert (verdict.overlaps[i], verdict.paths.get(i)) == (own.overlaps[0], own.paths.get(0))
            if i in draft.trees:
                accepted.add(verdict.accepted[i])
    assert accepted >= {0, 1, 2, 3}


@pytest.mark.parametrize("verifier", ["match", "rejection", "block"])
def test_a_chain_given_as_a_tree_gets_the_chains_verdict(verifier: Verifier) -> None:
    lengths = set()
    for seed in range(2):
        sequences, draft, logits = batch_of([(verifier, 0.8, None)] * 90, seed)
        chains = {i: trees.chain(k) for i, k in enumerate(draft.ks)}
        plain = verdict_of(sequences, replace(draft, trees={}), logits)
        as_trees = verdict_of(sequences, replace(draft, trees=chains), logits)
        assert as_trees == replace(plain, paths={i: list(range(n)) for i, n in enumerate(plain.accepted)})
        lengths |= set(plain.accepted)
    assert lengths >= {0, 1, 2, 3}


def test_overlaps_are_told_of_the_nodes_that_were_tried() -> None:
    sequences, draft, logits = batch_of([("rejection", 1.0, None)] * 30)
    verdict = verdict_of(sequences, draft, logits)
    for i, shape in draft.trees.items():
        assert len(verdict.overlaps[i]) == len(trees.tried(shape, verdict.paths[i]))
        if shape:
            first = logits[sum(draft.ks[:i]) + i].log_softmax(0)
            assert draft.tokens is not None
            assert draft.logq is not None
            q = draft.logq[i, 0] if i in draft.logq_rows else torch.full((VOCAB,), -inf).double()
            q = q if i in draft.logq_rows else q.index_fill(0, draft.tokens[i, 0], 0.0)
            exact = torch.minimum(first, q).exp().sum().item()
            assert verdict.overlaps[i][0] == pytest.approx(exact, abs=0.51 / OVERLAP_SCALE)


def test_everything_comes_in_one_copy_from_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences, draft, logits = batch_of(KINDS * 2)
    sampler, copies, tolist = Sampler(sequences, draft.ks, VOCAB, CPU), list[tuple[int, ...]](), Tensor.tolist

    def counting(self: Tensor) -> object:
        copies.append(tuple(self.shape))
        return tolist(self)

    monkeypatch.setattr(Tensor, "tolist", counting)
    monkeypatch.setattr(Tensor, "item", None)
    monkeypatch.setattr(verification, "_on_device", lambda _: True)
    verify(DraftBatch(tuple(sequences), sampler), draft, logits)
    assert copies == [(len(sequences), 3 + 2 * max(draft.ks))]


def test_block_verification_refuses_a_tree_before_it_decides() -> None:
    sequences, draft, logits = batch_of([("block", 1.0, None)] * 2)
    tree = replace(draft, ks=(2, 2), trees={1: (ROOT, ROOT)})
    with pytest.raises(ValueError, match=r"chains only.*sequence-1.*match or rejection"):
        verdict_of(sequences, tree, logits)


def test_a_round_without_drafts_has_empty_paths() -> None:
    sequences, _, logits = batch_of([("rejection", 1.0, None)] * 2)
    verdict = verdict_of(sequences, Draft((0, 0), None, trees={1: ()}), logits[:2])
    assert verdict.paths == {1: []}


# A target that gives NaN


@pytest.mark.parametrize("row", range(6))
@pytest.mark.parametrize("verifier", ["match", "rejection"])
def test_scores_that_are_not_finite_matter_where_the_round_went(verifier: Verifier, row: int) -> None:
    """A sequence ends if the row is on its path, and only then."""
    sequences, _, _ = batch_of([(verifier, 1.0, None)] * 200)
    generator, shape = torch.Generator().manual_seed(row), (ROOT, ROOT, 0, 1, 1)
    drafts = torch.randint(3, (200, 5), generator=generator)
    logits = torch.randn(200, 6, VOCAB, generator=generator, dtype=torch.float64)
    logits[:, :, :3] += 2
    logits[:, row] = nan
    draft = Draft((5,) * 200, drafts, trees=dict.fromkeys(range(200), shape))
    verdict = verdict_of(sequences, draft, logits.flatten(0, 1))
    on_path = [row in (0, *(node + 1 for node in verdict.paths[i])) for i in range(200)]
    assert verdict.non_finite == on_path
    assert set(on_path) == ({True} if row == 0 else {True, False})


# Log-probabilities


def test_log_probabilities_are_those_of_the_rows_on_the_path() -> None:
    params = SamplingParams(temperature=1.0, logprobs=0)
    sequences, draft, logits = batch_of([("match", 1.0, None)] * 12)
    for sequence in sequences:
        sequence.params = params
    batch = DraftBatch(tuple(sequences), Sampler(sequences, draft.ks, VOCAB, CPU))
    verdict = verify(batch, draft, logits)
    found = _logprobs(batch, batch.sampler.offsets, verdict, logits, {})
    assert any(path != list(range(len(path))) for path in verdict.paths.values())
    for i, emitted in enumerate(verdict.emitted):
        first = sum(draft.ks[:i]) + i
        rows = [0, *(node + 1 for node in verdict.paths.get(i, range(verdict.accepted[i])))]
        exact = [logits[first + row].log_softmax(0)[token].item() for row, token in zip(rows, emitted, strict=True)]
        assert [(entry.token, entry.logprob) for entry in found[i]] == list(zip(emitted, exact, strict=True))
