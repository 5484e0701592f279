"""Rejection and block verification emit exactly p: every draft, coin and emitted token enumerated in fp64.

Drafts may be any: drawn from q, deterministic, with ids that are no tokens, from a model that broke. Each promise has a
fault beside it that breaks it.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from math import inf, log, nan

import pytest
import torch
from torch import Tensor

from engine.kernels.laws import draft_laws
from engine.sampling import acceptance
from engine.sampling.acceptance import AcceptanceLaw
from engine.types import Verifier
from tests.engine.enumeration import (
    EXACT,
    KINDS,
    NOTHING,
    VOCAB,
    Start,
    Tree,
    batch_of,
    completed,
    emissions,
    number,
    pairs,
    random_tree,
    starts_of,
    subtree,
    target_law,
    unsure,
    worst,
)

both_verifiers = pytest.mark.parametrize("verifier", ["rejection", "block"])


@both_verifiers
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_one_round_emits_p(kind: str, verifier: Verifier) -> None:
    """Twelve pairs of trees with k = 0 … 3 in one ragged batch; NaN wherever a sequence has no draft."""
    assert worst(starts_of(kind), verifier) < EXACT


@both_verifiers
def test_sequences_of_all_kinds_in_one_batch(verifier: Verifier) -> None:
    starts = [start for kind in sorted(KINDS) for start in starts_of(kind, 4)]
    assert worst(starts, verifier) < EXACT


@both_verifiers
def test_a_law_that_is_looked_at_in_vain_shows(verifier: Verifier) -> None:
    """Control: NaN where there is a draft, one place before those that the other tests fill with it."""
    (start,) = starts_of("random", 1)
    assert worst([start], verifier) < EXACT
    broken = [*start.p[:3], torch.full_like(start.p[3], nan)]
    assert worst([replace(start, p=broken)], verifier) == inf


# Two rounds


def next_k(length: int, text: int) -> int:
    """The next round's k, as a planner might choose it: by what was emitted."""
    return (length + text) % 4


def two_rounds(kind: str, verifier: Verifier, fault: Callable[[Start], Start] = lambda start: start) -> float:
    """The largest error of any text's probability after two rounds, the second with drafts of its own."""
    ((p, q),) = pairs(kind, 1, depth=8)
    generator = torch.Generator().manual_seed(7)
    length, masses = 8, [torch.zeros(VOCAB**n, dtype=torch.float64) for n in range(9)]
    first = emissions([Start(p, q, 3)], verifier)
    places, starts = [], []
    for n, part in enumerate(first, 1):
        for text in part[0].nonzero()[:, 0].tolist():
            k = next_k(n, text)
            places.append((n, text, part[0, text]))
            starts.append(fault(Start(subtree(p, n, text, k + 1), random_tree(generator, k, zeros=0.2), k)))
    for m, part in enumerate(emissions(starts, verifier), 1):
        for (n, text, mass), row in zip(places, part, strict=True):
            masses[n + m].view(VOCAB**n, -1)[text] += mass * row
    return (completed(masses, p, length) - target_law(p, length)).abs().max().item()


@both_verifiers
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_two_rounds_emit_p(kind: str, verifier: Verifier) -> None:
    assert two_rounds(kind, verifier) < EXACT


@both_verifiers
def test_a_fault_of_the_second_round_shows(verifier: Verifier) -> None:
    """Control: its drafts are drawn from one law and reported with another."""
    claimed = random_tree(torch.Generator().manual_seed(1), 3)
    assert two_rounds("random", verifier, lambda start: replace(start, claimed=claimed)) > 1e-3


# Drafts that end where the draft model is no longer sure

LIMITS = (0.3, 0.45, 0.6, 0.8)


def unsure_starts(kind: str, *, peeking: bool = False) -> list[Start]:
    """Up to three drafts, cut at limits of which some end many drafts and some few."""
    return [
        Start(p, q, 3 - i % 5 // 4, cut=unsure(q, LIMITS[i % 4], peeking=peeking))
        for i, (p, q) in enumerate(pairs(kind, 12))
    ]


@both_verifiers
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_drafts_of_varying_length_emit_p(kind: str, verifier: Verifier) -> None:
    """Where a draft ends is decided by the tokens before: the same sequence has drafts of 0 to 3 tokens."""
    assert worst(unsure_starts(kind), verifier) < EXACT


def test_the_drafts_do_vary_in_length() -> None:
    ks = batch_of(unsure_starts("random")).ks
    assert all(ks.count(k) >= 10 for k in range(4))


@both_verifiers
def test_any_rule_that_looks_back_alone_emits_p(verifier: Verifier) -> None:
    """Ends drawn at random for every text of drafts, from among the rules there are."""
    generator = torch.Generator().manual_seed(5)
    starts = []
    for p, q in pairs("zeros in both", 24):
        ends = [torch.rand(VOCAB**n, generator=generator) < 0.35 for n in range(3)]

        def cut(drafts: Tensor, ends: list[Tensor] = ends) -> Tensor:
            goes_on = torch.stack([~end[number(drafts[:, :n])] for n, end in enumerate(ends)], 1)
            return goes_on.cumprod(1).sum(1)

        starts.append(Start(p, q, 3, cut=cut))
    assert worst(starts, verifier) < EXACT


@both_verifiers
def test_a_draft_cut_by_the_token_that_was_drawn_shows(verifier: Verifier) -> None:
    """Control: the same rule on the drawn tokens' own probabilities."""
    assert worst(unsure_starts("random", peeking=True), verifier) > 1e-2


# Drafts that no law came with


@both_verifiers
@pytest.mark.parametrize("kind", ["random", "zeros in p", "p near one-hot", "equal rows"])
def test_deterministic_drafts(kind: str, verifier: Verifier) -> None:
    """Every draft there is of 0 to 3 tokens, each with trees of its own."""
    drafts = [x for k in range(4) for x in itertools.product(range(VOCAB), repeat=k)]
    trees = pairs(kind, len(drafts))
    assert worst([Start(p, q, len(x), fixed=x) for x, (p, q) in zip(drafts, trees, strict=True)], verifier) < EXACT


@both_verifiers
def test_ids_that_are_no_tokens(verifier: Verifier) -> None:
    """They are never accepted, nor is anything behind them, and the law stays p."""
    drafts = [
        x
        for k in range(1, 4)
        for x in itertools.product([-(2**62), -1, 0, 1, VOCAB, 2**62], repeat=k)
        if any(not 0 <= token < VOCAB for token in x)
    ]
    starts = [Start(p, q, len(x), fixed=x) for x, (p, q) in zip(drafts, pairs("random", len(drafts)), strict=True)]
    # Some drafters give a law with them: it is not what they were drawn from.
    starts = [
        replace(start, claimed=start.q) if not 0 <= x[0] < VOCAB else start
        for start, x in zip(starts, drafts, strict=True)
    ]
    assert worst(starts, verifier) < EXACT
    emitted = emissions(starts, verifier)
    for i, x in enumerate(drafts):
        legal = next(j for j, token in enumerate(x) if not 0 <= token < VOCAB)
        assert all(part[i].sum() == 0 for part in emitted[legal + 1 :])


@both_verifiers
def test_an_id_that_is_no_token_passed_off_as_a_token_shows(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a draft model's law is kept for it, so the clamped id counts as drawn from that law."""
    p, q = next(pairs("random", 1))

    def believing(laws: Tensor, sources: Tensor, drafts: Tensor, logp: Tensor) -> Tensor:
        return q[0][:1].expand(len(drafts), 1, VOCAB).clone()

    monkeypatch.setattr("tests.engine.enumeration.draft_laws", believing)
    assert worst([Start(p, q, 1, fixed=(VOCAB,))], verifier) > 1e-3


def broken_model(tree: Tree, generator: torch.Generator) -> tuple[Tree, Tree]:
    """(what is drawn from, what is claimed): NaN after some texts, where the draft is then the first token."""
    drawn, claimed = [], []
    for law in tree:
        fails = torch.rand(len(law), 1, generator=generator) < 0.4
        claimed.append(law.masked_fill(fails, nan))
        drawn.append(torch.where(fails, torch.tensor([0.0, -inf, -inf], dtype=torch.float64), law))
    return drawn, claimed


@both_verifiers
@pytest.mark.parametrize("kind", ["random", "zeros in p", "zeros in q"])
def test_a_draft_model_that_gives_nan(kind: str, verifier: Verifier) -> None:
    generator = torch.Generator().manual_seed(3)
    starts = []
    for i, (p, q) in enumerate(pairs(kind, 9)):
        drawn, claimed = broken_model(q, generator)
        starts.append(Start(p, drawn, 1 + i % 3, claimed))
    assert any(law.isnan().any() for start in starts for law in start.claimed or ())
    assert worst(starts, verifier) < EXACT


def test_a_draft_of_fewer_tokens_than_the_targets() -> None:
    """A law over a smaller table gives the rest of the vocabulary nothing."""
    claimed = torch.tensor([0.25, 0.75], dtype=torch.float64).log().view(1, 1, 2)
    drafts, logp = torch.tensor([[1]]), torch.zeros(1, 2, VOCAB, dtype=torch.float64)
    q = draft_laws(claimed, None, drafts, logp)
    assert torch.allclose(q.exp(), torch.tensor([[[0.25, 0.75, 0.0]]], dtype=torch.float64), atol=1e-15)


# Faults, each of which must break the law

Fault = Callable[[pytest.MonkeyPatch], None]
log_residual, emitted_law, block = acceptance.log_residual, acceptance.emitted_law, acceptance.block


def clamp_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    def clamped(logp: Tensor, logq: Tensor, log_scale: Tensor) -> Tensor:
        return log_residual(logp, logq, log_scale).clamp(min=log(1e-6))

    monkeypatch.setattr(acceptance, "log_residual", clamped)


def draw_bonus_from_another_law(monkeypatch: pytest.MonkeyPatch) -> None:
    def tempered(logp: Tensor, logq: Tensor, scales: Tensor, accepted: Tensor, ks: list[int]) -> Tensor:
        law = emitted_law(logp, logq, scales, accepted, ks)
        return torch.where((accepted == torch.tensor(ks))[:, None], law / 1.01, law)

    monkeypatch.setattr(acceptance, "emitted_law", tempered)


def recover_from_p(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(logp: Tensor, logq: Tensor, scales: Tensor, accepted: Tensor, ks: list[int]) -> Tensor:
        return logp[torch.arange(len(accepted)), accepted]

    monkeypatch.setattr(acceptance, "emitted_law", whole)


def stop_at_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "last_success", acceptance.first_failure)


def go_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "first_failure", acceptance.last_success)


def forget_the_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    def unscaled(logp: Tensor, logq: Tensor, drafts: Tensor, ks: list[int]) -> AcceptanceLaw:
        decided = block(logp, logq, drafts, ks)
        return replace(decided, log_scales=torch.zeros_like(decided.log_scales))

    monkeypatch.setattr(acceptance, "block", unscaled)


def multiply_without_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """min(Π p/q, 1) at the end only, where Algorithm 2 caps every step."""

    def uncapped(logp: Tensor, logq: Tensor, drafts: Tensor, ks: list[int]) -> AcceptanceLaw:
        ratios = acceptance.log_ratios(logp[:, :-1], logq, drafts)
        scales = torch.cat([torch.zeros_like(ratios[:, :1]), ratios.cumsum(1).clamp(max=0)], 1)
        return replace(block(logp, logq, drafts, ks), log_scales=scales)

    monkeypatch.setattr(acceptance, "block", uncapped)


def accept_by_the_product_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chances p_i in place of h_i, which makes room for the longer prefixes."""

    def alone(logp: Tensor, logq: Tensor, drafts: Tensor, ks: list[int]) -> AcceptanceLaw:
        decided = block(logp, logq, drafts, ks)
        return replace(decided, chances=acceptance._within(decided.log_scales[:, 1:].exp(), ks))

    monkeypatch.setattr(acceptance, "block", alone)


FAULTS: list[tuple[Verifier, Fault]] = [
    ("rejection", clamp_residual),
    ("rejection", draw_bonus_from_another_law),
    ("rejection", recover_from_p),
    ("rejection", go_on_after_a_failure),
    ("block", clamp_residual),
    ("block", draw_bonus_from_another_law),
    ("block", recover_from_p),
    ("block", stop_at_the_first_failure),
    ("block", forget_the_scales),
    ("block", multiply_without_the_cap),
    ("block", accept_by_the_product_alone),
]


@pytest.mark.parametrize(("verifier", "fault"), FAULTS, ids=[f"{v}-{f.__name__}" for v, f in FAULTS])
def test_a_fault_of_the_verifier_shows(verifier: Verifier, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = starts_of("random", 48)
    assert worst(starts, verifier) < EXACT
    fault(monkeypatch)
    assert worst(starts, verifier) > 1e3 * EXACT


def argmax_scored_as_softmax(p: Tree, q: Tree) -> Start:
    certain = [torch.zeros_like(law).masked_fill(law < law.amax(1, keepdim=True), -inf) for law in q]
    return Start(p, certain, 3, claimed=q)


def raw_law_claimed(p: Tree, q: Tree) -> Start:
    """Drawn after top-k 2, reported without it."""
    drawn = [law.masked_fill(law <= law.amin(1, keepdim=True), -inf).log_softmax(1) for law in q]
    return Start(p, drawn, 3, claimed=q)


def raw_temperature_claimed(p: Tree, q: Tree) -> Start:
    return Start(p, [(law / 0.9).log_softmax(1) for law in q], 3, claimed=q)


@both_verifiers
@pytest.mark.parametrize("fault", [argmax_scored_as_softmax, raw_law_claimed, raw_temperature_claimed])
def test_a_law_that_drafts_were_not_drawn_from_shows(fault: Callable[[Tree, Tree], Start], verifier: Verifier) -> None:
    misclaimed = [fault(p, q) for p, q in pairs("random", 4)]
    assert worst([replace(start, claimed=None) for start in misclaimed], verifier) < EXACT
    assert worst(misclaimed, verifier) > 1e-3


def test_the_sum_over_texts_is_one() -> None:
    """The yardstick itself: p's law of texts is a law, and a round without drafts is p."""
    (start,) = starts_of("random", 1)
    assert abs(target_law(start.p, 4).sum().item() - 1) < EXACT
    plain = emissions([replace(start, k=0), start], "rejection")[0][0]
    assert torch.allclose(plain, completed([NOTHING + 1], start.p, 1), rtol=0, atol=EXACT)
