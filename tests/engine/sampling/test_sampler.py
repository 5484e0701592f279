"""The one transform: filters as transformers has them, the law of the draws, and rows that do not see each other."""

import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import engine.sampling.sampler as sampling_module
from engine.sampling.filters import Filters, removed
from engine.sampling.noise import GumbelRace, sequence_key
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence
from engine.types import SamplingParams
from tests.engine.driving import make_sequence
from tests.examples import examples

CPU = torch.device("cpu")


def warped(logits: Tensor, p: SamplingParams) -> Tensor:
    """transformers' processors in generate's order."""
    chain = LogitsProcessorList()
    chain.append(TemperatureLogitsWarper(p.temperature))
    if p.top_k:
        chain.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        chain.append(TopPLogitsWarper(p.top_p))
    if p.min_p:
        chain.append(MinPLogitsWarper(p.min_p))
    result: Tensor = chain(torch.LongTensor([[0]]), logits[None].double())
    return result[0]


def law(logits: Tensor, p: SamplingParams) -> Tensor:
    return warped(logits, p).softmax(-1)


def filters(params: Seq[SamplingParams], vocab: int) -> Filters:
    return Filters(
        temperature=torch.tensor([p.temperature or 1.0 for p in params], dtype=torch.float64),
        top_k=torch.tensor([p.top_k or vocab for p in params]),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float64),
        any_top_p=any(p.top_p < 1 for p in params),
    )


# Multiples of 1/4 make ties; the others lie 1e-6 apart, since what is tied after rounding is nobody's promise.
SCORES = st.one_of(
    st.integers(-24, 24).map(lambda n: n / 4), st.integers(-20_000_000, 20_000_000).map(lambda n: n / 1_000_000)
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.8, 1.0, 1.7]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.13, 1e-6]),
    min_p=st.sampled_from([0.0, 0.01, 0.1, 0.37, 1.0]),
)


@examples(60)
@given(st.lists(st.tuples(st.lists(SCORES, min_size=12, max_size=12), PARAMS), min_size=1, max_size=4))
def test_filters_are_those_of_transformers(rows: list[tuple[list[float], SamplingParams]]) -> None:
    logits = torch.tensor([scores for scores, _ in rows], dtype=torch.float64)
    params = [p for _, p in rows]
    gone = removed(logits, filters(params, 12))
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64)[:, None]
    for row, scores, p in zip(~gone, logits / temperature, params, strict=True):
        theirs = warped(scores * p.temperature, p) > -torch.inf
        assert theirs.any()
        assert row[theirs].all()
        # Where top-p cuts through equals, transformers keeps some of them, by their order; we keep them all.
        assert (scores[row & ~theirs] == scores[theirs].min()).all()


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2), [0, 1]),
        (SamplingParams(top_k=3), [0, 1, 2, 3]),  # ties with the third score stay
        (SamplingParams(top_p=0.5), [0]),
        (SamplingParams(top_p=0.6), [0, 1]),
        (SamplingParams(min_p=0.3), [0, 1]),
        (SamplingParams(), [0, 1, 2, 3]),
        (SamplingParams(top_k=2, top_p=0.6), [0]),  # top-p sees the two renormalised: 5/8 and 3/8
    ],
)
def test_filters_by_hand(params: SamplingParams, kept: list[int]) -> None:
    """p = (.5, .3, .1, .1)."""
    logits = torch.tensor([[0.5, 0.3, 0.1, 0.1]], dtype=torch.float64).log()
    gone = removed(logits, filters([params], 4))
    assert (~gone[0]).nonzero().flatten().tolist() == kept


def sampler_of(sequences: Seq[Sequence], ks: Seq[int], vocab: int) -> Sampler:
    return Sampler(sequences, ks, vocab, CPU)


def sample(sampler: Sampler, logits: Tensor, rows: Seq[int] | None = None) -> Tensor:
    """The target's own draws; no row may look at drafts."""
    rows = range(logits.shape[0]) if rows is None else rows
    return sampler.sample(sampler.scores(logits, rows), rows)


def draws(logits: Tensor, params: SamplingParams, count: int) -> Tensor:
    """Token ids drawn from one row of logits at `count` positions of several sequences."""
    ids = []
    for seed in range(8):
        sequence = make_sequence(seed, [0] * 5, params, key=sequence_key(seed, 0, 0))
        sampler = sampler_of([sequence], [count // 8 - 1], logits.shape[-1])
        ids.append(sample(sampler, logits.expand(count // 8, -1)))
    return torch.cat(ids)


LAWS = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.5),
    "hot": SamplingParams(temperature=2.0),
    "top-k": SamplingParams(top_k=5),
    "top-p": SamplingParams(top_p=0.8),
    "min-p": SamplingParams(min_p=0.15),
    "all": SamplingParams(temperature=1.3, top_k=6, top_p=0.9, min_p=0.05),
}
V8 = torch.tensor([1.2, 0.3, -0.5, 0.9, -1.4, 0.0, 0.7, -3.0])


def g_statistic(counts: Tensor, p: Tensor) -> float:
    n = counts.sum()
    seen = counts > 0
    return float(2 * (counts[seen] * (counts[seen] / (n * p[seen])).log()).sum())


@pytest.mark.parametrize("name", sorted(LAWS))
def test_draws_follow_the_law(name: str) -> None:
    """G-test, 40,000 draws, at most 7 degrees of freedom: a G above 42 has probability below 6e-7."""
    p = law(V8, LAWS[name])
    counts = draws(V8, LAWS[name], 40_000).bincount(minlength=8).double()
    assert counts[p == 0].sum() == 0
    assert g_statistic(counts, p) < 42


def test_negative_control_of_the_law() -> None:
    """The same test refuses draws from a law that is 2 % off."""
    counts = draws(V8, LAWS["plain"], 40_000).bincount(minlength=8).double()
    wrong = law(V8, SamplingParams(temperature=1.05))
    assert g_statistic(counts, wrong) > 42


def test_draws_at_neighbouring_positions_are_independent() -> None:
    """χ² of the 8 × 8 table of consecutive draws, 49 degrees of freedom: above 112 with probability 1e-6."""
    ids = draws(V8, SamplingParams(temperature=2.0), 40_000)
    table = (ids[:-1] * 8 + ids[1:]).bincount(minlength=64).double().view(8, 8)
    expected = table.sum(1, keepdim=True) * table.sum(0) / table.sum()
    assert ((table - expected) ** 2 / expected).sum() < 112


def random_params(rng: random.Random, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice((0.0, 0.0, 0.4, 1.0, 2.0)),
        top_p=rng.choice((1.0, 0.9, 0.4)),
        top_k=rng.choice((0, 3, 1)),
        min_p=rng.choice((0.0, 0.1)),
        min_tokens=rng.choice((0, 2, 9)),
        max_tokens=16,
        seed=seed,
    )


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("seed", range(20))
def test_a_batch_is_its_rows(seed: int, ties: bool) -> None:
    """Every sequence gets what it would get alone, whoever else is in the batch; also with tied logits."""
    rng, vocab = random.Random(seed), 40
    generator = torch.Generator().manual_seed(seed)
    params = [random_params(rng, i) for i in range(6)]
    sequences = [
        make_sequence(i, range(rng.randint(1, 9)), p, key=i * 77, end_ids=(3, 7)) for i, p in enumerate(params)
    ]
    ks = [rng.randint(0, 4) for _ in sequences]
    logits = torch.randn(sum(ks) + 6, vocab, generator=generator)
    if ties:
        logits = logits.round()
    together = sampler_of(sequences, ks, vocab)
    drawn = sample(together, logits)
    first = 0
    for sequence, k in zip(sequences, ks, strict=True):
        rows = list(range(first, first + k + 1))
        alone = sample(sampler_of([sequence], [k], vocab), logits[rows])
        assert torch.equal(drawn[rows], alone)
        rows.reverse()  # any selection of rows, in any order, gives the same
        assert torch.equal(sample(together, logits[rows], rows), alone.flip(0))
        first += k + 1


def test_a_smaller_table_draws_with_the_same_noise() -> None:
    """Where the target's likeliest is in the draft's table, both draw the same token from the same logits."""
    sequence = make_sequence(0, [1, 2], SamplingParams(top_p=0.9), key=5)
    logits = torch.randn(8, 30, generator=torch.Generator().manual_seed(0))
    logits[:, 20:] = -torch.inf
    sampler = sampler_of([sequence], [7], 30)
    assert torch.equal(sample(sampler, logits), sample(sampler, logits[:, :20]))


@pytest.mark.parametrize("vocab", [2, 8, 33, 4096, 151_936])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_ties_take_the_lowest_id(vocab: int, dtype: torch.dtype) -> None:
    greedy = make_sequence(0, [1], SamplingParams(temperature=0))
    sampled = make_sequence(1, [1], SamplingParams(temperature=1, top_p=0.9))
    logits = torch.zeros(2, vocab, dtype=dtype)
    assert sample(sampler_of([greedy], [0], vocab), logits[:1]).tolist() == [0]
    assert sample(sampler_of([greedy, sampled], [0, 0], vocab), logits)[0] == 0
    logits[:, vocab // 2 :] = 3.0
    assert sample(sampler_of([greedy], [0], vocab), logits[:1]).tolist() == [vocab // 2]
    assert sample(sampler_of([greedy, sampled], [0, 0], vocab), logits)[0] == vocab // 2


@pytest.mark.parametrize("beside", [SamplingParams(temperature=0), SamplingParams(temperature=1, top_p=0.5)])
@pytest.mark.parametrize("knobs", [{"top_p": 0.4}, {"top_k": 1}, {"min_p": 1.0}])
def test_filters_do_not_reach_greedy_rows(beside: SamplingParams, knobs: dict[str, float]) -> None:
    """A greedy row's tie is decided by its ids, also when its own top-p would keep only the highest of them."""
    greedy = make_sequence(0, [1], SamplingParams(temperature=0, **knobs))  # type: ignore[arg-type]
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert sample(sampler_of([greedy, make_sequence(1, [1], beside)], [0, 0], 4), logits)[0] == 1


def test_end_tokens_are_banned_under_min_tokens() -> None:
    """Rows 0 … 4 draw outputs 3 … 7; with min_tokens 5 the first three of them cannot end the text."""
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, min_tokens=5)
        sequence = make_sequence(0, [1, 2, 3, 4], params, key=9, end_ids=(1, 4))
        sequence.num_prompt = 2
        logits = torch.zeros(5, 6)
        logits[:, [1, 4]] = 50.0
        drawn = sample(sampler_of([sequence], [4], 6), logits).tolist()
        assert all(token not in (1, 4) for token in drawn[:3])
        assert all(token in (1, 4) for token in drawn[3:])


def test_banned_logits_of_the_caller_are_left_alone() -> None:
    knobs = SamplingParams(temperature=1, min_tokens=3, top_k=1, presence_penalty=1, logit_bias=((0, 1.0),))
    sequence = make_sequence(0, [1], knobs, end_ids=(2,))
    logits = torch.ones(1, 4)
    sample(sampler_of([sequence], [0], 4), logits)
    assert torch.equal(logits, torch.ones(1, 4))


def test_parameters_cost_nothing_where_no_row_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy logits come back as they are, and only the sampled sequence's rows run the race."""
    greedy, plain = (make_sequence(i, [1], SamplingParams(temperature=t)) for i, t in enumerate((0.0, 1.0)))
    logits = torch.randn(7, 10, generator=torch.Generator().manual_seed(0))
    mixed = sampler_of([greedy, plain], [3, 2], 10)
    assert mixed.scores(logits, range(7)) is logits
    raced = []

    class Watched(GumbelRace):
        def run(self, scores: Tensor, rows: Seq[int], above: Any = None) -> Tensor:
            raced.append(scores.shape[0])
            return super().run(scores, rows, above)

    monkeypatch.setattr(sampling_module, "GumbelRace", Watched)
    sample(mixed, logits)
    sample(sampler_of([greedy], [3], 10), logits[:4])
    assert raced == [3]
