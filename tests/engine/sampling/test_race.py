"""The race: that pruning changes no draw, that noise made from the top of a block is noise like any other, that
streams, rounds and positions draw apart, and that `match` emits the race's winners whatever was drafted.

Nothing is drawn at run time, so a test passes always or never; thresholds are set as in test_noise.py.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from math import inf

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from engine.drafters.base import Draft, DraftBatch
from engine.sampling import hashing, token_race
from engine.sampling import noise as noise_module
from engine.sampling import race as race_module
from engine.sampling.hashing import BLOCK
from engine.sampling.noise import DENSE_NOISE_LIMIT, GumbelRace, gumbel_noise, sequence_key, stream_key, uniforms
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence
from engine.types import SamplingParams
from engine.verification import verify
from tests.engine.driving import make_sequence
from tests.examples import examples

pytestmark = pytest.mark.usefixtures("pruned_races")  # noise in blocks, whatever the vocabulary

CPU = torch.device("cpu")
Z = 5.0  # normal deviates; a single comparison exceeds it with probability 6e-7

# Pruned and dense


def normal(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64) * 3


def forbidden(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    """Nine in ten are −inf, in whole blocks and inside them; in some rows all are."""
    scores = normal(shape, g)
    scores[torch.rand(shape, generator=g) < 0.9] = -inf
    return scores


def only_one(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    scores = torch.full(shape, -inf, dtype=torch.float64)
    return scores.scatter_(1, torch.randint(shape[1], (shape[0], 1), generator=g), 0.0)


def few_left(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    """A handful of tokens, some of them equal and side by side; in some rows none, or one that is not a number."""
    scores = torch.full(shape, -inf, dtype=torch.float64)
    for n, row in enumerate(scores):
        ids = torch.randint(shape[1], (n % 4,), generator=g)
        row[ids] = row[(ids + 1) % shape[1]] = torch.randint(3, (), generator=g).double()
        row[int(torch.randint(shape[1], (), generator=g))] = torch.nan if n % 5 == 4 else -inf
    return scores


def ties(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    return normal(shape, g).round()


def huge_ties(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    """So large that the noise is lost in rounding: the lowest of equals must win."""
    return torch.randint(3, shape, generator=g).double() * 1e18


def nothing_allowed(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    return torch.full(shape, -inf, dtype=torch.float64)


def peaks(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    """One good token in every block: its bound tells little about it, so that rivals often win."""
    scores = torch.full(shape, -50.0, dtype=torch.float64)
    places = torch.arange(0, shape[1], BLOCK)
    scores[:, places + torch.randint(min(BLOCK, shape[1] - int(places[-1])), (1,), generator=g)] = 0.0
    return scores


Kind = Callable[[tuple[int, int], torch.Generator], Tensor]
KINDS: list[Kind] = [
    normal,
    forbidden,
    only_one,
    few_left,
    ties,
    huge_ties,
    nothing_allowed,
    peaks,
]
SHAPES = [*((1 + v % 7, v) for v in range(1, 301, 13)), (50, 31), (50, 32), (50, 33), (50, 300), (9, 4096), (2, 20_000)]


Ids = NDArray[np.int64]
Rivals = tuple[NDArray[np.float64], Ids]
Draw = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def race(scores: Tensor, temperatures: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    return GumbelRace(keys, positions, temperatures, scores.shape[1]).run(scores, range(len(scores)))


def finals(scores: Tensor, temperatures: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    noise = gumbel_noise(keys, positions, scores.shape[1])
    return noise * temperatures[:, None] + scores.double()


def parameters(rows: int, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """(temperatures, keys, positions), [rows] each."""
    temperatures = torch.tensor([1e-6, 0.3, 1.0, 2.0, 1e6], dtype=torch.float64).repeat(10)[:rows]
    keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g)
    return temperatures, keys, torch.randint(0, 5000, (rows,), generator=g)


def draws_apart(kind: Kind, dtype: torch.dtype, draw: Draw = race) -> int:
    """Rows of all shapes in which the winner is not the argmax of scores + temperature · noise."""
    wrong = 0
    for seed, shape in enumerate(SHAPES):
        g = torch.Generator().manual_seed(seed)
        scores = kind(shape, g).to(dtype)
        noise = parameters(shape[0], g)
        dense = torch.from_numpy(finals(scores, *noise).numpy().argmax(1))
        before = scores.clone()
        wrong += int((draw(scores, *noise) != dense).sum())
        assert torch.equal(scores.nan_to_num(), before.nan_to_num())
    return wrong


def without_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_race, "compiled_module", lambda name: None)


@pytest.fixture(params=["blocks", "rivals", "at once", "compiled", "as configured"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways to race: over blocks, over the tokens that may win, over the noise of all tokens, over those that
    compiled code finds, and the one chosen."""
    limits = {"blocks": (0, 0), "rivals": (10**9, 0), "at once": (10**9, 10**9), "compiled": (10**9, 0)}
    dense, at_once = limits.get(request.param, (DENSE_NOISE_LIMIT, token_race.MADE_AT_ONCE))
    monkeypatch.setattr(noise_module, "DENSE_NOISE_LIMIT", dense)
    monkeypatch.setattr(token_race, "MADE_AT_ONCE", at_once)
    if request.param in ("rivals", "at once"):
        without_compiled_code(monkeypatch)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_race_is_an_argmax(kind: Kind, dtype: torch.dtype) -> None:
    """Id for id, for every size of the last block."""
    assert draws_apart(kind, dtype) == 0


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("vocab", [40, 600, 4096])
@pytest.mark.parametrize("kind", [normal, few_left], ids=lambda kind: kind.__name__)
def test_a_score_that_is_not_a_number_wins(kind: Kind, vocab: int) -> None:
    """Wherever it stands, so that it is seen: the verifier ends a sequence whose token has no finite score."""
    g = torch.Generator().manual_seed(vocab)
    scores, (temperatures, keys, positions) = kind((50, vocab), g), parameters(50, g)
    scores[torch.arange(50), torch.randint(vocab, (50,), generator=g)] = torch.nan
    drawn = GumbelRace(keys, positions, temperatures, vocab).run(scores, range(50))
    assert scores.gather(1, drawn[:, None]).isnan().all()


@pytest.mark.usefixtures("way")
def test_noise_is_raced_over_again() -> None:
    """Any rows, in any order, several times, over smaller vocabularies too: the noise stays what it was."""
    g = torch.Generator().manual_seed(0)
    scores, noise = peaks((20, 1000), g) + normal((20, 1000), g), parameters(20, g)
    dense, once = finals(scores, *noise), GumbelRace(noise[1], noise[2], noise[0], 1000)
    for at in ([*range(20)], [3], [19, 0, 7], [*range(20)][::-1], [5, 5]):
        for vocab in (1000, 999, 961, 960, 31, 1):
            drawn = once.run(scores[at, :vocab], at)
            assert drawn.tolist() == dense[at, :vocab].argmax(1).tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("at_once", [0, 10**9, None], ids=["rivals", "at once", "compiled"])
def test_only_tokens_above_a_limit_run(
    at_once: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each row its own limit; token 0 where no token is above it."""
    monkeypatch.setattr(noise_module, "DENSE_NOISE_LIMIT", 10**9)
    if at_once is not None:
        monkeypatch.setattr(token_race, "MADE_AT_ONCE", at_once)
        without_compiled_code(monkeypatch)
    g = torch.Generator().manual_seed(0)
    scores, noise = ties((50, 700), g).to(dtype), parameters(50, g)
    limits = scores.kthvalue(350, 1).values
    limits[7] = inf
    left = scores.masked_fill(scores <= limits[:, None], -inf)
    drawn = GumbelRace(noise[1], noise[2], noise[0], 700).run(scores, range(50), limits.tolist())
    assert drawn.tolist() == finals(left, *noise).argmax(1).tolist()
    assert drawn[7] == 0


def test_noise_of_few_rows_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first draft; other drafts and the target draw with it."""
    made: list[int] = []

    def watched(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
        made.append(bits.size)
        return race_module.clocks_of(bits)

    monkeypatch.setattr(noise_module, "DENSE_NOISE_LIMIT", 4096)
    monkeypatch.setattr(token_race, "clocks_of", watched)
    without_compiled_code(monkeypatch)
    g = torch.Generator().manual_seed(0)
    scores, (temperatures, keys, positions) = normal((5, 4096), g), parameters(5, g)
    once = GumbelRace(keys, positions, temperatures, 4096)
    for rows in ([0], [1], [2], [3], [*range(5)]):
        once.run(scores[rows], rows)
    assert made == [5 * 4096]


def test_excluded_tokens_get_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever leads: after top-p or top-k most blocks hold nothing, and often no leader of a block may be drawn."""
    made: list[int] = []
    noise_of = race_module.BlockNoise._noise

    def watched(self: race_module.BlockNoise, rows: Ids, block: Ids, ids: Ids) -> NDArray[np.float64]:
        made.append(ids.size)
        return noise_of(self, rows, block, ids)

    def no_leaders(rows: Ids, blocks: Ids) -> None:
        pytest.fail("the earliest clocks of all blocks were made")

    monkeypatch.setattr(race_module.BlockNoise, "_noise", watched)
    monkeypatch.setattr(race_module, "Leaders", no_leaders)
    g = torch.Generator().manual_seed(0)
    noise = parameters(50, g)
    allowed = only_one((50, 20_000), g)
    assert race(allowed, *noise).tolist() == allowed.argmax(1).tolist()
    assert race(nothing_allowed((50, 20_000), g), *noise).tolist() == [0] * 50
    assert made == [50, 0]


def most_excluded(shape: tuple[int, int], g: torch.Generator) -> Tensor:
    """Too many blocks hold a token for these to race alone; many hold none, and many leaders are excluded."""
    scores = peaks(shape, g)
    return scores.masked_fill(torch.rand(shape, generator=g) < 0.5, -inf)


def test_excluded_blocks_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Ids] = []
    run = race_module.BlockNoise._run

    def watched(self: race_module.BlockNoise, scores: NDArray[np.floating], at: Ids, row: Ids, block: Ids) -> Rivals:
        assert (scores.reshape(len(scores), -1, BLOCK)[row, block] > -inf).any(1).all()
        ran.append(block)
        return run(self, scores, at, row, block)

    monkeypatch.setattr(race_module.BlockNoise, "_run", watched)
    g = torch.Generator().manual_seed(0)
    scores, noise = most_excluded((50, 19_968), g), parameters(50, g)
    scores[:, 640:9_600] = -inf
    assert race(scores, *noise).tolist() == finals(scores, *noise).argmax(1).tolist()
    assert len(ran[0])


def favourites_only(scores: Tensor, temperatures: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """A pruned race that believes its bounds: a block's best score with its best noise."""
    noise = gumbel_noise(keys, positions, scores.shape[1]) * temperatures[:, None]
    missing = -scores.shape[1] % BLOCK
    blocks = [torch.nn.functional.pad(x, (0, missing), value=-inf).view(len(x), -1, BLOCK) for x in (scores, noise)]
    bounds = blocks[0].amax(2) + blocks[1].amax(2)
    run = torch.zeros_like(bounds).scatter_(1, bounds.topk(min(8, bounds.shape[1])).indices, 1).bool()
    shown = run.repeat_interleave(BLOCK, 1)[:, : scores.shape[1]]
    return (noise + scores).masked_fill(~shown, -inf).argmax(1)


def highest_of_equals(scores: Tensor, temperatures: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    return scores.shape[1] - 1 - finals(scores, temperatures, keys, positions).flip(1).argmax(1)


@pytest.mark.parametrize(("kind", "draw"), [(peaks, favourites_only), (huge_ties, highest_of_equals)])
def test_a_race_that_cuts_a_corner_shows(kind: Kind, draw: Draw) -> None:
    assert draws_apart(kind, torch.float64, draw) > 3


# The clocks of a block


def some_noise(rows: int = 256, blocks: int = 96) -> Tensor:
    """[rows · blocks, 32]"""
    keys = torch.tensor([stream_key(sequence_key(seed, 0, 0), 0) for seed in range(rows)])
    return gumbel_noise(keys, torch.arange(rows), blocks * BLOCK).view(-1, BLOCK)


@pytest.mark.parametrize("bits", [0, -1, 1, -(2**63)], ids=["all zeros", "all ones", "lowest", "highest"])
@pytest.mark.parametrize("score", [0.0, -inf])
def test_extreme_bits_race(bits: int, score: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a warning, and what is forbidden does not win."""
    filled = np.array(bits, np.int64).view(np.uint64)
    monkeypatch.setattr(race_module, "mix_array", lambda z: np.full_like(z, filled))
    scores = torch.full((2, 100), -inf, dtype=torch.float64)
    scores[:, 70] = score
    monkeypatch.setattr(noise_module, "DENSE_NOISE_LIMIT", 0)
    drawn = race(scores, torch.ones(2, dtype=torch.float64), torch.arange(2), torch.arange(2))
    assert drawn.tolist() == [70 if score == 0 else 0] * 2


def law(noise: Tensor) -> Tensor:
    """The uniform numbers behind Gumbel noise."""
    return (-(-noise).exp()).exp()


def correlation(noise: Tensor) -> float:
    """The largest of the 496 correlations of places in a block, as a normal deviate."""
    scaled = (law(noise) - 0.5) * 12**0.5
    return float((scaled.T @ scaled / len(noise) ** 0.5).triu(1).abs().max())


def cells(values: Tensor, count: int) -> float:
    """χ² of values in 0 … count − 1 against the uniform law, as a normal deviate."""
    counts = values.bincount(minlength=count).double()
    each = len(values) / count
    return float((((counts - each) ** 2 / each).sum() - (count - 1)) / (2 * (count - 1)) ** 0.5)


def test_the_places_of_a_block_have_the_same_law_and_do_not_correlate() -> None:
    """24,576 blocks. The largest of 496 deviates exceeds 6.5 with probability 4e-8; each of 32 χ² exceeds 6 with
    probability about 1e-6."""
    noise = some_noise()
    assert correlation(noise) < 6.5
    uniform = law(noise)
    for place in range(BLOCK):
        assert abs(cells((uniform[:, place] * 64).long(), 64)) < 6


def test_the_order_in_a_block_is_any() -> None:
    """Who is first, who is second, also given the first, who is last, and one token's place in the order; false alarm
    about 1e-6 each."""
    noise = some_noise()
    assert abs(cells(noise.argmax(1), BLOCK)) < 6
    assert abs(cells(noise.argmin(1), BLOCK)) < 6
    first, second = noise.topk(2, 1).indices.unbind(1)
    assert abs(cells(second, BLOCK)) < 6
    assert abs(cells((second - first) % BLOCK - 1, BLOCK - 1)) < 6
    for place in (0, 17, 31):
        assert abs(cells((noise > noise[:, place : place + 1]).sum(1), BLOCK)) < 6


def test_gaps_between_a_blocks_clocks_are_exponential() -> None:
    """The i-th gap times (32 − i) is standard exponential, the first ones as well as the last, and gaps do not
    correlate: together that is the law of 32 independent clocks. False alarm below 1e-6 each."""
    clocks = (-some_noise()).exp().sort(1).values
    gaps = torch.diff(clocks, dim=1, prepend=torch.zeros(len(clocks), 1, dtype=torch.float64))
    uniform = (-gaps * torch.arange(BLOCK, 0, -1)).exp()
    for i in range(BLOCK):
        assert abs(cells((uniform[:, i] * 64).long().clamp(max=63), 64)) < 6
    scaled = (uniform - 0.5) * 12**0.5
    assert (scaled.T @ scaled / len(scaled) ** 0.5).triu(1).abs().max() < 6.5


def wrong_noise(generator: torch.Generator, *, first: bool, apart: bool) -> Tensor:
    """Blocks made from the top, wrongly: nobody is the first, or neighbours share a clock."""
    clocks = torch.empty(24_576, BLOCK, dtype=torch.float64).exponential_(generator=generator)
    earliest = torch.empty(24_576, 1, dtype=torch.float64).exponential_(generator=generator) / BLOCK
    if not apart:
        clocks[:, 1::2] = clocks[:, ::2]
    if first:
        clocks.scatter_(1, torch.randint(BLOCK, (24_576, 1), generator=generator), 0.0)
    return -(clocks + earliest).log()


def test_noise_that_is_made_wrongly_shows() -> None:
    """Control; the right recipe passes from a generator of torch's as well."""
    g = torch.Generator().manual_seed(0)
    right, nobody, shared = (
        wrong_noise(g, first=first, apart=apart) for first, apart in ((True, True), (False, True), (True, False))
    )
    assert abs(cells((law(right)[:, 0] * 64).long(), 64)) < 6 < abs(cells((law(nobody)[:, 0] * 64).long(), 64))
    assert correlation(right) < 6.5 < correlation(shared)


# Coins and keys


@pytest.mark.parametrize(("bits", "value"), [(0, 0.0), (-1, 1 - 2.0**-53), (2047, 0.0), (-(2**63), 0.5)])
def test_coins_of_extreme_bits(bits: int, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 can come, 1 cannot: with a strict comparison, a chance of 0 never accepts and a chance of 1 always does."""
    monkeypatch.setattr(noise_module, "mix_tensor", lambda z: torch.full_like(z, bits))
    assert uniforms(torch.tensor([1]), torch.tensor([1])).tolist() == [value]


KEYS = [sequence_key(seed, 0, 0) for seed in range(40)]
STARTS = (0, 1, 5, 1000)


def coin_rows() -> Tensor:
    """[640, 512]: coins of 40 keys, streams 0 to 3 and four starts, at 512 positions."""
    keys = [stream_key(key, stream, start) for key in KEYS for stream in range(4) for start in STARTS]
    return uniforms(torch.tensor(keys)[:, None], torch.arange(512))


def test_coins_are_uniform() -> None:
    """χ² over 256 cells; false alarm below 1e-6."""
    coins = coin_rows()
    assert coins.dtype is torch.float64
    assert ((coins >= 0) & (coins < 1)).all()
    assert abs(cells((coins.flatten() * 256).long(), 256)) < Z


def test_coins_of_streams_rounds_and_positions_are_unrelated() -> None:
    """The largest of 204,480 deviates exceeds 7.5 with probability 2e-8; neighbouring positions 6e-7 each."""
    scaled = (coin_rows() - 0.5) * 12**0.5
    assert (scaled @ scaled.T / 512**0.5).triu(1).abs().max() < 7.5
    for lag in (1, 2, 3):
        products = scaled[:, lag:] * scaled[:, :-lag]
        assert abs(products.mean().item()) * products.numel() ** 0.5 < Z


def test_coins_that_forget_the_round_show() -> None:
    """Control: keyed by position only, a later round's coins are those that the one before threw away."""
    keys = torch.tensor([stream_key(KEYS[0], 2) for _ in STARTS])
    scaled = (uniforms(keys[:, None], torch.arange(512)) - 0.5) * 12**0.5
    assert (scaled @ scaled.T / 512**0.5).triu(1).abs().max() > 7.5


def test_keys_of_streams_and_rounds_differ() -> None:
    keys = [stream_key(key, stream) for key in KEYS for stream in range(4)]
    keys += [stream_key(key, stream, start) for key in KEYS for stream in range(4) for start in range(200)]
    assert len(set(keys)) == len(keys)
    assert all(-(2**63) <= key < 2**63 for key in keys)


def in_a_round(length: int, ks: int, vocab: int = 50) -> Sampler:
    return Sampler([make_sequence(0, [1] * length, key=77)], [ks], vocab, CPU)


def residuals(sampler: Sampler, ahead: Seq[int]) -> list[int]:
    flat = torch.zeros(1, 50, dtype=torch.float64)
    return [int(sampler.emit(flat, [0], torch.tensor([n]))) for n in ahead]


def coins(sampler: Sampler, depth: int) -> torch.Tensor:
    key, end = sampler.coin_numbers([0])
    return uniforms(key, end + torch.arange(depth))


def test_only_the_targets_own_noise_outlives_a_round() -> None:
    """Positions 10 … 14, as a round from 10 and a round from 8 see them: the target draws the same, the draft, the
    coins and the residual draw anew."""
    flat = torch.zeros(5, 50, dtype=torch.float64)
    late, early = in_a_round(10, 4), in_a_round(8, 6)
    rows = range(2, 7)  # of the early round: the same positions
    assert torch.equal(late.sample(flat, range(5)), early.sample(flat, rows))
    assert not torch.equal(late.propose(flat, range(5)), early.propose(flat, rows))
    assert not torch.isclose(coins(late, 5), coins(early, 7)[2:]).any()
    ends = [
        [r.emit(flat[:1], [0], torch.tensor([n + at])).item() for n in range(5)] for r, at in ((late, 0), (early, 2))
    ]
    assert ends[0] != ends[1]


def test_a_rounds_streams_draw_apart() -> None:
    """In one round, the target, the draft and the residual each have noise of their own, and at each position anew."""
    flat, round_ = torch.zeros(5, 50, dtype=torch.float64), in_a_round(10, 4)
    target, draft = round_.sample(flat, range(5)).tolist(), round_.propose(flat, range(5)).tolist()
    residual = residuals(round_, range(5))
    assert target != draft != residual != target
    assert all(len(set(drawn)) > 2 for drawn in (target, draft, residual))


# Match


VOCABS = st.sampled_from([2, 5, 33, 300])


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[Sequence], list[int], Tensor, Tensor]:
    """(sequences, ks, logits, drafts): some drafts are what the target is about to draw, others are anything."""
    vocab = draw(VOCABS)
    ks = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    temperature = st.sampled_from([0.3, 1.0, 2.0])
    sequences = [
        make_sequence(i, [0] * draw(st.integers(1, 9)), SamplingParams(temperature=draw(temperature)), key=i * 7919)
        for i in range(len(ks))
    ]
    logits = torch.randn(sum(ks) + len(ks), vocab, generator=g, dtype=torch.float64) * 2
    return sequences, ks, logits, torch.randint(-1, vocab + 1, (len(ks), max(ks) + 1), generator=g)


def winners(sequences: Seq[Sequence], ks: Seq[int], logits: Tensor, stream: int) -> list[list[int]]:
    """For each sequence the ids that win at its k + 1 positions: argmax of log p + noise, by no code of the sampler."""
    wins, first = [], 0
    for sequence, k in zip(sequences, ks, strict=True):
        p = (logits[first : first + k + 1] / sequence.params.temperature).softmax(1)
        key = stream_key(sequence.key, stream)
        positions = torch.arange(len(sequence.tokens), len(sequence.tokens) + k + 1)
        noise = gumbel_noise(torch.full_like(positions, key), positions, logits.shape[1])
        wins.append((p.log() + noise).argmax(1).tolist())
        first += k + 1
    return wins


def emitted(sequences: Seq[Sequence], ks: Seq[int], logits: Tensor, drafts: Tensor) -> list[list[int]]:
    sampler = Sampler(sequences, ks, logits.shape[1], CPU)
    verdict = verify(DraftBatch(tuple(sequences), sampler), Draft(tuple(ks), drafts), logits)
    assert [len(tokens) - 1 for tokens in verdict.emitted] == verdict.accepted
    return verdict.emitted


@examples(80)
@given(rounds(), st.integers(0, 4))
def test_match_emits_the_races_winners_whatever_was_drafted(
    case: tuple[list[Sequence], list[int], Tensor, Tensor], agreeing: int
) -> None:
    sequences, ks, logits, drafts = case
    wins = winners(sequences, ks, logits, noise_module.TARGET_STREAM)
    for row, win in zip(drafts, wins, strict=True):
        agreed = min(agreeing, len(win) - 1)
        row[:agreed] = torch.tensor(win[:agreed], dtype=torch.int64)
    for tokens, win, row, k in zip(emitted(sequences, ks, logits, drafts), wins, drafts.tolist(), ks, strict=True):
        agreed = next((j for j in range(k) if row[j] != win[j]), k)
        assert tokens == win[: agreed + 1]


def test_match_with_another_streams_noise_shows() -> None:
    """Control: winners by stream 1 are not what is emitted."""
    sequences = [make_sequence(i, [0], key=i) for i in range(20)]
    logits, drafts = torch.zeros(20, 50, dtype=torch.float64), torch.zeros(20, 1, dtype=torch.int64)
    tokens = emitted(sequences, [0] * 20, logits, drafts)
    assert tokens == winners(sequences, [0] * 20, logits, noise_module.TARGET_STREAM)
    assert tokens != winners(sequences, [0] * 20, logits, noise_module.DRAFT_STREAM)


def test_few_rows_have_the_keys_of_many() -> None:
    """Python's integers do not overflow."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(-(2**63), 2**63 - 1, (2 * hashing.FEW_ROWS,), generator=generator)
    positions = torch.randint(0, 2**40, (2 * hashing.FEW_ROWS,), generator=generator)
    many = hashing.row_keys(keys, positions)
    few = hashing.row_keys(keys[: hashing.FEW_ROWS], positions[: hashing.FEW_ROWS])
    assert many.dtype == few.dtype == np.uint64
    assert few.tolist() == many[: hashing.FEW_ROWS].tolist()
    assert few.tolist() != hashing.row_keys(keys[: hashing.FEW_ROWS], positions[1 : hashing.FEW_ROWS + 1]).tolist()
