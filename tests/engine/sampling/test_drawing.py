"""Drawing without scores: the tokens are those of the whole transform and of a race over all of the noise."""

from collections import Counter
from collections.abc import Sequence as Seq
from math import inf, nan
from pathlib import Path
from types import ModuleType
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.drafters.base import Draft, DraftBatch
from engine.kernels import decide, laws
from engine.models.compiled import compiled_module
from engine.sampling import candidates, elementwise, filters, kept_draws, token_race
from engine.sampling.kept_draws import compile_draws
from engine.sampling.long_row import Doubles
from engine.sampling.noise import DENSE_NOISE_LIMIT, GumbelRace, gumbel_noise, target_key
from engine.sampling.race import Bits, clocks_of
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence
from engine.types import SamplingParams, Verifier
from engine.verification import verify
from tests.engine.driving import make_sequence
from tests.engine.kernels.faults import with_fault

CPU = torch.device("cpu")
VOCABULARIES = [300, 4096, 20_000]
TOP_P = SamplingParams(top_p=0.9, temperature=0.8)


def rows_of_every_kind(vocab: int) -> Tensor:
    """Flat, common and peaked rows, in fp32; some with ties, with excluded tokens, or without a law."""
    g = torch.Generator().manual_seed(vocab)
    rows = torch.randn(40, vocab, generator=g) * torch.tensor([0.01, 1.0, 3.0, 6.0, 30.0]).repeat(8)[:, None]
    rows[5:10] = rows[5:10].round()
    rows[10:15][torch.rand(5, vocab, generator=g) < 0.9] = -inf
    rows[15, 7], rows[16, 7], rows[17] = nan, inf, -inf
    return rows


def sampler_of(sequences: Seq[Sequence], vocab: int) -> Sampler:
    return Sampler(sequences, [0] * len(sequences), vocab, CPU)


def drawn_apart(params: Seq[SamplingParams], vocab: int, *, drafting: bool = False) -> int:
    """Rows whose token is not the argmax over scores with all of the noise, or whose finiteness is not told."""
    logits = rows_of_every_kind(vocab)
    sequences = [make_sequence(i, [0], p, key=i) for i, p in enumerate(params)]
    sampler = sampler_of(sequences, vocab)
    drawn, finite = sampler.draw(logits, range(len(params)))
    if drafting:
        drawn = sampler_of(sequences, vocab).draw_drafts(logits, range(len(params)))
    chosen = filters.Filters.make(params, vocab, CPU)
    scores = logits.masked_fill(filters.removed(logits, chosen), -inf)
    keys = torch.tensor([target_key(sequence.key) for sequence in sequences])
    noise = gumbel_noise(keys, torch.ones(len(params), dtype=torch.int64), vocab) * chosen.temperature[:, None]
    expected = torch.from_numpy((noise + scores).numpy().argmax(1))
    is_finite = scores.gather(1, expected[:, None])[:, 0].abs() < inf
    return int(((drawn != expected) & is_finite).sum() + (finite != is_finite).sum())


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_a_draw_is_an_argmax(vocab: int, drafting: bool) -> None:
    assert drawn_apart([TOP_P] * 40, vocab, drafting=drafting) == 0


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_rows_with_and_without_filters_draw_together(vocab: int) -> None:
    kinds = [TOP_P, SamplingParams(), SamplingParams(top_k=20), SamplingParams(min_p=0.1), SamplingParams(top_p=0.5)]
    kinds.append(SamplingParams(top_p=0.7, min_p=0.2, temperature=1.3))
    assert drawn_apart([kinds[i % len(kinds)] for i in range(40)], vocab) == 0


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_a_draw_without_the_lowest_kept_tokens_shows(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: nine in ten of the kept tokens never win, or the logits within one of the lowest kept one."""
    cut_rows, removed_up_to = candidates.cut_rows, candidates.removed_up_to

    def short(logits: Tensor, cuts: candidates.Cuts) -> candidates.CutRows:
        found = cut_rows(logits, cuts)
        kept = found.kept
        some = np.arange(len(kept.rows)) % 10 == 0
        fewer = candidates.KeptTokens(kept.rows[some], kept.tokens[some], kept.values[some])
        return candidates.CutRows(fewer, found.last_removed, found.left)

    monkeypatch.setattr(kept_draws, "cut_rows", short)
    monkeypatch.setattr(kept_draws, "removed_up_to", lambda *args: removed_up_to(*args) + 1.0)
    assert drawn_apart([TOP_P] * 40, vocab) > 1


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_kept_tokens_are_never_written_out(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that keeps few tokens needs no scores: writing and reading them takes as long as the filter."""
    monkeypatch.setattr(filters, "truncated_rows", lambda *args: pytest.fail("scores were made"))
    monkeypatch.setattr(candidates.CutRows, "write", lambda *args: pytest.fail("scores were made"))
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(0)) * 6
    sequences = [make_sequence(i, [0], TOP_P, key=i) for i in range(8)]
    drawn, finite = sampler_of(sequences, vocab).draw(logits.clone(), range(8))
    assert finite.all()
    assert drawn.unique().numel() > 1


# The race over a small vocabulary


def parameters(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g)
    return keys, torch.arange(rows), torch.full((rows,), 0.8, dtype=torch.float64)


def raced_apart(spread: float) -> int:
    scores = torch.randn(200, 1000, generator=torch.Generator().manual_seed(1)) * spread
    keys, positions, temperatures = parameters(200)
    noise = gumbel_noise(keys, positions, 1000) * temperatures[:, None]
    drawn = GumbelRace(keys, positions, temperatures, 1000).run(scores, range(200))
    return int((drawn.numpy() != (noise + scores).numpy().argmax(1)).sum())


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 10.0, 300.0])
def test_a_race_over_rivals_alone_is_an_argmax(spread: float) -> None:
    assert raced_apart(spread) == 0


def test_a_race_with_too_low_a_limit_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_race, "NOISE_MARGIN", -3.0)
    monkeypatch.setattr(token_race, "compiled_module", lambda name: None)
    assert raced_apart(3.0) > 3


def test_most_tokens_get_no_logarithms(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def watched(bits: Bits) -> Doubles:
        made.append(bits.size)
        return clocks_of(bits)

    monkeypatch.setattr(token_race, "clocks_of", watched)
    monkeypatch.setattr(token_race, "compiled_module", lambda name: None)
    assert DENSE_NOISE_LIMIT >= 1000
    assert raced_apart(3.0) == 0
    assert 200 < sum(made) < 200 * 1000 / 10


@pytest.mark.parametrize("width", [1, 15, 16, 1000, 1001])
def test_compiled_code_finds_few_tokens_that_may_win(width: int) -> None:
    """Each row's winner among them. Their noise is computed again, so there must be few."""
    scores = torch.randn(200, width, generator=torch.Generator().manual_seed(1)) * 3
    keys, positions, temperatures = parameters(200)
    noise = token_race.TokenNoise(keys, positions, temperatures, width)
    found = noise._contenders(scores.numpy(), np.arange(200), None)
    assert found is not None
    owners, tokens = found
    assert len(owners) <= 202
    sums = gumbel_noise(keys, positions, width) * temperatures[:, None] + scores
    winners = {*enumerate(sums.argmax(1).tolist())}
    assert winners <= {*zip(owners.tolist(), tokens.tolist(), strict=True)}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("larger(builder, ahead, lowest), to_beat", "builder.fadd(ahead, spread(builder, heat, NUMBERS)), to_beat"),
        ("limit = np.float32(top - 2 * error)", "limit = np.float32(top + 2 * error)"),
        ("builder.fsub(best, times(heat, MOST_LOST))", "builder.fadd(best, times(heat, MOST_LOST))"),
        ("127 + 63 + 1]", "127 + 63 - 1]"),
    ],
)
def test_a_fault_in_compiled_races_shows(
    before: str, after: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernels = compiled_module("cpu_race")
    assert kernels is not None
    with with_fault(kernels, before, after, tmp_path) as faulty:
        monkeypatch.setattr(token_race, "compiled_module", lambda name: faulty)
        assert raced_apart(1.0) + raced_apart(3.0) > 3


@pytest.mark.parametrize("value", [inf, nan, 1e9])
def test_compiled_code_leaves_what_it_cannot_tell(value: float) -> None:
    scores = torch.randn(8, 300)
    scores[5, 77] = value
    noise = token_race.TokenNoise(*parameters(8), 300)
    assert noise._contenders(scores.numpy(), np.arange(8), None) is None
    assert noise._contenders(scores[:5].numpy(), np.arange(5), None) is not None
    assert noise._contenders(torch.zeros(5, 300).numpy().astype(np.float64), np.arange(5), None) is None
    cold = token_race.TokenNoise(*parameters(8)[:2], torch.full((8,), 1e-40, dtype=torch.float64), 300)
    assert cold._contenders(np.zeros((5, 300), np.float32), np.arange(5), None) is None


def test_compiled_code_has_room_for_some_tokens_that_may_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding hides the noise here, so that every token may win."""
    noise = token_race.TokenNoise(*parameters(8)[:2], torch.full((8,), 1e-3, dtype=torch.float64), 300)
    scores = np.full((5, 300), 900, np.float32)
    assert noise._contenders(scores, np.arange(5), None) is None
    monkeypatch.setattr(token_race, "CONTENDERS", 300)
    found = noise._contenders(scores, np.arange(5), None)
    assert found is not None
    assert len(found[0]) > 40


@pytest.mark.parametrize("value", [-inf, -1000.0, -90.0, 80.0, 1000.0, nan])
def test_exponentials_and_logarithms_are_those_of_torch(value: float) -> None:
    """Also where they vanish or overflow."""
    values = torch.tensor([value, 0.0, 1.0, -1.0])
    assert torch.allclose(elementwise.exp(values), values.exp(), rtol=1e-6, atol=1e-37, equal_nan=True)
    assert torch.allclose(elementwise.log(values), values.log(), rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("is_there", [True, False])
def test_what_draws_need_is_compiled_before_the_first_one(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no Numba, nothing is."""
    asked: list[str] = []

    def module(name: str) -> ModuleType | None:
        asked.append(name)
        return compiled_module(name) if is_there else None

    for user in (token_race, candidates, laws, decide):
        monkeypatch.setattr(user, "compiled_module", module)
    compile_draws()
    assert Counter(asked) == {"cpu_cuts": 1, "cpu_race": 1, "cpu_laws": 3}


def test_no_draw_compiles_anything_after_that() -> None:
    compile_draws()
    kernels = [compiled_module(f"cpu_{name}") for name in ("cuts", "race", "laws")]
    functions = [f for kernel in kernels for f in vars(kernel).values() if hasattr(f, "signatures")]
    known = [list(function.signatures) for function in functions]
    assert sum(map(len, known)) >= 5
    kinds = [("match", SamplingParams(top_p=0.9)), ("match", SamplingParams()), ("block", SamplingParams(min_p=0.1))]
    for ks in ([3, 3, 3, 3], [3, 1, 0, 2]):
        sequences = [make_sequence(i, [1], params) for i, (_, params) in enumerate([*kinds, kinds[1]])]
        for sequence, verifier in zip(sequences, ("match", "match", "block", "rejection"), strict=True):
            sequence.verifier = cast(Verifier, verifier)
        logits = torch.randn(sum(ks) + 4, 4096, generator=torch.Generator().manual_seed(0))
        batch = DraftBatch(tuple(sequences), Sampler(sequences, ks, 4096, CPU))
        drafts = torch.arange(12).view(3, 4).t()  # as columns of drafts are
        q = torch.randn(2, 3, 4096).log_softmax(-1)
        verify(batch, Draft(tuple(ks), drafts, q, {2: 0, 3: 1} if ks[2] else {3: 1}), logits)
    assert [list(function.signatures) for function in functions] == known
