"""The race as one operation: the tokens of the CPU's races, from the reference and from the Triton kernels alike."""

from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels.race import race, race_reference
from engine.sampling.hashing import BLOCK
from engine.sampling.noise import DENSE_NOISE_LIMIT, GumbelRace, gumbel_noise
from tests.engine.kernels.faults import with_fault
from tests.examples import in_proofs, usual_and_proofs

Race = Callable[[Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
Kind = Callable[[tuple[int, int], torch.Generator], Tensor]
TEMPERATURES = (1e-3, 0.3, 0.8, 1.0, 2.0, 5.0)
SMALL = (1, 31, 32, 33, 500, 4096)
LARGE = (DENSE_NOISE_LIMIT, 20_000)


@pytest.fixture
def kernels(device: torch.device) -> ModuleType:
    from engine.kernels import race_kernel

    return race_kernel


@pytest.fixture
def kernel(kernels: ModuleType, device: torch.device) -> Race:
    return on_device(kernels, device)


def on_device(kernels: ModuleType, device: torch.device) -> Race:
    """The Triton kernels, for tensors on the CPU."""

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        with np.errstate(all="ignore"):
            tokens, finite = kernels.race(*(x.to(device) if isinstance(x, Tensor) else x for x in args))
        return tokens.cpu(), finite.cpu()

    return run


def normal(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64) * 3


def forbidden(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    """Nine in ten are −inf; in the last row all are."""
    scores = normal(shape, g).masked_fill(torch.rand(shape, generator=g) < 0.9, -inf)
    scores[-1] = -inf
    return scores


def ties(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    """So large that the noise is lost in rounding: the lowest of equals must win."""
    return torch.randint(3, shape, generator=g).double() * 1e18


def peaked(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    """A handful of good tokens, as of a model that is sure: most blocks cannot hold the winner."""
    scores = normal(shape, g) - 20
    return scores.scatter_(1, torch.randint(shape[1], (shape[0], 5), generator=g), 1.0)


def level(rows: int, vocab: int, blocks: bool, g: torch.Generator) -> Tensor:
    """Scores that the noise of parameters(seed 7) brings to one level, but for one token in each row: if the noise of
    any token is too large by 1e-9, that token wins."""
    keys, positions, temperatures = parameters(rows, torch.Generator().manual_seed(7))
    noise = gumbel_noise(keys, positions, max(vocab, DENSE_NOISE_LIMIT + 1) if blocks else vocab)[:, :vocab]
    winners = torch.randint(vocab, (rows, 1), generator=g)
    return (-noise * temperatures[:, None]).scatter_add_(1, winners, torch.full((rows, 1), 1e-9, dtype=torch.float64))


def seconds(rows: int, vocab: int, g: torch.Generator) -> Tensor:
    """As level(), in whole blocks where only the tokens with the two earliest clocks are allowed, and the earliest are
    a little behind: one with a second clock wins, and its noise is the bound itself."""
    scores = level(rows, vocab, True, g).unflatten(1, (-1, BLOCK))
    order = scores.argsort(-1)  # the earliest clock gives the most noise, and here the least score
    result = torch.full_like(scores, -inf).scatter_(2, order[..., 1:2], scores.gather(2, order[..., 1:2]))
    return result.scatter_(2, order[..., :1], scores.gather(2, order[..., :1]) - 1e-4).flatten(1)


def parameters(rows: int, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """(keys, positions, temperatures), [rows] each. Half of the keys are negative."""
    keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g)
    temperatures = torch.tensor(TEMPERATURES, dtype=torch.float64).repeat(rows)[:rows]
    return keys, torch.randint(0, 5000, (rows,), generator=g), temperatures


def cpu_race(scores: Tensor, keys: Tensor, positions: Tensor, temperatures: Tensor, blocks: bool) -> Tensor:
    """The race of the CPU's engine, of a sampler whose vocabulary may be larger."""
    vocab_size = max(scores.shape[1], DENSE_NOISE_LIMIT + 1) if blocks else scores.shape[1]
    return GumbelRace(keys, positions, temperatures, vocab_size).run(scores, range(len(scores)))


def check(run: Race, scores: Tensor, blocks: bool, seed: int = 0) -> None:
    g = torch.Generator().manual_seed(seed)
    keys, positions, temperatures = parameters(len(scores), g)
    tokens, finite = run(scores, keys, positions, temperatures, blocks)
    assert tokens.tolist() == cpu_race(scores.contiguous(), keys, positions, temperatures, blocks).tolist()
    assert finite.tolist() == scores.gather(1, tokens[:, None])[:, 0].isfinite().tolist()


@pytest.mark.parametrize("kind", [normal, forbidden, ties, peaked])
@pytest.mark.parametrize("dtype", [torch.float32, *in_proofs(torch.float64)])
def test_the_reference_draws_the_tokens_of_the_cpu(kind: Kind, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    for vocab in (*SMALL, *LARGE):
        for blocks in {vocab > DENSE_NOISE_LIMIT, True}:
            check(race_reference, kind((30 if vocab < 5000 else 3, vocab), g).to(dtype), blocks)


def test_the_reference_draws_the_tokens_of_the_cpu_over_a_real_vocabulary() -> None:
    check(race_reference, normal((3, 151_936), torch.Generator().manual_seed(2)).float(), True)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("kind", [normal, forbidden, ties, peaked])
def test_the_kernels_draw_the_tokens_of_the_cpu(kernel: Race, kind: Kind, blocks: bool) -> None:
    g = torch.Generator().manual_seed(3)
    for vocab, rows, dtype in ((1, 2, torch.float32), (33, 2, torch.float64), (500, 6, torch.float32)):
        check(kernel, kind((rows, vocab), g).to(dtype), blocks, seed=vocab)


@pytest.mark.proofs
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("kind", [normal, forbidden, ties, peaked])
def test_the_kernels_draw_the_tokens_of_the_cpu_over_every_size(kernel: Race, kind: Kind, blocks: bool) -> None:
    g = torch.Generator().manual_seed(3)
    for vocab in SMALL:
        for dtype in (torch.float32, torch.float64):
            check(kernel, kind((6 if vocab == 500 else 2, vocab), g).to(dtype), blocks, seed=vocab)


@pytest.mark.parametrize("blocks", [False, True])
def test_the_noise_of_every_token_is_that_of_the_cpu(kernel: Race, blocks: bool) -> None:
    check(kernel, level(4, 4096, blocks, torch.Generator().manual_seed(16)), blocks, seed=7)


def test_the_kernels_draw_the_tokens_of_the_cpu_over_several_parts(kernel: Race) -> None:
    g = torch.Generator().manual_seed(4)
    check(kernel, normal((1, DENSE_NOISE_LIMIT), g).float(), False)
    check(kernel, torch.cat([kind((1, 20_000), g) for kind in (normal, ties, forbidden)]).float(), True)


@pytest.mark.proofs
def test_the_kernels_draw_the_tokens_of_the_cpu_over_a_real_vocabulary(
    kernels: ModuleType, kernel: Race, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "TILE", 8192)  # the interpreter's time is mostly that of its operations
    g = torch.Generator().manual_seed(5)
    check(kernel, torch.cat([normal((1, 151_936), g), peaked((1, 151_936), g)]).float(), True)


@pytest.mark.parametrize("run", ["reference", "kernel"])
@pytest.mark.parametrize("blocks", [False, True])
def test_narrow_scores_draw_as_their_values_in_fp32(run: str, blocks: bool, request: pytest.FixtureRequest) -> None:
    race_of = race_reference if run == "reference" else request.getfixturevalue("kernel")
    g = torch.Generator().manual_seed(6)
    scores, settings = normal((6, 500), g), parameters(6, g)
    for dtype in (torch.bfloat16, torch.float16):
        narrow = scores.to(dtype)
        assert race_of(narrow, *settings, blocks)[0].tolist() == race_of(narrow.float(), *settings, blocks)[0].tolist()


@pytest.mark.parametrize("run", ["reference", "kernel"])
@pytest.mark.parametrize("blocks", [False, True])
def test_rows_without_a_finite_winner_are_told(run: str, blocks: bool, request: pytest.FixtureRequest) -> None:
    race_of = race_reference if run == "reference" else request.getfixturevalue("kernel")
    g = torch.Generator().manual_seed(7)
    scores = normal((6, 1500), g)
    scores[0] = -inf
    scores[1, [1444, 70, 900]] = nan
    scores[2, [1203, 40]] = inf
    scores[3, 5], scores[3, 4] = nan, inf
    scores[4, ::2] = -inf
    keys, positions, temperatures = parameters(6, g)
    tokens, finite = race_of(scores.float(), keys, positions, temperatures, blocks)
    assert tokens[:4].tolist() == [0, 70, 40, 5]
    assert finite.tolist() == [False, False, False, False, True, True]


@pytest.mark.parametrize("run", ["reference", "kernel"])
@pytest.mark.parametrize("blocks", [False, True])
def test_at_temperature_0_the_best_score_wins(run: str, blocks: bool, request: pytest.FixtureRequest) -> None:
    race_of = race_reference if run == "reference" else request.getfixturevalue("kernel")
    g = torch.Generator().manual_seed(8)
    scores = normal((6, 3000), g).round()
    keys, positions, _ = parameters(6, g)
    tokens, finite = race_of(scores, keys, positions, torch.zeros(6, dtype=torch.float64), blocks)
    assert tokens.tolist() == scores.numpy().argmax(1).tolist()
    assert finite.all()


def test_scores_may_be_columns_of_a_larger_table(kernel: Race) -> None:
    g = torch.Generator().manual_seed(9)
    table = normal((12, 700), g)
    for scores in (table[::2, 3:603], table[:, :6].T):
        check(kernel, scores, False)


def test_the_operation_is_the_reference_on_the_cpu_and_has_shapes_without_values() -> None:
    g = torch.Generator().manual_seed(10)
    scores, settings = normal((5, 40), g), parameters(5, g)
    for made, expected in zip(race(scores, *settings, False), race_reference(scores, *settings, False), strict=True):
        assert torch.equal(made, expected)
    torch.library.opcheck(
        torch.ops.foretoken.race.default, (scores, *settings, False), test_utils=["test_schema", "test_faketensor"]
    )


FAULTS = {
    "another salt of the first clock": ("row_key ^ FIRST_CLOCK_SALT", "row_key ^ SECOND_CLOCK_SALT"),
    "another salt of the second clock": ("bits + SECOND_CLOCK_SALT", "bits + FIRST_CLOCK_SALT"),
    "another salt of the second token": ("bits + SECOND_TOKEN_SALT", "bits + FIRST_CLOCK_SALT"),
    "a wrong remainder": ("% (BLOCK - 1)", "% BLOCK"),
    "a wrong rate": ("/ (BLOCK - 1)", "/ BLOCK"),
    "the position before": ("tl.load(positions + row) + 1", "tl.load(positions + row)"),
    "the token before": ("(ids + 1).to(", "ids.to("),
    "the highest id of equals": ("(leader < winner)", "(leader > winner)"),
    "a bound that is too low": ("if tl.max(bound) >= best", "if tl.max(bound) >= best + 1e-3"),
    "tokens past the end": ("mask=ids < vocab, other", "mask=ids < vocab + 40, other"),
    "a NaN is passed over": ("first_nan < NO_ID, first_nan", "first_nan < 0, first_nan"),
    "the first part only": ("value == tl.max(value), winner", "part == 0, winner"),
}


# Two faults of each kernel.
USUAL_FAULTS = ("a wrong rate", "a bound that is too low", "a NaN is passed over", "the first part only")


@pytest.mark.parametrize("fault", usual_and_proofs(FAULTS, USUAL_FAULTS))
def test_a_kernel_with_a_fault_is_seen(kernels: ModuleType, device: torch.device, fault: str, tmp_path: Path) -> None:
    with with_fault(kernels, *FAULTS[fault], tmp_path) as faulty, pytest.raises(AssertionError):
        compare_few(on_device(small(faulty), device))


def test_a_kernel_without_a_fault_passes_the_same_comparison(
    kernels: ModuleType, device: torch.device, tmp_path: Path
) -> None:
    with with_fault(kernels, "WARPS = 8", "WARPS = 4", tmp_path) as sound:
        compare_few(on_device(small(sound), device))


def small(kernels: ModuleType) -> ModuleType:
    """Two parts for 1,100 tokens, the first of two tiles."""
    kernels.SHORT_PART, kernels.TILE = 1024, 512  # type: ignore[attr-defined]
    return kernels


def compare_few(run: Race) -> None:
    """What shows each of FAULTS."""
    g = torch.Generator().manual_seed(12)
    for blocks in (True, False):
        scores = torch.full((2, 2000), 1e30, dtype=torch.float64)[:, :1100]  # beyond the vocabulary lie better scores
        check(run, scores.copy_(level(2, 1100, blocks, g)), blocks, seed=7)
    check(run, ties((2, 1100), g), False)
    check(run, seconds(1, 64, g), True, seed=7)
    scores = normal((2, 1100), g)
    scores[0, 1090], scores[1, 700] = 100, nan
    check(run, scores, False)


def test_pruning_makes_the_noise_of_few_tokens(
    kernels: ModuleType, kernel: Race, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a peaked row most tiles are settled by the earliest clocks of their blocks."""
    if not kernels.triton.knobs.runtime.interpret:
        pytest.skip("a compiled kernel cannot be counted")
    tiles, token_clocks = [], kernels.token_clocks

    def counted(row_key: Any, ids: Any) -> Any:
        tiles.append(0)
        return token_clocks(row_key, ids)

    monkeypatch.setattr(kernels, "token_clocks", counted)
    monkeypatch.setattr(kernels, "SHORT_PART", kernels.PART)
    g = torch.Generator().manual_seed(14)
    scores = normal((1, 40 * kernels.TILE), g) - 20
    scores[0, 7] = 1.0
    keys, positions, temperatures = parameters(1, g)
    kernel(scores, keys, positions, temperatures, True)
    assert 1 <= len(tiles) <= 10


def test_noise_in_blocks_differs_from_noise_of_tokens() -> None:
    """So the flag matters, and each of the two is the engine's noise."""
    g = torch.Generator().manual_seed(15)
    scores, (keys, positions, temperatures) = normal((30, 500), g), parameters(30, g)
    tokens = [race(scores, keys, positions, temperatures, blocks)[0].tolist() for blocks in (False, True)]
    assert tokens[0] != tokens[1]
    noise = gumbel_noise(keys, positions, 500) * temperatures[:, None]
    assert tokens[0] == (scores + noise).argmax(1).tolist()
    noise = gumbel_noise(keys, positions, DENSE_NOISE_LIMIT + 1)[:, :500] * temperatures[:, None]
    assert tokens[1] == (scores + noise).argmax(1).tolist()
