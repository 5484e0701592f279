"""The measurement of an EAGLE-3 head: its probabilities against simulation and enumeration."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import heads_data, train_eagle
from scripts.eval_eagle import (
    FACTORS,
    K,
    chain_factors,
    features,
    head_logits,
    load_head,
    main,
    match_factor,
    measure,
    per_depth,
    rejection_factor,
    tokens_per_round,
)
from scripts.eval_pair import continue_text, coupling, overlap
from scripts.heads_data import load_target
from scripts.make_pair import make_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pair, and a head that was trained for a few steps, with 60 of the 300 tokens as drafts."""
    out = tmp_path_factory.mktemp("pair")
    make_pair(out, layers=7, draft_layers=1, hidden=32, heads=2, kv_heads=1, ffn=64, vocab=300)
    for i in range(100):
        (out / f"m{i}.txt").write_text(f"text {i}\n" * 60)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"CONTEXT": 24, "SHARD_ROWS": 4, "PREFIX": (2, 8)}.items():
            patch.setattr(heads_data, name, value)
        train_eagle.main(
            [
                *(f"--target={out / 'target'}", f"--text={out}", f"--out={out / 'head'}", "--eval-prefixes=0"),
                *("--generated=1", "--plain=1", "--most-steps=40", "--batch=4", "--lr=1e-2", "--draft-vocab=60"),
            ]
        )
    return out


def laws(rows: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    p, q = (
        torch.randn(2, rows, vocab, generator=torch.Generator().manual_seed(3), dtype=torch.float64).mul(2).softmax(-1)
    )
    return p, q


def test_over_all_tokens_the_factors_sum_to_the_acceptance_of_the_verifier() -> None:
    """Σ_x p(x) · P(accepted | x) is Σ min(p, q) for rejection, and the coupling for match."""
    p, q = laws(4, 30)
    for factor, acceptance in ((rejection_factor, overlap), (match_factor, coupling)):
        total = sum(p[:, x] * factor(p, q, torch.full((4,), x)) for x in range(30))
        torch.testing.assert_close(total, acceptance(p, q))


def test_the_match_factor_is_how_often_the_draft_s_race_has_the_winner_of_the_target_s() -> None:
    """400,000 races; five standard errors at the rarest of six tokens."""
    p, q = (law[0] for law in laws(1, 6))
    noise = torch.empty(400_000, 6, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(4))
    winner, drafted = (noise / p).argmin(-1), (noise / q).argmin(-1)
    for x in range(6):
        came = winner == x
        share = (drafted[came] == x).double().mean().item()
        assert share == pytest.approx(
            match_factor(p, q, torch.tensor(x)).item(), abs=5 * 0.5 / came.sum().item() ** 0.5
        )


def test_tokens_per_round_are_those_of_simulated_rounds() -> None:
    """20,000 walks through a text of 12 positions; five standard errors are about 0.02."""
    generator = torch.Generator().manual_seed(5)
    factors = torch.rand(3, 1, 12, generator=generator)
    rounds = tokens = 0
    for drawn in torch.rand(20_000, 12, 3, generator=generator) < factors[:, 0].T:
        r = 0
        while r < 12:
            taken = 1 + int(drawn[r].long().cumprod(0).sum())
            r, rounds, tokens = r + taken, rounds + 1, tokens + taken
    assert tokens_per_round(factors) == pytest.approx(tokens / rounds, abs=0.02)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (1.0, K + 1)])
def test_the_ends_of_tokens_per_round(share: float, expected: float) -> None:
    assert tokens_per_round(torch.full((K, 2, 10), share)) == expected


def test_the_acceptance_by_depth_is_among_rounds_that_came_so_far() -> None:
    factors = torch.tensor([[1.0, 1.0, 0.0, 0.5], [1.0, 0.0, 1.0, 0.5]])[:, None]
    assert per_depth(factors) == pytest.approx([2.5 / 4, 1.25 / 2.5])


@torch.no_grad()
def test_greedy_factors_are_what_drafting_one_token_after_the_other_gives(pair: Path) -> None:
    """From each position the head drafts its own best tokens, and the target's text says how many of them are right."""
    target = load_target(pair / "target")
    head, layers = load_head(pair / "head", target)
    prefix = torch.randint(0, 300, (3, 10), generator=torch.Generator().manual_seed(6))
    ids, logits = continue_text(target.model, prefix, 20, 0.0)
    text = torch.cat((prefix, ids), 1)
    states = features(target, text, layers)
    steps = [x[:, 8:] for x in head_logits(head, text, states)]
    factors = chain_factors(steps, logits, ids, 0.0)["match"]
    found = factors.cumprod(0).sum(0)  # accepted drafts of the round that begins before ids[:, i]
    for row in range(3):
        for i in range(20 - K + 1):
            last = 10 + i - 1  # the last token that is known; the features go to the one before it
            h, kv = head(text[row : row + 1, 1 : last + 1], head.fuse(states[row : row + 1, :last]))
            right = 0
            while right < K:
                assert head.draft_ids is not None
                token = head.draft_ids[head.logits(h[:, -1]).argmax(-1)]
                if token.item() != ids[row, i + right].item():
                    break
                h, kv = head(token[None], h[:, -1:], last + right, kv)
                right += 1
            assert found[row, i] == right
    assert found.sum() > 0


def test_the_target_as_its_own_draft_is_always_right(pair: Path) -> None:
    target = load_target(pair / "target")
    prefix = torch.randint(0, 300, (3, 10), generator=torch.Generator().manual_seed(7))
    found = measure(target, None, target.model, prefix, 12)["draft"]
    for by_verifier in found.values():
        for figures in by_verifier.values():
            assert figures["acceptance"] == pytest.approx([1.0] * K, abs=1e-4)
            assert figures["tokens_per_round"] == pytest.approx(K + 1, abs=1e-3)


def test_the_command_prints_a_table_and_ends_in_one_line_of_json(
    pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [f"--target={pair / 'target'}", f"--head={pair / 'head'}", f"--draft={pair / 'draft'}"]
    main([*paths, f"--text={pair}", "--all", "--prefixes=3", "--prefix-tokens=8", "--new-tokens=12"])
    *table, line = capsys.readouterr().out.splitlines()
    figures: dict[str, Any] = json.loads(line)
    assert set(figures) == {"head", "draft"}
    assert len(table) == 2 + 2 * 2 * len(FACTORS)
    for drafter in figures.values():
        for by_verifier in drafter.values():
            assert by_verifier["match"]["acceptance"][0] <= by_verifier["rejection"]["acceptance"][0] + 1e-6
            assert 1 <= by_verifier["match"]["tokens_per_round"] <= K + 1
