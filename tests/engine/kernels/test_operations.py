"""Operations as torch dispatches them: what they run, and what their first call costs."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from engine.kernels import operations
from engine.kernels.operations import on_cuda

# What a round on CUDA calls, without a GPU: each operation of one module.
FIRST_CALLS = """
import sys
import torch
from engine.kernels.laws import mark_non_finite
from engine.kernels.penalise import record_texts

ids = torch.zeros(1, 1, dtype=torch.int64)
with torch.inference_mode():
    mark_non_finite(ids, torch.zeros(1, 4), -1)
    record_texts(uses := torch.zeros(1, 4, dtype=torch.int32), torch.tensor([0, 2, 1]))
print(uses.tolist(), *(name for name in ("torch._dynamo", "sympy", "triton") if name in sys.modules))
"""


def test_a_first_call_imports_nothing_large() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[[0, 0, 3, 0]]"


def double(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize(("installed", "expected"), [(True, 10), (False, 2)])
def test_cuda_runs_the_kernel_where_triton_is_installed(
    monkeypatch: pytest.MonkeyPatch, installed: bool, expected: int
) -> None:
    kernels = SimpleNamespace(tenfold=lambda x: x * 10)
    asked = []

    def module(name: str) -> SimpleNamespace | None:
        asked.append(name)
        return kernels if installed else None

    monkeypatch.setattr(operations, "triton_module", module)
    assert on_cuda(double, "some_kernel.tenfold")(torch.ones(1)).tolist() == [expected]
    assert asked == ["engine.kernels.some_kernel"]
