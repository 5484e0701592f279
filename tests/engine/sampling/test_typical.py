"""Typical acceptance (Medusa, Cai et al. 2024, section 3.3.1) against its definition, written here in plain Python."""

import random
from dataclasses import replace
from math import exp, inf, log, nan

import pytest
import torch
from torch import Tensor

from engine.device.staging import RoundNumbers, Staging
from engine.drafters.base import Draft, DraftBatch
from engine.sampling import tree_acceptance
from engine.sampling.sampler import Sampler
from engine.sampling.tree_acceptance import TreeTable
from engine.trees import Parents, chain, is_chain
from engine.trees import path as path_to
from engine.types import SamplingParams, Typical
from engine.verification import verify
from tests.engine.driving import make_sequence
from tests.engine.tree_enumeration import all_orders

CPU = torch.device("cpu")
VOCAB = 6
LIMITS = (Typical(0.3, 0.9), Typical(0.09, 0.3), Typical(0.6, 1.0), Typical(0.2, 0.05))


def is_typical(law: list[float], token: int, limits: Typical) -> bool:
    if not 0 <= token < len(law):
        return False
    entropy = -sum(p * log(p) for p in law if p)
    return law[token] > min(limits.epsilon, limits.delta * exp(-entropy))


def longest(laws: list[list[float]], drafts: list[int], shape: Parents, limits: Typical) -> list[int]:
    """The nodes of the longest path of typical drafts, the first one of several."""
    kept: list[list[int]] = [[]]
    for node in range(len(shape)):
        nodes = path_to(shape, node)
        if all(is_typical(laws[shape[n] + 1], drafts[n], limits) for n in nodes):
            kept.append(nodes)
    return max(kept, key=len)


def random_laws(rng: random.Random, rows: int) -> list[list[float]]:
    """Sharp and flat ones, some with tokens that cannot be drawn."""
    laws = []
    for _ in range(rows):
        weights = [exp(rng.gauss(0, rng.choice((0.2, 1.0, 3.0)))) * (rng.random() > 0.2) for _ in range(VOCAB)]
        weights[rng.randrange(VOCAB)] += 0.1
        laws.append([w / sum(weights) for w in weights])
    return laws


def test_it_is_the_definition_on_every_small_tree() -> None:
    rng = random.Random(1)
    shapes = [shape for size in range(5) for shape in all_orders(size, height=4)] * 8
    laws = [random_laws(rng, 5) for _ in shapes]
    drafts = [[rng.choice((-1, VOCAB, *range(VOCAB))) for _ in range(4)] for _ in shapes]
    for case, (shape, own) in enumerate(zip(shapes, drafts, strict=True)):
        for node, parent in enumerate(shape):
            if rng.random() < 0.7:  # the likeliest token
                own[node] = max(range(VOCAB), key=laws[case][parent + 1].__getitem__)
    limits = [rng.choice(LIMITS) for _ in shapes]
    table, ids = TreeTable.of(shapes, RoundNumbers(Staging(CPU))), torch.tensor(drafts)
    legal = ids.clamp(0, VOCAB - 1)
    logp = torch.tensor(laws, dtype=torch.float64).log()
    last = tree_acceptance.typical(logp, legal, legal == ids, table, torch.tensor(limits, dtype=torch.float64))
    found = [path_to(shape, row - 1) for shape, row in zip(shapes, last.tolist(), strict=True)]
    assert found == [longest(*case) for case in zip(laws, drafts, shapes, limits, strict=True)]
    assert {len(nodes) for nodes in found} == {0, 1, 2, 3, 4}
    assert any(nodes and nodes != list(range(len(nodes))) for nodes in found)


def test_equal_chances_at_the_threshold_are_rejected() -> None:
    """The rule is p > min(ε, δ·exp(−H)): ε = ½ for a law with p = ½, and the next smaller ε."""
    logp = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]], dtype=torch.float64).log()
    table = TreeTable.of([chain(1)], RoundNumbers(Staging(CPU)))
    ids = torch.tensor([[0]])
    for epsilon, kept in ((0.5, 0), (0.5 - 1e-12, 1)):
        limits = torch.tensor([[epsilon, 1.0 + 1e-9]], dtype=torch.float64)
        assert tree_acceptance.typical(logp, ids, ids == ids, table, limits).tolist() == [kept]


@pytest.mark.parametrize("shape", [chain(3), (-1, 0, -1), (-1, -1, 1)])
def test_verdicts_beside_other_verifiers(shape: Parents) -> None:
    """The token behind the kept drafts is drawn from the target's law, by the noise of `rejection`'s last draw."""
    rng = random.Random(2)
    sequences = []
    for i in range(6):
        sequence = make_sequence(i, range(2 + i, 8 + i), SamplingParams(temperature=0.7, top_k=4))
        sequence.key, sequence.verifier = 100 + i, "match" if i == 2 else "rejection"
        sequence.typical = LIMITS[i % 4] if i % 2 else None
        sequences.append(sequence)
    logits = torch.tensor([[rng.gauss(0, 2) for _ in range(VOCAB)] for _ in range(4 * 6)], dtype=torch.float64)
    drafts = torch.tensor([[rng.choice((0, 1, 2, 9)) for _ in range(3)] for _ in sequences])
    trees = {} if is_chain(shape) else dict.fromkeys(range(6), shape)
    draft = Draft((3,) * 6, drafts, trees=trees)

    def run(members: list[int]) -> list[list[int]]:
        own = tuple(sequences[i] for i in members)
        batch = DraftBatch(own, Sampler(own, [3] * len(own), VOCAB, CPU))
        rows = torch.cat([logits[4 * i : 4 * i + 4] for i in members])
        alone = replace(draft, ks=(3,) * len(own), tokens=drafts[members])
        alone = replace(alone, trees=dict.fromkeys(range(len(own)), shape) if trees else {})
        return verify(batch, alone, rows).emitted

    together = run(list(range(6)))
    for i, emitted in enumerate(together):
        assert run([i]) == [emitted]
        if (limits := sequences[i].typical) is not None:
            laws = [filtered(row) for row in logits[4 * i : 4 * i + 4]]
            nodes = longest(laws, drafts[i].tolist(), shape, limits)
            assert emitted[:-1] == [int(drafts[i, n]) for n in nodes]
            assert laws[nodes[-1] + 1 if nodes else 0][emitted[-1]] > 0


def filtered(row: Tensor) -> list[float]:
    """The law at temperature 0.7 of the four likeliest tokens."""
    scaled = row / 0.7
    kept = scaled.masked_fill(scaled < scaled.topk(4).values[-1], -torch.inf)
    law: list[float] = kept.softmax(0).tolist()
    return law


def test_the_emitted_token_follows_the_law() -> None:
    """After a rejection and after the last draft, over many seeds."""
    for ids, row in (([9], 0), ([0], 1)):
        logits = torch.tensor([[3.0, 0.0, 0.0], [0.0, 1.0, 2.0]], dtype=torch.float64)
        count = 4000
        sequences = []
        for i in range(count):
            sequence = make_sequence(i, (1, 2), SamplingParams(temperature=1.0))
            sequence.key, sequence.verifier, sequence.typical = i, "rejection", Typical(0.3, 0.9)
            sequences.append(sequence)
        batch = DraftBatch(tuple(sequences), Sampler(sequences, [1] * count, 3, CPU))
        verdict = verify(batch, Draft((1,) * count, torch.tensor([ids] * count)), logits.repeat(count, 1))
        assert set(verdict.accepted) == {row}
        found = torch.tensor([emitted[-1] for emitted in verdict.emitted]).bincount(minlength=3) / count
        law = logits[row].softmax(0)
        assert ((found - law).abs() < 5 * (law * (1 - law) / count).sqrt()).all()


@pytest.mark.parametrize("bad", [nan, inf])
def test_scores_that_are_not_finite_end_their_sequence_only(bad: float) -> None:
    sequences = []
    for i in range(2):
        sequence = make_sequence(i, (1, 2), SamplingParams(temperature=1.0))
        sequence.verifier, sequence.typical = "rejection", Typical(0.3, 0.9)
        sequences.append(sequence)
    logits = torch.zeros(4, 3, dtype=torch.float64)
    logits[0, 1] = bad
    batch = DraftBatch(tuple(sequences), Sampler(sequences, [1, 1], 3, CPU))
    verdict = verify(batch, Draft((1, 1), torch.tensor([[0], [0]])), logits)
    assert verdict.non_finite == [True, False]
