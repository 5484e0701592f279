"""How much p and q have in common at the drafts that were looked at: what rejection accepts, told for every round."""

from collections.abc import Sequence as Seq
from math import exp, inf, nan

import pytest
import torch
from torch import Tensor

from engine import rescue, verification
from engine.drafters.base import Draft, DraftBatch, Drafter
from engine.models.runner import Runner
from engine.round import Outcome, run_round
from engine.sampling import acceptance
from engine.sampling.acceptance import OVERLAP_SCALE
from engine.sampling.sampler import Sampler
from engine.scheduler import Plan
from engine.sequence import Sequence
from engine.types import Request, SamplingParams, Verifier
from engine.verification import verify
from tests.engine.driving import drive, make_sequence
from tests.engine.enumeration import KINDS, VOCAB, Start, batch_of, number, pairs
from tests.engine.law.tables import DRAFT, TARGET, row_of, table_engine

CPU = torch.device("cpu")
ROUNDED = 0.51 / OVERLAP_SCALE


@pytest.mark.parametrize("lenience", [1.0, 0.6])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_it_is_the_probability_that_rejection_accepts(kind: str, lenience: float) -> None:
    """At every position, given the drafts before it: the drafts enumerated against one number."""
    for p, q in pairs(kind, 6):
        batch = batch_of([Start(p, q, 3, lenience=lenience)])
        chances = acceptance.rejection(batch.logp, batch.logq, batch.drafts, batch.ks, batch.leniences).chances
        told = acceptance.overlaps(batch.logp, batch.logq, batch.leniences) / OVERLAP_SCALE
        for j in range(3):
            before = number(batch.drafts[:, :j])
            nothing = torch.zeros(VOCAB**j, dtype=torch.float64)
            accepted = nothing.index_add(0, before, batch.masses * chances[:, j])
            expected = nothing.index_add(0, before, batch.masses * told[:, j])
            assert torch.allclose(accepted, expected, rtol=0, atol=ROUNDED)


@pytest.mark.parametrize(("p", "shared"), [(nan, 0.0), (-inf, 0.0), (0.0, 1.0)])
def test_it_is_a_share_whatever_the_scores(p: float, shared: float) -> None:
    """NaN is no share; a lenience makes no more than one."""
    logp = torch.full((1, 2, 1), p)
    assert acceptance.overlaps(logp, torch.zeros(1, 1, 1), torch.tensor([0.5])).tolist() == [[shared * OVERLAP_SCALE]]


# What a round tells


def round_of(kinds: Seq[tuple[Verifier, float, int, float | None]]) -> tuple[list[Sequence], Draft, Tensor]:
    """(sequences, drafts with laws for the first of every two, logits) of (verifier, temperature, k, lenience)."""
    generator = torch.Generator().manual_seed(3)
    sequences, ks = [], [k for _, _, k, _ in kinds]
    for i, (verifier, temperature, _, lenience) in enumerate(kinds):
        sequence = make_sequence(i, [0], SamplingParams(temperature=temperature), key=i * 7919)
        sequence.verifier, sequence.lenience = verifier, lenience
        sequences.append(sequence)
    shape = (len(kinds), max(ks), VOCAB)
    laws = torch.randn(*shape, generator=generator, dtype=torch.float64).log_softmax(-1)
    drafts = torch.randint(VOCAB, shape[:2], generator=generator)
    draft = Draft(tuple(ks), drafts, laws[::2], {i: i // 2 for i in range(0, len(kinds), 2)})
    return sequences, draft, torch.randn(sum(ks) + len(ks), VOCAB, generator=generator, dtype=torch.float64)


def expected(sequences: Seq[Sequence], draft: Draft, logits: Tensor, accepted: Seq[int]) -> list[list[float]]:
    """Plain floats, one sequence at a time."""
    rows = iter(logits.tolist())
    result: list[list[float]] = []
    for i, (sequence, k) in enumerate(zip(sequences, draft.ks, strict=True)):
        scores = [next(rows) for _ in range(k + 1)]
        result.append([])
        if sequence.verifier == "match" or sequence.params.temperature == 0:
            continue
        for j in range(min(accepted[i] + 1, k)):
            weights = [exp(s / sequence.params.temperature) for s in scores[j]]
            p = [w / sum(weights) / (sequence.lenience or 1.0) for w in weights]
            assert draft.tokens is not None
            assert draft.logq is not None
            token = draft.tokens[i, j].item()
            certain = [float(t == token) for t in range(VOCAB)]
            q = certain if i not in draft.logq_rows else draft.logq[draft.logq_rows[i], j].exp().tolist()
            result[-1].append(sum(map(min, p, q)))
    return result


ALL: list[tuple[Verifier, float, int, float | None]] = [
    ("rejection", 1.0, 3, None),
    ("rejection", 0.7, 3, None),
    ("block", 1.3, 2, None),
    ("block", 1.0, 4, None),
    ("rejection", 1.0, 2, 0.5),
    ("rejection", 0.0, 3, None),
    ("match", 1.0, 4, None),
    ("block", 1.0, 0, None),
    ("rejection", 1.0, 0, None),
]


@pytest.mark.parametrize("part", ["rejection", "block", "match", "all"])
def test_a_verdict_tells_of_the_drafts_that_were_looked_at(part: str) -> None:
    """Alone and in a mixed batch; nothing of sequences whose drafts are accepted by equality, or that have none."""
    kinds = [kind for kind in ALL * 8 if part in (kind[0], "all")]
    sequences, draft, logits = round_of(kinds)
    sampler = Sampler(sequences, draft.ks, VOCAB, CPU)
    verdict = verify(DraftBatch(tuple(sequences), sampler), draft, logits)
    wanted = expected(sequences, draft, logits, verdict.accepted)
    assert [len(told) for told in verdict.overlaps] == [len(told) for told in wanted]
    for told, exact in zip(verdict.overlaps, wanted, strict=True):
        assert told == pytest.approx(exact, abs=ROUNDED)
    assert any(verdict.overlaps) == (part != "match")


@pytest.mark.parametrize("part", ["match", "all"])
def test_they_come_with_the_one_copy_to_the_host(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences, draft, logits = round_of([kind for kind in ALL if part in (kind[0], "all")])
    sampler, copies = Sampler(sequences, draft.ks, VOCAB, CPU), []
    tolist = Tensor.tolist

    def counting(self: Tensor) -> object:
        copies.append(tuple(self.shape))
        return tolist(self)

    monkeypatch.setattr(Tensor, "tolist", counting)
    monkeypatch.setattr(Tensor, "item", None)
    monkeypatch.setattr(verification, "_on_device", lambda _: True)
    verify(DraftBatch(tuple(sequences), sampler), draft, logits)
    width = 3 + 4 + (4 if part == "all" else 0)  # nothing more is copied where nobody has any
    assert copies == [(len(sequences), width)]


@pytest.mark.parametrize("verifier", ["rejection", "block", "match"])
def test_an_engines_rounds_tell_what_the_models_have_in_common(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[tuple[float, ...], list[float]]] = []

    def watched(plan: Plan, target: Runner, drafter: Drafter) -> Outcome:
        outcome = run_round(plan, target, drafter)
        verdict = outcome.verdict
        for i, part in enumerate(outcome.slices):
            looked_at = min(verdict.accepted[i] + 1, outcome.draft.ks[i])
            texts = [part.sequence.tokens + verdict.emitted[i][:j] for j in range(looked_at)]
            laws = [(TARGET[row_of(text)].softmax(0), DRAFT[row_of(text)].softmax(0)) for text in texts]
            told.append((verdict.overlaps[i], [torch.minimum(p, q).sum().item() for p, q in laws]))
        return outcome

    monkeypatch.setattr(rescue, "run_round", watched)
    params = [SamplingParams(max_tokens=6, ignore_eos=True, seed=seed) for seed in range(40)]
    requests = [
        Request(str(i), (0, 1, 2), p, k=1 + i % 3, verifier=verifier, drafter="model") for i, p in enumerate(params)
    ]
    drive(table_engine(), requests)
    if verifier == "match":
        assert not any(overlaps for overlaps, _ in told)
        return
    assert max(len(overlaps) for overlaps, _ in told) == 3
    for overlaps, exact in told:
        assert overlaps == pytest.approx(exact, abs=ROUNDED)
