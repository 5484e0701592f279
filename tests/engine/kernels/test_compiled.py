"""The kernels compile for every supported architecture, within its memory and registers, and with tensor cores."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from benchmarks.compiled_kernels import SHARED_LIMITS, resource_usage
from tests.examples import in_proofs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
PROBE = """
import json
from dataclasses import asdict
from benchmarks.compiled_kernels import CASES, compile_launch, launches_of
for name, capability in CHOSEN:
    for launch in launches_of(CASES[name], capability):
        print(json.dumps(asdict(compile_launch(launch, capability))))
"""
FRAME = 16  # bytes of a stack that attend_keys of 1 row gets on sm_86, although 127 registers are left
Cases = tuple[tuple[str, int], ...]  # what is compiled (benchmarks.compiled_kernels.CASES), and the compute capability
USUAL: Cases = (("1 row, 128", 90), ("prefill, 256", 80))
ALL: Cases = tuple(product(("1 row, 128", "prefill, 256", "tree of 32, 128, sinks"), SHARED_LIMITS))


@dataclass(frozen=True, slots=True)
class Figures:
    kernel: str
    capability: int
    shared: int
    registers: int
    spilled: int
    tensor_cores: bool
    waits: bool
    warpgroup: bool


@pytest.fixture(scope="module", params=[USUAL, *in_proofs(ALL)], ids=["usual", "all"])
def cases(request: pytest.FixtureRequest) -> Cases:
    found: Cases = request.param
    return found


@pytest.fixture(scope="module")
def figures(cases: Cases, tmp_path_factory: pytest.TempPathFactory) -> list[Figures]:
    """Compiled in a process of its own, because this one interprets kernels."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    cache = str(tmp_path_factory.mktemp("triton"))
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
    command = [sys.executable, "-c", f"CHOSEN = {cases}\n{PROBE}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [Figures(**json.loads(line)) for line in done.stdout.splitlines()]


def test_kernels_fit_the_memory_and_registers_of_every_architecture(figures: list[Figures], cases: Cases) -> None:
    assert {f.capability for f in figures} == {capability for _, capability in cases}
    assert {f.kernel for f in figures} == {"attend_keys", "join_parts"}
    assert oversized(figures, SHARED_LIMITS) == []
    assert [f for f in figures if f.spilled > FRAME] == []
    assert all(0 < f.registers <= 255 for f in figures)


def oversized(figures: list[Figures], limits: dict[int, int]) -> list[Figures]:
    return [f for f in figures if f.shared > limits[f.capability]]


def test_a_kernel_that_needs_too_much_shared_memory_is_seen(figures: list[Figures]) -> None:
    found = oversized(figures, dict.fromkeys(SHARED_LIMITS, 16 << 10))
    assert {f.capability for f in found} == {f.capability for f in figures}


def test_products_of_short_types_use_tensor_cores(figures: list[Figures]) -> None:
    assert [f for f in figures if f.tensor_cores != (f.kernel == "attend_keys")] == []


def test_a_kernel_that_may_start_early_waits(figures: list[Figures]) -> None:
    assert [f for f in figures if f.waits != (f.capability >= 90)] == []


def test_spilled_registers_are_read_from_the_report() -> None:
    text = " Function attend_keys:\n  REG:168 STACK:8 SHARED:45312 LOCAL:16 CONSTANT[0]:512 TEXTURE:0"
    assert resource_usage(text) == (168, 24)
    with pytest.raises(RuntimeError, match="nothing of registers"):
        resource_usage("no kernels")
