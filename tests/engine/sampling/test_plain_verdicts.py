"""Rounds on a CPU: verify() decides about match without tensors what it decides with them."""

import random
from collections.abc import Callable
from dataclasses import replace
from math import inf, nan

import pytest
import torch
from torch import Tensor

from engine import verification
from engine.drafters.base import Draft, DraftBatch
from engine.sampling.acceptance import Verdict
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence
from engine.types import SamplingParams, Verifier
from engine.verification import verify
from tests.engine.driving import make_sequence

CPU = torch.device("cpu")
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, presence_penalty=1.5, bad_word_ids=((1, 2),)),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.2, min_tokens=4, max_tokens=9, top_k=5),
    SamplingParams(temperature=0.7, bad_word_ids=((3, 1, 2), (2,)), top_p=0.9),
    SamplingParams(temperature=0.0, logit_bias=((2, 1.0),), allowed_token_ids=(0, 1, 2, 3, 4, 6)),
    SamplingParams(temperature=0.9, repetition_penalty=1.3, min_p=0.1),
]
SIZES = [1, 2, 5, 9]


def random_round(seed: int, verifiers: tuple[Verifier, ...]) -> tuple[Callable[[], DraftBatch], Tensor]:
    """(makes the batch, logits), some rows with ties, without a number, infinite or all excluded."""
    rng = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    vocab, size = rng.choice([7, 300, 1000]), rng.choice(SIZES)
    ks = [rng.choice([0, 0, 3]) for _ in range(size)]  # that were planned: the drafter offers none
    sequences = list[Sequence]()
    for i in range(size):
        sequence = make_sequence(i, [0, 1, 2, 0, 1], rng.choice(PARAMS), key=77 * i + seed, end_ids=(5,))
        sequence.verifier = rng.choice(verifiers)
        sequence.tokens += [rng.randrange(4) for _ in range(rng.randint(0, 3))]
        sequences.append(sequence)
    logits = torch.randn(size, vocab, generator=g) * 4
    for row in logits:
        kind = rng.randrange(8)
        if kind == 0:
            row.round_()
        elif kind < 4:
            row[rng.randrange(vocab)] = (inf, nan, -inf)[kind - 1]
        elif kind == 4:
            row.fill_(-inf)
    return lambda: DraftBatch(tuple(sequences), Sampler(sequences, ks, vocab, CPU)), logits


def in_general(batch: DraftBatch, logits: Tensor) -> Verdict:
    """By the operations on tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "_on_device", lambda _: True)
        return verify(batch, Draft.none(len(batch.sequences)), logits)


@pytest.mark.parametrize("verifiers", [("match",), ("match", "rejection", "block")])
def test_the_verdict_is_that_of_the_operations_on_tensors(verifiers: tuple[Verifier, ...]) -> None:
    """For every adjustment and filter, also where scores are not finite, and where a sequence's verifier needs laws."""
    non_finite = 0
    for seed in range(200):
        make, logits = random_round(seed, verifiers)
        before = logits.clone()
        verdict = verify(make(), Draft.none(len(logits)), logits)
        assert verdict == in_general(make(), logits), f"seed {seed}"
        assert torch.equal(logits.nan_to_num(), before.nan_to_num())
        non_finite += sum(verdict.non_finite)
    assert non_finite > 50


def test_plain_rounds_make_no_verdict_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for logits in 16 bits."""
    monkeypatch.setattr(verification, "copy_to_host", lambda *_: pytest.fail("tensors were made"))
    make, logits = random_round(3, ("match",))
    for each in (logits, logits.bfloat16()):
        assert len(verify(make(), Draft.none(len(logits)), each).emitted) == len(logits)


def random_draft(seed: int, ks: list[int], vocab: int) -> Draft:
    """Chains and trees of few tokens, some ids illegal, in a table wider than the longest."""
    rng = random.Random(seed)
    ids = torch.tensor([[rng.choice([0, 0, 0, 1, 1, 1, 2, -1, vocab]) for _ in range(max(ks) + 2)] for _ in ks])
    shapes = {i: tuple(rng.randrange(-1, node) for node in range(k)) for i, k in enumerate(ks) if rng.random() < 0.5}
    return Draft(tuple(ks), ids, trees=shapes, wants_drawn=rng.random() < 0.5)


@pytest.mark.parametrize("verifiers", [("match",), ("match", "match", "rejection")])
def test_drafts_are_judged_as_by_operations_on_tensors(
    verifiers: tuple[Verifier, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted, non_finite, paths = set[int](), 0, 0
    for seed in range(200):
        rng = random.Random(seed)
        make, plain = random_round(seed, verifiers)
        vocab, ks = plain.shape[1], [rng.randint(0, 5) for _ in plain]
        draft = random_draft(seed, ks, vocab)
        rows = torch.randn(sum(ks) + len(ks), vocab, generator=torch.Generator().manual_seed(seed))
        rows[:, :2] += 9
        rows[rng.randrange(len(rows)), 1] = nan
        sequences = make().sequences

        def decide(on_device: bool) -> Verdict:
            batch = DraftBatch(sequences, Sampler(sequences, ks, vocab, CPU))  # noqa: B023
            with monkeypatch.context() as patch:
                if on_device:
                    patch.setattr(verification, "_on_device", lambda _: True)
                return replace(verify(batch, draft, rows), last_rows=None)  # noqa: B023

        ours, theirs = decide(False), decide(True)
        assert len(ours.drawn) == len(ks) * draft.wants_drawn
        ours, theirs = (replace(v, drawn=[row[: k + 1] for row, k in zip(v.drawn, ks)]) for v in (ours, theirs))  # noqa: B905
        assert ours == theirs, seed
        accepted |= set(ours.accepted)
        non_finite, paths = non_finite + sum(ours.non_finite), paths + sum(map(bool, ours.paths.values()))
    assert accepted >= {0, 1, 2, 3}
    assert non_finite > 20
    assert paths > 100


def test_a_tree_without_drafts_has_a_path() -> None:
    make, logits = random_round(3, ("match",))
    verdict = verify(make(), replace(Draft.none(len(logits)), trees={0: ()}), logits)
    assert verdict.paths == {0: []}
