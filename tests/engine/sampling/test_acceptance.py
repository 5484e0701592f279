"""Acceptance by equality, against plain Python over every case there is."""

import itertools
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from engine.drafters.base import Draft
from engine.kernels.verdict import match_verdict
from engine.sampling.acceptance import DeviceVerdict, Verdict
from engine.sampling.matching import match
from engine.verification import copy_to_host

JUNK = -99  # fills what lies beyond a row's drafts; never looked at


def reference(drawn: Seq[Seq[int]], drafts: Seq[Seq[int]], vocab: int) -> Verdict:
    accepted, emitted, illegal = [], [], 0
    for own, proposed in zip(drawn, drafts, strict=True):
        n = 0
        while n < len(proposed) and proposed[n] == own[n]:
            n += 1
        accepted.append(n)
        emitted.append(list(own[: n + 1]))
        illegal += any(not 0 <= token < vocab for token in proposed)
    return Verdict(
        accepted, emitted, [False] * len(accepted), [()] * len(accepted), illegal, [list(row) for row in drafts]
    )


def on_host(drawn: Seq[int], finite: Seq[bool], table: Tensor, ks: Seq[int], vocab: int) -> Verdict:
    return match(drawn, finite, [row[:k] for row, k in zip(table.tolist(), ks, strict=True)], {}, vocab)


def as_operation(drawn: Seq[int], finite: Seq[bool], table: Tensor, ks: Seq[int], vocab: int) -> Verdict:
    first_rows = torch.tensor([*accumulate((k + 1 for k in ks), initial=0)])
    found = match_verdict(torch.tensor(drawn), torch.tensor(finite), table[:, : max(ks)], first_rows)
    rows, tokens, row_finite = found[:, :3].unbind(1)
    return copy_to_host(DeviceVerdict(rows, tokens, row_finite, table=found), Draft(tuple(ks), table), vocab)


Way = Callable[[Seq[int], Seq[bool], Tensor, Seq[int], int], Verdict]


@pytest.fixture(params=[on_host, as_operation])
def way(request: pytest.FixtureRequest) -> Way:
    chosen: Way = request.param
    return chosen


def run(way: Way, drawn: Seq[Seq[int]], drafts: Seq[Seq[int]], vocab: int, extra: int = 0) -> Verdict:
    """match over lists; `extra` columns of junk widen the table. All scores are finite."""
    width = max(map(len, drafts)) + extra
    table = torch.tensor([[*row, *[JUNK] * (width - len(row))] for row in drafts], dtype=torch.int64)
    draws = [t for row in drawn for t in row]
    return way(draws, [True] * len(draws), table, [len(row) for row in drafts], vocab)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("vocab", [2, 3])
def test_every_case(way: Way, vocab: int, k: int) -> None:
    """All draws and all drafts, the ids just outside the vocabulary included, as one batch."""
    cases = [
        (own, proposed)
        for own in itertools.product(range(vocab), repeat=k + 1)
        for proposed in itertools.product(range(-1, vocab + 1), repeat=k)
    ]
    drawn, drafts = zip(*cases, strict=True)
    assert run(way, drawn, drafts, vocab) == reference(drawn, drafts, vocab)


@pytest.mark.parametrize("seed", range(50))
def test_ragged_batches(way: Way, seed: int) -> None:
    rng, vocab = random.Random(seed), 3
    ks = [rng.choice((0, 0, 1, 2, 5)) for _ in range(rng.randint(1, 6))]
    ks[0] = ks[0] or 1
    drawn = [[rng.randrange(vocab) for _ in range(k + 1)] for k in ks]
    drafts = [[t if rng.random() < 0.8 else rng.randrange(-1, vocab + 1) for t in own[:-1]] for own in drawn]
    expected = reference(drawn, drafts, vocab)
    assert run(way, drawn, drafts, vocab) == expected
    assert run(way, drawn, drafts, vocab, extra=2) == expected


def test_without_drafts() -> None:
    expected = Verdict([0, 0], [[4], [5]], [False, True], [(), ()], 0, [[], []])
    assert match([4, 5], [True, False], [[], []], {}, 9) == expected
    assert match([], [], [], {}, 9) == Verdict([], [], [], [], 0, [])


def test_the_docstrings_example(way: Way) -> None:
    assert run(way, [[7, 3, 9, 4]], [[7, 3, 5]], 10) == Verdict([2], [[7, 3, 9]], [False], [()], 0, [[7, 3, 5]])


def test_illegal_ids_cost_their_own_sequence_only(way: Way) -> None:
    verdict = run(way, [[1, 2, 3], [1, 2, 3], [1, 2, 3]], [[1, 2], [1, 10], [-1, 2]], 10)
    assert verdict == Verdict([2, 1, 0], [[1, 2, 3], [1, 2], [1]], [False] * 3, [()] * 3, 2, [[1, 2], [1, 10], [-1, 2]])


def test_an_illegal_id_that_was_drawn_is_accepted_by_nobody_else(way: Way) -> None:
    """Junk beyond a row's drafts may equal the draw; it was never proposed."""
    table = torch.tensor([[1, 2], [1, 2]])
    verdict = way([1, 2, 1, 2, 3], [True] * 5, table, [1, 2], 10)
    assert verdict == Verdict([1, 2], [[1, 2], [1, 2, 3]], [False, False], [(), ()], 0, [[1], [1, 2]])


@pytest.mark.parametrize("row", range(4))
def test_a_score_that_is_not_finite_matters_where_it_was_emitted(way: Way, row: int) -> None:
    """k = 3, one draft accepted: rows 0 and 1 are emitted, 2 and 3 were looked at in vain."""
    finite = [at != row for at in range(5)]
    table = torch.tensor([[7, 0, 9], [0, 0, 0]])
    verdict = way([7, 3, 9, 4, 5], finite, table, [3, 0], 10)
    assert verdict == Verdict([1, 0], [[7, 3], [5]], [row < 2, False], [(), ()], 0, [[7, 0, 9], []])


def test_results_are_plain_python(way: Way) -> None:
    verdict = run(way, [[1, 2]], [[1]], 10)
    assert all(type(n) is int for n in (*verdict.accepted, *verdict.emitted[0], verdict.num_illegal))
