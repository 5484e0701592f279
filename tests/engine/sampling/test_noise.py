"""Keyed noise: its law, its independence, and that it depends on nothing but its key.

Nothing is drawn at run time, so a test passes always or never. The thresholds are set as if the seeds were chosen anew
each time: a sound generator would exceed one with the stated probability.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.sampling import noise
from engine.sampling.hashing import mix_array, mix_int, mix_tensor, signed
from engine.sampling.noise import gumbel_noise, sequence_key, stream_key

ROWS, VOCAB = 64, 1024
Z = 5.0  # normal deviates; a single comparison exceeds it with probability 6e-7


def uniforms(keys: list[int], positions: list[int], vocab: int = VOCAB) -> Tensor:
    """The uniform numbers behind the noise: u = exp(−exp(−g)), [R, vocab]."""
    noise = gumbel_noise(torch.tensor(keys), torch.tensor(positions), vocab)
    assert noise.dtype is torch.float64
    return (-(-noise).exp()).exp()


KEYS = [stream_key(sequence_key(seed, 0, 0), 0) for seed in range(ROWS)]
BLOCKS = {
    "positions of one key": uniforms([KEYS[0]] * ROWS, list(range(ROWS))),
    "keys at one position": uniforms(KEYS, [7] * ROWS),
    "prompt indices": uniforms([stream_key(sequence_key(1, i, 0), 0) for i in range(ROWS)], [7] * ROWS),
    "choice indices": uniforms([stream_key(sequence_key(1, 0, i), 0) for i in range(ROWS)], [7] * ROWS),
    "streams": uniforms([stream_key(sequence_key(1, 0, 0), i) for i in range(ROWS)], [7] * ROWS),
    "large seeds": uniforms([stream_key(sequence_key(2**63 - 1 - i, 0, 0), 0) for i in range(ROWS)], [7] * ROWS),
}


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_uniform_law(name: str) -> None:
    """χ² over 256 cells, as a normal deviate: false alarm below 1e-6 each."""
    values, cells = BLOCKS[name].flatten(), 256
    counts = torch.histc(values, bins=cells, min=0, max=1)
    each = values.numel() / cells
    chi2 = ((counts - each) ** 2 / each).sum().item()
    assert abs(chi2 - (cells - 1)) / (2 * (cells - 1)) ** 0.5 < Z


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_neighbours_are_independent(name: str) -> None:
    """Correlations along tokens and along rows, at lags 1 to 4: 48 comparisons in all, false alarm below 3e-5."""
    values = (BLOCKS[name] - 0.5) * 12**0.5
    for lag in range(1, 5):
        for a, b in ((values[:, lag:], values[:, :-lag]), (values[lag:], values[:-lag])):
            assert abs((a * b).mean().item()) * a.numel() ** 0.5 < Z


def test_all_rows_are_uncorrelated() -> None:
    """2,016 pairs of rows in each of the blocks: the largest of 12,096 deviates exceeds 6.5 with probability 1e-6."""
    for values in BLOCKS.values():
        rows = (values - 0.5) * 12**0.5
        correlations = rows @ rows.T / VOCAB**0.5
        assert correlations.triu(1).abs().max() < 6.5


def test_gumbel_law() -> None:
    """Mean γ and variance π²/6 of the standard Gumbel law; false alarm 6e-7 each (the variance of (g − γ)² is 8.0)."""
    noise = gumbel_noise(torch.tensor(KEYS), torch.arange(ROWS), VOCAB).flatten()
    euler, variance = 0.5772156649, 1.6449340668
    assert abs(noise.mean().item() - euler) < Z * (variance / noise.numel()) ** 0.5
    assert abs(((noise - euler) ** 2).mean().item() - variance) < Z * (12.0 / noise.numel()) ** 0.5


def test_noise_depends_on_key_position_and_id_alone() -> None:
    """Not on the vocabulary's size, on the other rows, or on the order in which rows are asked for."""
    whole = gumbel_noise(torch.tensor(KEYS), torch.arange(ROWS), VOCAB)
    assert torch.equal(gumbel_noise(torch.tensor(KEYS), torch.arange(ROWS), 100), whole[:, :100])
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    shuffled = gumbel_noise(torch.tensor(KEYS)[order], torch.arange(ROWS)[order], VOCAB)
    assert torch.equal(shuffled, whole[order])
    one = gumbel_noise(torch.tensor(KEYS[5:6]), torch.tensor([5]), VOCAB)
    assert torch.equal(one[0], whole[5])


def test_global_generators_are_neither_read_nor_moved() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = gumbel_noise(torch.tensor([3]), torch.tensor([4]), 50)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(gumbel_noise(torch.tensor([3]), torch.tensor([4]), 50), first)


def test_inputs_are_left_alone() -> None:
    keys, positions = torch.tensor(KEYS), torch.arange(ROWS)
    gumbel_noise(keys, positions, 10)
    assert keys.tolist() == KEYS
    assert positions.tolist() == list(range(ROWS))


INTERESTING = [0, 1, -1, 2**63 - 1, -(2**63), 2**62, -(2**62), 0x5555555555555555, 12345678901234567]


def test_tensor_and_array_mix_equal_integer_mix() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**63), 2**63 - 1, (2000,), generator=generator)
    values = torch.cat([torch.tensor(INTERESTING), drawn])
    integers = [signed(mix_int(v)) for v in values.tolist()]
    assert mix_tensor(values.clone()).tolist() == integers
    assert mix_array(values.numpy().view(np.uint64)).view(np.int64).tolist() == integers


def test_known_answers() -> None:
    """splitmix64 from state 0, as published with the reference implementation."""
    golden = 0x9E3779B97F4A7C15
    assert [mix_int(n * golden) for n in (1, 2, 3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@pytest.mark.parametrize("bits", [0, -1, 1, -(2**63)], ids=["all zeros", "all ones", "lowest", "highest"])
def test_extreme_bits_give_finite_noise(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """An infinite number would let a token of probability 0 win (−∞ + ∞), or turn a greedy row's 0 · ∞ into NaN."""
    monkeypatch.setattr(noise, "mix_tensor", lambda z: torch.full_like(z, bits))
    assert torch.isfinite(gumbel_noise(torch.tensor([1]), torch.tensor([1]), 4)).all()


def test_seeds_map_apart() -> None:
    keys = [sequence_key(s, p, c) for s in (-(2**63) + 1, -1, 0, 1, 2**63 - 1) for p in range(20) for c in range(20)]
    keys += [stream_key(sequence_key(0, 0, 0), i) for i in range(20)]
    assert len(set(keys)) == len(keys)
    assert all(-(2**63) <= k < 2**63 for k in keys)


def test_negative_control() -> None:
    """The correlation test sees noise whose rows are shifted copies of each other."""
    values = (BLOCKS["positions of one key"][0].repeat(2, 1) - 0.5) * 12**0.5
    values[1] = values[1].roll(1)
    a, b = values[1, 1:], values[0, :-1]
    assert abs((a * b).mean().item()) * a.numel() ** 0.5 > Z
