"""Operations as torch dispatches them: what they run, and what their first call costs."""

import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from engine.kernels import operations
from engine.kernels.operations import on_cuda
from engine.kernels.triton_modules import triton_module, triton_reason
from engine.models.coded_linear import coded_products_reason

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


class BrokenDriver:
    """Triton's driver where there is no C compiler."""

    asked = 0

    def get_current_target(self) -> None:
        self.asked += 1
        raise RuntimeError("Failed to find C compiler")


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_references_run_where_triton_finds_no_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the first round on CUDA fails, and with it the start."""
    from tests.engine.shadow.launches import fake_driver

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    broken = BrokenDriver()
    with fake_driver(broken):
        for _ in range(2):
            assert on_cuda(double, "race_kernel.race")(torch.ones(1)).tolist() == [2]
        assert coded_products_reason(torch.device("cuda")) == triton_reason()
    assert broken.asked == 1
    assert [record.message for record in caplog.records] == [
        "kernels are replaced by torch's operations, which are slower: triton cannot use the GPU: "
        "RuntimeError: Failed to find C compiler"
    ]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_kernels_run_where_triton_finds_a_gpu() -> None:
    from tests.engine.shadow.launches import fake_driver

    with fake_driver():
        assert triton_reason() is None
        assert triton_module("engine.kernels.race_kernel") is not None
