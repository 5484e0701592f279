"""What the verifiers' parts promise beside the law: how much is accepted, lenience, coins at their edges, rows that
nobody looks at, and that verification.verify decides by these very laws."""

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import inf, nan

import pytest
import torch
from torch import Tensor

from engine.drafters.base import Draft, DraftBatch
from engine.sampling import acceptance, noise
from engine.sampling.acceptance import first_failure, last_success, log_residual
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence
from engine.types import SamplingParams, Verifier
from engine.verification import verify
from tests.engine.driving import make_sequence
from tests.engine.enumeration import (
    EXACT,
    KINDS,
    NOTHING,
    VOCAB,
    Batch,
    Start,
    Tree,
    batch_of,
    completed,
    emissions,
    expected_accepted,
    is_draft,
    starts_of,
    target_law,
    worst,
)

CPU = torch.device("cpu")

# How much is accepted


def repeated(law: Seq[float], depth: int) -> Tree:
    """The same law whatever came before."""
    return [torch.tensor(law, dtype=torch.float64).log().repeat(VOCAB**n, 1) for n in range(depth)]


def test_the_papers_example() -> None:
    """Sun et al. 2024, section 2: p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 10/9 accepted token by token, 11/9 as a
    block."""
    start = Start(repeated([1 / 3, 2 / 3, 0.0], 3), repeated([2 / 3, 1 / 3, 0.0], 2), 2)
    assert expected_accepted([start], "rejection").item() == pytest.approx(10 / 9, abs=EXACT)
    assert expected_accepted([start], "block").item() == pytest.approx(11 / 9, abs=EXACT)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_block_accepts_at_least_as_much(kind: str) -> None:
    starts = starts_of(kind, 24)
    more = expected_accepted(starts, "block") - expected_accepted(starts, "rejection")
    assert (more > -EXACT).all()
    if kind == "random":
        assert (more[[start.k > 1 for start in starts]] > 1e-4).any()
    shallow = torch.tensor([start.k < 2 for start in starts])
    assert (more[shallow].abs() < EXACT).all()  # with one draft they are the same


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_rejection_accepts_as_the_laws_overlap(kind: str) -> None:
    """The first draft with probability Σ min(p, q)."""
    starts = [start for start in starts_of(kind, 12) if start.k]
    first = 1 - emissions(starts, "rejection")[0].sum(1)
    overlap = torch.stack([torch.minimum(s.p[0], s.q[0]).exp().sum() for s in starts])
    assert torch.allclose(first, overlap, rtol=0, atol=EXACT)


# Lenience (Leviathan et al. 2023, A.5)


def lenient(kind: str, lenience: float) -> list[Start]:
    return [replace(start, lenience=lenience) for start in starts_of(kind)]


@pytest.mark.parametrize("lenience", [0.5, 0.25])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_lenience_accepts_more_and_stays_below_its_bound(kind: str, lenience: float) -> None:
    """Every token is at most 1/l times as likely as under p, and a draft is accepted with probability Σ min(p/l, q)."""
    starts = lenient(kind, lenience)
    emitted = emissions(starts, "rejection")
    for i, start in enumerate(starts):
        law = completed([NOTHING, *(part[i] for part in emitted)], start.p, 4)
        for n in range(1, 5):
            mass = law.view(VOCAB**n, -1).sum(1).view(-1, VOCAB)
            before = mass.sum(1, keepdim=True)
            assert (mass <= before * start.p[n - 1].exp() / lenience + EXACT).all()
        if start.k:
            overlap = torch.minimum(start.p[0].exp() / lenience, start.q[0].exp()).sum()
            assert abs(1 - emitted[0][i].sum() - overlap) < EXACT


def test_lenience_changes_the_law_and_only_its_own() -> None:
    """l = 1 in the same batch stays exact; a lenient sequence does not."""
    lossy = lenient("random", 0.5)[0]
    exact = starts_of("random", 8)
    emitted = emissions([lossy, *exact], "rejection")
    laws = [completed([NOTHING, *(part[i] for part in emitted)], s.p, 4) for i, s in enumerate([lossy, *exact])]
    errors = [(law - target_law(s.p, 4)).abs().max().item() for law, s in zip(laws, [lossy, *exact], strict=True)]
    assert errors[0] > 1e-3
    assert max(errors[1:]) < EXACT


# Coins

Accept = Callable[[Tensor, Tensor], Tensor]


def first_failure_by_hand(below: Seq[bool]) -> int:
    return next((i for i, success in enumerate(below) if not success), len(below))


def last_success_by_hand(below: Seq[bool]) -> int:
    return max((i + 1 for i, success in enumerate(below) if success), default=0)


@pytest.mark.parametrize(
    ("accept", "by_hand"), [(first_failure, first_failure_by_hand), (last_success, last_success_by_hand)]
)
def test_every_outcome_of_the_coins(accept: Accept, by_hand: Callable[[Seq[bool]], int]) -> None:
    patterns = list(itertools.product((True, False), repeat=4))
    coins = torch.where(torch.tensor(patterns), 0.2, 0.7).double()
    assert accept(torch.full_like(coins, 0.5), coins).tolist() == [by_hand(pattern) for pattern in patterns]


def lax_first_failure(chances: Tensor, coins: Tensor) -> Tensor:
    return (coins <= chances).cumprod(1).sum(1)


def lax_last_success(chances: Tensor, coins: Tensor) -> Tensor:
    return ((coins <= chances) * torch.arange(1, chances.shape[1] + 1)).amax(1)


def takes_the_impossible(accept: Accept) -> bool:
    """Whether a draft of probability 0 is accepted at the smallest coin."""
    return accept(torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)).item() == 1


@pytest.mark.parametrize(("accept", "lax"), [(first_failure, lax_first_failure), (last_success, lax_last_success)])
def test_what_cannot_be_is_not_accepted_even_at_a_coin_of_zero(accept: Accept, lax: Accept) -> None:
    assert not takes_the_impossible(accept)
    assert takes_the_impossible(lax)
    highest = torch.tensor([[1 - 2.0**-53]], dtype=torch.float64)
    assert accept(torch.ones_like(highest), highest).item() == 1  # and what is certain always is


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_a_draft_that_p_forbids_has_no_chance_at_all(verifier: Verifier) -> None:
    """Exactly 0, and so has everything behind it: the strict comparison needs that."""
    batch = batch_of(starts_of("zeros in p", 24))
    decided = decide(batch, verifier)
    p = batch.logp[:, :-1].gather(2, batch.drafts[..., None])[..., 0]
    dead = (p == -inf).cumsum(1) > 0
    within = is_draft(batch.ks, CPU)
    assert (dead & within).any()
    if verifier == "block":
        assert (decided.chances[dead & within] == 0).all()
    else:
        assert (decided.chances[(p == -inf) & within] == 0).all()


def decide(batch: Batch, verifier: Verifier) -> acceptance.AcceptanceLaw:
    if verifier == "block":
        return acceptance.block(batch.logp, batch.logq, batch.drafts, batch.ks)
    return acceptance.rejection(batch.logp, batch.logq, batch.drafts, batch.ks, batch.leniences)


# Residuals


def test_residuals_lose_nothing_where_p_and_q_are_close() -> None:
    """max(p − q, 0) to 1e-9 of itself, where a subtraction of probabilities would keep no digit."""
    p = torch.tensor([1e-30, 0.3, 0.5], dtype=torch.float64)
    gaps = torch.tensor([1e-7, 1e-13, 0.0], dtype=torch.float64)
    logq = p.log() + torch.log1p(-gaps)
    weights = log_residual(p.log(), logq, torch.zeros((), dtype=torch.float64)).exp()
    difference = torch.expm1(p.log() - logq) * logq.exp()
    assert torch.allclose(weights, difference, rtol=1e-9, atol=0)
    assert weights[2] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_residuals_mass_is_the_sum_of_its_weights(dtype: torch.dtype) -> None:
    """Also where p and q are close, where both forbid a token, where q is one-hot, and where nothing is left."""
    g = torch.Generator().manual_seed(0)
    logp = (torch.randn(8, 50, generator=g).double() * 3).log_softmax(-1)
    logq = (logp + 1e-4 * torch.randn(8, 50, generator=g).double()).log_softmax(-1)
    logp[1, :20] = logq[1, :10] = logq[2, 1:] = -inf
    logq[3], scale = logp[3], torch.linspace(-0.5, 0, 8).double()[:, None]
    scale[4], scale[3] = -inf, 0.0
    mass = acceptance.residual_mass(logp.to(dtype), logq.to(dtype), scale.to(dtype)).double()
    expected = log_residual(logp.to(dtype), logq.to(dtype), scale.to(dtype)).double().logsumexp(-1).exp()
    assert torch.allclose(mass, expected, rtol=1e-6 if dtype == torch.float32 else 1e-13, atol=0)
    assert mass[3] == mass[4] == 0
    assert (mass > 0).any()


def test_residuals_of_what_is_forbidden() -> None:
    """−inf, never NaN, whichever of p, q and the scale is 0."""
    values = [-inf, -1.0, 0.0]
    for p, q, scale in itertools.product(values, values, [-inf, -0.5, 0.0]):
        got = log_residual(*(torch.tensor(x, dtype=torch.float64) for x in (p, q, scale)))
        exact = torch.tensor(p + scale, dtype=torch.float64).exp() - torch.tensor(q, dtype=torch.float64).exp()
        assert torch.allclose(got.exp(), exact.clamp(min=0), rtol=0, atol=1e-15)


# The same through verification.verify


class Watched(Sampler):
    """What is emitted is watched, not drawn."""

    drawn: dict[int, tuple[int, Tensor]]

    def emit(self, weights: Tensor, which: Seq[int], ahead: Tensor) -> Tensor:
        for i, accepted, row in zip(which, ahead.tolist(), weights, strict=True):
            self.drawn[i] = accepted, row.softmax(0)
        return torch.zeros(len(which), dtype=torch.int64)


def sequences_of(batch: Batch, verifiers: Seq[Verifier], temperature: float) -> list[Sequence]:
    made = [make_sequence(i, [0], SamplingParams(temperature=temperature)) for i in range(len(batch.ks))]
    for sequence, verifier, lenience in zip(made, verifiers, batch.leniences.tolist(), strict=True):
        sequence.verifier = verifier
        sequence.lenience = None if lenience == 1 else lenience
    return made


def packed(table: Tensor, ks: Seq[int]) -> Tensor:
    """[N, K + 1, …] → [Σ (k + 1), …], as the target's pass gives it."""
    return torch.cat([row[: k + 1] for row, k in zip(table, ks, strict=True)])


def test_verify_decides_by_these_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixed batch at every outcome of three coins: each sequence's number accepted, tokens and law are those that the
    pure functions give for it alone among its kind."""
    starts = [*starts_of("random", 8), *starts_of("zeros in both", 8), *lenient("random", 0.5)[:4]]
    batch = batch_of(starts)
    # Lenience is rejection's; the others take turns, so that no verifier has the whole batch.
    verifiers: list[Verifier] = ["rejection" if o >= 16 or o % 2 else "block" for o in batch.owners.tolist()]
    ks, temperature = batch.ks, 0.5
    given = batch.logq.masked_fill(~is_draft(ks, CPU)[..., None], -inf)
    draft = Draft(tuple(ks), batch.drafts, given, {i: i for i in range(len(ks))})
    logits = packed(batch.logp, ks) * temperature + 3.0  # whatever gives p at this temperature
    decisions = {name: decide(batch, name) for name in ("rejection", "block")}
    for pattern in itertools.product((0.1, 0.9), repeat=3):
        sequences = sequences_of(batch, verifiers, temperature)
        sampler = Watched(sequences, ks, VOCAB, CPU)
        coins, sampler.drawn = torch.tensor(pattern, dtype=torch.float64).expand(len(ks), 3), {}
        monkeypatch.setattr(noise, "uniforms", lambda keys, positions, coins=coins: coins[: len(keys)])
        verdict = verify(DraftBatch(tuple(sequences), sampler), draft, logits)
        for name, accept in (("rejection", first_failure), ("block", last_success)):
            accepted = accept(decisions[name].chances, coins)
            laws = acceptance.emitted_law(batch.logp, batch.logq, decisions[name].log_scales, accepted, ks).softmax(1)
            for i in (i for i, verifier in enumerate(verifiers) if verifier == name):
                count, law = sampler.drawn[i]
                assert verdict.accepted[i] == count == accepted[i]
                assert verdict.emitted[i] == [*batch.drafts[i, :count].tolist(), 0]
                assert torch.allclose(law, laws[i], rtol=0, atol=EXACT)
                assert not verdict.non_finite[i]


# A target that gives NaN


DTYPES, PATTERNS = (torch.float32, torch.float64), list(itertools.product((0.0, 0.99), repeat=3))


def with_nan(
    rows: Seq[int], verifier: Verifier, coins: Seq[float], drafts: Seq[int], dtype: torch.dtype
) -> tuple[int, bool]:
    """(accepted, bad) of one sequence with k = 3, q one-hot and p = 1/3, but for NaN in some of the target's rows."""
    logits = torch.zeros(4, VOCAB, dtype=dtype)
    logits[list(rows)] = nan
    sequence = make_sequence(0, [0])
    sequence.verifier = verifier
    sampler = Watched([sequence], [3], VOCAB, CPU)
    sampler.drawn = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "uniforms", lambda keys, positions: torch.tensor([coins], dtype=torch.float64))
        verdict = verify(DraftBatch((sequence,), sampler), Draft((3,), torch.tensor([drafts])), logits)
    return verdict.accepted[0], verdict.non_finite[0]


@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_nothing_is_emitted_from_scores_that_are_not_finite(verifier: Verifier, row: int) -> None:
    """At whatever coins, the round ends before that row or the sequence ends with an error. Rejection looks no further
    than it accepts; block needs the next row to decide about a draft."""
    for coins, dtype in itertools.product(PATTERNS, DTYPES):
        accepted, bad = with_nan([row], verifier, coins, [0, 1, 2], dtype)
        assert bad or accepted < row
        if verifier == "rejection":
            assert accepted <= row
            assert bad == (accepted == row)
    if row:
        assert not with_nan([], verifier, (0.99,) * 3, [0, 1, 2], DTYPES[0])[1]  # control: without it nothing is wrong


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_scores_behind_an_id_that_is_no_token_do_not_matter(verifier: Verifier, place: int) -> None:
    """Such a draft costs the sequence that draft and nothing else (architecture R9), whatever the target says of it."""
    drafts = [0, 1, 2]
    drafts[place] = VOCAB
    behind = range(place + 1, 4)
    for coins, dtype in itertools.product(PATTERNS, DTYPES):
        accepted, bad = with_nan(behind, verifier, coins, drafts, dtype)
        assert accepted <= place
        assert not bad


def test_worst_sees_a_law_that_is_not_p() -> None:
    """Control of the yardstick: drafts claimed as if from another law."""
    (start,) = starts_of("random", 1)
    assert worst([replace(start, claimed=start.p)], "rejection") > 1e-3
