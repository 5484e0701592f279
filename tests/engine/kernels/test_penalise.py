"""Penalties as one operation: exactly the logits of the CPU's penalties, from the reference and the kernel alike."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.device.staging import RoundNumbers, Staging
from engine.kernels import penalise as operations
from engine.kernels.penalise import NO_COLUMN, NO_ROW, OUTPUT, SEEN
from engine.sampling.penalties import History, PenaltyRows
from engine.types import SamplingParams
from tests.engine.kernels.faults import with_fault

VOCAB = 150
COLUMNS = 3
FAULTS = (
    ("count > 0).to", "count >= 0).to"),
    ("seen, count = seen | hit, count + hit.to(tl.int32)", "seen = seen | hit"),
    ("tl.where(seen, new, old)", "new"),
    ("used = column != NO_COLUMN", "used = column != -2"),
    ("ids == token", "ids == token + 1"),
    ("tl.where(old > 0,", "tl.where(old < 0,"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of three texts, the second of which has no penalties, with the drafts that they see."""

    prompts: tuple[list[int], ...]
    outputs: tuple[list[int], ...]
    owners: list[int]
    columns: list[list[int]]
    drafts: Tensor
    logits: Tensor
    params: tuple[SamplingParams, ...]

    def uses(self) -> Tensor:
        uses = torch.zeros(3, VOCAB, dtype=torch.int32)
        entries = [(i, t, 0) for i, text in enumerate(self.prompts) for t in text]
        entries += [(i, t, 1) for i, text in enumerate(self.outputs) for t in text]
        operations.record_texts(uses, torch.tensor(entries).t().flatten())
        return uses

    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        rows = [
            [i if self.params[i].penalised else NO_ROW, i, *columns, *[NO_COLUMN] * (COLUMNS - len(columns))]
            for i, columns in zip(self.owners, self.columns, strict=True)
        ]
        names = "repetition_penalty", "frequency_penalty", "presence_penalty"
        params = [[getattr(self.params[i], name) for i in self.owners] for name in names]
        return self.logits, self.uses(), torch.tensor(rows), torch.tensor(params, dtype=torch.float64), self.drafts

    def on_the_cpu(self) -> Tensor:
        histories = []
        for prompt, output, params in zip(self.prompts, self.outputs, self.params, strict=True):
            history = History(params, len(prompt), VOCAB)
            history.sync([*prompt, *output])
            histories.append(history)
        rows = [n for n, i in enumerate(self.owners) if self.params[i].penalised]
        seen = [(at, self.owners[n], column) for at, n in enumerate(rows) for column in self.columns[n]]
        numbers = RoundNumbers(Staging(torch.device("cpu")))
        penalties = PenaltyRows([histories[self.owners[n]] for n in rows], seen, numbers, tuple(rows))
        result = self.logits.clone()
        result[rows] = penalties.apply(self.logits[rows], self.drafts)
        return result


def make_case(seed: int, dtype: torch.dtype, vocab: int = VOCAB) -> Case:
    g = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=g).tolist()

    owners = [0, 0, 1, 2, 2, 0]
    logits = torch.randn(len(owners), vocab, generator=g, dtype=torch.float64).to(dtype) * 4
    logits[1, 3], logits[3, :9] = torch.nan, -torch.inf
    plain = SamplingParams()
    return Case(
        tuple(ids(0, 40, 30) for _ in range(3)),
        tuple(ids(0, 60, 25) for _ in range(3)),
        owners,
        [[], [0], [0, 1], [0, 1], [2, 0, 1], [0, 1, 2]],
        torch.randint(-3, VOCAB + 3, (COLUMNS, 3), generator=g).remainder(70).sub(3).t(),
        logits,
        (
            SamplingParams(repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=-0.4),
            plain,
            SamplingParams(repetition_penalty=0.6, presence_penalty=1.1),
        ),
    )


@pytest.fixture
def kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from engine.kernels import penalise_kernel

    monkeypatch.setattr(penalise_kernel, "TILE", 64)  # several tiles to a row
    return penalise_kernel


def on_device(kernels: ModuleType, device: torch.device) -> Callable[..., Tensor]:
    def run(*args: Any) -> Tensor:
        with np.errstate(all="ignore"):
            result: Tensor = kernels.penalise(*(x.to(device) if isinstance(x, Tensor) else x for x in args))
        return result.cpu()

    return run


def equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("vocab", [VOCAB, 100])
def test_the_operation_is_the_penalties_of_the_cpu(dtype: torch.dtype, vocab: int) -> None:
    for seed in range(10):
        case = make_case(seed, dtype, vocab)
        expected = case.on_the_cpu()
        assert equal(operations.penalise(*case.args()), expected)
        assert not equal(expected, case.logits)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("vocab", [VOCAB, 100])
def test_the_kernel_is_the_reference(dtype: torch.dtype, vocab: int, kernels: ModuleType, device: torch.device) -> None:
    run = on_device(kernels, device)
    for seed in range(2):
        args = make_case(seed, dtype, vocab).args()
        assert equal(run(*args), operations.penalise_reference(*args))
    logits, uses, index, params, _ = args
    without = logits, uses, index[:, :2].contiguous(), params, None
    assert equal(run(*without), operations.penalise_reference(*without))


@pytest.mark.parametrize(("before", "after"), FAULTS)
def test_a_fault_in_the_kernel_shows(
    before: str, after: str, kernels: ModuleType, device: torch.device, tmp_path: Path
) -> None:
    args = make_case(1, torch.float64).args()
    with with_fault(kernels, before, after, tmp_path) as faulty:
        assert not equal(on_device(faulty, device)(*args), operations.penalise_reference(*args))


def counted(uses: Tensor, tokens: Tensor) -> Tensor:
    """record_texts(), token by token."""
    result = uses.clone()
    for row, token, output in tokens.view(3, -1).t().tolist():
        result[row, token] = (result[row, token] | SEEN) + OUTPUT * output
    return result


def test_texts_are_counted_token_by_token(kernels: ModuleType, device: torch.device) -> None:
    g = torch.Generator().manual_seed(5)
    uses = torch.zeros(4, VOCAB, dtype=torch.int32)
    for _ in range(3):
        tokens = torch.stack([torch.randint(high, (170,), generator=g) for high in (4, 20, 2)]).flatten()
        expected, compiled = counted(uses, tokens), uses.to(device, copy=True)
        operations.record_texts(uses, tokens)
        kernels.record(compiled, tokens.to(device))
        assert torch.equal(uses, expected)
        assert torch.equal(compiled.cpu(), expected)
