"""Log-laws and the check of a draw as single operations: equal to what they replace, from references and kernels."""

from collections.abc import Callable, Sequence
from math import inf, nan
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.drafters.base import NO_TOKEN
from engine.kernels import laws
from engine.kernels.laws import NO_LAW
from engine.sampling.filters import apply_temperature
from tests.engine.kernels.faults import with_fault

VOCAB = 150
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CLOSE = {torch.float64: 1e-13, torch.float32: 2e-5}
TEMPERATURES = torch.tensor([0.8, 1e-9, 1.0, 1.0, 1.0, 1e-320, 2.5], dtype=torch.float64)


@pytest.fixture
def kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from engine.kernels import laws_kernel

    for name in ("PART", "TILE"):
        monkeypatch.setattr(laws_kernel, name, getattr(laws_kernel, name))  # and back at the end
    small(laws_kernel)
    return laws_kernel


def small(kernels: Any) -> None:
    """Several parts to a row, and several tiles to a part."""
    kernels.PART, kernels.TILE = 64, 32


def on_device(kernel: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
    """A Triton kernel, for tensors on the CPU."""

    def run(*args: Any) -> Tensor:
        with np.errstate(all="ignore"):
            return kernel(*(x.to(device) if isinstance(x, Tensor) else x for x in args)).cpu()

    return run


def scores(dtype: torch.dtype) -> Tensor:
    """Rows with few tokens, none, a NaN and an infinite score, and at the lowest temperatures."""
    g = torch.Generator().manual_seed(3)
    found = torch.randn(7, VOCAB, generator=g, dtype=torch.float64) * 3
    found[1, 5:], found[2], found[3, 70], found[4, 9] = -inf, -inf, nan, inf
    found[5, :3] = found[5].max() + 1  # ties at a temperature that leaves nothing else
    return found.to(dtype)


def error(a: Tensor, b: Tensor) -> float:
    """The greatest difference of finite numbers; infinity where one is NaN or −inf and the other is not."""
    if a.dtype != b.dtype or not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a == -inf, b == -inf):
        return inf
    return float((a - b).abs().nan_to_num(0.0, 0.0, 0.0).max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_law_is_the_softmax_at_its_temperature(dtype: torch.dtype) -> None:
    x = scores(dtype)
    wide = x if dtype is torch.float64 else x.float()
    law = laws.log_law_reference(x, TEMPERATURES)
    assert error(law, apply_temperature(wide, TEMPERATURES).log_softmax(-1)) == 0
    finite = [0, 1, 5, 6]
    assert torch.allclose(law[finite].exp().sum(1), torch.ones_like(law[finite, 0]))
    assert law[[2, 3, 4]].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_cpu_a_law_is_the_reference(dtype: torch.dtype) -> None:
    """Only laws of fp32 scores are computed by compiled code."""
    x = scores(dtype)
    found, expected = laws.log_law(x, TEMPERATURES), laws.log_law_reference(x, TEMPERATURES)
    assert error(found, expected) < (5e-6 if dtype is torch.float32 else 1e-300)
    assert (laws._compiled_log_law(x, TEMPERATURES) is None) == (dtype is not torch.float32)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("(scores[row, i] - best) / temperature", "(scores[row, i] - best)"),
        ("laws[row, i] -= log_mass", "laws[row, i] -= 0"),
        ("max(np.float32(temperatures[row]), LEAST_TEMPERATURE)", "np.float32(temperatures[row])"),
    ],
)
@pytest.mark.proofs
def test_a_fault_in_the_compiled_laws_shows(
    before: str, after: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from engine.kernels import cpu_laws

    args = scores(torch.float32), TEMPERATURES
    with with_fault(cpu_laws, before, after, tmp_path) as faulty:
        monkeypatch.setattr(laws, "compiled_module", lambda name: faulty)
        assert error(laws.log_law(*args), laws.log_law_reference(*args)) > 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_of_laws_is_the_reference(dtype: torch.dtype, kernels: ModuleType, device: torch.device) -> None:
    args = scores(dtype), TEMPERATURES
    expected = laws.log_law_reference(*args)
    assert error(on_device(kernels.log_law, device)(*args), expected) < CLOSE[expected.dtype]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('top == float("-inf"), 0.0, top', 'top == float("inf"), 0.0, top'),
        ("mass * tl.exp(divided(top - best, temperature).to(tl.float64))", "mass"),
        ("x > best, x, best", "x < best, x, best"),
    ],
)
def test_a_fault_in_the_kernel_of_laws_shows(
    before: str, after: str, kernels: ModuleType, device: torch.device, tmp_path: Path
) -> None:
    args = scores(torch.float64), TEMPERATURES
    args[0][6, :64] = -inf  # a part without tokens
    with with_fault(kernels, before, after, tmp_path) as faulty:
        small(faulty)
        assert error(on_device(faulty.log_law, device)(*args), laws.log_law_reference(*args)) > 1e-6
    assert error(on_device(kernels.log_law, device)(*args), laws.log_law_reference(*args)) < 1e-13


# Laws of drafts

SOURCES = (2, NO_LAW, 0, 1)
WIDTHS = (VOCAB, VOCAB - 40, VOCAB + 15)


def drafted(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(laws [3, 4, width] in fp32, drafts [4, 3] with illegal ids and ids without probability, logp)."""
    g = torch.Generator().manual_seed(width)
    found = torch.randn(3, 4, width, generator=g).log_softmax(-1)
    drafts = torch.randint(0, width - 20, (3, 4), generator=g).t()
    drafts[0, 1], drafts[2, 2], drafts[3, 0] = VOCAB + 3, -1, VOCAB - 1
    found[0, 0, drafts[2, 0]], found[1, 2] = -inf, nan
    return found, drafts, torch.zeros(4, 4, VOCAB, dtype=dtype)


def by_hand(found: Tensor | None, sources: Sequence[int], drafts: Tensor, logp: Tensor) -> Tensor:
    """Position by position."""
    logq = logp.new_full((*drafts.shape, VOCAB), -inf)
    for n, source in enumerate(sources):
        for j, token in enumerate(drafts[n].tolist()):
            if not 0 <= token < VOCAB:
                continue
            law = logp.new_full((VOCAB,), -inf)
            if found is not None and source != NO_LAW:
                known = found[source, j, :VOCAB]
                law[: len(known)] = known
            logq[n, j] = law
            if not law[token].isfinite():
                logq[n, j] = -inf
                logq[n, j, token] = 0.0
    return logq


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("width", WIDTHS)
def test_laws_of_drafts_are_those_they_came_with(width: int, dtype: torch.dtype) -> None:
    found, drafts, logp = drafted(width, dtype)
    for run in (laws.draft_laws, laws.draft_laws_reference):
        assert torch.equal(run(found, torch.tensor(SOURCES), drafts, logp), by_hand(found, SOURCES, drafts, logp))
        assert torch.equal(run(None, None, drafts, logp), by_hand(None, SOURCES, drafts, logp))
        three = drafts[:3], logp[:3]
        assert torch.equal(run(found, None, *three), by_hand(found, range(3), *three))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("if sources[n] < 0:", "if sources[n] < -9:"),
        ("sources[n] * depth + j", "sources[n] * depth"),
        ("logq[target, known:] = NONE", "logq[target, known:] = -30"),
        ("token < 0 or token >= vocab", "token < 0"),
        ("np.isfinite(logq[target, token])", "logq[target, token] != NONE"),
    ],
)
@pytest.mark.proofs
def test_a_fault_in_the_compiled_laws_of_drafts_shows(
    before: str, after: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from engine.kernels import cpu_laws

    seen = False
    with with_fault(cpu_laws, before, after, tmp_path) as faulty:
        monkeypatch.setattr(laws, "compiled_module", lambda name: faulty)
        for width in WIDTHS:
            found, drafts, logp = drafted(width, torch.float32)
            args = found, torch.tensor(SOURCES), drafts, logp
            seen |= not torch.equal(laws.draft_laws(*args), laws.draft_laws_reference(*args))
    assert seen


@pytest.mark.parametrize("width", WIDTHS)
def test_the_kernel_of_drafts_is_the_reference(width: int, kernels: ModuleType, device: torch.device) -> None:
    found, drafts, logp = drafted(width, torch.float32)
    run, sources = on_device(kernels.draft_laws, device), torch.tensor(SOURCES)
    for args in (
        (found, sources, drafts, logp),
        (found, None, drafts[:3], logp[:3]),
        (None, None, drafts, logp),
        (found, sources, drafts, logp.double()),
    ):
        expected = laws.draft_laws_reference(*args)
        found_here = run(*args)
        assert found_here.dtype == expected.dtype
        assert torch.equal(found_here, expected)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("source != NO_LAW", "source == source"),
        ("(draft >= 0)", "(draft >= -1)"),
        ("(draft < known)", "(draft < 2 * known)"),
        ("tl.where(usable, x, one_hot)", "x"),
        ("ids == draft", "ids == draft + 1"),
    ],
)
def test_a_fault_in_the_kernel_of_drafts_shows(
    before: str, after: str, kernels: ModuleType, device: torch.device, tmp_path: Path
) -> None:
    found, drafts, logp = drafted(VOCAB + 15, torch.float32)
    after_a_row = found[[2, 2, 0, 1]].contiguous()[1:]  # so that row −1 is the memory of a law too
    args = after_a_row, torch.tensor(SOURCES), drafts, logp
    with with_fault(kernels, before, after, tmp_path) as faulty:
        small(faulty)
        assert not torch.equal(on_device(faulty.draft_laws, device)(*args), laws.draft_laws_reference(*args))


# Draws from scores that are not finite


def test_draws_that_are_not_finite_are_marked(kernels: ModuleType, device: torch.device) -> None:
    logits = torch.zeros(3, 10)
    logits[0, 4], logits[1, 9], logits[2, 2] = nan, -inf, inf
    drawn = torch.tensor([[3, 9, 4], [4, 2, 1]]).t()
    expected = [[3, NO_TOKEN], [NO_TOKEN, 2], [4, 1]]
    for run in (laws.mark_non_finite, on_device(kernels.mark_non_finite, device)):
        assert run(drawn, logits, NO_TOKEN).tolist() == expected
        assert run(drawn, logits.bfloat16(), NO_TOKEN).tolist() == expected
