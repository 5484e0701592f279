"""Rejection and block verification as one operation: acceptance.py's decisions, from the reference and the kernels."""

from collections.abc import Callable, Iterator
from itertools import product
from math import inf, nan
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels import decide
from engine.kernels.laws import draft_laws_reference
from engine.sampling import acceptance, noise
from tests.engine.kernels.faults import with_fault
from tests.examples import usual_and_proofs

VOCAB, COUNT, DEPTH = 90, 5, 3
KS = (3, 2, 3, 0, 1)
LENIENCES = {"block": None, "rejection": 1.0, "lenient": 0.4}
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5}

Args = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]
Result = tuple[Tensor, Tensor, Tensor]


def cases(lenience: float | None, dtype: torch.dtype, rounds: int) -> Iterator[Args]:
    """Laws p and q that are near each other, equal, apart; with NaN rows, tokens without mass and illegal drafts."""
    g = torch.Generator().manual_seed(11)
    for n in range(rounds):
        logits = torch.randn(COUNT, DEPTH + 1, VOCAB, generator=g, dtype=torch.float64) * 2
        logits[torch.rand(logits.shape, generator=g) < 0.3] = -inf
        logits[..., [0, -1]] = 0.0  # an illegal draft is read as one of these
        others = logits[:, :-1] + torch.randn(COUNT, DEPTH, VOCAB, generator=g, dtype=torch.float64)
        others[2] = logits[2, :-1]  # nothing is left of p
        logp, laws = logits.log_softmax(-1).to(dtype), others.log_softmax(-1).to(dtype)
        drafts = torch.multinomial(laws.double().exp().view(-1, VOCAB), 1, generator=g).view(COUNT, DEPTH)
        if n == 1:
            logp[0, 1, 3] = nan
            drafts[1, 1], drafts[2, 2] = VOCAB, -1
        if n == 2:  # a row that is not finite, behind a draft that p excludes
            logp[0, 0, drafts[0, 0]], logp[0, 1, 3] = -inf, nan
        logq = draft_laws_reference(laws, None, drafts, logp)
        # The draft is rejected, and nothing is left of p.
        logq[4, 0] = logp[4, 0].scatter_add(0, drafts[4, :1], torch.ones(1, dtype=dtype))
        if n == 3:
            logq[4, 0, logp[4, 0].argmax()] = nan
        keys = torch.randint(-(2**62), 2**62, (COUNT,), generator=g)
        column = None if lenience is None else torch.full((COUNT,), lenience, dtype=torch.float64)
        ends = close_coins(logp, logq, drafts, column, keys, n)
        yield logp, logq, drafts, torch.tensor(KS), column, keys, ends


def close_coins(logp: Tensor, logq: Tensor, drafts: Tensor, lenience: Tensor | None, keys: Tensor, n: int) -> Tensor:
    """The position at which the coin of one of a sequence's drafts is nearest to its chance, so that small errors of a
    chance decide otherwise."""
    legal = drafts.clamp(0, VOCAB - 1)
    if lenience is None:
        chances = acceptance.block(logp, logq, legal, KS).chances
    else:
        chances = acceptance.rejection(logp, logq, legal, KS, lenience).chances
    column = torch.tensor([n % max(k, 1) for k in KS])
    coins = noise.uniforms(keys[:, None], torch.arange(3000) + column[:, None])
    distances = (coins - chances.gather(1, column[:, None])).nan_to_num(1.0).abs()
    return distances.argmin(1)


def by_hand(args: Args) -> Result:
    """What the functions of acceptance.py decide, one after the other and with the ks on the host."""
    logp, logq, drafts, _, lenience, keys, ends = args
    legal = drafts.clamp(0, VOCAB - 1)
    coins = noise.uniforms(keys[:, None], ends[:, None] + torch.arange(DEPTH))
    if lenience is None:
        law = acceptance.block(logp, logq, legal, KS)
        accepted = acceptance.last_success(law.chances, coins)
    else:
        law = acceptance.rejection(logp, logq, legal, KS, lenience)
        accepted = acceptance.first_failure(law.chances, coins)
    weights = acceptance.emitted_law(logp, logq, law.log_scales, accepted, KS)
    return accepted, weights, acceptance.overlaps(logp, logq, lenience)


def differ(a: Result, b: Result, close: float) -> bool:
    """Whether two results decide differently: log-weights by more than `close`, overlaps by more than a millionth."""
    (accepted, weights, overlaps), (others, more, them) = a, b
    same = torch.equal(weights.isnan(), more.isnan()) and torch.equal(weights == -inf, more == -inf)
    error = (weights - more).abs().nan_to_num(0.0, 0.0, 0.0).max()
    return (
        not torch.equal(accepted, others) or not same or bool(error > close) or bool((overlaps - them).abs().max() > 1)
    )


@pytest.fixture
def kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from engine.kernels import decide_kernel

    for name in ("PART", "TILE"):
        monkeypatch.setattr(decide_kernel, name, getattr(decide_kernel, name))  # and back at the end
    small(decide_kernel)
    return decide_kernel


def small(kernels: Any) -> None:
    """Several parts to a row, and several tiles to a part."""
    kernels.PART, kernels.TILE = 64, 32


def on_device(kernels: ModuleType, device: torch.device) -> Callable[[Args], Result]:
    def run(args: Args) -> Result:
        with np.errstate(all="ignore"):
            found = kernels.decide(*(x.to(device) if isinstance(x, Tensor) else x for x in args))
        return tuple(x.cpu() for x in found)

    return run


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", LENIENCES)
def test_the_reference_decides_as_acceptance_does(name: str, dtype: torch.dtype) -> None:
    counts = set[int]()
    for args in cases(LENIENCES[name], dtype, rounds=20):
        found, expected = decide.decide_reference(*args), by_hand(args)
        assert torch.equal(found[0], expected[0])
        assert torch.allclose(found[1], expected[1], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found[2], expected[2])
        counts |= set(found[0].tolist())
    assert counts == {0, 1, 2, 3}


def as_tried(result: Result) -> Result:
    """With overlaps of 0 where no draft was tried: the compiled code computes no others."""
    accepted, weights, overlaps = result
    places, ks = torch.arange(DEPTH), torch.tensor(KS)
    return accepted, weights, overlaps * ((places <= accepted[:, None]) & (places < ks[:, None]))


def test_in_fp64_a_cpu_runs_the_reference() -> None:
    for args in cases(None, torch.float64, rounds=3):
        assert not differ(decide.decide_chains(*args), decide.decide_reference(*args), 0.0)


@pytest.mark.parametrize("name", LENIENCES)
def test_the_compiled_code_is_the_reference(name: str) -> None:
    """But that it computes no overlaps of drafts that were not tried."""
    untried = 0
    for args in cases(LENIENCES[name], torch.float32, rounds=20):
        found, expected = decide.decide_chains(*args), decide.decide_reference(*args)
        assert not differ(found, as_tried(expected), CLOSE[torch.float32])
        untried += int((found[2] < expected[2]).sum())
    assert untried


COMPILED_FAULTS = (
    ("block", "range(len(log_scales) - 1, 0, -1)", "range(1, len(log_scales))"),
    ("block", "left / room if room > 0", "left if room > 0"),
    ("block", "np.float32(0) if scale == NONE else ", ""),
    ("block", "row + j, logq, draft + j, scale)", "row, logq, draft, scale)"),
    ("rejection", "return NONE if q == NONE else p - q", "return p - q"),
    (
        "rejection",
        "row + kept, logq, draft + kept, scale, weights, n) == NONE",
        "row, logq, draft, scale, weights, n) > 9",
    ),
    ("rejection", '"==", left, _every(left, 0.0)', '"==", left, _every(left, -1.0)'),
    ("rejection", "j <= kept and j < k", "j < kept"),
    ("rejection", "fadd(scaled, logarithm(builder, left))", "fadd(scaled, left)"),
    (
        "rejection",
        'select(builder.fcmp_unordered("uno", left, left), left, weight)',
        'select(builder.fcmp_ordered("<", left, left), left, weight)',
    ),
    ("lenient", "row + j, logq, draft + j, log_scale)", "row + j, logq, draft + j, np.float32(0))"),
    ("lenient", "at_most_one(ratios[j] + log_scale)", "at_most_one(ratios[j])"),
)


@pytest.mark.parametrize("fault", usual_and_proofs(COMPILED_FAULTS, (COMPILED_FAULTS[3], COMPILED_FAULTS[7])), ids=str)
def test_a_fault_in_the_compiled_code_shows(
    fault: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from engine.kernels import cpu_laws

    name, before, after = fault
    with with_fault(cpu_laws, before, after, tmp_path) as faulty:
        monkeypatch.setattr(decide, "compiled_module", lambda name: faulty)
        assert any(
            differ(decide.decide_chains(*args), as_tried(decide.decide_reference(*args)), CLOSE[torch.float32])
            for args in cases(LENIENCES[name], torch.float32, rounds=20)
        )


KINDS = list(product(LENIENCES, (torch.float64, torch.float32)))
USUAL_KINDS = (("block", torch.float64), ("rejection", torch.float32), ("lenient", torch.float64))


@pytest.mark.parametrize("kind", usual_and_proofs(KINDS, USUAL_KINDS), ids=str)
def test_the_kernels_are_the_reference(
    kind: tuple[str, torch.dtype], kernels: ModuleType, device: torch.device
) -> None:
    """The second round has illegal drafts, and a row that is not finite."""
    (name, dtype), run = kind, on_device(kernels, device)
    for args in cases(LENIENCES[name], dtype, rounds=2 if kind in USUAL_KINDS else 3):
        assert not differ(run(args), decide.decide_reference(*args), CLOSE[dtype])


FAULTS = (
    ("block", "for i in range(j):", "for i in range(j + 1):"),
    ("block", "rest -= tl.exp(scaled) * expm1", "rest += tl.exp(scaled) * expm1"),
    ("block", "room > 0, mass / room, 1.0", "room > 0, mass, 1.0"),
    ("block", "j + 1 < tl.minimum(length, depth)", "j + 1 < depth"),
    ("block", "tl.where(complete, 0.0, scale)", "scale"),
    ("rejection", "coin < chance) & (j < length) & (accepted == j)", "coin < chance) & (accepted == j)"),
    ("rejection", "(accepted == j)).to", "(j == j)).to"),
    ("rejection", "uniform(key, end + j)", "uniform(key, end)"),
    ("rejection", 'tl.where(q == float("-inf"), float("-inf"), p - q)', "p - q"),
    ("rejection", "place < parts, other=0)) == 0", "place < parts, other=0)) < 0"),
    ("rejection", "(level < q) | (level != level)", "(level < q)"),
    ("rejection", "tl.exp(x) - 1.0", "tl.exp(x)"),
    ("lenient", "level = p if IS_BLOCK else scaled", "level = p"),
    ("lenient", "chance = tl.exp((ratio + scale)", "chance = tl.exp((ratio)"),
)
# A fault of each kernel.
USUAL_FAULTS = (FAULTS[2], FAULTS[4], FAULTS[6], FAULTS[9])


@pytest.mark.parametrize("fault", usual_and_proofs(FAULTS, USUAL_FAULTS), ids=str)
def test_a_fault_in_the_kernels_shows(
    fault: tuple[str, str, str], kernels: ModuleType, device: torch.device, tmp_path: Path
) -> None:
    name, before, after = fault
    with with_fault(kernels, before, after, tmp_path) as faulty:
        small(faulty)
        run = on_device(faulty, device)
        assert any(
            differ(run(args), decide.decide_reference(*args), CLOSE[torch.float64])
            for args in cases(LENIENCES[name], torch.float64, rounds=5)
        )


def test_residuals_of_the_compiled_code_are_as_precise_as_their_numbers() -> None:
    """q is p but for some 1e-5 of each mass."""
    g = torch.Generator().manual_seed(2)
    p = torch.rand(1, 2, VOCAB, generator=g) - 1.0  # fp32 numbers near 0 are dense
    gaps = torch.rand(1, 1, VOCAB, generator=g) * 1e-5 + 1e-6
    drafts, one = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
    q = (p[:, :1] - gaps).index_fill(2, torch.tensor([0]), 5.0)  # the draft's token is rejected
    keys = torch.tensor([next(k for k in range(99) if noise.uniforms(torch.tensor(k), torch.tensor(3)) > 0.1)])
    args = p, q, drafts, torch.tensor([1]), one, keys, torch.tensor([3])
    weights = decide.decide_chains(*args)[1][0, 1:]
    exact = p[0, 0].double(), q[0, 0].double()
    expected = (exact[0] + torch.log(-torch.expm1(exact[1] - exact[0])))[1:]
    assert torch.allclose(weights.double(), expected, rtol=1e-6)
    assert not torch.allclose(torch.log(p[0, 0].exp() - q[0, 0].exp())[1:].double(), expected, rtol=1e-4)


def test_a_residual_is_as_precise_as_its_numbers(kernels: ModuleType, device: torch.device) -> None:
    """q is p but for 1e-9 of each mass: the weights are the differences, not their rounding."""
    g = torch.Generator().manual_seed(2)
    p = torch.randn(1, 2, VOCAB, generator=g, dtype=torch.float64).log_softmax(-1)
    gaps = torch.rand(1, 1, VOCAB, generator=g, dtype=torch.float64) * 1e-9 + 1e-10
    drafts = torch.zeros(1, 1, dtype=torch.int64)
    q = (p[:, :1] - gaps).index_fill(2, torch.tensor([0]), 5.0)  # the draft's token is rejected
    one = torch.ones(1, dtype=torch.float64)
    keys = torch.tensor([next(k for k in range(99) if noise.uniforms(torch.tensor(k), torch.tensor(3)) > 0.1)])
    args = p, q, drafts, torch.tensor([1]), one, keys, torch.tensor([3])
    expected = (p[0, 0] + torch.log(-torch.expm1(-gaps[0, 0]))).index_fill(0, torch.tensor([0]), -inf)
    weights: Any = on_device(kernels, device)(args)[1][0]
    assert torch.allclose(weights, expected, rtol=1e-6)  # the gaps' own digits after the subtraction
    assert not torch.allclose(torch.log(p[0, 0, 1:].exp() - q[0, 0, 1:].exp()), expected[1:], rtol=1e-8)
