"""Biases, bans and penalties on a device change the logits as they do on the CPU, whatever the rows are."""

import gc
import random

import pytest
import torch
from torch import Tensor

from engine.device.round_limits import RoundLimits
from engine.device.staging import Staging
from engine.sampling.device_bans import Bans
from engine.sampling.device_bias import BiasTable
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence
from engine.types import SamplingParams
from tests.engine.driving import make_sequence

CPU = torch.device("cpu")
VOCAB, SMALLER = 8, 5
EXCLUDED = -torch.inf


def device_staging(sequences: int = 6) -> Staging:
    """As that of a device."""
    staging = Staging(CPU, limits=RoundLimits(sequences, 5))
    staging.deferred = True
    return staging


def random_sequence(handle: int, rng: random.Random) -> Sequence:
    few = range(3)  # so that words occur
    words = [tuple(rng.choice(few) for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(0, 5))]
    params = SamplingParams(
        logit_bias=tuple((t, rng.uniform(-3, 3)) for t in rng.sample(range(VOCAB), rng.randint(0, 4))),
        bad_word_ids=tuple(words),
        allowed_token_ids=tuple(rng.sample(range(VOCAB), rng.randint(1, VOCAB))) if rng.random() < 0.3 else None,
        repetition_penalty=rng.choice([1.0, 1.7]),
        min_tokens=rng.randint(0, 6),
    )
    sequence = make_sequence(handle, [0, 1, 2, 0, 1], params)
    sequence.end_ids = frozenset({2, 6}) if rng.random() < 0.5 else frozenset()
    sequence.tokens += [rng.choice(few) for _ in range(rng.randint(0, 5))]
    return sequence


def check_as_on_the_cpu(seed: int, trees: dict[int, tuple[int, ...]]) -> None:
    """In two rounds over some of the same sequences, in other places."""
    rng, staging = random.Random(seed), device_staging()
    texts = [random_sequence(i, rng) for i in range(6)]
    for sequences in (texts[:5], [texts[5], *texts[1:3]]):
        ks = [len(trees.get(i, range(rng.randint(0, 5)))) for i in range(len(sequences))]
        drafts = torch.tensor([[rng.randrange(-1, 3) for _ in range(5)] for _ in sequences])
        rows = rng.sample(range(sum(ks) + len(ks)), sum(ks) + len(ks))
        samplers = Sampler(sequences, ks, VOCAB, CPU), Sampler(sequences, ks, VOCAB, CPU, staging)
        cpu, device = (s.on_trees(trees) if trees else s for s in samplers)
        device.prepare(rows)
        for vocab in (VOCAB, SMALLER):
            logits = torch.randn(len(rows), vocab, dtype=torch.float64)
            legal = drafts.clamp(min=0)
            assert torch.equal(device.scores(logits, rows, legal), cpu.scores(logits, rows, legal))
        for sequence in sequences:
            sequence.tokens.append(rng.randrange(3))


@pytest.mark.parametrize("seed", range(40))
def test_chains(seed: int) -> None:
    check_as_on_the_cpu(seed, {})


@pytest.mark.parametrize("seed", range(10))
def test_trees(seed: int) -> None:
    check_as_on_the_cpu(seed, {0: (-1, -1, 0, 1, 2), 2: (-1, 0, 0)})


def test_negative_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bans that see other drafts."""
    apply = Bans.apply
    monkeypatch.setattr(Bans, "apply", lambda bans, logits, drafts: apply(bans, logits, torch.full_like(drafts, 7)))
    with pytest.raises(AssertionError):
        check_as_on_the_cpu(3, {})


def values(table: BiasTable, row: int) -> list[float]:
    table.put()
    return list(table.values[row].tolist())


def test_a_row_of_the_table_is_used_again() -> None:
    table = BiasTable(device_staging(2), VOCAB)
    address = table.values.data_ptr()
    first, lasting = (table.start(SamplingParams(logit_bias=((t, 2.0),))) for t in (1, 3))
    assert values(table, first.row) == [0, 2, *[0] * 6]
    row = first.row
    del first
    gc.collect()
    again = table.start(
        SamplingParams(allowed_token_ids=(4, 5), logit_bias=((5, -1.0), (6, 1.0)), bad_word_ids=((4,),))
    )
    assert again.row == row
    assert values(table, row) == [*[EXCLUDED] * 5, -1, *[EXCLUDED] * 2]
    assert values(table, lasting.row) == [0, 0, 0, 2, *[0] * 4]
    assert values(table, 0) == [0] * VOCAB
    assert table.values.data_ptr() == address


def test_what_a_failed_round_did_not_write_is_written_later() -> None:
    staging = device_staging()
    table = BiasTable(staging, VOCAB)
    bias = table.start(SamplingParams(logit_bias=((1, 2.0),)))
    table.put()  # nobody reads it
    staging.begin()
    assert values(table, bias.row) == [0, 2, *[0] * 6]


def test_bans_are_put_in_numbers_that_do_not_depend_on_the_text() -> None:
    """In a round that may be captured: their number is part of a graph's key."""
    params = SamplingParams(bad_word_ids=((0, 1), (2, 2, 1), (3, 4)))

    def bans_of(output: list[int]) -> Tensor:
        sequence = make_sequence(0, [0, 1], params)
        sequence.tokens += output
        sampler = Sampler([sequence], [2], VOCAB, CPU, staging := device_staging())
        staging._used = 0  # as between Staging.begin(fixed=True) and the copy
        assert sampler._on_device is not None
        sampler.prepare(range(3))
        (found,) = [part for part in staging._layout if isinstance(part, tuple) and part[0] == "bans"]
        return torch.tensor(found[1:])

    assert bans_of([]).tolist() == bans_of([0]).tolist() == bans_of([2, 2]).tolist() == [16, 2]
